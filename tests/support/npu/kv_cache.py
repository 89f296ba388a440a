"""`npu_scatter_pa_kv_cache` and `npu_gather_pa_kv_cache`: tokens into the paged cache, and sequences out of it.

Where the sources disagree: op-plugin's page refuses every non-contiguous input; the newest CANN also takes a cache with
gaps between its blocks, and tokens with gaps between rows. The page stands here, since an older CANN copies or refuses.
"""

from __future__ import annotations

import torch

from tests.support.npu.layouts import nz_width, read_slots, write_slots
from tests.support.npu.machine import Chip, Machine
from tests.support.npu.rules import OP_PLUGIN, OPS_TRANSFORMER, Rule

_PAGE = "docs/zh/custom_APIs/torch_npu/torch_npu-npu_scatter_pa_kv_cache.md"
_TILING = "attention/scatter_pa_kv_cache/op_host/scatter_pa_kv_cache_tiling.cpp"
_ACLNN = "attention/scatter_pa_kv_cache/op_host/op_api/aclnn_scatter_pa_kv_cache.cpp"
_KERNEL = "attention/scatter_pa_kv_cache/op_kernel/scatter_pa_kv_cache_normal.h"
_GATHER = "attention/gather_pa_kv_cache/op_host/op_api/aclnn_gather_pa_kv_cache.cpp"
_GATHER_PAGE = "attention/gather_pa_kv_cache/docs/aclnnGatherPaKvCache.md"
_GATHER_CPP = "op_plugin/ops/opapi/GatherPaKvCacheKernelNpuOpApi.cpp"

SCATTER_CHIP = Rule("SCATTER-CHIP", "only A2 and A3 have it", OP_PLUGIN.at(_PAGE, 5, 8))
SCATTER_MODE = Rule("SCATTER-MODE", "cache_mode is None, Norm or PA_NZ", OPS_TRANSFORMER.at(_TILING, 508, 532))
SCATTER_UNCOMPRESSED = Rule(
    "SCATTER-UNCOMPRESSED",
    "compressed writes need a scatter mode that torch_npu never passes",
    OP_PLUGIN.at("op_plugin/ops/opapi/ScatterPaKvCacheNpuOpApi.cpp", 69),
)
SCATTER_DTYPE = Rule("SCATTER-DTYPE", "tokens are float16, bfloat16 or int8", OPS_TRANSFORMER.at(_TILING, 120, 123))
SCATTER_SAME_DTYPE = Rule(
    "SCATTER-SAME-DTYPE", "key, value and both caches have one dtype", OPS_TRANSFORMER.at(_ACLNN, 122, 165)
)
SCATTER_SLOT_DTYPE = Rule("SCATTER-SLOT-DTYPE", "slot_mapping is int32 or int64", OPS_TRANSFORMER.at(_TILING, 139, 142))
SCATTER_DIMS = Rule(
    "SCATTER-DIMS", "tokens have 3 dimensions, slot_mapping 1, an ND cache 4", OPS_TRANSFORMER.at(_TILING, 213, 236)
)
SCATTER_DIMS_NZ = Rule("SCATTER-DIMS-NZ", "an NZ cache has 4 or 5 dimensions", OPS_TRANSFORMER.at(_TILING, 252, 264))
SCATTER_SHAPE = Rule(
    "SCATTER-SHAPE", "an ND cache is (blocks, block size, heads, head size)", OPS_TRANSFORMER.at(_TILING, 351, 377)
)
SCATTER_SHAPE_NZ = Rule(
    "SCATTER-SHAPE-NZ",
    "an NZ cache is (blocks, heads·head size/16, block size, 16), or that with heads apart",
    OPS_TRANSFORMER.at(_TILING, 440, 463),
)
SCATTER_TOKENS = Rule(
    "SCATTER-TOKENS", "key, value and slot_mapping have as many rows", OPS_TRANSFORMER.at(_TILING, 367, 370)
)
SCATTER_ROOM = Rule("SCATTER-ROOM", "no more tokens than slots", OPS_TRANSFORMER.at(_TILING, 347, 348))
SCATTER_CONTIGUOUS = Rule("SCATTER-CONTIGUOUS", "inputs are contiguous", OP_PLUGIN.at(_PAGE, 65))
SCATTER_SLOT_RANGE = Rule(
    "SCATTER-SLOT-RANGE",
    "slots are below blocks·block size (negative ones are skipped)",
    OPS_TRANSFORMER.at(_KERNEL, 61, 70),
    unchecked=True,
)
SCATTER_SLOT_TWICE = Rule(
    "SCATTER-SLOT-TWICE", "no slot is written twice in one call", OP_PLUGIN.at(_PAGE, 68), unchecked=True
)

GATHER_CHIP = Rule("GATHER-CHIP", "only A2 and A3 have it", OPS_TRANSFORMER.at(_GATHER_PAGE, 5, 8))
GATHER_DIMS = Rule(
    "GATHER-DIMS",
    "caches have 4 dimensions, block_tables 2, seq_lens 1, key and value 2 or 3",
    OPS_TRANSFORMER.at(_GATHER, 155, 201),
)
GATHER_DTYPE = Rule(
    "GATHER-DTYPE", "key has its cache's dtype, and value its own's", OPS_TRANSFORMER.at(_GATHER, 103, 121)
)
GATHER_INDEX_DTYPE = Rule(
    "GATHER-INDEX-DTYPE",
    "block_tables, seq_lens and seq_offset are int32: the A2 kernel reads them so, whatever they are",
    OPS_TRANSFORMER.at("attention/gather_pa_kv_cache/op_kernel/gather_pa_kv_cache_nd.h", 102, 104),
    unchecked=True,
)
GATHER_ROWS = Rule(
    "GATHER-ROWS", "key and value have a row for each token", OPS_TRANSFORMER.at(_GATHER_PAGE, 14, 16), unchecked=True
)
GATHER_BLOCK_IDS = Rule(
    "GATHER-BLOCK-IDS", "block ids are in the cache", OPS_TRANSFORMER.at(_GATHER_PAGE, 49), unchecked=True
)
GATHER_TABLE = Rule(
    "GATHER-TABLE",
    "each sequence's blocks are in its row of block_tables",
    OPS_TRANSFORMER.at("attention/gather_pa_kv_cache/op_kernel/gather_pa_kv_cache_nd.h", 153),
    unchecked=True,
)

RULES = (
    SCATTER_CHIP,
    SCATTER_MODE,
    SCATTER_UNCOMPRESSED,
    SCATTER_DTYPE,
    SCATTER_SAME_DTYPE,
    SCATTER_SLOT_DTYPE,
    SCATTER_DIMS,
    SCATTER_DIMS_NZ,
    SCATTER_SHAPE,
    SCATTER_SHAPE_NZ,
    SCATTER_TOKENS,
    SCATTER_ROOM,
    SCATTER_CONTIGUOUS,
    SCATTER_SLOT_RANGE,
    SCATTER_SLOT_TWICE,
    GATHER_CHIP,
    GATHER_DIMS,
    GATHER_DTYPE,
    GATHER_INDEX_DTYPE,
    GATHER_ROWS,
    GATHER_BLOCK_IDS,
    GATHER_TABLE,
)


def scatter_pa_kv_cache(
    machine: Machine,
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    compress_lens: torch.Tensor | None = None,
    compress_seq_offsets: torch.Tensor | None = None,
    seq_lens: torch.Tensor | None = None,
    cache_mode: str | None = "PA_NZ",
) -> None:
    """Writes each token's key and value to its slot; see `_TILING`'s CheckInputShapeNorm and CheckInputShapeNz."""
    SCATTER_CHIP.require(machine.chip is Chip.ASCEND_910B, f"chip {machine.chip.value}")
    SCATTER_MODE.require(cache_mode in (None, "Norm", "PA_NZ"), f"cache_mode {cache_mode!r}")
    SCATTER_UNCOMPRESSED.require(
        compress_lens is None and compress_seq_offsets is None and seq_lens is None, "compression arguments were given"
    )
    nz = cache_mode == "PA_NZ"
    dtypes = [tensor.dtype for tensor in (key, value, key_cache, value_cache)]
    SCATTER_DTYPE.require(machine.is_half(key.dtype) or key.dtype == torch.int8, f"{key.dtype}")
    SCATTER_SAME_DTYPE.require(len(set(dtypes)) == 1, f"{dtypes}")
    SCATTER_SLOT_DTYPE.require(slot_mapping.dtype in (torch.int32, torch.int64), f"{slot_mapping.dtype}")
    dims = [tensor.dim() for tensor in (key, value, slot_mapping)]
    SCATTER_DIMS.require(dims == [3, 3, 1], f"key, value, slot_mapping: {dims}")
    for name, rows, cache in (("key", key, key_cache), ("value", value, value_cache)):
        _check_cache(name, rows, cache, nz=nz)
    _check_same_blocks(key_cache, value_cache, nz=nz)
    counts = [key.shape[0], value.shape[0], slot_mapping.shape[0]]
    SCATTER_TOKENS.require(
        len(set(counts)) == 1 and key.shape[1] == value.shape[1], f"rows {counts}, heads {key.shape[1], value.shape[1]}"
    )
    size = key_cache.shape[-2] if nz else key_cache.shape[1]
    slots = key_cache.shape[0] * size
    SCATTER_ROOM.require(key.shape[0] <= slots, f"{key.shape[0]} tokens, {slots} slots")
    inputs = (key, value, key_cache, value_cache, slot_mapping)
    SCATTER_CONTIGUOUS.require(all(tensor.is_contiguous() for tensor in inputs), f"strides {key.stride()} …")
    wanted = slot_mapping.tolist()
    SCATTER_SLOT_RANGE.require(all(slot < slots for slot in wanted), f"slot {max(wanted, default=0)} of {slots}")
    written = [slot for slot in wanted if slot >= 0]
    SCATTER_SLOT_TWICE.require(len(set(written)) == len(written), f"{len(written) - len(set(written))} slots twice")
    write_slots(key_cache, key, wanted, nz=nz)
    write_slots(value_cache, value, wanted, nz=nz)


def _check_cache(name: str, rows: torch.Tensor, cache: torch.Tensor, *, nz: bool) -> None:
    shape = list(cache.shape)
    _, heads, size = rows.shape
    if not nz:
        SCATTER_DIMS.require(cache.dim() == 4, f"{name}_cache is {shape}")
        SCATTER_SHAPE.require(shape[2:] == [heads, size], f"{name}_cache is {shape} for {heads} heads of {size}")
        return
    width = nz_width(cache.dtype)
    SCATTER_DIMS_NZ.require(cache.dim() in (4, 5), f"{name}_cache is {shape}")
    columns = [heads * size // width] if cache.dim() == 4 else [heads, size // width]
    SCATTER_SHAPE_NZ.require(
        shape[1:-2] == columns and shape[-1] == width, f"{name}_cache is {shape} for {heads} heads of {size}"
    )


def _check_same_blocks(key_cache: torch.Tensor, value_cache: torch.Tensor, *, nz: bool) -> None:
    axis = -2 if nz else 1
    keys, values = (key_cache.shape[0], key_cache.shape[axis]), (value_cache.shape[0], value_cache.shape[axis])
    rule = SCATTER_SHAPE_NZ if nz else SCATTER_SHAPE
    rule.require(keys == values, f"blocks and block size: keys {keys}, values {values}")


def gather_pa_kv_cache(
    machine: Machine,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    seq_offset: torch.Tensor | None = None,
    is_seq_lens_cumsum: bool = False,
) -> None:
    """Copies the sequences' tokens one after another into `key` and `value`; the cache's format says its layout."""
    GATHER_CHIP.require(machine.chip is Chip.ASCEND_910B, f"chip {machine.chip.value}")
    dims = [tensor.dim() for tensor in (key_cache, value_cache, block_tables, seq_lens, key, value)]
    GATHER_DIMS.require(dims[:4] == [4, 4, 2, 1] and set(dims[4:]) <= {2, 3}, f"{dims}")
    GATHER_DTYPE.require(
        key.dtype == key_cache.dtype and value.dtype == value_cache.dtype, f"{key.dtype} from {key_cache.dtype}"
    )
    indices = [block_tables, seq_lens, *([] if seq_offset is None else [seq_offset])]
    GATHER_INDEX_DTYPE.require(all(index.dtype == torch.int32 for index in indices), f"{[i.dtype for i in indices]}")
    nz = machine.formats.of(key_cache) != 2
    size = key_cache.shape[2] if nz else key_cache.shape[1]
    lengths = seq_lens.diff().tolist() if is_seq_lens_cumsum else seq_lens.tolist()
    offsets = [0] * len(lengths) if seq_offset is None else [offset // size for offset in seq_offset.tolist()]
    GATHER_ROWS.require(
        sum(lengths) == key.shape[0] == value.shape[0], f"{sum(lengths)} tokens, {key.shape[0]} rows of key"
    )
    GATHER_TABLE.require(len(lengths) == block_tables.shape[0], f"{len(lengths)} lengths, {block_tables.shape[0]} rows")
    start = 0
    for row, (length, first) in enumerate(zip(lengths, offsets, strict=True)):
        used = block_tables[row, first : first - (-length // size)].tolist()
        GATHER_TABLE.require(len(used) * size >= length, f"sequence {row}: {length} tokens, {len(used)} blocks")
        GATHER_BLOCK_IDS.require(all(0 <= block < key_cache.shape[0] for block in used), f"sequence {row}: {used}")
        for out, cache in ((key, key_cache), (value, value_cache)):
            rows = read_slots(cache, used, length, 1, nz=nz)
            out[start : start + length] = rows.reshape(length, *out.shape[1:])
        start += length
