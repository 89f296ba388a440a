"""Paged attention on an Ascend NPU (910B, 910C) with the operators of torch_npu 2.13.

`torch_npu` must have been imported by the caller (`device.resolve_device` does): importing it is what registers
`torch.ops.npu`. Axis letters are those of `attention/base.py`.

Every phase is the same call: a cold prefill reads its keys from the pool too, through the block table, and the key
lengths are always given apart from the query lengths. With a cache hit they differ, and the operator called without a
table would take the one for the other. It does not validate block ids, so `runner/batch.py` does, on the host, before
anything is launched; what it refuses of a model is told at load (`npu_limits.py`).

Sources: op-plugin docs torch_npu-npu_fused_infer_attention_score.md and -npu_scatter_pa_kv_cache.md (517f2e7); CANN
ops-transformer attention/fused_infer_attention_score/op_host/fused_infer_attention_score_tiling.cpp, `CheckFAI…`
(the lengths of layout TND: cumulative for queries, of each request for paged keys, the last one equal to the rows; the
mask 2048 × 2048 for modes 3 and 4, none for mode 0); vllm-ascend attention/attention_v1.py (182b75e).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate

import torch

from reprise_engine.attention.base import AttentionMetadata, LayerKV
from reprise_engine.attention.block_copies import BlockCopier, Copies
from reprise_engine.attention.npu_cascade import (
    LEAST_SAVED_BYTES,
    Cascade,
    can_merge_by_operator,
    merge,
    saved_bytes,
    split_step,
)

# The operator's compressed masks are a fixed 2048 × 2048 upper triangle, whatever the lengths.
_MASK_SIZE = 2048
_SPARSE_NO_MASK = 0
_SPARSE_RIGHT_DOWN_CAUSAL = 3
_SPARSE_BAND = 4
_UNBOUNDED = 2147483647


@dataclass(slots=True)
class _Plan:
    """What all layers of a step share. The cascade is made by the first layer that wants it."""

    metadata: AttentionMetadata
    query_ends: list[int] = field(init=False)
    kv_lens: list[int] = field(init=False)
    cascade: Cascade | None = None

    def __post_init__(self) -> None:
        self.query_ends = list(accumulate(self.metadata.query_lens))
        self.kv_lens = list(self.metadata.kv_lens)


class NPUAttention:
    """Every phase by `npu_fused_infer_attention_score` in layout TND: T rows packed without padding.

    Prefixes that requests of a step share are read once where that saves `least_cascade_bytes` a layer.
    """

    name = "npu"

    def __init__(self, device: torch.device, *, least_cascade_bytes: int = LEAST_SAVED_BYTES) -> None:
        mask = torch.ones((_MASK_SIZE, _MASK_SIZE), dtype=torch.int8, device=device)
        self._mask = torch.triu(mask, diagonal=1)
        self._copier = BlockCopier(device)
        self._least_cascade_bytes = least_cascade_bytes
        self._merges_by_operator = can_merge_by_operator(device)
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
        torch.ops.npu.npu_scatter_pa_kv_cache(
            k_TKH.contiguous(),
            v_TKH.contiguous(),
            kv.key_BSKH,
            kv.value_BSKH,
            metadata.slot_mapping_T,
            cache_mode="Norm",
        )
        if self._plan is None or self._plan.metadata is not metadata:
            self._plan = _Plan(metadata)
        plan = self._plan
        q_TNH = q_TNH.contiguous()
        # A window hides keys from some queries of a group and not from others: then each request reads its own.
        if sliding_window is None and self._is_cascade_worth_it(kv, metadata):
            if plan.cascade is None:
                plan.cascade = split_step(metadata)
            return self._attend_in_halves(q_TNH, kv, plan, plan.cascade, scale=scale)
        out_TNH, _ = _attend(
            q_TNH,
            kv,
            query_ends=plan.query_ends,
            kv_lens=plan.kv_lens,
            block_table_RM=metadata.block_table_RM,
            mask=self._mask,
            scale=scale,
            sliding_window=sliding_window,
        )
        return out_TNH

    def copy_blocks(self, kv: LayerKV, copies: Copies) -> None:
        self._copier.copy(kv, copies)

    def _is_cascade_worth_it(self, kv: LayerKV, metadata: AttentionMetadata) -> bool:
        if not metadata.shared_prefixes:
            return False
        bytes_per_token = 2 * kv.key_BSKH[0, 0].nbytes
        return saved_bytes(metadata.shared_prefixes, bytes_per_token=bytes_per_token) >= self._least_cascade_bytes

    def _attend_in_halves(
        self, q_TNH: torch.Tensor, kv: LayerKV, plan: _Plan, cascade: Cascade, *, scale: float
    ) -> torch.Tensor:
        rows_P = cascade.rows_P
        prefix = _attend(
            q_TNH if rows_P is None else q_TNH.index_select(0, rows_P),
            kv,
            query_ends=cascade.prefix_query_ends,
            kv_lens=cascade.prefix_lens,
            block_table_RM=cascade.prefix_table_GM,
            mask=None,
            scale=scale,
            with_lse=True,
        )
        out_TNH, lse_TN1 = _attend(
            q_TNH,
            kv,
            query_ends=plan.query_ends,
            kv_lens=cascade.rest_lens,
            block_table_RM=cascade.rest_table_RM,
            mask=self._mask,
            scale=scale,
            with_lse=True,
        )
        if rows_P is None:
            return merge(prefix, (out_TNH, lse_TN1), by_operator=self._merges_by_operator)
        rest = out_TNH.index_select(0, rows_P), lse_TN1.index_select(0, rows_P)
        return out_TNH.index_copy_(0, rows_P, merge(prefix, rest, by_operator=self._merges_by_operator))


def _attend(
    q_TNH: torch.Tensor,
    kv: LayerKV,
    *,
    query_ends: list[int],
    kv_lens: list[int],
    block_table_RM: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    sliding_window: int | None = None,
    with_lse: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out_TNH, lse_TN1 in float32), the latter only `with_lse`. Without a mask every query sees all its keys."""
    if mask is None:
        sparse_mode = _SPARSE_NO_MASK
    else:
        sparse_mode = _SPARSE_RIGHT_DOWN_CAUSAL if sliding_window is None else _SPARSE_BAND
    out: tuple[torch.Tensor, torch.Tensor] = torch.ops.npu.npu_fused_infer_attention_score(
        q_TNH,
        kv.key_BSKH.flatten(2, 3),
        kv.value_BSKH.flatten(2, 3),
        atten_mask=mask,
        block_table=block_table_RM,
        input_layout="TND",
        block_size=kv.block_size,
        actual_seq_lengths=query_ends,
        actual_seq_lengths_kv=kv_lens,
        num_heads=q_TNH.shape[1],
        num_key_value_heads=kv.key_BSKH.shape[2],
        scale=scale,
        sparse_mode=sparse_mode,
        # A band of `pre_tokens` before the query and the query itself: a window of pre_tokens + 1.
        pre_tokens=_UNBOUNDED if sliding_window is None else sliding_window - 1,
        next_tokens=_UNBOUNDED if sliding_window is None else 0,
        softmax_lse_flag=with_lse,
    )
    return out
