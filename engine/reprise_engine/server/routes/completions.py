"""POST /v1/completions: texts or token ids, one or several, n choices each."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from reprise_engine.request import TokenId, TokenLogprobs
from reprise_engine.server import prepare
from reprise_engine.server.generation import Generation, Generations
from reprise_engine.server.json_route import JsonAnswer, JsonRoute
from reprise_engine.server.logprobs import CompletionLogprobs, join_completion_logprobs
from reprise_engine.server.protocol import CompletionBody
from reprise_engine.server.respond import Deltas, choice_ids, prompt_logprobs_of, respond, wants_usage
from reprise_engine.server.state import Loaded, Model, State
from reprise_engine.server.streaming import event
from reprise_engine.text import TextDelta

router = APIRouter(route_class=JsonRoute)

_DEFAULT_MAX_TOKENS = 16
"""OpenAI's, for completions."""


@router.post("/v1/completions")
async def completions(request: Request, body: CompletionBody, state: State, model: Model) -> Response:
    arrival_time = time.monotonic()
    name = state.check_model(body.model)
    prompts: list[Sequence[TokenId]] = []
    for prompt in body.prompt:
        if isinstance(prompt, str):
            encoded = await prepare.text_prompt(
                *(model, prompt), add_special_tokens=body.add_special_tokens, fits=body.truncate_prompt_tokens is None
            )
            prompts.append(encoded)
        else:
            prepare.check_token_ids(model, prompt, param="prompt")
            prompts.append(prompt)
    default = _DEFAULT_MAX_TOKENS if model.defaults.max_tokens is None else model.defaults.max_tokens
    generations = await prepare.generations(
        model,
        state,
        request,
        body,
        prompts,
        max_tokens=body.max_tokens,
        default_max_tokens=default,
        logprobs=body.logprobs,
        structured=body.structured,
        arrival_time=arrival_time,
    )
    answer = _CompletionAnswer(
        model=model,
        body=body,
        name=name,
        generations=generations,
        include_usage=wants_usage(body, force=state.force_include_usage),
    )
    return await respond(request, body, generations, answer)


class _CompletionAnswer:
    """The two shapes of one answer."""

    def __init__(
        self, *, model: Loaded, body: CompletionBody, name: str, generations: Generations, include_usage: bool
    ) -> None:
        self._model = model
        self._body = body
        self._generations = generations
        self._include_usage = include_usage
        self._head = {
            "id": f"cmpl-{generations.batch}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": name,
        }
        self._echoes_logprobs = bool(body.echo) and body.logprobs is not None
        self._logprobs = [
            CompletionLogprobs(
                model.tokenizer,
                generation.request.prompt_token_ids,
                top=body.logprobs or 0,
                as_token_ids=bool(body.return_tokens_as_token_ids),
                skip_special_tokens=body.skip_special_tokens,
            )
            for generation in generations.generations
        ]

    def _echo(self, generation: Generation) -> str:
        """The prompt's text, where the answer repeats it."""
        if not self._body.echo:
            return ""
        prompt = self._body.prompt[generation.index // self._body.choices]
        if isinstance(prompt, str) and self._body.truncate_prompt_tokens is None:
            return prompt
        return self._model.tokenizer.decode(generation.request.prompt_token_ids)

    async def _echo_logprobs(self, generation: Generation, scored: Generation) -> dict[str, Any] | None:
        """Those of the prompt, which `scored` computed. A long one's take a while: the event loop goes on."""
        if not self._echoes_logprobs:
            return None
        return await asyncio.to_thread(
            self._logprobs[generation.index].push_prompt, scored.prompt_logprobs, text=self._echo(generation)
        )

    def _delta_logprobs(self, generation: Generation, entries: Sequence[TokenLogprobs]) -> dict[str, Any] | None:
        return None if self._body.logprobs is None else self._logprobs[generation.index].push(entries)

    def _prompt_ids(self, generation: Generation) -> dict[str, Any]:
        return {"prompt_token_ids": generation.request.prompt_token_ids} if self._body.return_token_ids else {}

    async def whole(self, deltas: Deltas) -> Response:
        generations = self._generations.generations
        choices: list[dict[str, Any]] = [
            {"index": generation.index, "text": self._echo(generation)} | self._prompt_ids(generation)
            for generation in generations
        ]
        token_ids: list[list[TokenId]] = [[] for _ in generations]
        entries: list[list[TokenLogprobs]] = [[] for _ in generations]
        async for generation, delta in deltas:
            choice = choices[generation.index]
            choice["text"] += delta.text
            token_ids[generation.index] += delta.token_ids
            entries[generation.index] += delta.logprobs
            choice["finish_reason"] = delta.finish_reason.value if delta.finish_reason else None
            choice["stop_reason"] = delta.stop_reason
        for index, (generation, choice) in enumerate(zip(generations, choices, strict=True)):
            scored = generations[index - index % self._body.choices]  # the first choice scores the prompt for all
            echoed = await self._echo_logprobs(generation, scored)
            parts = [echoed, self._delta_logprobs(generation, entries[index])]
            choice["logprobs"] = join_completion_logprobs([part for part in parts if part is not None]) or None
            choice.update(choice_ids(self._body, token_ids[index]))
            choice.update(await prompt_logprobs_of(self._model, self._body, scored))
        usage = self._generations.usage().as_json()
        return JsonAnswer(self._head | {"choices": choices, "usage": usage, "system_fingerprint": None})

    async def stream(self, deltas: Deltas) -> AsyncGenerator[bytes, None]:
        continuous = self._body.stream_options is not None and self._body.stream_options.continuous_usage_stats
        for generation in self._generations.generations:
            extra = self._prompt_ids(generation)
            if (extra or self._body.echo) and not self._echoes_logprobs:
                yield self._chunk(generation, self._echo(generation), extra=extra)
        waiting = set(self._generations.generations) if self._echoes_logprobs else set()
        async for generation, delta in deltas:
            if generation in waiting and (delta.token_ids or delta.finish_reason is not None):
                waiting.remove(generation)
                echoed = await self._echo_logprobs(generation, generation)
                extra = self._prompt_ids(generation)
                yield self._chunk(generation, self._echo(generation), logprobs=echoed, extra=extra)
            logprobs = self._delta_logprobs(generation, delta.logprobs)
            ids = choice_ids(self._body, delta.token_ids)
            if delta.text or delta.finish_reason is not None or (delta.token_ids and (logprobs or ids)):
                usage = self._generations.usage().as_json() if continuous else None
                yield self._chunk(generation, delta.text, logprobs=logprobs, end=delta, usage=usage, extra=ids)
        if self._include_usage:
            yield event(self._head | {"choices": [], "usage": self._generations.usage().as_json()})

    def _chunk(
        self,
        generation: Generation,
        text: str,
        *,
        logprobs: dict[str, Any] | None = None,
        end: TextDelta | None = None,
        usage: dict[str, Any] | None = None,
        extra: dict[str, Any] | None = None,
    ) -> bytes:
        choice: dict[str, Any] = {
            "index": generation.index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": end.finish_reason.value if end is not None and end.finish_reason else None,
        }
        if end is not None and end.finish_reason is not None:
            choice["stop_reason"] = end.stop_reason
        chunk: dict[str, Any] = self._head | {"choices": [choice | (extra or {})]}
        if self._include_usage:
            chunk["usage"] = usage
        return event(chunk)
