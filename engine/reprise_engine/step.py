"""A Step: everything the runner needs for one forward pass, and a StepResult: everything the scheduler needs back.

Frozen, picklable and complete: the runner asks nobody and keeps no state of requests, so a Step can be sent to every
tensor-parallel rank as it is, and a test can write one by hand.

Half-open intervals over one sequence (tokens known, tokens computed):

    [0, start)                         KV is in the pool already (computed earlier, or a cache hit)
    [start, start + len(token_ids))    computed by this step, written to its slots
    the logits of the last one are sampled when `samples` is True
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NewType

from reprise_engine.errors import RepriseError
from reprise_engine.request import RequestId, SamplingParams, TokenId, TokenLogprobs

BlockId = NewType("BlockId", int)
BlockHash = NewType("BlockHash", bytes)
SlotId = NewType("SlotId", int)
"""A slot of host memory: room for the KV of one block, in every layer."""


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Copy the whole of block `source` onto block `target`, in every layer, keys and values."""

    source: BlockId
    target: BlockId


@dataclass(frozen=True, slots=True)
class BlockStore:
    """Copy the whole of block `source` into the host's `slot`."""

    source: BlockId
    slot: SlotId


@dataclass(frozen=True, slots=True)
class BlockLoad:
    """Copy the host's `slot` onto the whole of block `target`."""

    slot: SlotId
    target: BlockId


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledRequest:
    """One sequence's part of a step.

    `block_table` covers at least start + len(token_ids) tokens: position p lives in block block_table[p // block_size],
    slot p % block_size. `history` is prompt + output so far, present only where a penalty needs it;
    `prompt_length` splits it. `output_index` is the number of tokens generated so far (position of the draw).
    `output` is what was generated so far, present only where a grammar needs it.
    `scored` are tokens of the prompt whose log-probabilities are wanted: scored[i] follows token_ids[scored_from + i].
    """

    request_id: RequestId
    token_ids: tuple[TokenId, ...]
    start: int
    block_table: tuple[BlockId, ...]
    samples: bool
    sampling: SamplingParams
    forbidden_token_ids: tuple[TokenId, ...] = ()  # ends while below min_tokens; what would complete a banned word
    history: tuple[TokenId, ...] | None = None
    output: tuple[TokenId, ...] | None = None
    scored: tuple[TokenId, ...] = ()
    scored_from: int = 0
    prompt_length: int = 0
    output_index: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One forward pass. Before it run, in this order: `stores`, `loads`, `copies`, each in its own order.

    A store's source may be rewritten by what comes after it; a copy's source stays referenced until commit, a slot that
    is loaded stays held until then. Without `requests` there is no forward.
    """

    step_id: int
    requests: tuple[ScheduledRequest, ...]
    copies: tuple[BlockCopy, ...] = ()
    stores: tuple[BlockStore, ...] = ()
    loads: tuple[BlockLoad, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(len(r.token_ids) for r in self.requests)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """The sampled token of every request whose part had `samples`; logprobs where its sampling asked for them.

    `prompt_logprobs` are those of each part's `scored` tokens. `errors`: requests that cannot go on; what was sampled
    or scored for them counts for nothing, and after NotFinite what the step wrote for them neither.
    `transfer_seconds` is what the step's stores and loads took.
    """

    step_id: int
    sampled: Mapping[RequestId, TokenId]
    logprobs: Mapping[RequestId, TokenLogprobs] = field(default_factory=dict)
    prompt_logprobs: Mapping[RequestId, tuple[TokenLogprobs, ...]] = field(default_factory=dict)
    errors: Mapping[RequestId, RepriseError] = field(default_factory=dict)
    transfer_seconds: float = 0.0
