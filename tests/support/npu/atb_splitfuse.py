"""ATB's operators for several queries a sequence: prompts, chunks and decodes together.

The first has a row of an additive mask for each query. The second, of CANN 9.1, has one triangle of 2,048 rows for all,
and reads it where each tile of queries and keys would stand in it.
"""

from __future__ import annotations

import torch

from tests.support.npu import atb_rules as rules
from tests.support.npu.atb import Paged, check_lengths
from tests.support.npu.atb_kernel import MASK_LENGTH, Tiling, compressed_bias
from tests.support.npu.machine import FORMAT_FRACTAL_NZ, FORMAT_ND, Atb, Chip, Machine

_NORM_COMPRESS = 5


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
    kv_heads = num_kv_heads or num_heads
    paged = Paged(machine, query, key_cache, value_cache, block_table, context_lens, kv_heads, num_heads, out)
    paged.check(mask=mask)
    queries, keys = _check_queries(paged, seq_len, many=True)
    rules.SPLITFUSE_ROWS.require(query.shape[0] <= 1024 or not paged.on_310p, f"{query.shape[0]} queries")
    mask_TL = _mask_rows(paged, mask)
    rules.MASK_COVERS.require(mask_TL.shape[1] >= max(keys), f"{mask_TL.shape[1]} columns, {keys}")
    start = 0
    for row, (count, length) in enumerate(zip(queries, keys, strict=True)):
        rows = slice(start, start + count)
        bias_QL = mask_TL[rows, :length]
        hidden = (bias_QL[:, : paged.block_size] == float("-inf")).all(1)
        rules.MASK_FIRST.require(not (paged.on_310p and hidden.any()), f"sequence {row}")
        paged.attend(row, rows, length, scale=scale_value, bias_QL=bias_QL)
        start += count


def paged_attention_splitfuse_v2(
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
    *,
    mask_type: int | None = _NORM_COMPRESS,
    out: torch.Tensor,
) -> None:
    rules.V2_MASK_TYPE.require(mask_type in (None, _NORM_COMPRESS), f"mask_type {mask_type}")
    failed = "PagedAttentionOperation CreateOperation failed!"
    rules.V2_ATB.require(machine.atb is not Atb.CANN_9_0, failed)
    rules.V2_CHIP.require(machine.chip is Chip.ASCEND_310P, failed)
    kv_heads = num_kv_heads or num_heads
    paged = Paged(machine, query, key_cache, value_cache, block_table, context_lens, kv_heads, num_heads, out)
    paged.check(mask=mask)
    shape, acl_format = list(mask.shape), machine.formats.of(mask)
    rules.MASK_DTYPE.require(mask.dtype == query.dtype, f"{mask.dtype}")
    rules.V2_MASK.require(
        acl_format == FORMAT_ND and shape in [[1] * ones + [MASK_LENGTH] * 2 for ones in range(3)],
        f"{shape}, format {acl_format}",
    )
    queries, keys = _check_queries(paged, seq_len, many=query.shape[0] != seq_len.shape[0])
    tiling = Tiling(paged.block_size, paged.head_size, queries)
    room = _numbers_from(mask)
    start = 0
    for row, (count, length) in enumerate(zip(queries, keys, strict=True)):
        crosses = length > MASK_LENGTH and tiling.crosses(count, length)
        rules.V2_TILES.require(
            not crosses, f"sequence {row}: {count} queries, {length} keys, block size {paged.block_size}"
        )
        read = compressed_bias(mask.reshape(MASK_LENGTH, MASK_LENGTH), count, length, tiling)
        rules.V2_MASK_ROOM.require(
            read.end <= room, f"sequence {row}: {read.end - room} numbers after the storage's end"
        )
        rows = slice(start, start + count)
        paged.attend(row, rows, length, scale=scale_value, bias_QL=read.bias_QL)
        start += count


def _check_queries(paged: Paged, seq_len: torch.Tensor, *, many: bool) -> tuple[list[int], list[int]]:
    """The sequences' queries and keys; `many` says whether the kernel goes the way of several queries a sequence."""
    check_lengths("seq_len", seq_len)
    if many and paged.on_310p:
        rules.MANY_BATCH.require(seq_len.shape[0] <= 2000, f"{seq_len.shape[0]} sequences")
        rules.MANY_HEADS.require(paged.heads <= 256, f"{paged.heads} heads")
        rules.MANY_SIZE.require(paged.heads * paged.head_size <= 128 * 128, f"{paged.heads} · {paged.head_size}")
    queries, keys = seq_len.tolist(), paged.context_lens.tolist()
    rules.QUERY_LENGTH.require(all(count > 0 for count in queries), f"seq_len {queries}")
    rules.QUERY_ROWS.require(
        sum(queries) == paged.query.shape[0] and len(queries) == len(keys),
        f"seq_len {queries}, {len(keys)} sequences, {paged.query.shape[0]} rows",
    )
    rules.QUERY_CONTEXT.require(
        all(count <= length for count, length in zip(queries, keys, strict=True)),
        f"seq_len {queries}, context_lens {keys}",
    )
    paged.check_context(keys)
    paged.check_offsets(keys)
    return queries, keys


def _mask_rows(paged: Paged, mask: torch.Tensor) -> torch.Tensor:
    """The mask as (T, L), a row a query."""
    rows, shape = paged.query.shape[0], list(mask.shape)
    rules.MASK_DTYPE.require(mask.dtype == paged.query.dtype, f"{mask.dtype}")
    if not paged.on_310p:
        rules.MASK.require(len(shape) == 2, f"{shape}")
        rules.MASK_ROWS.require(shape[0] == rows, f"{shape} for {rows} queries")
        return mask
    acl_format = paged.machine.formats.of(mask)
    rules.MASK.require(
        acl_format == FORMAT_FRACTAL_NZ and len(shape) == 4 and (shape[0], shape[3]) == (1, 16),
        f"{shape}, format {acl_format}",
    )
    padded = -(-rows // 16) * 16
    rules.MASK_ROWS.require(shape[2] == padded, f"{shape} for {rows} queries")
    return mask[0].transpose(0, 1).reshape(padded, -1)[:rows]


def _numbers_from(mask: torch.Tensor) -> int:
    """Numbers that the mask's storage has from its first on; a mask that is not contiguous is copied without more."""
    if not mask.is_contiguous():
        return mask.numel()
    return int(mask.untyped_storage().nbytes() // mask.itemsize - mask.storage_offset())
