"""Paged attention on an Ascend NPU (910B, 910C) with the two operators of torch_npu.

`torch_npu` must have been imported by the caller (`device.resolve_device` does): importing it is what registers
`torch.ops.npu`. Axis letters are those of `attention/base.py`.

The block table is passed in every phase, a cold prefill included, and the key lengths are always given apart from the
query lengths: with a cache hit they differ, and an operator called without a table would take the one for the other.
The operator does not validate block ids, so `runner/batch.py` does, on the host, before anything is launched.
"""

from __future__ import annotations

from itertools import accumulate

import torch

from reprise_engine.attention.base import AttentionMetadata, LayerKV

# The operator's compressed causal masks are a fixed 2048 × 2048 upper triangle, whatever the lengths.
_MASK_SIZE = 2048
_SPARSE_RIGHT_DOWN_CAUSAL = 3
_SPARSE_BAND = 4
_UNBOUNDED = 2147483647


class NPUAttention:
    """Every phase by `npu_fused_infer_attention_score` in layout TND: T rows packed without padding."""

    name = "npu"

    def __init__(self, device: torch.device) -> None:
        mask = torch.ones((_MASK_SIZE, _MASK_SIZE), dtype=torch.int8, device=device)
        self._mask = torch.triu(mask, diagonal=1)

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
        dtype = kv.key_BSKH.dtype
        torch.ops.npu.npu_scatter_pa_kv_cache(
            k_TKH.to(dtype).contiguous(),
            v_TKH.to(dtype).contiguous(),
            kv.key_BSKH,
            kv.value_BSKH,
            metadata.slot_mapping_T.to(torch.int32),
            cache_mode="Norm",
        )
        out_TNH: torch.Tensor
        out_TNH, _ = torch.ops.npu.npu_fused_infer_attention_score(
            q_TNH.contiguous(),
            kv.key_BSKH.flatten(2, 3),
            kv.value_BSKH.flatten(2, 3),
            atten_mask=self._mask,
            block_table=metadata.block_table_RM,
            input_layout="TND",
            block_size=metadata.block_size,
            actual_seq_lengths=list(accumulate(metadata.query_lens)),
            actual_seq_lengths_kv=list(metadata.kv_lens),
            num_heads=q_TNH.shape[1],
            num_key_value_heads=k_TKH.shape[1],
            scale=scale,
            sparse_mode=_SPARSE_RIGHT_DOWN_CAUSAL if sliding_window is None else _SPARSE_BAND,
            # A band of `pre_tokens` before the query and the query itself: a window of pre_tokens + 1.
            pre_tokens=_UNBOUNDED if sliding_window is None else sliding_window - 1,
            next_tokens=_UNBOUNDED if sliding_window is None else 0,
        )
        return out_TNH

    def copy_blocks(self, kv: LayerKV, copies: tuple[tuple[int, int], ...]) -> None:
        for source, target in copies:
            kv.key_BSKH[target].copy_(kv.key_BSKH[source])
            kv.value_BSKH[target].copy_(kv.value_BSKH[source])
