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
        forbidden: tuple[TokenId, ...] = ()
        if sampling.min_tokens and not state.may_stop:
            forbidden = tuple(sorted(state.eos_token_ids.union(sampling.stop_token_ids)))
        self.parts.append(
            ScheduledRequest(
                request_id=state.request_id,
                token_ids=tuple(tokens[start : start + count]),
                start=start,
                block_table=state.blocks.table,
                samples=samples,
                sampling=sampling,
                forbidden_token_ids=forbidden,
                history=history,
                prompt_length=state.prompt_length,
                output_index=len(tokens) - state.prompt_length,
            )
        )
