"""What a call of `npu_fused_infer_attention_score` must pass, in the order of the kernels' own checks.

Not emulated, and said so where it is asked for: quantisation, rope and position inputs, left padding, system prefixes,
tensor lists, and the layouts that transpose on the way out except BNSD_BSND. The engine uses none of them.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import fields
from itertools import pairwise

import torch

from tests.support.npu import fused_attention_rules as rules
from tests.support.npu.fused_attention_call import Arguments, Geometry, key_length
from tests.support.npu.layouts import nz_width
from tests.support.npu.machine import Chip, Machine

_LAYOUT_DIMS = {
    "BSH": 3,
    "BSND": 4,
    "BNSD": 4,
    "TND": 3,
    "NTD": 3,
    "BNSD_BSND": 4,
    "BSH_BNSD": 3,
    "BSND_BNSD": 4,
    "NTD_TND": 3,
    "BSH_NBSD": 3,
    "BSND_NBSD": 4,
    "BNSD_NBSD": 4,
    "TND_NTD": 3,
    "NSD": 3,
}
_EMULATED_LAYOUTS = ("TND", "BSH", "BSND", "BNSD", "BNSD_BSND")

_NOT_EMULATED = (
    *(name for field in fields(Arguments) if "quant" in (name := field.name) and "mode" not in name),
    "pse_shift",
    "query_padding_size",
    "kv_padding_size",
    "key_shared_prefix",
    "value_shared_prefix",
    "actual_shared_prefix_len",
    "query_rope",
    "key_rope",
)


def check(machine: Machine, call: Arguments) -> Geometry:
    query, key, value = call.query, call.key, call.value
    rules.CHIP.require(machine.chip is Chip.ASCEND_910B, f"chip {machine.chip.value}")
    rules.LAYOUT.require(call.input_layout in _LAYOUT_DIMS, f"input_layout {call.input_layout!r}")
    dims = _LAYOUT_DIMS[call.input_layout]
    rules.QUERY_DIMS.require(query.dim() == dims, f"{query.dim()} dimensions, {call.input_layout} has {dims}")
    rules.DTYPE.require(machine.is_half(query.dtype), f"{query.dtype}")
    rules.SAME_DTYPE.require(query.dtype == key.dtype == value.dtype, f"{query.dtype, key.dtype, value.dtype}")
    rules.HEADS.require(call.num_heads > 0, f"num_heads {call.num_heads}")
    rules.GROUPS.require(call.num_heads % call.kv_heads == 0, f"{call.num_heads} and {call.kv_heads}")
    rules.INNER_PRECISE.require(call.inner_precise in range(4), f"inner_precise {call.inner_precise}")
    rules.SPARSE_MODE.require(call.sparse_mode in range(5), f"sparse_mode {call.sparse_mode}")
    _check_prefix(call)
    _refuse_not_emulated(call)
    head_size = _check_heads(call)
    split_fuse = _uses_split_fuse(call, head_size)
    queries = _queries(call)
    _check_head_size(call, head_size, queries, split_fuse=split_fuse)
    batch = _check_lengths(call, queries)
    block_size = _check_cache(call, split_fuse=split_fuse) if call.block_table is not None else 0
    geometry = Geometry(batch, queries, head_size, block_size, split_fuse)
    _check_key_lengths(call, geometry)
    _check_mask(call, geometry)
    tensors = [query, key, value, *([] if call.atten_mask is None else [call.atten_mask])]
    rules.CONTIGUOUS.require(all(t.is_contiguous() for t in tensors), f"strides {[t.stride() for t in tensors]}")
    return geometry


def _check_prefix(call: Arguments) -> None:
    if call.key_shared_prefix is None and call.value_shared_prefix is None:
        return
    rules.PREFIX_LAYOUT.require(
        call.input_layout in ("BSH", "BSND", "BNSD", "BNSD_BSND"), f"input_layout {call.input_layout}"
    )
    rules.PREFIX_PAGED.require(call.block_table is None, "both were given")


def _refuse_not_emulated(call: Arguments) -> None:
    asked = [name for name in _NOT_EMULATED if getattr(call, name) is not None]
    if asked or call.input_layout not in _EMULATED_LAYOUTS:
        raise NotImplementedError(f"not emulated: {', '.join([*asked, f'input_layout {call.input_layout}'])}")


def _check_heads(call: Arguments) -> int:
    """Returns the head size of query, key and value."""
    match call.input_layout:
        case "TND":
            heads, size = call.query.shape[1:]
        case "BSH":
            heads, size = call.num_heads, call.query.shape[2] // call.num_heads
            rules.QUERY_HEADS.require(call.query.shape[2] % heads == 0, f"width {call.query.shape[2]}, {heads} heads")
        case "BSND":
            heads, size = call.query.shape[2:]
        case _:
            heads, size = call.query.shape[1], call.query.shape[3]
    rules.QUERY_HEADS.require(heads == call.num_heads, f"{heads} heads, num_heads {call.num_heads}")
    for name, tensor in (("key", call.key), ("value", call.value)):
        kv_heads, kv_size = _kv_heads_and_size(call, tensor)
        rules.KV_HEADS.require(kv_heads == call.kv_heads, f"{name} has {kv_heads} heads, not {call.kv_heads}")
        rules.HEAD_SIZES.require(kv_size == size, f"query's is {size}, {name}'s {kv_size}")
    return int(size)


def _kv_heads_and_size(call: Arguments, tensor: torch.Tensor) -> tuple[int, int]:
    if call.block_table is not None:
        rules.CACHE_DIMS.require(tensor.dim() in (3, 4, 5), f"{tensor.dim()} dimensions")
        rules.SAME_CACHE.require(call.key.shape == call.value.shape, f"{call.key.shape} and {call.value.shape}")
        if tensor.dim() == 3:
            rules.KV_HEADS_GIVEN.require(not call.tnd or call.num_key_value_heads > 0, "it is 0")
            width = tensor.shape[2]
            return call.kv_heads if width % call.kv_heads == 0 else 0, width // call.kv_heads
        if tensor.dim() == 4:
            return tensor.shape[1], tensor.shape[3]
        rules.CACHE_NZ.require(tensor.shape[4] == nz_width(tensor.dtype), f"{list(tensor.shape)}")
        return tensor.shape[1], tensor.shape[2] * tensor.shape[4]
    rules.KV_DIMS.require(tensor.dim() == call.query.dim(), f"{tensor.dim()} and {call.query.dim()} dimensions")
    rules.SAME_CACHE.require(call.key.shape == call.value.shape, f"{call.key.shape} and {call.value.shape}")
    match call.input_layout:
        case "TND":
            return tensor.shape[1], tensor.shape[2]
        case "BSH":
            width = tensor.shape[2]
            return call.kv_heads if width % call.kv_heads == 0 else 0, width // call.kv_heads
        case "BSND":
            return tensor.shape[2], tensor.shape[3]
        case _:
            return tensor.shape[1], tensor.shape[3]


def _uses_split_fuse(call: Arguments, head_size: int) -> bool:
    """`IsUsingFAI`, fused_infer_attention_score_tiling.cpp:1568-1616 (OPS_TRANSFORMER)."""
    several = call.kv_heads == call.num_heads
    bfloat16_fast = call.query.dtype == torch.bfloat16 and call.inner_precise == 1
    full_mask = call.sparse_mode == 0 and call.atten_mask is not None
    if several and (bfloat16_fast or full_mask):
        return False
    if not several and call.inner_precise != 0:
        return False
    if not call.tnd or call.sparse_mode not in (0, 3, 4) or head_size > 256:
        return False
    if call.block_table is None:
        return True
    if call.key.dim() == 5:
        return head_size % 16 == 0 and head_size not in (64, 128) and _block_size_is_split_fuse(call.key.shape[3])
    return call.key.dim() == 3 and _block_size_is_split_fuse(call.key.shape[1])


def _block_size_is_split_fuse(size: int) -> bool:
    return size % 16 == 0 and size <= 512


def _check_head_size(call: Arguments, head_size: int, queries: int, *, split_fuse: bool) -> None:
    rules.HEAD_SIZE_LIMIT.require(head_size <= 512, f"head size {head_size}")
    if split_fuse:
        return
    if call.tnd:
        rules.HEAD_SIZE_TND.require(head_size in (64, 128, 192), f"head size {head_size}")
    elif queries > 1:
        rules.HEAD_SIZE_ALIGNED.require(head_size % 16 == 0, f"head size {head_size}")


def _queries(call: Arguments) -> int:
    match call.input_layout:
        case "TND":
            ends = call.actual_seq_lengths or [call.query.shape[0]]
            return max(end - start for start, end in pairwise([0, *ends]))
        case "BSH" | "BSND":
            return call.query.shape[1]
        case _:
            return call.query.shape[2]


def _check_lengths(call: Arguments, queries: int) -> int:
    """Returns the number of sequences."""
    ends, keys = call.actual_seq_lengths, call.actual_seq_lengths_kv
    for lengths in (ends, keys):
        rules.BATCH_LIMIT.require(lengths is None or len(lengths) <= 65536, f"{len(lengths or ())} lengths")
    rules.PAGED_LENGTHS.require(call.block_table is None or call.tnd or bool(keys), "no lengths")
    if not call.tnd:
        batch = call.query.shape[0]
        for lengths in (ends, keys):
            rules.SAME_BATCH.require(
                lengths is None or len(lengths) == 1 or len(lengths) >= batch, f"{len(lengths or ())} for {batch}"
            )
        too_long = [length for length in ends or () if not 0 <= length <= queries]
        rules.QUERY_LENGTHS.require(queries == 1 or not too_long, f"{too_long} of {queries} positions")
        return batch
    rules.TND_LENGTHS.require(bool(ends) and bool(keys), f"actual_seq_lengths {ends}, actual_seq_lengths_kv {keys}")
    assert ends is not None
    assert keys is not None
    rules.SAME_BATCH.require(len(ends) == len(keys), f"{len(ends)} of queries, {len(keys)} of keys")
    rules.TND_QUERIES.require(ends[-1] == call.query.shape[0], f"{ends[-1]} for {call.query.shape[0]} rows")
    rules.CUMULATIVE.require(_never_falls(ends), f"of queries: {list(ends)}")
    if call.block_table is None:
        rules.TND_KEYS.require(keys[-1] == call.key.shape[0], f"{keys[-1]} for {call.key.shape[0]} keys")
        rules.CUMULATIVE.require(_never_falls(keys), f"of keys: {list(keys)}")
    return len(ends)


def _never_falls(ends: Sequence[int]) -> bool:
    return all(start <= end for start, end in pairwise([0, *ends]))


def _check_cache(call: Arguments, *, split_fuse: bool) -> int:
    """Returns the cache's block size."""
    table = call.block_table
    assert table is not None
    rules.TABLE_DTYPE.require(table.dtype == torch.int32, f"{table.dtype}")
    rules.TABLE_DIMS.require(table.dim() == 2, f"{table.dim()} dimensions")
    size = call.key.shape[{3: 1, 4: 2, 5: 3}[call.key.dim()]]
    rules.BLOCK_SIZE_GIVEN.require(call.block_size == size, f"block_size {call.block_size}, the cache's {size}")
    rules.BLOCK_SIZE_ALIGNED.require(size % 16 == 0, f"block_size {size}")
    rules.BLOCK_SIZE_LIMIT.require(size <= (512 if split_fuse else 1024), f"block_size {size}")
    rules.CACHE_SIZE.require(not split_fuse or call.key.numel() <= 2**32, f"{list(call.key.shape)}")
    return size


def _check_key_lengths(call: Arguments, geometry: Geometry) -> None:
    table = call.block_table
    if table is not None:
        rules.TABLE_ROWS.require(
            table.shape[0] == geometry.batch if call.tnd else table.shape[0] >= geometry.batch,
            f"{table.shape[0]} rows, {geometry.batch} sequences",
        )
    for sequence in range(geometry.batch):
        length, room = key_length(call, sequence), _key_room(call, geometry)
        rules.KEY_LENGTHS.require(0 <= length <= room, f"sequence {sequence} has {length} of {room}")
        if table is not None:
            used = table[sequence, : -(-length // geometry.block_size)]
            valid = bool(((used >= 0) & (used < call.key.shape[0])).all())
            rules.BLOCK_IDS.require(valid, f"sequence {sequence}: {used.tolist()} of {call.key.shape[0]}")


def _key_room(call: Arguments, geometry: Geometry) -> int:
    if call.block_table is not None:
        return call.block_table.shape[1] * geometry.block_size
    if call.tnd:
        return call.key.shape[0]
    return call.key.shape[1 if call.input_layout in ("BSH", "BSND") else 2]


def _check_mask(call: Arguments, geometry: Geometry) -> None:
    mask, mode = call.atten_mask, call.sparse_mode
    if geometry.queries == 1 and not call.tnd:
        mode = 0  # sparse_mode has no effect there: fused_infer_attention_score_tiling_info_parser.cpp, GetUpdateInfo
    rules.MASK_GIVEN.require(mode == 0 or mask is not None, f"sparse_mode {mode} without one")
    if mode == 4:
        fits = -call.next_tokens <= call.pre_tokens and not (call.pre_tokens < 0 and call.next_tokens < 0)
        rules.BAND.require(fits, f"pre_tokens {call.pre_tokens}, next_tokens {call.next_tokens}")
    if mask is None:
        return
    rules.MASK_DTYPE.require(mask.dtype in (torch.bool, torch.int8, torch.uint8), f"{mask.dtype}")
    rules.MASK_TND.require(not call.tnd or mode in (3, 4), f"sparse_mode {mode}")
    shape = list(mask.shape)
    if mode >= 2:
        rules.MASK_SHAPE.require(
            len(shape) in (2, 3, 4) and shape[-2:] == [2048, 2048] and set(shape[:-2]) <= {1}, f"{shape}"
        )
        rules.MASK_TRIANGLE.require(torch.equal(mask.reshape(2048, 2048).bool(), _triangle()), "it is not")
        return
    wanted = [
        geometry.batch if geometry.queries == 1 and len(shape) == 2 else geometry.queries,
        _key_room(call, geometry),
    ]
    covers = len(shape) in (2, 3, 4) and all(have >= want for have, want in zip(shape[-2:], wanted, strict=True))
    by_row = len(shape) != 2 or geometry.queries > 1 or shape[0] == geometry.batch
    rules.MASK_COVERS.require(covers and by_row and set(shape[:-2]) <= {1, geometry.batch}, f"{shape}, wanted {wanted}")


@functools.cache
def _triangle() -> torch.Tensor:
    return torch.ones(2048, 2048, dtype=torch.bool).triu(1)
