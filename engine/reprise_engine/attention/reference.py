"""Paged attention in plain torch: the readable oracle the other backends are tested against.

Axis letters are those of `attention/base.py`; L is the number of keys one request sees.
"""

from __future__ import annotations

from itertools import accumulate

import torch

from reprise_engine.attention.base import AttentionMetadata, LayerKV


class ReferenceAttention:
    """One request after the other, all scores at once, in float32; shared prefixes apart, merged by log-sum-exp."""

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

        first_rows = [0, *accumulate(metadata.query_lens)]
        # A window hides keys from some queries of a group and not from others: then each request reads its own.
        shared = metadata.shared_prefixes if sliding_window is None else ()
        prefix_of = {request: prefix for prefix in shared for request in prefix.requests}
        prefixes = {
            prefix: self._read(kv, metadata, prefix.requests[0], slice(0, prefix.num_tokens)) for prefix in shared
        }
        out_TNH = torch.empty_like(q_TNH)
        for request, (query_len, kv_len) in enumerate(zip(metadata.query_lens, metadata.kv_lens, strict=True)):
            rows = slice(first_rows[request], first_rows[request + 1])
            prefix = prefix_of.get(request)
            start = 0 if prefix is None else prefix.num_tokens
            key_LKH, value_LKH = self._read(kv, metadata, request, slice(start, kv_len))
            query_position = torch.arange(kv_len - query_len, kv_len).unsqueeze(1)
            key_position = torch.arange(start, kv_len).unsqueeze(0)
            visible_TL = key_position <= query_position
            if sliding_window is not None:
                visible_TL &= key_position > query_position - sliding_window
            parts = [_attend(q_TNH[rows].float(), key_LKH, value_LKH, visible_TL, scale)]
            if prefix is not None:
                everything = torch.ones((query_len, start), dtype=torch.bool)
                parts.append(_attend(q_TNH[rows].float(), *prefixes[prefix], everything, scale))
            out_TNH[rows] = _merge(parts).to(q_TNH.dtype)
        return out_TNH

    @staticmethod
    def _read(
        kv: LayerKV, metadata: AttentionMetadata, request: int, positions: slice
    ) -> tuple[torch.Tensor, torch.Tensor]:
        num_blocks = -(-positions.stop // metadata.block_size)
        block_ids = metadata.block_table_RM[request, :num_blocks].long()
        return (
            kv.key_BSKH[block_ids].flatten(0, 1)[positions].float(),
            kv.value_BSKH[block_ids].flatten(0, 1)[positions].float(),
        )

    def copy_blocks(self, kv: LayerKV, copies: tuple[tuple[int, int], ...]) -> None:
        for source, target in copies:
            kv.key_BSKH[target] = kv.key_BSKH[source]
            kv.value_BSKH[target] = kv.value_BSKH[source]


def _attend(
    q_TNH: torch.Tensor, key_LKH: torch.Tensor, value_LKH: torch.Tensor, visible_TL: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over some of the keys: out_TNH and the logarithm of the sum of exponentials of its scores, (T, N)."""
    groups = q_TNH.shape[1] // key_LKH.shape[1]
    key_LNH, value_LNH = key_LKH.repeat_interleave(groups, dim=1), value_LKH.repeat_interleave(groups, dim=1)
    scores_NTL = torch.einsum("tnh,lnh->ntl", q_TNH, key_LNH) * scale
    scores_NTL.masked_fill_(~visible_TL.to(scores_NTL.device), float("-inf"))
    out_TNH = torch.einsum("ntl,lnh->tnh", scores_NTL.softmax(dim=-1), value_LNH)
    return out_TNH, scores_NTL.logsumexp(dim=-1).transpose(0, 1)


def _merge(parts: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """Attention over disjoint sets of keys → over all of them: each weighs what its scores add up to."""
    weights_PTN = torch.stack([lse_TN for _, lse_TN in parts]).softmax(dim=0)
    return torch.einsum("ptn,ptnh->tnh", weights_PTN, torch.stack([out_TNH for out_TNH, _ in parts]))
