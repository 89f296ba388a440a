"""What the NPU backends decide before an operator is called: chips, limits, block copies, the halves of a cascade."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from reprise_engine.attention.base import AttentionMetadata, KVLayout, LayerKV, SharedPrefix
from reprise_engine.attention.block_copies import BlockCopier, original_sources
from reprise_engine.attention.npu_cascade import merge, saved_bytes, split_step
from reprise_engine.attention.npu_chip import Chip, chip_named
from reprise_engine.attention.npu_limits import check_npu_flags, check_npu_length, check_npu_model
from reprise_engine.errors import ConfigError, UnsupportedModel
from reprise_engine.runner.kv_cache import allocate_kv_cache
from tests.support.npu import npu_operators

CPU = torch.device("cpu")
QWEN: dict[str, Any] = {"num_heads": 16, "num_kv_heads": 8, "head_dim": 128, "dtype": "bfloat16"}


# --- chips and limits


@pytest.mark.parametrize(
    ("name", "chip"),
    [
        ("Ascend910B1", Chip.A2),
        ("Ascend910B4", Chip.A2),
        ("Ascend910_9392", Chip.A2),
        ("Ascend310P3", Chip.P310),
    ],
)
def test_a_device_name_tells_the_chip(name: str, chip: Chip) -> None:
    assert chip_named(name) is chip


@pytest.mark.parametrize("name", ["Ascend910A", "Ascend910ProB", "Ascend910B", "Ascend310", "Ascend950DT", ""])
def test_a_chip_without_a_backend_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"The NPU is '{name}', which is not supported: .*--device cpu"):
        chip_named(name)


def test_the_pool_of_a_310p_has_its_own_layout() -> None:
    assert (Chip.A2.kv_layout, Chip.P310.kv_layout) == (KVLayout.BSKH, KVLayout.NZ)


@pytest.mark.parametrize(
    ("chip", "changes"),
    [
        (Chip.A2, {}),
        (Chip.A2, {"dtype": "float16"}),
        (Chip.A2, {"head_dim": 80}),
        (Chip.A2, {"head_dim": 256}),
        (Chip.A2, {"num_kv_heads": 16}),
        (Chip.A2, {"num_kv_heads": 16, "head_dim": 64}),
        (Chip.A2, {"num_heads": 64, "num_kv_heads": 1}),
        (Chip.P310, {"dtype": "float16"}),
        (Chip.P310, {"dtype": "float16", "num_kv_heads": 16, "head_dim": 80}),
        (Chip.P310, {"dtype": "float16", "num_heads": 128}),
    ],
)
def test_models_within_the_limits_pass(chip: Chip, changes: dict[str, Any]) -> None:
    check_npu_model(chip, **(QWEN | changes))


@pytest.mark.parametrize(
    ("chip", "changes", "message"),
    [
        (Chip.A2, {"head_dim": 72}, r"key heads of 72; .* must be a multiple of 16, up to 256.*--device cpu"),
        (Chip.A2, {"head_dim": 512}, r"key heads of 512; .* up to 256"),
        (Chip.A2, {"num_kv_heads": 16, "head_dim": 80}, r"of 80; with as many key heads .* 64 or 128 only"),
        (Chip.A2, {"num_heads": 15}, r"15 query heads and 8 key heads .* equally many"),
        (Chip.A2, {"num_heads": 128, "num_kv_heads": 1}, r"up to 64\."),
        (Chip.A2, {"num_heads": 512}, r"may be 256 query heads"),
        (Chip.P310, {"dtype": "float16", "head_dim": 256}, r"multiple of 16, up to 128\."),
        (Chip.P310, {"dtype": "float16", "num_heads": 136}, r"may have 16384 elements, these have 17408\."),
    ],
)
def test_heads_that_the_operators_refuse_are_told_at_load(chip: Chip, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        check_npu_model(chip, **(QWEN | changes))


@pytest.mark.parametrize(
    ("chip", "dtype", "message"),
    [
        (Chip.A2, "float32", "--dtype is float32, .* take bfloat16 or float16. Use --dtype bfloat16"),
        (Chip.P310, "bfloat16", "--dtype is bfloat16, .* 310P take float16. Use --dtype float16"),
    ],
)
def test_a_dtype_that_the_operators_refuse_is_told_at_load(chip: Chip, dtype: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_npu_model(chip, **(QWEN | {"dtype": dtype}))


def test_flags_that_the_operators_refuse_are_told_at_load() -> None:
    for size in (128, 256, 384, 512):
        check_npu_flags(Chip.A2, block_size=size, max_num_seqs=4096)
    check_npu_flags(Chip.P310, block_size=128, max_num_seqs=2048)
    for chip, size in ((Chip.A2, 16), (Chip.A2, 192), (Chip.P310, 256), (Chip.P310, 64)):
        with pytest.raises(ConfigError, match=f"--block-size is {size}; .* must be 128"):
            check_npu_flags(chip, block_size=size, max_num_seqs=8)
    for chip, most in ((Chip.A2, 4096), (Chip.P310, 2048)):
        with pytest.raises(ConfigError, match=f"--max-num-seqs is {most + 1}; on an NPU {chip.value} at most {most} "):
            check_npu_flags(chip, block_size=128, max_num_seqs=most + 1)


def test_lengths_that_the_operators_refuse_are_told_at_load() -> None:
    for chip, length in ((Chip.A2, 10**6), (Chip.P310, 65_504)):
        assert check_npu_length(chip, max_model_len=length) is None
    warning = check_npu_length(Chip.P310, max_model_len=131_072)
    assert warning is not None
    assert warning.startswith("--max-model-len is 131072: beyond 65504 tokens an NPU 310P may sum")
    assert check_npu_length(Chip.P310, max_model_len=655_232) is not None
    with pytest.raises(ConfigError, match=r"--max-model-len is 655233; .* 655232 tokens\. Lower it"):
        check_npu_length(Chip.P310, max_model_len=655_233)


# --- the pool and its copies


@pytest.mark.usefixtures("npu_wheel")
@pytest.mark.parametrize("layout", KVLayout)
def test_a_layer_knows_its_blocks_in_every_layout(layout: KVLayout) -> None:
    with npu_operators("310P"):
        [layer] = allocate_kv_cache(
            num_layers=1,
            num_blocks=5,
            block_size=128,
            num_kv_heads=2,
            head_dim=24,
            dtype=torch.float16,
            device=CPU,
            layout=layout,
        )
    assert (layer.num_blocks, layer.block_size) == (5, 128)
    assert layer.key_BSKH.shape == ((5, 128, 2, 24) if layout is KVLayout.BSKH else (5, 3, 128, 16))
    assert layer.key_BSKH.shape == layer.value_BSKH.shape
    assert not layer.key_BSKH.any()
    assert not layer.value_BSKH.any()
    layer.key_BSKH.fill_(1.0)
    assert not layer.value_BSKH.any()


def test_heads_that_nz_cannot_hold_are_refused() -> None:
    with pytest.raises(ValueError, match="3 key heads of 8 are no multiple of 16"):
        allocate_kv_cache(
            num_layers=1,
            num_blocks=1,
            block_size=128,
            num_kv_heads=3,
            head_dim=8,
            dtype=torch.float16,
            device=CPU,
            layout=KVLayout.NZ,
        )


def test_copies_read_what_was_there_before_all_of_them() -> None:
    assert original_sources(((0, 1), (1, 2))) == {1: 0, 2: 0}
    assert original_sources(((0, 1), (5, 1))) == {1: 5}
    assert original_sources(((0, 1), (1, 0))) == {1: 0}
    assert original_sources(((3, 3),)) == {}


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=12))
def test_one_indexed_copy_equals_copies_in_order(copies: list[tuple[int, int]]) -> None:
    pool = torch.arange(2 * 6 * 4.0).view(2, 6, 4, 1, 1)
    expected = pool.clone()
    for source, target in copies:
        expected[:, target] = expected[:, source]
    copier, ordered = BlockCopier(CPU), tuple(copies)
    for layer in (pool.clone(), pool.clone()):
        copier.copy(LayerKV(layer[0], layer[1]), ordered)
        assert torch.equal(layer, expected)


def test_a_copier_forgets_the_copies_of_the_step_before() -> None:
    pool = torch.arange(2 * 3.0).view(2, 3, 1, 1, 1)
    copier = BlockCopier(CPU)
    for copies in (((0, 1),), ((2, 0),)):
        copier.copy(LayerKV(pool[0], pool[1]), copies)
    assert pool.flatten().tolist() == [2, 0, 2, 5, 3, 5]


# --- the halves of a cascade


def metadata_of(
    lengths: tuple[tuple[int, int], ...], table: list[list[int]], shared: tuple[SharedPrefix, ...]
) -> AttentionMetadata:
    rows = sum(query_len for query_len, _ in lengths)
    return AttentionMetadata(
        slot_mapping_T=torch.arange(rows),
        block_table_RM=torch.tensor(table, dtype=torch.int32),
        query_lens=tuple(query_len for query_len, _ in lengths),
        kv_lens=tuple(kv_len for _, kv_len in lengths),
        block_size=4,
        shared_prefixes=shared,
    )


def test_a_step_is_split_after_its_prefixes() -> None:
    metadata = metadata_of(
        ((1, 11), (2, 6), (3, 15), (1, 9)),
        [[7, 8, 1, 0], [2, 3, 0, 0], [7, 8, 5, 6], [7, 4, 9, 0]],
        (SharedPrefix((0, 2), 8),),
    )
    cascade = split_step(metadata)
    assert cascade.rows_P is not None
    assert cascade.rows_P.tolist() == [0, 3, 4, 5]
    assert cascade.prefix_table_GM.tolist() == [[7, 8]]
    assert (cascade.prefix_query_ends, cascade.prefix_lens) == ([4], [8])
    assert cascade.rest_lens == [3, 6, 7, 9]
    read = [row[: -(-n // 4)] for row, n in zip(cascade.rest_table_RM.tolist(), cascade.rest_lens, strict=True)]
    assert read == [[1], [2, 3], [5, 6], [7, 4, 9]]
    assert cascade.rest_table_RM.dtype == cascade.prefix_table_GM.dtype == torch.int32


def test_two_groups_of_all_rows_need_no_gathering() -> None:
    metadata = metadata_of(
        ((1, 5), (1, 6), (1, 9), (1, 10)),
        [[1, 2, 0], [1, 3, 0], [4, 5, 6], [4, 5, 7]],
        (SharedPrefix((0, 1), 4), SharedPrefix((2, 3), 8)),
    )
    cascade = split_step(metadata)
    assert cascade.rows_P is None
    assert cascade.prefix_table_GM[:, 0].tolist() == [1, 4]
    assert cascade.prefix_table_GM[1].tolist() == [4, 5]
    assert (cascade.prefix_query_ends, cascade.prefix_lens) == ([2, 4], [4, 8])
    assert cascade.rest_lens == [1, 2, 1, 2]
    assert cascade.rest_table_RM[:, 0].tolist() == [2, 3, 6, 7]


def test_what_a_cascade_saves() -> None:
    assert saved_bytes((SharedPrefix((0, 1, 2), 100), SharedPrefix((3, 4), 50)), bytes_per_token=10) == 2500


def test_halves_merge_to_attention_over_all_keys() -> None:
    generator = torch.Generator().manual_seed(3)
    scores = 6 * torch.randn(5, 2, 12, generator=generator)
    values = torch.randn(12, 4, generator=generator)
    halves = [
        (scores[..., part].softmax(-1) @ values[part], scores[..., part].logsumexp(-1, keepdim=True))
        for part in (slice(0, 7), slice(7, 12))
    ]
    merged = merge(halves[0], halves[1], by_operator=False)
    torch.testing.assert_close(merged, scores.softmax(-1) @ values, atol=1e-6, rtol=1e-5)
