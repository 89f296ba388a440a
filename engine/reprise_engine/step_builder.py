"""Collects a step within its token budget."""

from __future__ import annotations

from reprise_engine.request import TokenId
from reprise_engine.request_state import RequestState
from reprise_engine.step import BlockCopy, BlockLoad, BlockStore, ScheduledRequest, Step


class StepBuilder:
    """What a step that is being made will do; `left` is what its budget of tokens still allows."""

    def __init__(self, budget: int) -> None:
        self.left = budget
        self.parts: list[ScheduledRequest] = []
        self.copies: list[BlockCopy] = []
        self.stores: list[BlockStore] = []
        self.loads: list[BlockLoad] = []

    def step(self, step_id: int) -> Step | None:
        """The step; None where it would do nothing."""
        if not (self.parts or self.copies or self.stores or self.loads):
            return None
        return Step(
            step_id=step_id,
            requests=tuple(self.parts),
            copies=tuple(self.copies),
            stores=tuple(self.stores),
            loads=tuple(self.loads),
        )

    def take(self, state: RequestState, now: float) -> None:
        """Schedules as many pending tokens of `state` as the budget still allows; none is fine."""
        count = min(len(state.tokens) - state.computed, self.left)
        if not count:
            return
        self.left -= count
        if state.first_scheduled is None:
            state.first_scheduled = now
        tokens, start, sampling = state.tokens, state.computed, state.sampling
        samples = start + count == len(tokens)
        history = tuple(tokens) if samples and sampling.needs_history else None
        scored_from, scored = _scored(state, start, count)
        self.parts.append(
            ScheduledRequest(
                request_id=state.request_id,
                token_ids=tuple(tokens[start : start + count]),
                start=start,
                block_table=state.blocks.table,
                samples=samples,
                sampling=sampling,
                forbidden_token_ids=_forbidden(state) if samples else (),
                history=history,
                output=tuple(tokens[state.prompt_length :]) if samples and sampling.structured is not None else None,
                scored=scored,
                scored_from=scored_from,
                prompt_length=state.prompt_length,
                output_index=len(tokens) - state.prompt_length,
            )
        )


def _forbidden(state: RequestState) -> tuple[TokenId, ...]:
    """What the next token may not be: an end while below min_tokens, and what would complete a banned word.

    Of words only what was generated counts, as in vLLM: one that the prompt began may be ended.
    """
    sampling, output_length = state.sampling, state.output_length
    forbidden: set[TokenId] = set()
    if sampling.min_tokens and not state.may_stop:
        forbidden.update(state.eos_token_ids, sampling.stop_token_ids)
    for word in sampling.bad_words_token_ids:
        before = len(word) - 1
        if before <= output_length and state.tokens[len(state.tokens) - before :] == list(word[:-1]):
            forbidden.add(word[-1])
    return tuple(sorted(forbidden))


def _scored(state: RequestState, start: int, count: int) -> tuple[int, tuple[TokenId, ...]]:
    """The first of the `count` tokens from `start` on whose successor is to be scored, from `start`; and these.

    After a preemption what was scored is computed again, but not scored again.
    """
    if state.sampling.prompt_logprobs is None:
        return 0, ()
    first = max(start, state.prompt_scored)
    scored = state.tokens[first + 1 : min(start + count + 1, state.prompt_length)]
    return (first - start, tuple(scored)) if scored else (0, ())
