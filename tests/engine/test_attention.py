"""The backends on a CPU against dense attention, over mixed steps: cold, warm, chunked, decoding, grouped heads. Those
of NPUs are held to the reference in test_npu_attention.py."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from reprise_engine.attention.base import AttentionBackend, AttentionMetadata, LayerKV
from reprise_engine.attention.cpu import CPUAttention, group_by_length
from reprise_engine.attention.reference import ReferenceAttention

HEAD_DIM = 16
SCALE = 0.3


@dataclass(frozen=True)
class Case:
    """(query_len, kv_len) of every request of one step."""

    name: str
    lengths: tuple[tuple[int, int], ...]
    heads: tuple[int, int] = (4, 2)
    block_size: int = 8
    sliding_window: int | None = None


CASES = (
    Case("cold prefill", ((13, 13),)),
    Case("one token cold", ((1, 1),)),
    Case("warm prefill of a cached prefix", ((5, 21),)),
    Case("chunks that split blocks", ((3, 10), (6, 14))),
    Case("decode, equal lengths", ((1, 16), (1, 16), (1, 16))),
    Case("decode, very unequal lengths", ((1, 3), (1, 900), (1, 40), (1, 41))),
    Case("all kinds at once", ((1, 30), (9, 9), (1, 8), (4, 37), (1, 1))),
    Case("one key head per query head", ((7, 12), (1, 9)), heads=(3, 3)),
    Case("eight query heads per key head", ((7, 12), (1, 9)), heads=(8, 1)),
    Case("longer than a tile and than a kernel block", ((300, 700), (1, 1100)), heads=(2, 1)),
    Case("window", ((20, 20), (1, 30), (6, 40)), sliding_window=7),
    Case("window, first keys far outside", ((270, 800), (1, 1300)), heads=(2, 1), sliding_window=5),
    Case("window wider than the sequence", ((5, 9), (1, 9)), sliding_window=64),
    Case("blocks of one token", ((4, 6), (1, 5)), block_size=1),
    Case("NPU blocks", ((130, 300), (1, 129)), block_size=128),
)


@dataclass
class Scene:
    """A step's inputs over a pool that already holds the KV of earlier steps, and the dense truth."""

    case: Case
    q_TNH: torch.Tensor
    k_TKH: torch.Tensor
    v_TKH: torch.Tensor
    kv: LayerKV
    metadata: AttentionMetadata
    expected_TNH: torch.Tensor

    def run(self, backend: AttentionBackend) -> torch.Tensor:
        return backend.forward(
            self.q_TNH,
            self.k_TKH,
            self.v_TKH,
            self.kv,
            self.metadata,
            scale=SCALE,
            sliding_window=self.case.sliding_window,
        )


def make_scene(case: Case, *, kv_dtype: torch.dtype = torch.float32) -> Scene:
    generator = torch.Generator().manual_seed(5)
    num_heads, num_kv_heads = case.heads
    size = case.block_size
    blocks_needed = [-(-kv_len // size) for _, kv_len in case.lengths]
    num_blocks = sum(blocks_needed) + 3
    # Garbage, not zeros, in every slot that is not written: reading one shows.
    pool = torch.full((2, num_blocks, size, num_kv_heads, HEAD_DIM), 50.0, dtype=kv_dtype)
    order = torch.randperm(num_blocks, generator=generator).tolist()

    queries, keys, values, slots, expected = [], [], [], [], []
    table = torch.zeros((len(case.lengths), max(blocks_needed)), dtype=torch.int32)
    for request, (query_len, kv_len) in enumerate(case.lengths):
        block_ids = [order.pop() for _ in range(blocks_needed[request])]
        table[request, : len(block_ids)] = torch.tensor(block_ids, dtype=torch.int32)
        query = torch.randn(query_len, num_heads, HEAD_DIM, generator=generator)
        key = torch.randn(kv_len, num_kv_heads, HEAD_DIM, generator=generator).to(kv_dtype)
        value = torch.randn(kv_len, num_kv_heads, HEAD_DIM, generator=generator).to(kv_dtype)
        slot = torch.tensor([block_ids[p // size] * size + p % size for p in range(kv_len)])
        old = slot[: kv_len - query_len]
        pool[0].flatten(0, 1)[old] = key[: len(old)]
        pool[1].flatten(0, 1)[old] = value[: len(old)]
        queries.append(query)
        keys.append(key[len(old) :].float())
        values.append(value[len(old) :].float())
        slots.append(slot[len(old) :])
        expected.append(dense_attention(query, key.float(), value.float(), case.sliding_window))
    metadata = AttentionMetadata(
        slot_mapping_T=torch.cat(slots),
        block_table_RM=table,
        query_lens=tuple(query_len for query_len, _ in case.lengths),
        kv_lens=tuple(kv_len for _, kv_len in case.lengths),
        block_size=size,
    )
    return Scene(
        case,
        torch.cat(queries),
        torch.cat(keys),
        torch.cat(values),
        LayerKV(pool[0], pool[1]),
        metadata,
        torch.cat(expected),
    )


def dense_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, window: int | None) -> torch.Tensor:
    """Attention of the last len(query) positions over contiguous keys, by torch's own kernel."""
    position = torch.arange(len(key))
    visible = position <= position[len(key) - len(query) :].unsqueeze(1)
    if window is not None:
        visible &= position > position[len(key) - len(query) :].unsqueeze(1) - window
    groups = query.shape[1] // key.shape[1]
    return F.scaled_dot_product_attention(
        query.transpose(0, 1).double(),
        key.transpose(0, 1).repeat_interleave(groups, dim=0).double(),
        value.transpose(0, 1).repeat_interleave(groups, dim=0).double(),
        attn_mask=visible,
        scale=SCALE,
    ).transpose(0, 1)


@pytest.fixture(params=["reference", "cpu"])
def backend(request: pytest.FixtureRequest) -> AttentionBackend:
    return ReferenceAttention() if request.param == "reference" else CPUAttention()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_backend_equals_dense_attention(backend: AttentionBackend, case: Case) -> None:
    scene = make_scene(case)
    torch.testing.assert_close(scene.run(backend).double(), scene.expected_TNH, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("case", CASES[:7], ids=lambda case: case.name)
def test_backend_reads_the_pools_rounded_values(backend: AttentionBackend, case: Case) -> None:
    """A bfloat16 pool: what this step wrote is read back rounded, so a later warm run sees the same keys."""
    scene = make_scene(case, kv_dtype=torch.bfloat16)
    torch.testing.assert_close(scene.run(backend).double(), scene.expected_TNH, atol=5e-6, rtol=1e-5)


def test_backend_writes_its_slots_and_nothing_else(backend: AttentionBackend) -> None:
    scene = make_scene(CASES[6])
    before = torch.stack([scene.kv.key_BSKH, scene.kv.value_BSKH]).flatten(1, 2)
    scene.run(backend)
    after = torch.stack([scene.kv.key_BSKH, scene.kv.value_BSKH]).flatten(1, 2)
    slots = scene.metadata.slot_mapping_T
    assert torch.equal(after[0, slots], scene.k_TKH)
    assert torch.equal(after[1, slots], scene.v_TKH)
    untouched = torch.ones(after.shape[1], dtype=torch.bool)
    untouched[slots] = False
    assert torch.equal(after[:, untouched], before[:, untouched])


def test_copy_blocks_runs_in_order(backend: AttentionBackend) -> None:
    pool = torch.arange(2 * 4 * 2 * 1 * 3, dtype=torch.float32).view(2, 4, 2, 1, 3).clone()
    original = pool.clone()
    backend.copy_blocks(LayerKV(pool[0], pool[1]), ((0, 1), (1, 2)))
    assert torch.equal(pool[:, 1], original[:, 0])
    assert torch.equal(pool[:, 2], original[:, 0])
    assert torch.equal(pool[:, [0, 3]], original[:, [0, 3]])


def test_cpu_decode_does_not_depend_on_the_rest_of_the_batch() -> None:
    batch = make_scene(Case("batch", ((1, 100), (1, 97), (1, 110), (1, 13))))
    together = batch.run(CPUAttention())
    metadata = batch.metadata
    for request in range(4):
        alone = CPUAttention().forward(
            batch.q_TNH[request : request + 1],
            batch.k_TKH[request : request + 1],
            batch.v_TKH[request : request + 1],
            batch.kv,
            AttentionMetadata(
                slot_mapping_T=metadata.slot_mapping_T[request : request + 1],
                block_table_RM=metadata.block_table_RM[request : request + 1],
                query_lens=(1,),
                kv_lens=(metadata.kv_lens[request],),
                block_size=metadata.block_size,
            ),
            scale=SCALE,
            sliding_window=None,
        )
        torch.testing.assert_close(together[request : request + 1], alone, atol=1e-6, rtol=1e-6)


@given(st.lists(st.integers(1, 5000), max_size=40))
def test_groups_hold_everybody_once_and_little_padding(kv_lens: list[int]) -> None:
    groups = group_by_length(kv_lens, max_keys=6000, max_padding=1.25)
    assert sorted(index for group in groups for index in group) == list(range(len(kv_lens)))
    for group in groups:
        lengths = [kv_lens[index] for index in group]
        padded = len(group) * max(lengths)
        assert padded <= max(lengths) or padded <= 6000
        assert padded <= 1.25 * sum(lengths)
