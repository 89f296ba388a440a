"""Calls that ATB refuses, or that an NPU would compute wrongly, and calls beside them that go through."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from tests.engine import npu_calls as calls
from tests.engine.npu_calls import HALF, half, ints, nz
from tests.engine.npu_refusals import BFLOAT, P310, PAGED, RESHAPE, SPLITFUSE, SPLITFUSE_V2, Refused
from tests.support.npu import Atb, Rule
from tests.support.npu import atb_rules as atb

Make = Callable[[], dict[str, Any]]

_BLOCK = 2 * 128 * 16
"""Numbers in a block of the calls' caches."""
_FAR = 2**32 // _BLOCK
"""The first block that 32 bits do not reach."""


def _writes(rule: Rule, **changes: Callable[[], Any]) -> Refused:
    return Refused(rule, RESHAPE, partial(_changed, calls.reshape_and_cache, changes), P310)


def _decodes(rule: Rule, **changes: Callable[[], Any]) -> Refused:
    return Refused(rule, PAGED, partial(_changed, calls.paged_attention, changes), P310)


def _splits(rule: Rule, **changes: Callable[[], Any]) -> Refused:
    return Refused(rule, SPLITFUSE, partial(_changed, calls.splitfuse, changes), P310)


def _splits_v2(rule: Rule, **changes: Callable[[], Any]) -> Refused:
    return Refused(rule, SPLITFUSE_V2, partial(_changed, calls.splitfuse_v2, changes), P310)


def _changed(make: Callable[..., dict[str, Any]], changes: dict[str, Callable[[], Any]]) -> dict[str, Any]:
    """Made while the operators are defined, which marking as NZ needs."""
    return make(**{name: change() for name, change in changes.items()})


def _caches(*shape: int) -> dict[str, Callable[[], Any]]:
    return {name: lambda: nz(half(*shape)) for name in ("key_cache", "value_cache")}


def _queries(*shape: int) -> dict[str, Callable[[], Any]]:
    return {name: lambda: half(*shape) for name in ("query", "out")}


def _huge(blocks: int, columns: int = 2) -> torch.Tensor:
    """A cache whose blocks are one."""
    return nz(half(1, columns, 128, 16)).expand(blocks, -1, -1, -1)


def _table(*rows: list[int]) -> Callable[[], torch.Tensor]:
    return lambda: torch.tensor(rows, dtype=torch.int32)


def _first_block_hidden(value: float) -> torch.Tensor:
    mask = calls.causal_mask([3, 1], [20, 130])
    mask[3, :128] = value
    return calls.nz_mask(mask)


def _long_splitfuse(queries: int) -> dict[str, Any]:
    mask = calls.nz_mask(calls.causal_mask([queries], [queries]))
    return calls.long_splitfuse_v2(queries, queries, mask=mask)


def _copied_mask() -> torch.Tensor:
    """Not contiguous, so that torch_npu copies it, and what stands after it in memory is not its own."""
    mask = torch.zeros(2048 + 127, 2064, dtype=HALF)[:2048, :2048]
    return mask.copy_(calls.compressed_mask())


def _blocks_of_64() -> dict[str, Any]:
    """A tile's 128 queries begin with a block, and fill two."""
    caches = {name: nz(half(34, 1, 64, 16)) for name in ("key_cache", "value_cache")}
    table = torch.arange(34, dtype=torch.int32).unsqueeze(0)
    return calls.long_splitfuse_v2(128, 2048 + 128, block_table=table, **caches)


ATB_REFUSED = (
    # writing
    _writes(atb.DTYPE, key=lambda: half(3, 2, 16).to(BFLOAT)),
    _writes(atb.SAME_DTYPE, value=lambda: half(3, 2, 16).float()),
    _writes(atb.EMPTY, key=lambda: half(0, 2, 16), value=lambda: half(0, 2, 16), slot_indices=ints),
    _writes(atb.WRITE_FORMAT, key_cache=lambda: half(4, 2, 128, 16)),
    _writes(atb.WRITE_FORMAT, value_cache=lambda: half(4, 2, 128, 16)),
    Refused(atb.WRITE_FORMAT, RESHAPE, calls.reshape_and_cache),
    _writes(atb.WRITE_SHAPE, key_cache=lambda: nz(half(4, 128, 2, 16))),
    _writes(atb.WRITE_SHAPE, key_cache=lambda: nz(half(4, 2, 128, 8))),
    _writes(atb.WRITE_SHAPE, value_cache=lambda: nz(half(4, 2, 128, 16, 1))),
    Refused(
        atb.WRITE_SHAPE,
        RESHAPE,
        lambda: calls.reshape_and_cache(key_cache=half(4, 128, 4, 16), value_cache=half(4, 128, 2, 16)),
    ),
    _writes(atb.WRITE_HEAD_SIZE, key=lambda: half(3, 2, 24), value=lambda: half(3, 2, 24), **_caches(4, 3, 128, 16)),
    _writes(atb.SAME_CACHES, value_cache=lambda: nz(half(5, 2, 128, 16))),
    _writes(atb.SAME_CACHES, value_cache=lambda: nz(half(4, 2, 64, 16))),
    _writes(atb.BLOCK_SIZE, **_caches(5, 2, 120, 16)),
    _writes(atb.CONTIGUOUS, key_cache=lambda: nz(half(2, 4, 128, 16)).transpose(0, 1)),
    _writes(atb.CONTIGUOUS, value_cache=lambda: nz(half(2, 4, 128, 16)).transpose(0, 1)),
    _writes(atb.SLOT_DTYPE, slot_indices=lambda: torch.tensor([1, 2, 3])),
    _writes(atb.SLOT_DTYPE, slot_indices=lambda: ints(5, 130, 511).view(3, 1)),
    _writes(atb.SLOT_ROWS, slot_indices=lambda: ints(1, 2)),
    _writes(atb.SLOT_ROWS, key=lambda: half(3, 32)),
    _writes(atb.SLOT_ROWS, value=lambda: half(2, 2, 16)),
    _writes(atb.SLOT_ROWS, value=lambda: half(3, 4, 16), value_cache=lambda: nz(half(4, 4, 128, 16))),
    _writes(atb.SLOT_RANGE, slot_indices=lambda: ints(1, 2, 512)),
    _writes(atb.SLOT_TWICE, slot_indices=lambda: ints(1, 2, 1)),
    _writes(
        atb.SLOT_OFFSET,
        key=lambda: half(1000, 2, 16),
        value=lambda: half(1000, 2, 16),
        slot_indices=lambda: ints(*range(999), _FAR * 128),
        key_cache=lambda: _huge(_FAR + 1),
        value_cache=lambda: _huge(_FAR + 1),
    ),
    _writes(
        atb.SLOT_OFFSET,  # 64 KiB and more of a token's keys, as much of its values
        key=lambda: half(1, 2050, 16),
        value=lambda: half(1, 2050, 16),
        slot_indices=lambda: ints(1023 * 128),
        key_cache=lambda: _huge(1024, 2050),
        value_cache=lambda: _huge(1024, 2050),
    ),
    # reading
    _decodes(atb.SAME_DTYPE, out=lambda: torch.zeros(2, 4, 16)),
    _decodes(
        atb.EMPTY, block_table=lambda: torch.zeros(0, 2, dtype=torch.int32), context_lens=ints, **_queries(0, 4, 16)
    ),
    _decodes(atb.CONTIGUOUS, out=lambda: half(4, 2, 16).transpose(0, 1)),
    _decodes(atb.CACHE_FORMATS, value_cache=lambda: half(5, 2, 128, 16)),
    Refused(atb.CACHE_FORMATS, PAGED, calls.paged_attention),
    _splits(atb.CACHE_FORMATS, key_cache=lambda: half(5, 2, 128, 16), value_cache=lambda: half(5, 2, 128, 16)),
    _decodes(atb.CACHE_SHAPE, key_cache=lambda: nz(half(5, 3, 128, 16))),
    _decodes(atb.CACHE_SHAPE, value_cache=lambda: nz(half(5, 4, 128, 8))),
    _decodes(atb.CACHE_SHAPE, num_kv_heads=lambda: 0),  # as many as queries, four
    _decodes(atb.SAME_CACHES, value_cache=lambda: nz(half(6, 2, 128, 16))),
    _decodes(atb.BLOCK_SIZE, **_caches(5, 2, 120, 16)),
    _decodes(atb.BLOCK_LIMIT, **_caches(5, 2, 256, 16)),
    _decodes(atb.BLOCK_AREA, **_queries(2, 4, 256), **_caches(5, 32, 128, 16)),
    _decodes(atb.HEAD_SIZE, **_queries(2, 4, 24), **_caches(5, 3, 128, 16)),
    _decodes(atb.HEAD_SIZE, **_queries(2, 4, 272), **_caches(5, 34, 16, 16)),
    _decodes(
        atb.BATCH,
        context_lens=lambda: torch.ones(2049, dtype=torch.int32),
        block_table=lambda: torch.zeros(2049, 1, dtype=torch.int32),
        **_queries(2049, 4, 16),
    ),
    _decodes(atb.GROUPS, num_kv_heads=lambda: 3),
    _decodes(atb.GROUPS, num_kv_heads=lambda: -1),
    _decodes(atb.GROUPS, num_heads=lambda: 0),
    _decodes(atb.HEADS, num_heads=lambda: 2),
    _decodes(atb.HEADS, query=lambda: half(2, 4, 16, 1)),
    _decodes(atb.OUT, out=lambda: half(2, 64)),
    _decodes(atb.OUT_ROWS, out=lambda: half(3, 4, 16)),
    _decodes(atb.TABLE, block_table=lambda: torch.tensor([[3, 0], [1, 4]])),
    _decodes(atb.TABLE, block_table=lambda: ints(3, 0, 1, 4)),
    _decodes(atb.TABLE_ROWS, block_table=_table([3, 0])),
    _decodes(atb.TABLE_COLUMNS, block_table=lambda: torch.zeros(2, 5120, dtype=torch.int32)),
    _decodes(atb.LENS, context_lens=lambda: torch.tensor([20, 130])),
    _decodes(atb.LENS, context_lens=lambda: ints(20, 130).view(2, 1)),
    _decodes(atb.DECODE_ROWS, **_queries(3, 4, 16)),
    _decodes(atb.CONTEXT, context_lens=lambda: ints(20, 257)),
    _decodes(atb.CONTEXT, context_lens=lambda: ints(0, 130)),
    _decodes(atb.BLOCK_IDS, block_table=_table([3, 0], [1, 5])),
    _decodes(atb.BLOCK_IDS, block_table=_table([3, 0], [-1, 4])),
    _decodes(
        atb.PRODUCT,
        query=lambda: torch.full((2, 4, 16), 64.0, dtype=HALF),
        key_cache=lambda: nz(torch.full((5, 2, 128, 16), 64.0, dtype=HALF)),
    ),
    _decodes(
        atb.SUMS,  # of weights: 2¹⁶ keys alike
        key_cache=lambda: nz(torch.zeros(5, 2, 128, 16, dtype=HALF)),
        block_table=lambda: torch.zeros(2, 512, dtype=torch.int32),
        context_lens=lambda: ints(20, 65536),
    ),
    _decodes(
        atb.SUMS,  # of values
        key_cache=lambda: nz(torch.zeros(5, 2, 128, 16, dtype=HALF)),
        value_cache=lambda: nz(torch.full((5, 2, 128, 16), 600.0, dtype=HALF)),
    ),
    # several queries a sequence
    _splits(
        atb.MANY_BATCH,
        context_lens=lambda: torch.ones(2001, dtype=torch.int32),
        seq_len=lambda: torch.ones(2001, dtype=torch.int32),
        block_table=lambda: torch.zeros(2001, 1, dtype=torch.int32),
        **_queries(2001, 4, 16),
    ),
    _splits_v2(atb.MANY_HEADS, num_heads=lambda: 258, **_queries(4, 258, 16)),
    _splits_v2(
        atb.MANY_SIZE,
        num_heads=lambda: 66,
        block_table=_table([3, 0, 0], [1, 4, 2]),
        **_queries(4, 66, 256),
        **_caches(5, 32, 64, 16),
    ),
    _splits(atb.LENS, seq_len=lambda: torch.tensor([3, 1])),
    _splits(atb.LENS, seq_len=lambda: ints(3, 1).view(2, 1)),
    _splits(atb.QUERY_LENGTH, seq_len=lambda: ints(4, 0)),
    _splits(atb.QUERY_ROWS, seq_len=lambda: ints(3, 4)),
    _splits(atb.QUERY_ROWS, seq_len=lambda: ints(2, 1, 1)),
    _splits(atb.QUERY_CONTEXT, context_lens=lambda: ints(2, 130)),
    _splits(
        atb.BLOCK_OFFSET,
        key_cache=lambda: _huge(_FAR + 1),
        value_cache=lambda: _huge(_FAR + 1),
        block_table=_table([_FAR, 0], [1, 4]),
    ),
    _splits(atb.MASK_DTYPE, mask=lambda: calls.nz_mask(torch.zeros(4, 130))),
    _splits_v2(atb.MASK_DTYPE, mask=lambda: calls.compressed_mask().float()),
    _splits(atb.MASK, mask=lambda: calls.causal_mask([3, 1], [20, 130])),
    _splits(atb.MASK, mask=lambda: half(1, 9, 16, 16)),  # not marked as NZ
    _splits(atb.MASK, mask=lambda: nz(half(9, 16, 16))),
    _splits(atb.MASK, mask=lambda: nz(half(2, 9, 16, 16))),
    _splits(atb.MASK_ROWS, mask=lambda: nz(half(1, 9, 32, 16))),
    _splits(atb.MASK_COVERS, mask=lambda: calls.nz_mask(torch.zeros(4, 64, dtype=HALF))),
    _splits(atb.MASK_FIRST, mask=lambda: _first_block_hidden(float("-inf"))),
    Refused(atb.SPLITFUSE_ROWS, SPLITFUSE, lambda: _long_splitfuse(1025), P310),
    # one mask for all
    _splits_v2(atb.V2_MASK_TYPE, mask_type=lambda: 3),
    Refused(atb.V2_ATB, SPLITFUSE_V2, calls.splitfuse_v2, P310, Atb.CANN_9_0),
    Refused(atb.V2_CHIP, SPLITFUSE_V2, calls.splitfuse_v2),
    _splits_v2(atb.V2_MASK, mask=lambda: nz(calls.compressed_mask())),
    _splits_v2(atb.V2_MASK, mask=lambda: calls.compressed_mask()[:1024, :1024]),
    _splits_v2(atb.V2_MASK, mask=lambda: calls.compressed_mask().expand(2, -1, -1)),
    Refused(
        atb.V2_MASK_ROOM,
        SPLITFUSE_V2,
        lambda: calls.long_splitfuse_v2(20, 2100, mask=calls.compressed_mask().clone()),
        P310,
    ),
    Refused(
        atb.V2_MASK_ROOM,
        SPLITFUSE_V2,
        lambda: calls.long_splitfuse_v2(1, 2048, mask=calls.compressed_mask().clone()),
        P310,
    ),
    Refused(atb.V2_MASK_ROOM, SPLITFUSE_V2, lambda: calls.long_splitfuse_v2(20, 2100, mask=_copied_mask()), P310),
    Refused(atb.V2_TILES, SPLITFUSE_V2, lambda: calls.long_splitfuse_v2(20, 2060), P310),
    Refused(atb.V2_TILES, SPLITFUSE_V2, _blocks_of_64, P310),
)

GOOD_ATB: tuple[tuple[str, Make], ...] = (
    (RESHAPE, lambda: calls.reshape_and_cache(slot_indices=ints(-1, -1, 7))),
    (PAGED, lambda: calls.paged_attention(num_kv_heads=0, num_heads=2, query=half(2, 2, 16), out=half(2, 2, 16))),
    (PAGED, lambda: calls.paged_attention(block_table=torch.zeros(3, 5119, dtype=torch.int32))),
    (
        PAGED,
        lambda: calls.paged_attention(
            key_cache=_huge(_FAR + 1), block_table=_table([_FAR, 0], [1, 4])(), value_cache=_huge(_FAR + 1)
        ),
    ),
    (SPLITFUSE, lambda: _long_splitfuse(1024)),
    (SPLITFUSE, lambda: calls.splitfuse(mask=_first_block_hidden(-10000.0))),
    (SPLITFUSE_V2, lambda: calls.splitfuse_v2(mask_type=None)),
    (SPLITFUSE_V2, lambda: calls.splitfuse_v2(mask=calls.compressed_mask()[None])),
    (SPLITFUSE_V2, lambda: calls.splitfuse_v2(mask=calls.compressed_mask()[None, None].clone())),
    (SPLITFUSE_V2, lambda: calls.splitfuse_v2(key_cache=half(5, 2, 128, 16), value_cache=half(5, 2, 128, 16))),
    (SPLITFUSE_V2, lambda: calls.long_splitfuse_v2(20, 2048, mask=calls.compressed_mask().clone())),
    (SPLITFUSE_V2, lambda: calls.long_splitfuse_v2(1, 2100, mask=calls.compressed_mask().clone())),
    (SPLITFUSE_V2, lambda: calls.long_splitfuse_v2(128, 2048 + 128)),
)
