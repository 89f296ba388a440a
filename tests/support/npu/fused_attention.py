"""`npu_fused_infer_attention_score`: attention over one batch, paged or not. Shapes as in `fused_attention_call.py`."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tests.support.npu.fused_attention_call import Arguments, Geometry, key_length
from tests.support.npu.fused_attention_checks import check
from tests.support.npu.layouts import attend, read_slots
from tests.support.npu.machine import Machine


def fused_infer_attention_score(
    machine: Machine, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **others: object
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns attention, shaped as the layout says, and the rows' log-sum-exp (T, N, 1) or (B, N, S, 1), or nothing."""
    call = Arguments(query=query, key=key, value=value, **others)  # type: ignore[arg-type]  # checked by the dispatcher
    geometry = check(machine, call)
    out_parts, lse_parts = [], []
    for sequence in range(geometry.batch):
        query_QND = _query_rows(call, geometry, sequence)
        keys_LKD, values_LKD = _kv_rows(call, geometry, sequence)
        hidden_QL = _hidden(call, geometry, sequence, query_QND.shape[0], keys_LKD.shape[0])
        bias_QL = torch.zeros(hidden_QL.shape).masked_fill(hidden_QL, float("-inf"))
        out_QND, lse_QN = attend(query_QND, keys_LKD, values_LKD, scale=call.scale, bias=bias_QL)
        out_parts.append(out_QND.to(query.dtype))
        lse_parts.append(lse_QN)
    if call.tnd:
        out, lse = torch.cat(out_parts), torch.cat(lse_parts).unsqueeze(-1)
    else:
        out, lse = _in_rows(call, geometry, out_parts, lse_parts)
    return out.contiguous(), lse.contiguous() if call.softmax_lse_flag else lse.new_empty(0)


def _query_rows(call: Arguments, geometry: Geometry, sequence: int) -> torch.Tensor:
    """The sequence's queries that count, as (Q, N, D)."""
    match call.input_layout:
        case "TND":
            assert call.actual_seq_lengths is not None
            start = call.actual_seq_lengths[sequence - 1] if sequence else 0
            return call.query[start : call.actual_seq_lengths[sequence]]
        case "BSH" | "BSND":
            rows = call.query[sequence].view(geometry.queries, call.num_heads, geometry.head_size)
        case _:
            rows = call.query[sequence].transpose(0, 1)
    return rows[: _query_length(call, geometry, sequence)]


def _query_length(call: Arguments, geometry: Geometry, sequence: int) -> int:
    lengths = call.actual_seq_lengths
    if geometry.queries == 1 or lengths is None:
        return geometry.queries
    return lengths[0] if len(lengths) == 1 else lengths[sequence]


def _kv_rows(call: Arguments, geometry: Geometry, sequence: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The sequence's keys and values as (L, K, D)."""
    length = key_length(call, sequence)
    if call.block_table is not None:
        ids = call.block_table[sequence, : -(-length // geometry.block_size)].tolist()
        keys, values = (_paged_rows(cache, ids, length, call.kv_heads) for cache in (call.key, call.value))
        return keys, values
    if call.tnd:
        assert call.actual_seq_lengths_kv is not None
        end = call.actual_seq_lengths_kv[sequence]
        return call.key[end - length : end], call.value[end - length : end]
    if call.input_layout in ("BSH", "BSND"):
        keys, values = (kv[sequence].view(-1, call.kv_heads, geometry.head_size) for kv in (call.key, call.value))
    else:
        keys, values = (kv[sequence].transpose(0, 1) for kv in (call.key, call.value))
    return keys[:length], values[:length]


def _paged_rows(cache: torch.Tensor, ids: Sequence[int], length: int, heads: int) -> torch.Tensor:
    match cache.dim():
        case 3:
            return read_slots(cache, ids, length, heads, nz=False)
        case 4:
            return read_slots(cache.transpose(1, 2), ids, length, heads, nz=False)
        case _:
            columns_PCW16 = cache.view(cache.shape[0], -1, cache.shape[3], cache.shape[4])
            return read_slots(columns_PCW16, ids, length, heads, nz=True)


def _hidden(call: Arguments, geometry: Geometry, sequence: int, queries: int, keys: int) -> torch.Tensor:
    """Where the sequence's queries may not look, as (Q, L). Modes 3 and 4 are aligned at the last query and key."""
    mode = call.sparse_mode if call.tnd or geometry.queries > 1 else 0
    ahead_QL = torch.arange(keys).unsqueeze(0) - torch.arange(queries).unsqueeze(1)
    match mode:
        case 2:
            return ahead_QL > 0
        case 3:
            return ahead_QL > keys - queries
        case 4:
            ahead_QL = ahead_QL - (keys - queries)
            return (ahead_QL > call.next_tokens) | (ahead_QL < -call.pre_tokens)
    hidden_QL = torch.zeros(queries, keys, dtype=torch.bool)
    if call.atten_mask is None:
        return hidden_QL
    if mode == 0 and geometry.queries > 1:
        hidden_QL = (ahead_QL > call.next_tokens) | (ahead_QL < -call.pre_tokens)
    return hidden_QL | _mask_of(call.atten_mask, geometry, sequence)[:queries, :keys]


def _mask_of(mask: torch.Tensor, geometry: Geometry, sequence: int) -> torch.Tensor:
    """The sequence's own part of a full mask, as (Q, L)."""
    if mask.dim() == 2:
        return mask[sequence : sequence + 1].bool() if geometry.queries == 1 else mask.bool()
    own = mask[sequence if mask.shape[0] > 1 else 0].bool()
    return own.reshape(own.shape[-2:])


def _in_rows(
    call: Arguments, geometry: Geometry, out_parts: list[torch.Tensor], lse_parts: list[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """(Q, N, D) and (Q, N) of each sequence into the layout's shape, zeros and +inf beyond its length."""
    batch, queries, heads, size = geometry.batch, geometry.queries, call.num_heads, geometry.head_size
    out_BSND = call.query.new_zeros(batch, queries, heads, size)
    lse_BSN = torch.full((batch, queries, heads), float("inf"))
    for sequence, (out_QND, lse_QN) in enumerate(zip(out_parts, lse_parts, strict=True)):
        out_BSND[sequence, : out_QND.shape[0]] = out_QND
        lse_BSN[sequence, : lse_QN.shape[0]] = lse_QN
    lse_BNS1 = lse_BSN.transpose(1, 2).unsqueeze(-1)
    match call.input_layout:
        case "BSH":
            return out_BSND.flatten(2), lse_BNS1
        case "BNSD":
            return out_BSND.transpose(1, 2), lse_BNS1
        case _:
            return out_BSND, lse_BNS1
