"""ATB's operators, with which 310P writes and reads its paged cache (`torch.ops.atb.*`, `torch_npu._npu_*`).

310P keeps the cache in NZ, marked as such: (P, K·D/16, W, 16), P blocks of W slots, K key-value heads of size D.
A2 and A3 take ND caches, (P, W, K, D). The wheel documents `_npu_paged_attention_v2`, of the same kernel; what it does
not say comes from vLLM-Ascend, which runs on 310P.
"""

from __future__ import annotations

import torch

from tests.support.npu.layouts import attend, nz_width, read_slots, write_slots
from tests.support.npu.machine import FORMAT_FRACTAL_NZ, Chip, Machine
from tests.support.npu.rules import OP_PLUGIN, VLLM_ASCEND, WHEEL, Rule

_PAGE = "torch_npu/op_plugin/atb/_atb_api_docs.py"
_310P_MASK = "vllm_ascend/_310p/attention/attention_mask.py"
_RESHAPE = "op_plugin/ops/atb/ReshapeAndCachAtb.cpp"
_SPLITFUSE_TEST = "test/test_custom_ops/test_atb_paged_attention_splitfuse.py"

DTYPE = Rule("ATB-DTYPE", "310P computes in float16, A2 and A3 in float16 or bfloat16", WHEEL.at(_PAGE, 279))
SAME_DTYPE = Rule("ATB-SAME-DTYPE", "query, caches and out have one dtype", WHEEL.at(_PAGE, 253, 268))
CACHE_FORMAT = Rule("ATB-CACHE-FORMAT", "310P's cache is marked FRACTAL_NZ, A2's is ND", OP_PLUGIN.at(_RESHAPE, 32, 41))
CACHE_SHAPE = Rule(
    "ATB-CACHE-SHAPE",
    "the cache is (blocks, heads·head size/16, block size, 16) on 310P, else (blocks, block size, heads, head size)",
    WHEEL.at(_PAGE, 255, 264),
)
BLOCK_SIZE = Rule("ATB-BLOCK-SIZE", "block sizes are multiples of 16, at most 128", WHEEL.at(_PAGE, 275, 276))
BLOCK_AREA = Rule("ATB-BLOCK-AREA", "block size·head size is at most 128·128 on 310P", WHEEL.at(_PAGE, 280))
HEAD_SIZE = Rule("ATB-HEAD-SIZE", "head sizes are at most 256, on 310P multiples of 16", WHEEL.at(_PAGE, 278))
BATCH = Rule("ATB-BATCH", "1 to 2,048 sequences on 310P", WHEEL.at(_PAGE, 279))
HEADS = Rule(
    "ATB-HEADS", "query and cache have the heads that are named, and whole groups of them", WHEEL.at(_PAGE, 253, 270)
)
OUT = Rule(
    "ATB-OUT",
    "out has the query's shape, and is contiguous",
    OP_PLUGIN.at("op_plugin/ops/atb/PagedAttentionAtb.cpp", 53),
)
SLOT_DTYPE = Rule(
    "ATB-SLOT-DTYPE",
    "slot_indices is int32, one-dimensional",
    OP_PLUGIN.at("test/test_custom_ops/test_atb_reshape_and_cache.py", 74),
)
SLOT_RANGE = Rule(
    "ATB-SLOT-RANGE",
    "slots are below blocks·block size (negative ones are skipped)",
    OP_PLUGIN.at("test/test_custom_ops/test_atb_reshape_and_cache.py", 22, 24),
    unchecked=True,
)
SLOT_ROWS = Rule(
    "ATB-SLOT-ROWS",
    "key, value and slot_indices have as many rows",
    OP_PLUGIN.at("test/test_custom_ops/test_atb_reshape_and_cache.py", 20, 29),
)
TABLE = Rule("ATB-TABLE", "block_table is int32 (sequences, blocks)", WHEEL.at(_PAGE, 258))
LENS_DTYPE = Rule("ATB-LENS-DTYPE", "context_lens and seq_len are int32", OP_PLUGIN.at(_SPLITFUSE_TEST, 192, 194))
DECODE_ROWS = Rule(
    "ATB-DECODE-ROWS", "_npu_paged_attention has one query a sequence", WHEEL.at(_PAGE, 258), unchecked=True
)
CONTEXT = Rule("ATB-CONTEXT", "a sequence's tokens are in its row of block_table", WHEEL.at(_PAGE, 258), unchecked=True)
BLOCK_IDS = Rule("ATB-BLOCK-IDS", "block ids are in the cache", WHEEL.at(_PAGE, 277), unchecked=True)
QUERY_ROWS = Rule(
    "ATB-QUERY-ROWS",
    "seq_len sums to the query's rows, and no sequence has more queries than context",
    OP_PLUGIN.at(_SPLITFUSE_TEST, 172, 176),
    unchecked=True,
)
MASK = Rule(
    "ATB-MASK",
    "splitfuse's mask has the query's dtype and a row a query; on 310P NZ: (1, keys/16, rows, 16), padded to 16",
    VLLM_ASCEND.at(_310P_MASK, 88, 99),
)
MASK_COVERS = Rule(
    "ATB-MASK-COVERS", "the mask has a column for each key", VLLM_ASCEND.at(_310P_MASK, 88, 99), unchecked=True
)

RULES = (
    DTYPE,
    SAME_DTYPE,
    CACHE_FORMAT,
    CACHE_SHAPE,
    BLOCK_SIZE,
    BLOCK_AREA,
    HEAD_SIZE,
    BATCH,
    HEADS,
    OUT,
    SLOT_DTYPE,
    SLOT_RANGE,
    SLOT_ROWS,
    TABLE,
    LENS_DTYPE,
    DECODE_ROWS,
    CONTEXT,
    BLOCK_IDS,
    QUERY_ROWS,
    MASK,
    MASK_COVERS,
)


def reshape_and_cache(
    machine: Machine,
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_indices: torch.Tensor,
) -> None:
    """Writes (T, K, D) keys and values to their slots."""
    _check_dtypes(machine, key, value, key_cache, value_cache)
    SLOT_DTYPE.require(
        slot_indices.dtype == torch.int32 and slot_indices.dim() == 1, f"{slot_indices.dtype}, {slot_indices.dim()}-d"
    )
    SLOT_ROWS.require(
        key.dim() == value.dim() == 3 and key.shape[0] == value.shape[0] == slot_indices.shape[0],
        f"{list(key.shape)}, {list(value.shape)}, {list(slot_indices.shape)}",
    )
    nz = machine.chip is Chip.ASCEND_310P
    for rows, cache in ((key, key_cache), (value, value_cache)):
        _check_cache(machine, cache, heads=rows.shape[1], head_size=rows.shape[2])
    slots = key_cache.shape[0] * _block_size(machine, key_cache)
    wanted = slot_indices.tolist()
    SLOT_RANGE.require(all(slot < slots for slot in wanted), f"slot {max(wanted, default=0)} of {slots}")
    write_slots(key_cache, key, wanted, nz=nz)
    write_slots(value_cache, value, wanted, nz=nz)


def paged_attention(
    machine: Machine,
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    num_kv_heads: int,
    num_heads: int,
    scale_value: float,
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    out: torch.Tensor,
    *,
    workspace: torch.Tensor | None = None,
) -> None:
    """One query a sequence over all of its context, into `out`."""
    _check_attention(machine, query, key_cache, value_cache, num_kv_heads, num_heads, block_table, context_lens, out)
    DECODE_ROWS.require(
        query.shape[0] == context_lens.shape[0], f"{query.shape[0]} queries, {context_lens.shape[0]} sequences"
    )
    lengths = context_lens.tolist()
    _check_context(machine, key_cache, block_table, lengths)
    for row, length in enumerate(lengths):
        keys, values = _context(machine, key_cache, value_cache, block_table, row, length, num_kv_heads)
        out[row : row + 1] = attend(query[row : row + 1], keys, values, scale=scale_value)[0].to(out.dtype)


def paged_attention_splitfuse(
    machine: Machine,
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    mask: torch.Tensor,
    seq_len: torch.Tensor,
    num_kv_heads: int,
    num_heads: int,
    scale_value: float,
    out: torch.Tensor,
) -> None:
    """Several queries a sequence, with the additive mask's row for each: prompts, chunks and decode together."""
    _check_attention(machine, query, key_cache, value_cache, num_kv_heads, num_heads, block_table, context_lens, out)
    LENS_DTYPE.require(seq_len.dtype == torch.int32, f"seq_len is {seq_len.dtype}")
    contexts, queries = context_lens.tolist(), seq_len.tolist()
    QUERY_ROWS.require(
        sum(queries) == query.shape[0]
        and len(queries) == len(contexts)
        and all(0 <= q <= c for q, c in zip(queries, contexts, strict=False)),
        f"seq_len {queries}, context_lens {contexts}, {query.shape[0]} rows",
    )
    _check_context(machine, key_cache, block_table, contexts)
    mask_TL = _mask_rows(machine, query, mask)
    MASK_COVERS.require(mask_TL.shape[1] >= max(contexts, default=0), f"{mask_TL.shape[1]} columns, {contexts}")
    start = 0
    for row, (count, length) in enumerate(zip(queries, contexts, strict=True)):
        keys, values = _context(machine, key_cache, value_cache, block_table, row, length, num_kv_heads)
        rows = slice(start, start + count)
        bias = mask_TL[rows, :length].float()
        out[rows] = attend(query[rows], keys, values, scale=scale_value, bias=bias)[0].to(out.dtype)
        start += count


def _check_attention(
    machine: Machine,
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    num_kv_heads: int,
    num_heads: int,
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    out: torch.Tensor,
) -> None:
    _check_dtypes(machine, query, key_cache, value_cache, out)
    HEADS.require(
        query.dim() == 3 and query.shape[1] == num_heads and num_kv_heads > 0 and num_heads % num_kv_heads == 0,
        f"query {list(query.shape)}, num_heads {num_heads}, num_kv_heads {num_kv_heads}",
    )
    head_size = query.shape[2]
    for cache in (key_cache, value_cache):
        _check_cache(machine, cache, heads=num_kv_heads, head_size=head_size)
    on_310p = machine.chip is Chip.ASCEND_310P
    size = _block_size(machine, key_cache)
    BLOCK_SIZE.require(size % 16 == 0 and size <= 128, f"block size {size}")
    HEAD_SIZE.require(head_size <= 256 and (head_size % 16 == 0 or not on_310p), f"head size {head_size}")
    BLOCK_AREA.require(size * head_size <= 128 * 128 or not on_310p, f"{size} · {head_size}")
    BATCH.require(0 < context_lens.shape[0] <= 2048 or not on_310p, f"{context_lens.shape[0]} sequences")
    OUT.require(out.shape == query.shape and out.is_contiguous(), f"{list(out.shape)} for {list(query.shape)}")
    TABLE.require(block_table.dtype == torch.int32 and block_table.dim() == 2, f"{block_table.dtype}")
    LENS_DTYPE.require(context_lens.dtype == torch.int32, f"context_lens is {context_lens.dtype}")


def _check_dtypes(machine: Machine, *tensors: torch.Tensor) -> None:
    DTYPE.require(machine.is_half(tensors[0].dtype), f"{tensors[0].dtype} on {machine.chip.value}")
    SAME_DTYPE.require(len({tensor.dtype for tensor in tensors}) == 1, f"{[tensor.dtype for tensor in tensors]}")


def _check_cache(machine: Machine, cache: torch.Tensor, *, heads: int, head_size: int) -> None:
    nz = machine.chip is Chip.ASCEND_310P
    CACHE_FORMAT.require((machine.formats.of(cache) == FORMAT_FRACTAL_NZ) == nz, f"format {machine.formats.of(cache)}")
    shape = list(cache.shape)
    if not nz:
        CACHE_SHAPE.require(
            len(shape) == 4 and shape[2:] == [heads, head_size], f"{shape}: {heads} heads of {head_size}"
        )
        return
    width = nz_width(cache.dtype)
    CACHE_SHAPE.require(
        len(shape) == 4 and shape[1] * width == heads * head_size and shape[3] == width,
        f"{shape}: {heads} heads of {head_size}",
    )


def _block_size(machine: Machine, cache: torch.Tensor) -> int:
    return cache.shape[2 if machine.chip is Chip.ASCEND_310P else 1]


def _check_context(machine: Machine, cache: torch.Tensor, block_table: torch.Tensor, lengths: list[int]) -> None:
    TABLE.require(block_table.shape[0] == len(lengths), f"{block_table.shape[0]} rows, {len(lengths)} sequences")
    size = _block_size(machine, cache)
    for row, length in enumerate(lengths):
        CONTEXT.require(0 < length <= block_table.shape[1] * size, f"sequence {row} has {length}")
        used = block_table[row, : -(-length // size)].tolist()
        BLOCK_IDS.require(all(0 <= block < cache.shape[0] for block in used), f"sequence {row}: {used}")


def _context(
    machine: Machine,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    row: int,
    length: int,
    heads: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    nz = machine.chip is Chip.ASCEND_310P
    ids = block_table[row, : -(-length // _block_size(machine, key_cache))].tolist()
    keys, values = (read_slots(cache, ids, length, heads, nz=nz) for cache in (key_cache, value_cache))
    return keys, values


def _mask_rows(machine: Machine, query: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The mask as (T, L), a row a query."""
    rows = query.shape[0]
    shape = list(mask.shape)
    MASK.require(mask.dtype == query.dtype, f"{mask.dtype}")
    if machine.chip is not Chip.ASCEND_310P:
        MASK.require(len(shape) == 2 and shape[0] == rows, f"{shape} for {rows} queries")
        return mask
    MASK.require(machine.formats.of(mask) == FORMAT_FRACTAL_NZ, f"format {machine.formats.of(mask)}")
    padded = -(-rows // 16) * 16
    MASK.require(len(shape) == 4 and [shape[0], *shape[2:]] == [1, padded, 16], f"{shape} for {rows} queries")
    return mask[0].transpose(0, 1).reshape(padded, -1)[:rows]
