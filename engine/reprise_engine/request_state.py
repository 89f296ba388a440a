"""The scheduler's own, mutable view of a request, and its place in a queue."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

from reprise_engine.cache_report import CacheExplanation, PinnedPrefix
from reprise_engine.kv.sequence import SequenceBlocks
from reprise_engine.kv.tier_load import TierLoad
from reprise_engine.request import (
    FinishReason,
    RequestId,
    RequestOutput,
    RequestTimes,
    SamplingParams,
    TokenId,
    TokenLogprobs,
)

Rank = tuple[int, float, int]
"""(priority, arrival time, order of add): the lower, the sooner."""


@dataclass(slots=True, eq=False, kw_only=True)
class RequestState:
    """The scheduler's own view of a request, from add to its end."""

    request_id: RequestId
    rank: Rank
    sampling: SamplingParams
    eos_token_ids: frozenset[TokenId]
    """Those that end this request; empty with ignore_eos."""
    prompt_length: int
    max_tokens: int
    tokens: list[TokenId]
    """All known tokens: prompt, then output."""
    blocks: SequenceBlocks
    pin: str | None = None
    load: TierLoad | None = None
    """While blocks of it come up from the tiers: until then it is not computed."""
    computed: int = 0
    prompt_scored: int = 0
    """Prompt tokens whose successor has its log-probability, which has been given out."""
    explanation: CacheExplanation | None = None
    """What the cache had of the prompt at the first admission; None before it."""
    explain_cache: bool = False
    """Whether the client asked for it."""
    isolated: bool = False
    """Whether it must not tell of other salts."""
    aborted: bool = False
    """Aborted while its step runs: dropped at the commit."""
    arrival: float
    first_scheduled: float | None = None
    first_token: float | None = None
    last_token: float | None = None

    @property
    def cached_tokens(self) -> int:
        """Of the first admission; 0 before it."""
        return 0 if self.explanation is None else self.explanation.cached_tokens

    @property
    def output_length(self) -> int:
        return len(self.tokens) - self.prompt_length

    @property
    def may_stop(self) -> bool:
        """Whether the next token may be one that ends the request."""
        return self.output_length >= self.sampling.min_tokens

    @property
    def pending(self) -> int:
        """Tokens known whose KV is not computed."""
        return len(self.tokens) - self.computed


def rank_of(state: RequestState) -> Rank:
    return state.rank


def remove(queue: list[RequestState], state: RequestState) -> bool:
    """Takes `state` out of a queue ordered by rank, which is unique; False where it is not in it."""
    position = bisect_left(queue, state.rank, key=rank_of)
    if position == len(queue) or queue[position] is not state:
        return False
    del queue[position]
    return True


def output_of(
    state: RequestState,
    *,
    new_token_ids: tuple[TokenId, ...] = (),
    new_logprobs: tuple[TokenLogprobs, ...] = (),
    prompt_logprobs: tuple[TokenLogprobs, ...] = (),
    finish_reason: FinishReason | None,
    stop_token_id: TokenId | None = None,
    pinned: PinnedPrefix | None = None,
) -> RequestOutput:
    """What the client is told."""
    return RequestOutput(
        request_id=state.request_id,
        new_token_ids=new_token_ids,
        new_logprobs=new_logprobs,
        prompt_logprobs=prompt_logprobs,
        finish_reason=finish_reason,
        stop_token_id=stop_token_id,
        prompt_tokens=state.prompt_length,
        cached_tokens=state.cached_tokens,
        cache_explanation=state.explanation if state.explain_cache else None,
        pinned=pinned,
        times=RequestTimes(
            arrival=state.arrival,
            first_scheduled=state.first_scheduled,
            first_token=state.first_token,
            last_token=state.last_token,
        ),
    )
