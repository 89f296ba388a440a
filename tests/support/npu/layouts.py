"""Paged caches in both storage layouts, and attention over what comes out of them.

Shapes: B sequences, L keys, Q queries, N heads, K key-value heads, D head size, P blocks of S slots.
`cache_PSKD`: the ND layout. `cache_PCS16`: the NZ one, C = K·D/16 columns of 16 numbers (32 bytes of float16).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def nz_width(dtype: torch.dtype) -> int:
    """Numbers in 32 bytes: the innermost axis of the NZ layout."""
    return 32 // dtype.itemsize


def to_nz(rows_TX: torch.Tensor) -> torch.Tensor:
    """(T, X) → (X/16, T, 16)."""
    width = nz_width(rows_TX.dtype)
    return rows_TX.reshape(rows_TX.shape[0], -1, width).transpose(0, 1)


def write_slots(cache: torch.Tensor, rows_TKD: torch.Tensor, slots: Sequence[int], *, nz: bool) -> None:
    """Row t to slot slots[t] of the cache; negative slots are skipped."""
    kept = [(row, slot) for row, slot in enumerate(slots) if slot >= 0]
    if not kept:
        return
    rows = torch.tensor([row for row, _ in kept])
    size = cache.shape[-2] if nz else cache.shape[1]
    blocks, offsets = torch.tensor([divmod(slot, size) for _, slot in kept]).unbind(1)
    if not nz:
        cache[blocks, offsets] = rows_TKD[rows]
        return
    width = cache.shape[-1]
    columns_PCSW = cache.view(cache.shape[0], -1, size, width)
    columns_PCSW[blocks, :, offsets] = rows_TKD[rows].reshape(len(kept), -1, width)


def read_slots(cache: torch.Tensor, block_ids: Sequence[int], length: int, heads: int, *, nz: bool) -> torch.Tensor:
    """The first `length` slots of the given blocks, as (L, K, D)."""
    blocks = cache[torch.tensor(block_ids, dtype=torch.long)]
    if nz:
        blocks = blocks.reshape(len(block_ids), -1, cache.shape[-2], cache.shape[-1]).permute(0, 2, 1, 3)
    return blocks.reshape(-1, heads, _head_size(cache, heads, nz=nz))[:length]


def _head_size(cache: torch.Tensor, heads: int, *, nz: bool) -> int:
    numbers = cache[0].numel() // (cache.shape[-2] if nz else cache.shape[1])
    return numbers // heads


def attend(
    query_QND: torch.Tensor,
    keys_LKD: torch.Tensor,
    values_LKD: torch.Tensor,
    *,
    scale: float,
    bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """softmax(scale·QKᵀ + bias)·V in float32, and the natural logarithm of each row's sum of exponentials.

    `bias` is (Q, L), -inf where a query may not look. A row that may look nowhere is 0, and its logarithm +inf: what
    the kernels leave there (attn_infra/epilogue/block/block_epilogue_init_outputs.hpp:44-45 in OPS_TRANSFORMER).
    Returns (Q, N, D) and (Q, N).
    """
    queries, heads, _ = query_QND.shape
    if keys_LKD.shape[0] == 0:
        empty_QND = query_QND.new_zeros(queries, heads, values_LKD.shape[2], dtype=torch.float32)
        return empty_QND, torch.full((queries, heads), float("inf"))
    groups = heads // keys_LKD.shape[1]
    keys_LND = keys_LKD.float().repeat_interleave(groups, dim=1)
    values_LND = values_LKD.float().repeat_interleave(groups, dim=1)
    scores_NQL = torch.einsum("qnd,lnd->nql", query_QND.float(), keys_LND) * scale
    if bias is not None:
        scores_NQL = scores_NQL + bias
    lse_NQ = scores_NQL.logsumexp(-1)
    weights_NQL = (scores_NQL - lse_NQ.unsqueeze(-1)).exp().nan_to_num(nan=0.0)
    lse_NQ = lse_NQ.masked_fill(lse_NQ == float("-inf"), float("inf"))
    return torch.einsum("nql,lnd->qnd", weights_NQL, values_LND), lse_NQ.T
