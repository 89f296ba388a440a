"""ATB's emulated operators against dense attention, and what its 310P kernel makes of masks and of float16."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.engine import npu_calls as calls
from tests.engine.npu_calls import HALF, half, ints
from tests.engine.npu_dense import expected_attention, visible
from tests.support.npu import Atb, npu_operators
from tests.support.npu.atb_kernel import Tiling, compressed_bias

pytestmark = pytest.mark.usefixtures("npu_wheel")

HEADS, KV_HEADS = 4, 2


@pytest.mark.parametrize("chip", ["310P", "910B"])
def test_atb_writes_and_reads_its_cache(chip: str) -> None:
    """Chunked prompt and decode in one call, decode alone in another, over a cache that the third operator filled."""
    queries, contexts, width = [5, 1], [150, 40], 128
    table = torch.tensor([[3, 1], [2, 0]], dtype=torch.int32)
    keys, values = half(190, 2, 16), half(190, 2, 16, seed=1)
    place = [*range(150), *range(40)]
    rows = [0] * 150 + [1] * 40
    slots = [int(table[row, at // width]) * width + at % width for row, at in zip(rows, place, strict=True)]
    q = half(6, 4, 16, seed=2)
    dense = calls.causal_mask(queries, contexts)
    with npu_operators(chip):
        shape = (4, 2, width, 16) if chip == "310P" else (4, width, 2, 16)
        caches = [
            torch.ops.npu.npu_format_cast(torch.zeros(shape, dtype=HALF), 29 if chip == "310P" else 2) for _ in range(2)
        ]
        torch.ops.atb._npu_reshape_and_cache(keys, values, *caches, ints(*slots))
        mask = calls.nz_mask(dense) if chip == "310P" else dense
        out = torch.full_like(q, 7.0)
        torch.ops.atb._npu_paged_attention_splitfuse(
            q, *caches, table, ints(*contexts), mask, ints(*queries), 2, 4, 0.25, out
        )
        last = torch.full_like(q[-2:], 7.0)
        torch.ops.atb._npu_paged_attention(q[4:], *caches, 2, 4, 0.25, table, ints(*contexts), last)
    own = [(slice(0, 5), slice(0, 150)), (slice(5, 6), slice(150, 190))]
    expected = torch.cat(
        [
            expected_attention(
                q[a], keys[b], values[b], visible(a.stop - a.start, b.stop - b.start, before=190, after=0), 0.25
            )
            for a, b in own
        ]
    )
    torch.testing.assert_close(out.double(), expected, atol=2e-3, rtol=2e-3)
    torch.testing.assert_close(last, out[4:])


def run_v2(
    lengths: list[tuple[int, int]], *, block_size: int = 128, head_size: int = 16, mask: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of (queries, keys) a sequence, whose blocks lie backwards in the pool: the operator's answer, and the dense."""
    counts = [-(-keys // block_size) for _, keys in lengths]
    table = torch.full((len(lengths), max(counts)), -7, dtype=torch.int32)
    free = list(range(sum(counts)))
    for row, count in enumerate(counts):
        table[row, :count] = ints(*(free.pop() for _ in range(count)))
    query = half(sum(queries for queries, _ in lengths), HEADS, head_size)
    keys = [half(length, KV_HEADS, head_size, seed=row + 1) for row, (_, length) in enumerate(lengths)]
    values = [half(length, KV_HEADS, head_size, seed=row + 99) for row, (_, length) in enumerate(lengths)]
    slots = [
        int(table[row, place // block_size]) * block_size + place % block_size
        for row, (_, length) in enumerate(lengths)
        for place in range(length)
    ]
    scale, out = head_size**-0.5, torch.full_like(query, 7.0)
    with npu_operators("310P"):
        shape = (sum(counts), KV_HEADS * head_size // 16, block_size, 16)
        caches = [calls.nz(torch.full(shape, float("nan"), dtype=HALF)) for _ in range(2)]
        torch.ops.atb._npu_reshape_and_cache(torch.cat(keys), torch.cat(values), *caches, ints(*slots))
        torch.ops.atb._npu_paged_attention_splitfuse_v2(
            query,
            *caches,
            table,
            ints(*(length for _, length in lengths)),
            calls.compressed_mask() if mask is None else mask,
            ints(*(queries for queries, _ in lengths)),
            KV_HEADS,
            HEADS,
            scale,
            out=out,
        )
    expected, start = [], 0
    for (queries, length), own_keys, own_values in zip(lengths, keys, values, strict=True):
        seen = visible(queries, length, before=length, after=0)
        expected.append(expected_attention(query[start : start + queries], own_keys, own_values, seen, scale))
        start += queries
    return out.double(), torch.cat(expected)


V2_CALLS = (
    pytest.param([(300, 300)], {}, id="cold"),
    pytest.param([(5, 400)], {}, id="a hit: few queries, many keys"),
    pytest.param([(100, 188), (70, 130)], {}, id="chunks that split blocks"),
    pytest.param([(1, 300), (1, 1), (1, 128)], {}, id="decodes only"),
    pytest.param([(1, 300), (140, 140), (1, 1), (4, 260), (1, 2048)], {}, id="all kinds at once"),
    pytest.param([(200, 2048)], {}, id="as many keys as the mask has"),
    pytest.param([(1, 2049), (1, 4500)], {}, id="decodes of more keys"),
    pytest.param([(16, 2320), (7, 2048 + 7)], {}, id="up to 16 queries of more keys, in one block"),
    pytest.param([(300, 2048 + 300), (1, 2100)], {}, id="a chunk of more keys that begins with a block"),
    pytest.param([(60, 2304 + 68)], {}, id="a chunk of more keys within a block"),
    pytest.param([(2100, 2100)], {}, id="cold, with more keys"),
    pytest.param([(100, 188), (9, 9)], {"block_size": 64, "head_size": 256}, id="small tiles"),
    pytest.param([(33, 40), (2, 2080)], {"block_size": 16, "head_size": 80}, id="small blocks"),
)


@pytest.mark.parametrize(("lengths", "sizes"), V2_CALLS)
def test_one_triangle_masks_every_sequence(lengths: list[tuple[int, int]], sizes: dict[str, int]) -> None:
    out, expected = run_v2(lengths, block_size=sizes.get("block_size", 128), head_size=sizes.get("head_size", 16))
    torch.testing.assert_close(out, expected, atol=1e-2, rtol=1e-2)


def test_a_wrong_mask_is_seen_where_the_kernel_reads_it() -> None:
    """In areas of 8 queries and 16 keys on the diagonal: other keys are hidden or not whatever the mask says."""
    lengths = [(40, 72)]
    out, expected = run_v2(lengths, mask=torch.zeros_like(calls.compressed_mask()))
    assert not torch.isclose(out, expected, atol=1e-2, rtol=1e-2).all(2).any(1).all()
    everywhere = torch.full_like(calls.compressed_mask(), -10000.0)
    hidden = compressed_bias(everywhere, 40, 72, Tiling(128, 16, [40])).bias_QL != 0
    open_ = compressed_bias(torch.zeros_like(everywhere), 40, 72, Tiling(128, 16, [40])).bias_QL != 0
    place_Q = torch.arange(32, 72).unsqueeze(1) // 8 * 8
    place_L = torch.arange(72) // 16 * 16
    assert torch.equal(hidden, place_L + 15 > place_Q)
    assert torch.equal(open_, place_L > place_Q + 7)


def test_a_mask_is_read_at_its_own_rows_and_columns() -> None:
    """Numbers that name their place: rows and columns up to 2,048 keys, the distance of a block beyond."""
    names = torch.arange(2048 * 2048, dtype=torch.float64).view(2048, 2048)
    for keys, start in ((300, (297, 297)), (2320, (2317 % 128, 2317 % 128))):
        bias_QL = compressed_bias(names, 3, keys, Tiling(128, 16, [3])).bias_QL
        assert bias_QL[0, keys - 3] == names[start]


def test_a_lone_query_reads_the_mask_for_the_last_2048_keys() -> None:
    """Two blocks at a time; beside a prompt's it is a tile like any other, and its own area is all that is read."""
    everywhere = torch.full_like(calls.compressed_mask(), -10000.0)
    alone = compressed_bias(everywhere, 1, 4500, Tiling(128, 16, [1])).bias_QL[0]
    assert torch.equal(alone != 0, torch.arange(4500) >= 2560)
    beside = compressed_bias(everywhere, 1, 4500, Tiling(128, 16, [1, 600])).bias_QL[0]
    assert torch.equal(beside != 0, torch.arange(4500) >= 4496)


@pytest.mark.parametrize(
    ("queries", "keys", "others", "rows"),
    [
        pytest.param(20, 2100, [], 19, id="more than 16 queries: a tile's rows from the last on"),
        pytest.param(128, 4096, [], 127, id="a whole tile"),
        pytest.param(5, 2100, [600], 4, id="a few beside a prompt"),
        pytest.param(5, 2100, [], -1, id="a few alone skip the keys far before them"),
        pytest.param(20, 2048, [], 0, id="as many keys as the mask has"),
        pytest.param(1, 2048, [], 1, id="for one query a whole row is loaded from where it begins"),
        pytest.param(1, 2304, [], 0, id="with more keys it begins with a row's first number"),
    ],
)
def test_the_kernel_loads_rows_after_the_mask(queries: int, keys: int, others: list[int], rows: int) -> None:
    """It uses none of them, but they must be there."""
    end = compressed_bias(calls.compressed_mask(), queries, keys, Tiling(128, 16, [queries, *others])).end
    assert max(-(-(end - 2048 * 2048) // 2048), -1) == rows


@pytest.mark.parametrize(("block_size", "head_size"), [(128, 128), (64, 64), (64, 256), (16, 16), (48, 80)])
@pytest.mark.parametrize("others", [[], [600]], ids=["alone", "beside a prompt"])
def test_tiles_that_cross_the_end_of_a_block_are_what_the_mask_fails_at(
    block_size: int, head_size: int, others: list[int]
) -> None:
    mask = calls.compressed_mask()
    met = {"right": 0, "wrong": 0, "spared": 0}
    for keys in (1, 130, 2047, 2048, *range(2049, 2049 + 2 * block_size, max(5, block_size // 12))):
        for queries in (1, 2, 9, 16, 17, 33, 130):
            if queries > keys:
                continue
            tiling = Tiling(block_size, head_size, [queries, *others])
            hidden = compressed_bias(mask, queries, keys, tiling).bias_QL < 0
            seen = visible(queries, keys, before=keys, after=0)
            assert not (hidden & seen).any(), "no key is lost"
            ahead = int((~hidden & ~seen).sum(1).max())
            assert ahead <= 22
            if keys <= 2048 or not tiling.crosses(queries, keys):
                assert ahead == 0, (queries, keys)
                met["right"] += 1
            elif ahead:
                met["wrong"] += 1
            else:  # one query only beyond the end, and whole areas before it
                last = tiling.tiles(queries, keys)[-1]
                assert (keys % block_size, (len(last) - 1) % 8) == (1, 0)
                met["spared"] += 1
    assert met["right"] > 20
    assert met["wrong"] > 20


def test_an_older_atb_has_one_splitfuse() -> None:
    with npu_operators("310P", atb=Atb.CANN_9_0):
        assert hasattr(torch.ops.atb, "_npu_paged_attention_splitfuse_v2"), "torch_npu registers it all the same"
        with pytest.raises(RuntimeError, match="PagedAttentionOperation CreateOperation failed!"):
            torch.ops.atb._npu_paged_attention_splitfuse_v2(**calls.splitfuse_v2())
        call = calls.splitfuse()
        torch.ops.atb._npu_paged_attention_splitfuse(**call)
        assert call["out"].any()


def numbers(*values: float) -> torch.Tensor:
    """A cache of one block of 16, one head of 16: the first number of each key, or value, and zeros."""
    rows = torch.zeros(16, 16, dtype=HALF)
    rows[: len(values), 0] = torch.tensor(values).half()
    return calls.nz(rows.view(1, 1, 16, 16))


@pytest.mark.parametrize(
    ("query", "keys", "scale", "expected"),
    [
        pytest.param(3.0, [682.5, 683.0], 0.25, 0.5, id="2,047.5 and 2,049 are both 2,048"),
        pytest.param(1.0, [64.0, 66.0], 0.25, 0.62255859375, id="what float16 has it keeps"),
        pytest.param(1.0, [2.0**-12, 0.0], 2.0**12, 0.268798828125, id="small products are scaled up"),
    ],
)
def test_scores_are_rounded_before_they_are_scaled(
    query: float, keys: list[float], scale: float, expected: float
) -> None:
    """Two keys, whose values are 0 and 1."""
    with npu_operators("310P"):
        call: dict[str, Any] = calls.paged_attention(
            query=torch.zeros(1, 1, 16, dtype=HALF),
            key_cache=numbers(*keys),
            value_cache=numbers(0.0, 1.0),
            num_kv_heads=1,
            num_heads=1,
            scale_value=scale,
            block_table=torch.zeros(1, 1, dtype=torch.int32),
            context_lens=ints(2),
            out=torch.zeros(1, 1, 16, dtype=HALF),
        )
        call["query"][0, 0, 0] = query
        torch.ops.atb._npu_paged_attention(**call)
    assert float(call["out"][0, 0, 0]) == pytest.approx(expected, abs=1e-3)
