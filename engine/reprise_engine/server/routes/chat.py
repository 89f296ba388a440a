"""POST /v1/chat/completions."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from reprise_engine.request import FinishReason, TokenLogprobs
from reprise_engine.server import prepare
from reprise_engine.server.generation import Generation, Generations
from reprise_engine.server.logprobs import chat_logprobs
from reprise_engine.server.protocol import ChatCompletionBody
from reprise_engine.server.respond import Deltas, choice_ids, prompt_logprobs_of, respond, wants_usage
from reprise_engine.server.state import Loaded, Model, State
from reprise_engine.server.streaming import event
from reprise_engine.text import TextDelta

router = APIRouter()


@router.post("/v1/chat/completions")
async def chat_completions(request: Request, body: ChatCompletionBody, state: State, model: Model) -> Response:
    arrival_time = time.monotonic()
    name = state.check_model(body.model)
    prompt = await prepare.chat_prompt(model, body)
    asked = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    generations = prepare.generations(
        model,
        state,
        request,
        body,
        [prompt],
        max_tokens=asked,
        default_max_tokens=model.defaults.max_tokens,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        arrival_time=arrival_time,
    )
    answer = _ChatAnswer(
        model=model,
        body=body,
        name=name,
        generations=generations,
        include_usage=wants_usage(body, force=state.force_include_usage),
    )
    return await respond(request, body, generations, answer)


@dataclass(slots=True)
class _Choice:
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None


class _ChatAnswer:
    """The two shapes of one answer."""

    def __init__(
        self, *, model: Loaded, body: ChatCompletionBody, name: str, generations: Generations, include_usage: bool
    ) -> None:
        self._model = model
        self._body = body
        self._generations = generations
        self._include_usage = include_usage
        self._head = {"id": f"chatcmpl-{generations.batch}", "created": int(time.time()), "model": name}

    def _logprobs(self, entries: tuple[TokenLogprobs, ...]) -> dict[str, Any] | None:
        if not self._body.logprobs:
            return None
        return chat_logprobs(
            self._model.tokenizer,
            entries,
            top=self._body.top_logprobs or 0,
            as_token_ids=bool(self._body.return_tokens_as_token_ids),
        )

    async def whole(self, deltas: Deltas) -> Response:
        choices = [_Choice() for _ in self._generations.generations]
        async for generation, delta in deltas:
            choice = choices[generation.index]
            choice.text += delta.text
            choice.token_ids += delta.token_ids
            choice.logprobs += delta.logprobs
            choice.finish_reason = delta.finish_reason
            choice.stop_reason = delta.stop_reason
        return JSONResponse(
            self._head
            | {
                "object": "chat.completion",
                "choices": [
                    {
                        "index": index,
                        "message": {"role": "assistant", "content": choice.text, "refusal": None},
                        "logprobs": self._logprobs(choice.logprobs),
                        "finish_reason": choice.finish_reason.value if choice.finish_reason else None,
                        "stop_reason": choice.stop_reason,
                    }
                    | choice_ids(self._body, choice.token_ids)
                    for index, choice in enumerate(choices)
                ],
                "usage": self._generations.usage().as_json(),
                "system_fingerprint": None,
            }
            | self._prompt_ids()
            | await prompt_logprobs_of(self._model, self._body, self._generations.generations[0])
        )

    def _prompt_ids(self) -> dict[str, Any]:
        if not self._body.return_token_ids:
            return {}
        return {"prompt_token_ids": self._generations.generations[0].request.prompt_token_ids}

    async def stream(self, deltas: Deltas) -> AsyncGenerator[bytes, None]:
        continuous = self._body.stream_options is not None and self._body.stream_options.continuous_usage_stats
        for generation in self._generations.generations:
            yield self._chunk(generation, {"role": "assistant", "content": ""}, extra=self._prompt_ids())
        async for generation, delta in deltas:
            usage = self._generations.usage().as_json() if continuous else None
            if delta.text or (delta.token_ids and (self._body.logprobs or self._body.return_token_ids)):
                yield self._chunk(
                    generation,
                    {"content": delta.text},
                    logprobs=self._logprobs(delta.logprobs),
                    usage=usage,
                    ids=choice_ids(self._body, delta.token_ids),
                )
            if delta.finish_reason is not None:
                yield self._chunk(generation, {}, end=delta, usage=usage)
        if self._include_usage:
            usage = self._generations.usage().as_json()
            yield event(self._head | {"object": "chat.completion.chunk", "choices": [], "usage": usage})

    def _chunk(
        self,
        generation: Generation,
        delta: dict[str, Any],
        *,
        logprobs: dict[str, Any] | None = None,
        end: TextDelta | None = None,
        usage: dict[str, Any] | None = None,
        ids: dict[str, Any] | None = None,
        extra: dict[str, Any] | None = None,
    ) -> bytes:
        choice: dict[str, Any] = {
            "index": generation.index,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": end.finish_reason.value if end is not None and end.finish_reason else None,
        }
        if end is not None:
            choice["stop_reason"] = end.stop_reason
        chunk = self._head | {"object": "chat.completion.chunk", "choices": [choice | (ids or {})]} | (extra or {})
        if self._include_usage:
            chunk["usage"] = usage
        return event(chunk)
