"""Paged attention on an Ascend 310P: another layout of the pool, and ATB's operators instead of the fused one.

`torch_npu` must have been imported by the caller, and the NNAL package installed: together they register
`torch.ops.atb`. Axis letters are those of `attention/base.py`; C is K·H/16, L the keys of a call's longest request.

The pool is in layout NZ, (B, C, S, 16), float16. One new token of a request goes through `_npu_paged_attention`, more
of them, a cold prefill included, through splitfuse attention, which reads every key from the pool and is told the
lengths of queries and keys apart. So nothing can mistake a cache hit for a cold prefill. Splitfuse attention is given a
mask with a row a query; windows are part of it, so with a window all rows go there. Block ids are validated by
`runner/batch.py`. There is no log-sum-exp to be had: each request reads a shared prefix itself.

What ATB's kernel does decides some things here: see `_split_scale`, `_HIDDEN`, `_MOST_ROWS` and `_MOST_REQUESTS`.

Why not `_npu_paged_attention_splitfuse_v2`, whose mask is of a fixed size: torch_npu registers it whatever ATB there
is, ATB has it from CANN 9.1 on only, and beyond 2,048 keys its kernel takes the mask of a tile of queries from the
wrong rows where the tile has queries of two blocks, so that queries see up to 22 keys after them.

Sources: vllm-ascend _310p/attention/attention_v1.py and attention_mask.py (182b75e: layout, which operator when, masks,
`seq_len` on the host and `context_lens` on the device); op-plugin ops/atb/PagedAttention*.cpp and
ReshapeAndCachAtb.cpp (517f2e7: schemas); ascend-transformer-boost src/kernels/mixkernels/pagedattention (ddcc8b6:
op_kernel/paged_attention_decoder_mask.cce for what is computed in float16 and which rows of a mask are read, tiling for
limits).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from reprise_engine.attention.base import AttentionMetadata, KVLayout, LayerKV
from reprise_engine.attention.block_copies import Copies, copy_one_by_one
from reprise_engine.errors import ConfigError

_HIDDEN = -10000.0
"""What the mask adds to a hidden score, as the vendor's own tests have it. Not -inf: where a window hides all of a
row's first block of keys, the kernel would take -inf for its largest score so far, and exp(-inf + inf) is not a number.
"""
_MOST_ROWS = 1024
"""Queries of one call of splitfuse attention. With 2,048 a service in production got wrong answers without an error,
with 1,024 never (field report of 2026-07-08); the sources do not say why."""
_MOST_DECODES = 511
_MOST_REQUESTS = 255
"""Of one call, for a part of an NPU (vNPU) that has one core: each core keeps the lengths of its requests in a buffer
with room for so many, and goes on beyond it."""
_ACL_FORMAT_FRACTAL_NZ = 29
_NZ_COLUMN = 16
_OPERATORS = ("_npu_reshape_and_cache", "_npu_paged_attention", "_npu_paged_attention_splitfuse")


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """What one call of an operator attends: consecutive rows of the step, which belong to consecutive requests."""

    first_row: int
    first_request: int
    query_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    decodes: bool
    """One query a request, without a mask."""

    @property
    def rows(self) -> slice:
        return slice(self.first_row, self.first_row + sum(self.query_lens))

    @property
    def requests(self) -> slice:
        return slice(self.first_request, self.first_request + len(self.query_lens))


def split_into_calls(query_lens: tuple[int, ...], kv_lens: tuple[int, ...], *, masked: bool) -> tuple[Call, ...]:
    """All rows of the step in their order: decodes apart from others, unless `masked` (each row then needs a mask), and
    no more in a call than it takes. Where a request is cut, the keys of its first queries end with the last of those.
    """
    pieces: list[list[tuple[int, int, int]]] = []  # of each call: (request, queries, keys)
    kinds: list[bool] = []
    room = 0  # rows that the last call still takes
    for request, (queries, keys) in enumerate(zip(query_lens, kv_lens, strict=True)):
        decodes = queries == 1 and not masked
        if kinds and (decodes != kinds[-1] or (len(pieces[-1]) == _MOST_REQUESTS and not decodes)):
            room = 0
        left = queries
        while left:
            if not room:
                pieces.append([])
                kinds.append(decodes)
                room = _MOST_DECODES if decodes else _MOST_ROWS
            taken = min(left, room)
            left -= taken
            room -= taken
            pieces[-1].append((request, taken, keys - left))
    calls: list[Call] = []
    first_row = 0
    for of_call, decodes in zip(pieces, kinds, strict=True):
        requests, queries_of, keys_of = zip(*of_call, strict=True)
        calls.append(
            Call(
                first_row=first_row,
                first_request=requests[0],
                query_lens=queries_of,
                kv_lens=keys_of,
                decodes=decodes,
            )
        )
        first_row += sum(queries_of)
    return tuple(calls)


class _Arguments:
    """Of one call, for all layers alike: on the device but for `query_lens_R`."""

    def __init__(self, call: Call, metadata: AttentionMetadata, sliding_window: int | None, device: torch.device):
        self.call = call
        self.block_table_RM = metadata.block_table_RM[call.requests]
        self.query_lens_R = torch.tensor(call.query_lens, dtype=torch.int32)
        self.kv_lens_R = torch.tensor(call.kv_lens, dtype=torch.int32, device=device)
        self.mask = None if call.decodes else _rows_of_mask(call, sliding_window, device)


class _Plan:
    """What all layers of a step share."""

    def __init__(self, metadata: AttentionMetadata, device: torch.device) -> None:
        self.metadata = metadata
        self.slots_T = metadata.slot_mapping_T.to(torch.int32)
        self._device = device
        self._arguments: dict[int | None, tuple[_Arguments, ...]] = {}

    def arguments(self, sliding_window: int | None) -> tuple[_Arguments, ...]:
        if sliding_window not in self._arguments:
            metadata = self.metadata
            calls = split_into_calls(metadata.query_lens, metadata.kv_lens, masked=sliding_window is not None)
            self._arguments[sliding_window] = tuple(
                _Arguments(call, metadata, sliding_window, self._device) for call in calls
            )
        return self._arguments[sliding_window]


class NPU310PAttention:
    """Takes pools of layout NZ only."""

    name = "npu-310p"

    def __init__(self, device: torch.device) -> None:
        """Raises ConfigError where ATB's operators are not there."""
        missing = [name for name in _OPERATORS if not hasattr(torch.ops.atb, name)]
        if missing:
            raise ConfigError(
                f"An NPU 310P needs {', '.join(missing)} of CANN's NNAL package (ATB), which is not loaded. "
                "Install NNAL and source its set_env.sh, or use --device cpu."
            )
        self._device = device
        self._plan: _Plan | None = None

    def forward(
        self,
        q_TNH: torch.Tensor,
        k_TKH: torch.Tensor,
        v_TKH: torch.Tensor,
        kv: LayerKV,
        metadata: AttentionMetadata,
        *,
        scale: float,
        sliding_window: int | None,
    ) -> torch.Tensor:
        assert kv.layout is KVLayout.NZ, f"the pool's layout is {kv.layout}"
        if self._plan is None or self._plan.metadata is not metadata:
            self._plan = _Plan(metadata, self._device)
        plan = self._plan
        torch.ops.atb._npu_reshape_and_cache(
            k_TKH.contiguous(), v_TKH.contiguous(), kv.key_BSKH, kv.value_BSKH, plan.slots_T
        )
        power, rest = _split_scale(scale)
        q_TNH = (q_TNH * power).contiguous()
        out_TNH = torch.empty_like(q_TNH)
        heads = {"num_kv_heads": k_TKH.shape[1], "num_heads": q_TNH.shape[1], "scale_value": rest}
        for given in plan.arguments(sliding_window):
            rows = given.call.rows
            common = {**heads, "block_table": given.block_table_RM, "context_lens": given.kv_lens_R}
            if given.mask is None:
                torch.ops.atb._npu_paged_attention(q_TNH[rows], kv.key_BSKH, kv.value_BSKH, **common, out=out_TNH[rows])
            else:
                torch.ops.atb._npu_paged_attention_splitfuse(
                    q_TNH[rows],
                    kv.key_BSKH,
                    kv.value_BSKH,
                    **common,
                    mask=given.mask,
                    seq_len=given.query_lens_R,
                    out=out_TNH[rows],
                )
        return out_TNH

    def copy_blocks(self, kv: LayerKV, copies: Copies) -> None:
        # aclnnIndexPutImpl is not among what ops-nn has for a 310P (docs/aclnnIndexPutImpl.md, e5c3fa9).
        copy_one_by_one(kv, copies)


def _split_scale(scale: float) -> tuple[float, float]:
    """(for the queries, for the operator), of which `scale` is the product: the kernel rounds a product of query and
    key to float16 before it scales it, and those of some models (Qwen2.5's keys have large biases) are beyond its
    65,504. A power of two costs no precision."""
    power = min(1.0, 2.0 ** math.ceil(math.log2(scale)))
    return power, scale / power


def _rows_of_mask(call: Call, sliding_window: int | None, device: torch.device) -> torch.Tensor:
    """What is added to the scores of each row of the call, as (1, L/16, T, 16) of format NZ, L and T padded to 16."""
    positions = [
        position
        for query_len, kv_len in zip(call.query_lens, call.kv_lens, strict=True)
        for position in range(kv_len - query_len, kv_len)
    ]
    positions += [positions[-1]] * (-len(positions) % _NZ_COLUMN)
    columns = -(-max(call.kv_lens) // _NZ_COLUMN)
    query_position = torch.tensor(positions, device=device).view(1, -1, 1)
    key_position = torch.arange(columns * _NZ_COLUMN, device=device).view(columns, 1, _NZ_COLUMN)
    hidden = key_position > query_position
    if sliding_window is not None:
        hidden |= key_position <= query_position - sliding_window
    mask = torch.zeros(hidden.shape, dtype=torch.float16, device=device).masked_fill_(hidden, _HIDDEN)
    cast: torch.Tensor = torch.ops.npu.npu_format_cast(mask.unsqueeze(0), _ACL_FORMAT_FRACTAL_NZ)
    return cast
