"""Shared-prefix (cascade) attention on an NPU: which rows read a common prefix once, and how two halves are merged.

The operator refuses its own `key_shared_prefix` together with a block table, so the prefix is a call of its own: all
queries of a group are one request there, which sees every key of the prefix. A second call is the usual one over what
follows the prefix, and the halves are merged by their log-sum-exps.
Axis letters are those of `attention/base.py`; G groups, P rows of queries that are in one, C = P·N.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch

from reprise_engine.attention.base import AttentionMetadata, SharedPrefix

# What reading a prefix once must save to be worth the launches it adds, about ten a layer at some 5 µs, which is what
# HBM of 1.2 TB/s delivers meanwhile. Computed from the data sheet, not measured.
LEAST_SAVED_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True)
class Cascade:
    """One step in two halves.

    rows_P             int64, the rows of all groups, group after group, or None where these are all rows in order
    prefix_table_GM    int32, the blocks of each group's prefix, rows padded with 0
    prefix_query_ends  rows up to and with each group: cumulative
    prefix_lens        tokens of each group's prefix
    rest_table_RM      int32, each request's blocks after its prefix (all of them where it has none)
    rest_lens          keys of each request after its prefix
    """

    rows_P: torch.Tensor | None
    prefix_table_GM: torch.Tensor
    prefix_query_ends: list[int]
    prefix_lens: list[int]
    rest_table_RM: torch.Tensor
    rest_lens: list[int]


def saved_bytes(prefixes: tuple[SharedPrefix, ...], *, bytes_per_token: int) -> int:
    """Bytes of one layer's keys and values that need not be read again."""
    return sum((len(prefix.requests) - 1) * prefix.num_tokens for prefix in prefixes) * bytes_per_token


def split_step(metadata: AttentionMetadata) -> Cascade:
    """Both halves of a step that has shared prefixes. The tables are gathered on the device."""
    table_RM, size = metadata.block_table_RM, metadata.block_size
    device = table_RM.device
    ends = list(accumulate(metadata.query_lens))
    rows: list[int] = []
    group_rows: list[int] = []
    skipped_blocks = [0] * len(metadata.kv_lens)
    for prefix in metadata.shared_prefixes:
        for request in prefix.requests:
            rows += range(ends[request] - metadata.query_lens[request], ends[request])
            skipped_blocks[request] = prefix.num_tokens // size
        group_rows.append(sum(metadata.query_lens[request] for request in prefix.requests))

    leaders = torch.tensor([prefix.requests[0] for prefix in metadata.shared_prefixes], device=device)
    prefix_blocks = max(prefix.num_tokens for prefix in metadata.shared_prefixes) // size
    rest_lens = [kv_len - skip * size for kv_len, skip in zip(metadata.kv_lens, skipped_blocks, strict=True)]
    rest_blocks = -(-max(rest_lens) // size)
    columns = torch.arange(rest_blocks, device=device) + torch.tensor(skipped_blocks, device=device).unsqueeze(1)
    return Cascade(
        rows_P=None if rows == list(range(ends[-1])) else torch.tensor(rows, device=device),
        prefix_table_GM=table_RM[leaders, :prefix_blocks].contiguous(),
        prefix_query_ends=list(accumulate(group_rows)),
        prefix_lens=[prefix.num_tokens for prefix in metadata.shared_prefixes],
        # Columns past a request's table are never read; any block will do.
        rest_table_RM=table_RM.gather(1, columns.clamp(max=table_RM.shape[1] - 1)),
        rest_lens=rest_lens,
    )


def merge(
    first: tuple[torch.Tensor, torch.Tensor], second: tuple[torch.Tensor, torch.Tensor], *, by_operator: bool
) -> torch.Tensor:
    """Attention over disjoint keys, each half as (out_TNH, lse_TN1), → out_TNH over all of them.

    `by_operator`: npu_attention_update (op-plugin docs torch_npu-npu_attention_update.md, 517f2e7: lse (C,) in float32,
    out (C, H) with H a multiple of 8 up to 512). Otherwise in float32 by torch.
    """
    shape = first[0].shape
    if by_operator:
        merged: torch.Tensor
        merged, _ = torch.ops.npu.npu_attention_update(
            [first[1].flatten(), second[1].flatten()], [first[0].flatten(0, 1), second[0].flatten(0, 1)], 0
        )
        return merged.view(shape)
    weight_TN1 = torch.sigmoid(first[1] - second[1])
    out_TNH = torch.lerp(second[0].float(), first[0].float(), weight_TN1)
    return out_TNH.to(first[0].dtype)


def can_merge_by_operator(device: torch.device) -> bool:
    """Whether the CANN that is installed has npu_attention_update: torch_npu finds out at the first call."""
    lse, out = torch.zeros(8, device=device), torch.zeros((8, 16), dtype=torch.float16, device=device)
    try:
        torch.ops.npu.npu_attention_update([lse, lse], [out, out], 0)
    except (AttributeError, RuntimeError):
        return False
    return True
