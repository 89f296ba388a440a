"""Paged attention in plain torch: the readable oracle the other backends are tested against.

Axis letters are those of `attention/base.py`; L is the number of keys one request sees.
"""

from __future__ import annotations

import torch

from reprise_engine.attention.base import AttentionMetadata, LayerKV


class ReferenceAttention:
    """One request after the other, all scores at once, in float32."""

    name = "reference"

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
        for row, slot in enumerate(metadata.slot_mapping_T.tolist()):
            block, offset = divmod(slot, metadata.block_size)
            kv.key_BSKH[block, offset] = k_TKH[row].to(kv.key_BSKH.dtype)
            kv.value_BSKH[block, offset] = v_TKH[row].to(kv.value_BSKH.dtype)

        out_TNH = torch.empty_like(q_TNH)
        first_row = 0
        for request, (query_len, kv_len) in enumerate(zip(metadata.query_lens, metadata.kv_lens, strict=True)):
            rows = slice(first_row, first_row + query_len)
            first_row += query_len
            num_blocks = -(-kv_len // metadata.block_size)
            block_ids = metadata.block_table_RM[request, :num_blocks].long()
            groups = q_TNH.shape[1] // k_TKH.shape[1]
            key_LNH = kv.key_BSKH[block_ids].flatten(0, 1)[:kv_len].float().repeat_interleave(groups, dim=1)
            value_LNH = kv.value_BSKH[block_ids].flatten(0, 1)[:kv_len].float().repeat_interleave(groups, dim=1)

            scores_NTL = torch.einsum("tnh,lnh->ntl", q_TNH[rows].float(), key_LNH) * scale
            query_position = torch.arange(kv_len - query_len, kv_len).unsqueeze(1)
            key_position = torch.arange(kv_len).unsqueeze(0)
            visible_TL = key_position <= query_position
            if sliding_window is not None:
                visible_TL &= key_position > query_position - sliding_window
            scores_NTL.masked_fill_(~visible_TL.to(scores_NTL.device), float("-inf"))
            out_TNH[rows] = torch.einsum("ntl,lnh->tnh", scores_NTL.softmax(dim=-1), value_LNH).to(q_TNH.dtype)
        return out_TNH

    def copy_blocks(self, kv: LayerKV, copies: tuple[tuple[int, int], ...]) -> None:
        for source, target in copies:
            kv.key_BSKH[target] = kv.key_BSKH[source]
            kv.value_BSKH[target] = kv.value_BSKH[source]
