"""Attention that emulated operators are held to: torch's own kernel over contiguous keys with an explicit mask."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def expected_attention(
    query_QND: torch.Tensor, keys_LKD: torch.Tensor, values_LKD: torch.Tensor, visible_QL: torch.Tensor, scale: float
) -> torch.Tensor:
    groups = query_QND.shape[1] // keys_LKD.shape[1]
    return F.scaled_dot_product_attention(
        query_QND.transpose(0, 1).double(),
        keys_LKD.transpose(0, 1).repeat_interleave(groups, dim=0).double(),
        values_LKD.transpose(0, 1).repeat_interleave(groups, dim=0).double(),
        attn_mask=visible_QL,
        scale=scale,
    ).transpose(0, 1)


def visible(queries: int, keys: int, *, before: int, after: int) -> torch.Tensor:
    """Keys from `before` behind to `after` ahead of each query, the last of which stands at the last key."""
    place_Q1 = torch.arange(keys - queries, keys).unsqueeze(1)
    place_L = torch.arange(keys)
    return (place_L >= place_Q1 - before) & (place_L <= place_Q1 + after)
