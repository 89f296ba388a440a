"""A request's sequences: each is one EngineRequest, its text, its figures; together one stream of deltas."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol

from reprise_engine.cache_report import CacheExplanation
from reprise_engine.engine import EngineClient
from reprise_engine.request import EngineRequest, FinishReason, RequestOutput, RequestTimes, TokenLogprobs
from reprise_engine.server.metrics import Metrics
from reprise_engine.text import OutputText, TextDelta
from reprise_engine.text.detokenizer import Decoder

_MAX_UNREAD = 64
"""Deltas of all sequences of a request that wait for its client; behind them the engine's outputs wait, bounded too."""


class Explained(Protocol):
    def added_to(self, explanation: CacheExplanation) -> dict[str, object]: ...


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens, as OpenAI counts them. `cached_tokens` is a part of `prompt_tokens`."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    explanations: tuple[CacheExplanation, ...] = ()
    """One a prompt, where the request asked for them."""
    ended_in: Explained | None = None
    """What is known besides of the only explanation."""
    reasoning_tokens: int | None = None
    """A part of `completion_tokens`; None where reasoning is not told apart."""

    def as_json(self) -> dict[str, object]:
        # cached_tokens is always there: a client must be able to tell "none" from "not told".
        details: dict[str, object] = {"cached_tokens": self.cached_tokens}
        if self.explanations:
            shown = self.explained()
            details["cache_explanation"] = shown[0] if len(shown) == 1 else shown
        usage: dict[str, object] = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": details,
        }
        if self.reasoning_tokens is not None:
            usage["completion_tokens_details"] = {"reasoning_tokens": self.reasoning_tokens}
        return usage

    def explained(self) -> list[dict[str, object]]:
        """The explanations as JSON."""
        return [one.as_json() if self.ended_in is None else self.ended_in.added_to(one) for one in self.explanations]


class Generation:
    """One sequence: choice `index` of the response, choice `choice` of its prompt."""

    def __init__(
        self,
        engine: EngineClient,
        request: EngineRequest,
        decoder: Decoder,
        metrics: Metrics,
        *,
        index: int,
        choice: int = 0,
        prompt_only: bool = False,
    ) -> None:
        """With `prompt_only` what is generated is kept back: only the prompt is of interest."""
        self.request = request
        self.index = index
        self.counts_prompt = choice == 0
        """The choices of one prompt share it: it is counted once."""
        self.cached_tokens = 0
        self.explanation: CacheExplanation | None = None
        self.completion_tokens = 0
        self.prompt_logprobs: list[TokenLogprobs] = []
        """Of the prompt's tokens but the first, where they are asked for: all of them before the first token comes."""
        self._prompt_only = prompt_only
        self._engine = engine
        self._metrics = metrics
        self._text = OutputText(decoder, prompt_token_ids=request.prompt_token_ids, sampling=request.sampling)
        self._last_token: float | None = None
        self.times: RequestTimes | None = None
        """Its milestones so far."""
        self._ended: FinishReason | None = None

    def end(self, reason: FinishReason) -> None:
        """No more is wanted: the sequence counts as ended so, and `deltas` aborts it in the engine when resumed."""
        self._ended = reason

    async def deltas(self) -> AsyncGenerator[TextDelta, None]:
        """Ends after the delta with a finish_reason. Leaving early aborts the sequence in the engine."""
        finish_reason = FinishReason.ABORT
        try:
            async with aclosing(self._engine.generate(self.request)) as outputs:
                async for output in outputs:
                    self.times = output.times
                    self.prompt_logprobs += output.prompt_logprobs
                    delta = self._text.push(output)
                    self._count(output, len(delta.token_ids))
                    if self._prompt_only:
                        self.completion_tokens = 0
                        ended = None if delta.finish_reason is None else FinishReason.LENGTH
                        delta = TextDelta(text="", token_ids=(), finish_reason=ended)
                    if delta.finish_reason is not None:
                        finish_reason = delta.finish_reason
                    yield delta
                    finish_reason = self._ended or finish_reason
                    if delta.finish_reason is not None or self._ended is not None:
                        break
        finally:
            self._metrics.finished(finish_reason, output_tokens=self.completion_tokens, times=self.times)

    def _count(self, output: RequestOutput, tokens: int) -> None:
        if not tokens:
            return
        times = output.times
        at = times.last_token if times is not None and times.last_token is not None else time.monotonic()
        if self._last_token is None:
            self.cached_tokens = output.cached_tokens
            self.explanation = output.cache_explanation
            self._metrics.first_token(
                prompt_tokens=output.prompt_tokens, cached_tokens=output.cached_tokens, times=times
            )
        self._metrics.tokens(tokens, since_previous=None if self._last_token is None else at - self._last_token)
        self._last_token = at
        self.completion_tokens += tokens


class Generations:
    """All sequences of one HTTP request."""

    def __init__(self, generations: Sequence[Generation], *, batch: str) -> None:
        self.generations = tuple(generations)
        self.batch = batch
        """Part of the response's id and of the sequences' ids in the engine: one can be found by the other."""

    def usage(self) -> Usage:
        """So far."""
        counted = [generation for generation in self.generations if generation.counts_prompt]
        return Usage(
            prompt_tokens=sum(len(generation.request.prompt_token_ids) for generation in counted),
            completion_tokens=sum(generation.completion_tokens for generation in self.generations),
            cached_tokens=sum(generation.cached_tokens for generation in counted),
            explanations=tuple(one.explanation for one in counted if one.explanation is not None),
        )

    async def deltas(self) -> AsyncGenerator[tuple[Generation, TextDelta], None]:
        """Of all sequences, as they come. The first error ends, and aborts, them all."""
        if len(self.generations) == 1:
            async with aclosing(self.generations[0].deltas()) as deltas:
                async for delta in deltas:
                    yield self.generations[0], delta
            return
        inbox: asyncio.Queue[tuple[Generation, TextDelta] | Exception | None] = asyncio.Queue(_MAX_UNREAD)

        async def pump(generation: Generation) -> None:
            try:
                async with aclosing(generation.deltas()) as deltas:
                    async for delta in deltas:
                        await inbox.put((generation, delta))
            except Exception as error:  # noqa: BLE001  (raised again by the reader of the inbox)
                await inbox.put(error)
            else:
                await inbox.put(None)

        tasks = [asyncio.create_task(pump(generation)) for generation in self.generations]
        try:
            running = len(tasks)
            while running:
                item = await inbox.get()
                if item is None:
                    running -= 1
                elif isinstance(item, Exception):
                    raise item
                else:
                    yield item
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
