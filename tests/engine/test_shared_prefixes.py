"""Shared-prefix (cascade) attention: which requests are grouped, and that it changes nothing but the reads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from reprise_engine import LLM
from reprise_engine.attention.base import AttentionBackend, AttentionMetadata, LayerKV, SharedPrefix
from reprise_engine.attention.cpu import CPUAttention
from reprise_engine.attention.native import NativeAttention
from reprise_engine.attention.reference import ReferenceAttention
from reprise_engine.attention.shared_prefixes import LEAST_SAVING, MOST_NEW_TOKENS, Candidate, find_shared_prefixes
from reprise_engine.native import open_kernels
from reprise_engine.native.build import library_path
from reprise_engine.native.library import available_levels
from reprise_engine.request import RequestId, SamplingParams
from reprise_engine.runner.batch import build_batch
from reprise_engine.step import BlockId, ScheduledRequest, Step
from tests.support.tiny_models import tiny_model_path

LEVELS = available_levels() if library_path().exists() else ()


# --- the decision


def table(*tables: list[int], filled: list[int] | None = None) -> list[Candidate]:
    counts = filled or [len(blocks) for blocks in tables]
    return [Candidate(i, blocks, n) for i, (blocks, n) in enumerate(zip(tables, counts, strict=True))]


@pytest.mark.parametrize(
    ("candidates", "expected", "why"),
    [
        ([], (), "nothing there"),
        (table([1, 2, 3], [4, 5, 6]), (), "nothing in common"),
        (table([1, 2, 3], [9, 2, 3]), (), "a common block in the middle is no prefix"),
        (table([1, 2, 3], [1, 2, 4]), (((0, 1), 20),), "two blocks in common"),
        (table([1, 2, 3], [8], [1, 2, 4]), (((0, 2), 20),), "indices are those of the step"),
        (table([1, 2, 3], [1, 2, 3], filled=[1, 3]), (((0, 1), 10),), "only what was filled before the step"),
        (table([1, 2], [1, 2], filled=[0, 2]), (), "one of them has nothing filled"),
        (table([1, 2, 7], [1, 2, 8], [5, 6], [5, 6]), (((0, 1), 20), ((2, 3), 20)), "two groups"),
        (table([1, 2, 3, 4], [1, 2, 3, 4], [1, 7]), (((0, 1), 40),), "a long pair saves more than three short ones"),
        (table([1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 6]), (((0, 1, 2), 20),), "three short ones save more than a pair"),
        (
            table([1, 2, 3, 4], [1, 2, 3, 4], [1, 7, 8, 9], [1, 7, 8, 9]),
            (((0, 1), 40), ((2, 3), 40)),
            "two branches save more than their stem",
        ),
    ],
)
def test_groups_that_save_the_most(
    candidates: list[Candidate], expected: tuple[tuple[tuple[int, ...], int], ...], why: str
) -> None:
    found = find_shared_prefixes(candidates, block_size=10, least_saving=1)
    assert tuple((group.requests, group.num_tokens) for group in found) == expected, why


def test_a_group_must_save_enough() -> None:
    blocks = list(range(LEAST_SAVING // 16))
    assert find_shared_prefixes(table(blocks, blocks), block_size=16) == (SharedPrefix((0, 1), LEAST_SAVING),)
    assert find_shared_prefixes(table(blocks[1:], blocks[1:]), block_size=16) == ()
    third = -(-len(blocks) // 2)
    assert len(find_shared_prefixes(table(*[blocks[:third]] * 3), block_size=16)) == 1, "two of three reads are saved"


@given(
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), max_size=8),
    st.lists(st.integers(0, 6), min_size=8, max_size=8),
)
def test_what_is_shared_is_common_filled_and_disjoint(tables: list[list[int]], filled: list[int]) -> None:
    candidates = table(*tables, filled=[min(len(t), n) for t, n in zip(tables, filled, strict=False)])
    found = find_shared_prefixes(candidates, block_size=4, least_saving=5)
    members = [request for group in found for request in group.requests]
    assert len(members) == len(set(members))
    for group in found:
        blocks = group.num_tokens // 4
        assert (len(group.requests) - 1) * group.num_tokens >= 5
        assert len({tuple(tables[request][:blocks]) for request in group.requests}) == 1
        assert all(candidates[request].num_filled >= blocks for request in group.requests)


def test_a_batch_groups_its_decoding_requests_and_leaves_prompts_alone() -> None:
    shared = list(range(LEAST_SAVING // 16))

    def part(name: str, new: int, own: list[int]) -> ScheduledRequest:
        return ScheduledRequest(
            request_id=RequestId(name),
            token_ids=(5,) * new,
            start=LEAST_SAVING + 3,
            block_table=tuple(BlockId(block) for block in [*shared, *own]),
            samples=True,
            sampling=SamplingParams(),
        )

    step = Step(
        step_id=1,
        requests=(
            part("prompt", MOST_NEW_TOKENS + 1, [90]),
            part("a", 1, [91]),
            part("b", MOST_NEW_TOKENS, [92]),
        ),
    )
    batch = build_batch(step, block_size=16, num_blocks=100, device=torch.device("cpu"))
    assert batch.metadata.shared_prefixes == (SharedPrefix((1, 2), LEAST_SAVING),)


# --- the attention


@dataclass(frozen=True)
class Group:
    """Requests, as (new tokens, own tokens before them), behind a prefix of `shared` blocks."""

    shared: int
    requests: tuple[tuple[int, int], ...]


CASES = {
    "eight decoding": ((Group(17, ((1, 3),) * 8),), (4, 2)),
    "groups of different lengths": ((Group(3, ((1, 0), (1, 9))), Group(30, ((1, 5), (1, 0), (1, 61)))), (4, 2)),
    "with a prompt and one alone": ((Group(0, ((40, 0),)), Group(9, ((1, 4), (2, 7))), Group(0, ((1, 33),))), (4, 2)),
    "more rows than a piece of work": ((Group(5, ((8, 1),) * 20),), (8, 1)),
    "one key head a query head": ((Group(12, ((1, 1), (3, 8), (1, 20))),), (3, 3)),
}  # fmt: skip
BLOCK_SIZE = 8


@pytest.fixture(params=["reference", "cpu", *LEVELS])
def backend(request: pytest.FixtureRequest) -> Iterator[AttentionBackend]:
    with torch.inference_mode():
        if request.param in LEVELS:
            yield NativeAttention(open_kernels(request.param))
        else:
            yield ReferenceAttention() if request.param == "reference" else CPUAttention()


def make_step(
    groups: tuple[Group, ...], heads: tuple[int, int], dtype: torch.dtype, head_dim: int = 40
) -> tuple[tuple[torch.Tensor, ...], LayerKV, AttentionMetadata]:
    generator = torch.Generator().manual_seed(3)
    pool = torch.randn(2, 500, BLOCK_SIZE, heads[1], head_dim, generator=generator).to(dtype)
    order = iter(torch.randperm(500, generator=generator).tolist())
    tables: list[list[int]] = []
    query_lens: list[int] = []
    kv_lens: list[int] = []
    slots: list[int] = []
    shared: list[SharedPrefix] = []
    for group in groups:
        prefix = [next(order) for _ in range(group.shared)]
        first = len(tables)
        for new, own in group.requests:
            blocks = prefix + [next(order) for _ in range(-(-(own + new) // BLOCK_SIZE))]
            end = group.shared * BLOCK_SIZE + own + new
            slots += [blocks[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in range(end - new, end)]
            tables.append(blocks)
            query_lens.append(new)
            kv_lens.append(end)
        if group.shared:
            shared.append(SharedPrefix(tuple(range(first, len(tables))), group.shared * BLOCK_SIZE))
    padded = torch.zeros(len(tables), max(map(len, tables)), dtype=torch.int32)
    for row, blocks in enumerate(tables):
        padded[row, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
    metadata = AttentionMetadata(
        slot_mapping_T=torch.tensor(slots),
        block_table_RM=padded,
        query_lens=tuple(query_lens),
        kv_lens=tuple(kv_lens),
        block_size=BLOCK_SIZE,
        shared_prefixes=tuple(shared),
    )
    tokens = sum(query_lens)
    qkv = tuple(torch.randn(tokens, n, head_dim, generator=generator) for n in (heads[0], heads[1], heads[1]))
    return qkv, LayerKV(pool[0], pool[1]), metadata


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 11])
@pytest.mark.parametrize("case", CASES)
def test_reading_once_is_reading_each(
    backend: AttentionBackend, case: str, window: int | None, dtype: torch.dtype
) -> None:
    groups, heads = CASES[case]
    (q, k, v), kv, metadata = make_step(groups, heads, dtype)
    assert metadata.shared_prefixes
    apart = replace(metadata, shared_prefixes=())
    oracle = ReferenceAttention().forward(q, k, v, kv, apart, scale=0.3, sliding_window=window)
    once = backend.forward(q, k, v, kv, metadata, scale=0.3, sliding_window=window)
    torch.testing.assert_close(once, oracle, atol=3e-6, rtol=1e-5)


@pytest.mark.skipif(not LEVELS, reason="the CPU kernels are not built (make venv)")
def test_the_shared_keys_are_read_from_the_first_request_only() -> None:
    """That the prefix is really taken once: another table entry of the second request is not looked at."""
    (q, k, v), kv, metadata = make_step((Group(4, ((1, 2), (1, 5))),), (4, 2), torch.float32)
    backend = NativeAttention(open_kernels(LEVELS[0]))
    expected = backend.forward(q, k, v, kv, metadata, scale=0.3, sliding_window=None)
    metadata.block_table_RM[1, :4] = 499
    assert torch.equal(backend.forward(q, k, v, kv, metadata, scale=0.3, sliding_window=None), expected)


# --- the engine


@pytest.mark.parametrize("family", ["qwen3", "llama", "qwen2-sliding"])
def test_tokens_are_those_of_a_run_that_shares_nothing(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that leave a cached prompt at different places, decoding together; on the kernels where they are."""
    grouped: list[int] = []

    def find(candidates: list[Candidate], *, block_size: int) -> tuple[SharedPrefix, ...]:
        found = find_shared_prefixes(candidates, block_size=block_size)
        grouped.append(len(found))
        return found

    monkeypatch.setattr("reprise_engine.runner.batch.find_shared_prefixes", find)
    generator = torch.Generator().manual_seed(11)
    tokens = torch.randint(3, 400, (600,), generator=generator).tolist()
    prompts: list[list[int]] = [
        tokens[:shared] + tokens[500 + own :] for own, shared in enumerate((500, 500, 470, 300))
    ]
    greedy = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    answers = []
    for caching in (True, False):
        llm = LLM(
            str(tiny_model_path(family)),
            device="cpu",
            skip_tokenizer_init=True,
            enable_prefix_caching=caching,
            num_gpu_blocks_override=300,
        )
        llm.generate([prompts[0]], greedy, use_tqdm=False)
        grouped.clear()
        answers.append([output.outputs[0].token_ids for output in llm.generate(prompts, greedy, use_tqdm=False)])
        assert any(grouped) == caching
    assert answers[0] == answers[1]
