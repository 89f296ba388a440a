"""Paged attention on a CPU: gather the blocks of a request, then torch's fused attention kernel.

Axis letters are those of `attention/base.py`; G = N / K query heads share a key/value head, L is a (padded) number of
keys, Q the rows of one tile of queries.

Every key is read back from the pool, also those of this very step, so a token's KV is rounded to the pool's dtype
once and a warm run sees what the cold one saw. Scores and sums are float32. No key or value is repeated for grouped
heads: prefill gives the group its own axis with stride 0, decode makes the group the rows of the query.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from reprise_engine.attention.base import AttentionMetadata, LayerKV

# Rows of queries a tile of a prefill: bounds the mask, and skips most of the upper triangle.
_TILE_ROWS = 256
# Keys gathered at once for a group of decoding requests: bounds the temporary copy.
_GROUP_KEYS = 16384
# A group may hold this many times the keys its requests need (shorter ones are padded to the longest).
_MAX_PADDING = 1.25


@dataclass(frozen=True, slots=True)
class _Prefill:
    """One request with several new tokens: rows [first_row, first_row + query_len) of the step."""

    first_row: int
    query_len: int
    kv_len: int
    block_ids: torch.Tensor


@dataclass(frozen=True, slots=True)
class _DecodeGroup:
    """Requests with one new token each, padded to the same number of blocks; row i of the step is rows[i]."""

    rows: torch.Tensor
    block_ids_RM: torch.Tensor
    kv_lens: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Plan:
    """How the requests of one step are served, for every layer alike."""

    metadata: AttentionMetadata
    prefills: tuple[_Prefill, ...]
    decode_groups: tuple[_DecodeGroup, ...]
    decode_masks: dict[tuple[int, int | None], torch.Tensor] = field(default_factory=dict)


def group_by_length(kv_lens: list[int], *, max_keys: int, max_padding: float) -> list[list[int]]:
    """Splits indices into groups of similar length: padded to its longest, a group holds at most `max_keys` keys
    (unless it has one member) and at most `max_padding` times the keys it needs."""
    groups: list[list[int]] = []
    longest = needed = 0
    for index in sorted(range(len(kv_lens)), key=lambda i: -kv_lens[i]):
        kv_len = kv_lens[index]
        size = len(groups[-1]) + 1 if groups else 1
        if groups and size * longest <= min(max_keys, max_padding * (needed + kv_len)):
            groups[-1].append(index)
            needed += kv_len
        else:
            groups.append([index])
            longest = needed = kv_len
    return groups


class CPUAttention:
    """Keeps the plan of the step it serves, since all layers of a forward pass share it."""

    name = "cpu"

    def __init__(self) -> None:
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
        slots = metadata.slot_mapping_T
        kv.key_BSKH.flatten(0, 1).index_copy_(0, slots, k_TKH.to(kv.key_BSKH.dtype))
        kv.value_BSKH.flatten(0, 1).index_copy_(0, slots, v_TKH.to(kv.value_BSKH.dtype))

        if self._plan is None or self._plan.metadata is not metadata:
            self._plan = _make_plan(metadata)
        out_TNH = torch.empty(q_TNH.shape, dtype=q_TNH.dtype)
        for prefill in self._plan.prefills:
            _attend_prefill(q_TNH, kv, prefill, out_TNH, scale=scale, sliding_window=sliding_window)
        for index, group in enumerate(self._plan.decode_groups):
            mask = self._decode_mask(self._plan, index, metadata.block_size, sliding_window)
            _attend_decode(q_TNH, kv, group, mask, out_TNH, scale=scale)
        return out_TNH

    def copy_blocks(self, kv: LayerKV, copies: tuple[tuple[int, int], ...]) -> None:
        for source, target in copies:
            kv.key_BSKH[target].copy_(kv.key_BSKH[source])
            kv.value_BSKH[target].copy_(kv.value_BSKH[source])

    @staticmethod
    def _decode_mask(plan: _Plan, index: int, block_size: int, sliding_window: int | None) -> torch.Tensor:
        mask = plan.decode_masks.get((index, sliding_window))
        if mask is None:
            group = plan.decode_groups[index]
            key_position = torch.arange(group.block_ids_RM.shape[1] * block_size)
            kv_lens = group.kv_lens.unsqueeze(1)
            visible = key_position < kv_lens
            if sliding_window is not None:
                visible &= key_position >= kv_lens - sliding_window
            mask = _additive(visible)[:, None, None, :]
            plan.decode_masks[index, sliding_window] = mask
        return mask


def _make_plan(metadata: AttentionMetadata) -> _Plan:
    prefills: list[_Prefill] = []
    decode_requests: list[int] = []
    decode_rows: list[int] = []
    first_row = 0
    for request, (query_len, kv_len) in enumerate(zip(metadata.query_lens, metadata.kv_lens, strict=True)):
        if query_len == 1:
            decode_requests.append(request)
            decode_rows.append(first_row)
        else:
            block_ids = metadata.block_table_RM[request, : -(-kv_len // metadata.block_size)]
            prefills.append(_Prefill(first_row, query_len, kv_len, block_ids))
        first_row += query_len

    groups: list[_DecodeGroup] = []
    lengths = [metadata.kv_lens[request] for request in decode_requests]
    for members in group_by_length(lengths, max_keys=_GROUP_KEYS, max_padding=_MAX_PADDING):
        num_blocks = -(-max(lengths[member] for member in members) // metadata.block_size)
        requests = torch.tensor([decode_requests[member] for member in members])
        groups.append(
            _DecodeGroup(
                rows=torch.tensor([decode_rows[member] for member in members]),
                block_ids_RM=metadata.block_table_RM[requests, :num_blocks],
                kv_lens=torch.tensor([lengths[member] for member in members]),
            )
        )
    return _Plan(metadata, tuple(prefills), tuple(groups))


def _attend_prefill(
    q_TNH: torch.Tensor,
    kv: LayerKV,
    prefill: _Prefill,
    out_TNH: torch.Tensor,
    *,
    scale: float,
    sliding_window: int | None,
) -> None:
    key_LKH = kv.key_BSKH.index_select(0, prefill.block_ids).flatten(0, 1).to(q_TNH.dtype)
    value_LKH = kv.value_BSKH.index_select(0, prefill.block_ids).flatten(0, 1).to(q_TNH.dtype)
    num_kv_heads, head_dim = key_LKH.shape[1:]
    groups = q_TNH.shape[1] // num_kv_heads
    start = prefill.kv_len - prefill.query_len
    for tile_start in range(0, prefill.query_len, _TILE_ROWS):
        tile_end = min(tile_start + _TILE_ROWS, prefill.query_len)
        rows = slice(prefill.first_row + tile_start, prefill.first_row + tile_end)
        key_end = start + tile_end
        key_start = 0 if sliding_window is None else max(0, start + tile_start - sliding_window + 1)

        query_KGQH = q_TNH[rows].reshape(-1, num_kv_heads, groups, head_dim).permute(1, 2, 0, 3)
        shape_KGLH = (num_kv_heads, groups, key_end - key_start, head_dim)
        key_KGLH = key_LKH[key_start:key_end].transpose(0, 1).unsqueeze(1).expand(shape_KGLH)
        value_KGLH = value_LKH[key_start:key_end].transpose(0, 1).unsqueeze(1).expand(shape_KGLH)
        query_position = torch.arange(start + tile_start, key_end).unsqueeze(1)
        key_position = torch.arange(key_start, key_end).unsqueeze(0)
        visible_QL = key_position <= query_position
        if sliding_window is not None:
            visible_QL &= key_position > query_position - sliding_window
        out_KGQH = F.scaled_dot_product_attention(
            query_KGQH, key_KGLH, value_KGLH, attn_mask=_additive(visible_QL), scale=scale
        )
        out_TNH[rows] = out_KGQH.permute(2, 0, 1, 3).flatten(1, 2)


def _attend_decode(
    q_TNH: torch.Tensor,
    kv: LayerKV,
    group: _DecodeGroup,
    mask_R11L: torch.Tensor,
    out_TNH: torch.Tensor,
    *,
    scale: float,
) -> None:
    num_requests, num_blocks = group.block_ids_RM.shape
    block_ids = group.block_ids_RM.flatten()
    _, block_size, num_kv_heads, head_dim = kv.key_BSKH.shape
    shape_RLKH = (num_requests, num_blocks * block_size, num_kv_heads, head_dim)
    key_RLKH = kv.key_BSKH.index_select(0, block_ids).view(shape_RLKH).to(q_TNH.dtype)
    value_RLKH = kv.value_BSKH.index_select(0, block_ids).view(shape_RLKH).to(q_TNH.dtype)
    query_RKGH = q_TNH.index_select(0, group.rows).view(num_requests, num_kv_heads, -1, head_dim)
    out_RKGH = F.scaled_dot_product_attention(
        query_RKGH, key_RLKH.transpose(1, 2), value_RLKH.transpose(1, 2), attn_mask=mask_R11L, scale=scale
    )
    out_TNH.index_copy_(0, group.rows, out_RKGH.flatten(1, 2))


def _additive(visible: torch.Tensor) -> torch.Tensor:
    return torch.zeros(visible.shape).masked_fill_(~visible, float("-inf"))
