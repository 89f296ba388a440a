"""ATB's operators, with which 310P writes and reads its paged cache (`torch.ops.atb.*`, `torch_npu._npu_*`).

310P keeps the cache in NZ: (P, K·D/16, W, 16), P blocks of W slots, K key-value heads of size D. A2 and A3 take ND
caches, (P, W, K, D). What they refuse is in `atb_rules`; `atb_splitfuse` has the two that take several queries.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tests.support.npu import atb_rules as rules
from tests.support.npu.atb_kernel import attend_in_float16
from tests.support.npu.layouts import attend, nz_width, read_slots, write_slots
from tests.support.npu.machine import FORMAT_FRACTAL_NZ, FORMAT_ND, Chip, Machine
from tests.support.npu.rules import Rule

_OFFSETS = 2**32
_MOST_COLUMNS = 20 * 1024 // 4 - 1


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
    rules.SLOT_DTYPE.require(
        slot_indices.dtype == torch.int32 and slot_indices.dim() == 1, f"{slot_indices.dtype}, {slot_indices.dim()}-d"
    )
    rules.SLOT_ROWS.require(
        key.dim() == value.dim() == 3
        and key.shape[0] == value.shape[0] == slot_indices.shape[0]
        and key.shape[1] == value.shape[1],
        f"{list(key.shape)}, {list(value.shape)}, {list(slot_indices.shape)}",
    )
    _check_not_empty(key, value, key_cache, value_cache)
    nz = machine.chip is Chip.ASCEND_310P
    for rows, cache in ((key, key_cache), (value, value_cache)):
        _check_written(machine, rows, cache)
    _check_same_blocks(machine, key_cache, value_cache)
    size = block_size_of(machine, key_cache)
    rules.BLOCK_SIZE.require(size % 16 == 0 or not nz, f"block size {size}")
    slots = key_cache.shape[0] * size
    wanted = slot_indices.tolist()
    rules.SLOT_RANGE.require(all(slot < slots for slot in wanted), f"slot {max(wanted)} of {slots}")
    written = [slot for slot in wanted if slot >= 0]
    rules.SLOT_TWICE.require(len(set(written)) == len(written), f"{len(written) - len(set(written))} slots twice")
    token = key[0].numel()
    if nz and (len(wanted) >= 1000 or (token + value[0].numel()) * key.itemsize > 128 * 1024):
        end = (max(written, default=0) // size + 1) * size * token
        rules.SLOT_OFFSET.require(end <= _OFFSETS, f"slot {max(wanted)}: number {end}")
    rules.CONTIGUOUS.require(
        key_cache.is_contiguous() and value_cache.is_contiguous(), f"{key_cache.stride()}, {value_cache.stride()}"
    )
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
    kv_heads = num_kv_heads or num_heads
    paged = Paged(machine, query, key_cache, value_cache, block_table, context_lens, kv_heads, num_heads, out)
    paged.check()
    lengths = context_lens.tolist()
    rules.DECODE_ROWS.require(query.shape[0] == len(lengths), f"{query.shape[0]} queries, {len(lengths)} sequences")
    paged.check_context(lengths)
    for row, length in enumerate(lengths):
        paged.attend(row, slice(row, row + 1), length, scale=scale_value)


@dataclass(frozen=True)
class Paged:
    """What the attention operators have in common: the queries of all sequences, the caches, and the result."""

    machine: Machine
    query: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    block_table: torch.Tensor
    context_lens: torch.Tensor
    kv_heads: int
    heads: int
    out: torch.Tensor

    @property
    def on_310p(self) -> bool:
        return self.machine.chip is Chip.ASCEND_310P

    @property
    def block_size(self) -> int:
        return block_size_of(self.machine, self.key_cache)

    @property
    def head_size(self) -> int:
        return self.query.shape[2]

    def check(self, *, mask: torch.Tensor | None = None) -> None:
        """All that does not depend on the values of lengths and tables."""
        query, out, caches = self.query, self.out, (self.key_cache, self.value_cache)
        rules.CONTIGUOUS.require(out.is_contiguous(), f"out has strides {out.stride()}")
        rules.GROUPS.require(
            self.kv_heads > 0 and self.heads > 0 and self.heads % self.kv_heads == 0, f"{self.heads}, {self.kv_heads}"
        )
        _check_not_empty(query, *caches, self.block_table, self.context_lens, out)
        _check_dtypes(self.machine, query, *caches, out)
        _check_formats(self.machine, caches, mask)
        rules.HEADS.require(query.dim() == 3 and query.shape[1] == self.heads, f"{list(query.shape)}: {self.heads}")
        for cache in caches:
            _check_cache(self.machine, rules.CACHE_SHAPE, cache, heads=self.kv_heads, head_size=self.head_size)
        _check_same_blocks(self.machine, *caches)
        self._check_sizes()
        rules.OUT.require(out.shape[1:] == query.shape[1:], f"{list(out.shape)} for {list(query.shape)}")
        rules.OUT_ROWS.require(out.shape[0] == query.shape[0], f"{list(out.shape)} for {list(query.shape)}")
        table = self.block_table
        rules.TABLE.require(table.dtype == torch.int32 and table.dim() == 2, f"{table.dtype}, {list(table.shape)}")
        rules.TABLE_COLUMNS.require(table.shape[1] <= _MOST_COLUMNS or not self.on_310p, f"{table.shape[1]} columns")
        check_lengths("context_lens", self.context_lens)

    def _check_sizes(self) -> None:
        size, head_size = self.block_size, self.head_size
        rules.BLOCK_SIZE.require(size % 16 == 0, f"block size {size}")
        rules.HEAD_SIZE.require(
            head_size <= 256 and (head_size % 16 == 0 or not self.on_310p), f"head size {head_size}"
        )
        rules.BLOCK_AREA.require(size * head_size <= 128 * 128 or not self.on_310p, f"{size} · {head_size}")
        rules.BLOCK_LIMIT.require(size <= 128, f"block size {size}")
        sequences = self.context_lens.shape[0]
        rules.BATCH.require(sequences <= 2048 or not self.on_310p, f"{sequences} sequences")

    def check_context(self, lengths: list[int]) -> None:
        table, size = self.block_table, self.block_size
        rules.TABLE_ROWS.require(table.shape[0] >= len(lengths), f"{table.shape[0]} rows, {len(lengths)} sequences")
        for row, length in enumerate(lengths):
            rules.CONTEXT.require(0 < length <= table.shape[1] * size, f"sequence {row} has {length}")
            used = self.blocks(row, length)
            rules.BLOCK_IDS.require(
                all(0 <= block < self.key_cache.shape[0] for block in used), f"sequence {row}: {used}"
            )

    def check_offsets(self, lengths: list[int]) -> None:
        """Of splitfuse."""
        block = self.key_cache[0].numel()
        for row, length in enumerate(lengths):
            start = max(self.blocks(row, length)) * block
            rules.BLOCK_OFFSET.require(start < _OFFSETS or not self.on_310p, f"sequence {row}: number {start}")

    def blocks(self, row: int, length: int) -> list[int]:
        used: list[int] = self.block_table[row, : -(-length // self.block_size)].tolist()
        return used

    def attend(self, row: int, rows: slice, length: int, *, scale: float, bias_QL: torch.Tensor | None = None) -> None:
        """Sequence `row`, whose queries are the given rows."""
        ids = self.blocks(row, length)
        keys, values = (
            read_slots(cache, ids, length, self.kv_heads, nz=self.on_310p)
            for cache in (self.key_cache, self.value_cache)
        )
        query = self.query[rows]
        if self.on_310p and query.dtype == torch.float16:
            self.out[rows] = attend_in_float16(query, keys, values, scale=scale, bias_QL=bias_QL)
            return
        bias = None if bias_QL is None else bias_QL.float()
        self.out[rows] = attend(query, keys, values, scale=scale, bias=bias)[0].to(self.out.dtype)


def block_size_of(machine: Machine, cache: torch.Tensor) -> int:
    return cache.shape[2 if machine.chip is Chip.ASCEND_310P else 1]


def check_lengths(name: str, lengths: torch.Tensor) -> None:
    rules.LENS.require(
        lengths.dtype == torch.int32 and lengths.dim() == 1, f"{name} is {lengths.dtype}, {lengths.dim()}-d"
    )


def _check_not_empty(*tensors: torch.Tensor) -> None:
    rules.EMPTY.require(all(tensor.numel() for tensor in tensors), f"{[list(tensor.shape) for tensor in tensors]}")


def _check_dtypes(machine: Machine, *tensors: torch.Tensor) -> None:
    rules.DTYPE.require(machine.is_half(tensors[0].dtype), f"{tensors[0].dtype} on {machine.chip.value}")
    rules.SAME_DTYPE.require(len({tensor.dtype for tensor in tensors}) == 1, f"{[tensor.dtype for tensor in tensors]}")


def _check_formats(machine: Machine, caches: tuple[torch.Tensor, ...], mask: torch.Tensor | None) -> None:
    of_caches = {machine.formats.of(cache) for cache in caches}
    taken = [{FORMAT_ND}] if machine.chip is not Chip.ASCEND_310P else [{FORMAT_ND}, {FORMAT_FRACTAL_NZ}]
    of_mask = FORMAT_ND if mask is None else machine.formats.of(mask)
    rules.CACHE_FORMATS.require(
        of_caches in taken and (of_mask == FORMAT_ND or of_caches == {FORMAT_FRACTAL_NZ}),
        f"caches {sorted(of_caches)}, mask {of_mask}",
    )


def _check_written(machine: Machine, rows: torch.Tensor, cache: torch.Tensor) -> None:
    nz = machine.chip is Chip.ASCEND_310P
    acl_format = machine.formats.of(cache)
    rules.WRITE_FORMAT.require((acl_format == FORMAT_FRACTAL_NZ) == nz, f"format {acl_format}")
    _check_cache(machine, rules.WRITE_SHAPE, cache, heads=rows.shape[1], head_size=rows.shape[2])
    aligned = rows.shape[2] * rows.itemsize % 32 == 0
    rules.WRITE_HEAD_SIZE.require(aligned or not nz, f"head size {rows.shape[2]}")


def _check_cache(machine: Machine, rule: Rule, cache: torch.Tensor, *, heads: int, head_size: int) -> None:
    shape = list(cache.shape)
    width = nz_width(cache.dtype)
    if machine.chip is Chip.ASCEND_310P:
        holds = len(shape) == 4 and shape[1] * width == heads * head_size and shape[3] == width
    else:
        holds = len(shape) == 4 and shape[2:] == [heads, head_size]
    rule.require(holds, f"{shape}: {heads} heads of {head_size}")


def _check_same_blocks(machine: Machine, key_cache: torch.Tensor, value_cache: torch.Tensor) -> None:
    keys, values = ((cache.shape[0], block_size_of(machine, cache)) for cache in (key_cache, value_cache))
    rules.SAME_CACHES.require(keys == values, f"blocks and block size: keys {keys}, values {values}")
