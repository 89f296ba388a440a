"""Step → tensors: a pure function, no model and no pool needed.

Axis letters are those of `attention/base.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from reprise_engine.attention.base import AttentionMetadata
from reprise_engine.attention.shared_prefixes import MOST_NEW_TOKENS, Candidate, find_shared_prefixes
from reprise_engine.step import ScheduledRequest, Step


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The input of one forward pass.

    input_ids_1T, position_ids_1T   int64, the new tokens of all requests, packed
    logits_rows                     int64, the row of the last token of every request that samples
    sampling                        those requests, in the order of `logits_rows`
    """

    input_ids_1T: torch.Tensor
    position_ids_1T: torch.Tensor
    metadata: AttentionMetadata
    logits_rows: torch.Tensor
    sampling: tuple[ScheduledRequest, ...]


def build_batch(step: Step, *, block_size: int, num_blocks: int, device: torch.device) -> Batch:
    """Lays the step out for the model. Raises ValueError for a step that would read or write outside its blocks, or
    write a slot twice: the operators of an NPU do not check, so this is the one place that does."""
    if not step.requests:
        raise ValueError(f"step {step.step_id} has no requests")
    positions: list[np.ndarray] = []
    slots: list[np.ndarray] = []
    tables: list[np.ndarray] = []
    kv_lens: list[int] = []
    logits_rows: list[int] = []
    num_rows = 0
    for request in step.requests:
        kv_len = request.start + len(request.token_ids)
        table = _checked_table(request, kv_len, block_size=block_size, num_blocks=num_blocks)
        position = np.arange(request.start, kv_len)
        positions.append(position)
        slots.append(table[position // block_size] * block_size + position % block_size)
        tables.append(table)
        kv_lens.append(kv_len)
        num_rows += len(request.token_ids)
        if request.samples:
            logits_rows.append(num_rows - 1)

    slot_mapping_T = np.concatenate(slots)
    if len(np.unique(slot_mapping_T)) != num_rows:
        raise ValueError(f"step {step.step_id} writes a slot twice: two of its requests own the same block")
    block_table_RM = np.zeros((len(tables), max(len(table) for table in tables)), dtype=np.int32)
    for row, table in enumerate(tables):
        block_table_RM[row, : len(table)] = table
    token_ids = np.fromiter(
        (token for request in step.requests for token in request.token_ids), dtype=np.int64, count=num_rows
    )
    return Batch(
        input_ids_1T=torch.from_numpy(token_ids).unsqueeze(0).to(device),
        position_ids_1T=torch.from_numpy(np.concatenate(positions)).unsqueeze(0).to(device),
        metadata=AttentionMetadata(
            slot_mapping_T=torch.from_numpy(slot_mapping_T).to(device),
            block_table_RM=torch.from_numpy(block_table_RM).to(device),
            query_lens=tuple(len(request.token_ids) for request in step.requests),
            kv_lens=tuple(kv_lens),
            block_size=block_size,
            shared_prefixes=find_shared_prefixes(
                [
                    Candidate(index, request.block_table, request.start // block_size)
                    for index, request in enumerate(step.requests)
                    if len(request.token_ids) <= MOST_NEW_TOKENS
                ],
                block_size=block_size,
            ),
        ),
        logits_rows=torch.tensor(logits_rows, dtype=torch.int64, device=device),
        sampling=tuple(request for request in step.requests if request.samples),
    )


def _checked_table(request: ScheduledRequest, kv_len: int, *, block_size: int, num_blocks: int) -> np.ndarray:
    """The blocks that hold the request's first `kv_len` tokens; blocks allocated ahead are left out."""
    if not request.token_ids or request.start < 0:
        raise ValueError(f"request {request.request_id}: start {request.start} with {len(request.token_ids)} tokens")
    needed = -(-kv_len // block_size)
    if len(request.block_table) < needed:
        raise ValueError(
            f"request {request.request_id}: {kv_len} tokens need {needed} blocks of {block_size}, but its block table "
            f"has {len(request.block_table)}"
        )
    table = np.array(request.block_table[:needed], dtype=np.int64)
    if table.min() < 0 or table.max() >= num_blocks:
        raise ValueError(
            f"request {request.request_id}: block ids {table.min()} to {table.max()} are outside the pool of "
            f"{num_blocks} blocks"
        )
    return table
