"""The two shapes of an answer to a chat completion: one object, or a stream of chunks."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Any

from fastapi.responses import Response

from reprise_engine.request import TokenLogprobs
from reprise_engine.server.generation import Generation, Generations
from reprise_engine.server.json_route import JsonAnswer
from reprise_engine.server.logprobs import chat_logprobs
from reprise_engine.server.parsed_answer import ParsedChoice, ParsedChoices
from reprise_engine.server.protocol_chat import ChatCompletionBody
from reprise_engine.server.respond import Deltas, choice_ids, prompt_logprobs_of
from reprise_engine.server.state import Loaded
from reprise_engine.server.streaming import event
from reprise_engine.text.answer_parts import (
    ContentText,
    Part,
    ReasoningText,
    ToolCallArguments,
    ToolCallBegin,
    ToolCallEnd,
)


def new_call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"


@dataclass(slots=True)
class _Whole:
    """One choice, put together."""

    reasoning: str = ""
    content: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)

    def add(self, part: Part) -> None:
        match part:
            case ReasoningText(text):
                self.reasoning += text
            case ContentText(text):
                self.content += text
            case ToolCallBegin(_, name):
                self.calls.append(
                    {"id": new_call_id(), "type": "function", "function": {"name": name, "arguments": ""}}
                )
            case ToolCallArguments(index, text):
                self.calls[index]["function"]["arguments"] += text
            case ToolCallEnd():
                pass

    def message(self, *, reasons: bool) -> dict[str, Any]:
        content = self.content or (None if self.reasoning or self.calls else "")
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if reasons:
            message |= reasoning_fields(self.reasoning or None)
        if self.calls:
            message["tool_calls"] = self.calls
        return message


def reasoning_fields(text: str | None) -> dict[str, Any]:
    """Under the newer and the older of the names that clients read."""
    return {"reasoning": text, "reasoning_content": text}


class ChatAnswer:
    def __init__(
        self,
        *,
        model: Loaded,
        body: ChatCompletionBody,
        name: str,
        generations: Generations,
        parsed: ParsedChoices,
        include_usage: bool,
    ) -> None:
        self._model = model
        self._body = body
        self._generations = generations
        self._parsed = parsed
        self._include_usage = include_usage
        self._head = {"id": f"chatcmpl-{generations.batch}", "created": int(time.time()), "model": name}

    def _logprobs(self, entries: Sequence[TokenLogprobs]) -> dict[str, Any] | None:
        if not self._body.logprobs:
            return None
        return chat_logprobs(
            self._model.tokenizer,
            entries,
            top=self._body.top_logprobs or 0,
            as_token_ids=bool(self._body.return_tokens_as_token_ids),
        )

    async def whole(self, deltas: Deltas) -> Response:
        choices = [_Whole() for _ in self._generations.generations]
        async for generation, delta in deltas:
            if self._parsed[generation].ended():
                continue
            choice = choices[generation.index]
            for part in self._parsed[generation].take(generation, delta):
                choice.add(part)
            choice.token_ids += delta.token_ids
            choice.logprobs += delta.logprobs
        return JsonAnswer(
            self._head
            | {
                "object": "chat.completion",
                "choices": [
                    {
                        "index": generation.index,
                        "message": choice.message(reasons=self._parsed.reasons),
                        "logprobs": self._logprobs(choice.logprobs),
                        "finish_reason": self._parsed[generation].finish_reason,
                        "stop_reason": self._parsed[generation].stop_reason,
                    }
                    | choice_ids(self._body, choice.token_ids)
                    for generation, choice in zip(self._generations.generations, choices, strict=True)
                ],
                "usage": (await self._parsed.final_usage()).as_json(),
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
            choice = self._parsed[generation]
            if choice.ended():
                continue
            pieces = [piece for part in choice.take(generation, delta) if (piece := _piece(part)) is not None]
            if not pieces and delta.token_ids and (self._body.logprobs or self._body.return_token_ids):
                pieces = [{"content": ""}]  # tokens whose text is held back, or nothing
            usage = self._parsed.usage().as_json() if continuous else None
            for number, piece in enumerate(pieces):
                yield self._chunk(
                    generation,
                    piece,
                    logprobs=self._logprobs(delta.logprobs) if number == 0 else None,
                    usage=usage,
                    ids=choice_ids(self._body, delta.token_ids if number == 0 else ()),
                )
            if choice.ended():
                yield self._chunk(generation, {}, end=choice, usage=usage)
        if self._include_usage:
            usage = (await self._parsed.final_usage()).as_json()
            yield event(self._head | {"object": "chat.completion.chunk", "choices": [], "usage": usage})

    def _chunk(
        self,
        generation: Generation,
        delta: dict[str, Any],
        *,
        logprobs: dict[str, Any] | None = None,
        end: ParsedChoice | None = None,
        usage: dict[str, Any] | None = None,
        ids: dict[str, Any] | None = None,
        extra: dict[str, Any] | None = None,
    ) -> bytes:
        choice: dict[str, Any] = {
            "index": generation.index,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": None if end is None else end.finish_reason,
        }
        if end is not None:
            choice["stop_reason"] = end.stop_reason
        chunk = self._head | {"object": "chat.completion.chunk", "choices": [choice | (ids or {})]} | (extra or {})
        if self._include_usage:
            chunk["usage"] = usage
        return event(chunk)


def _piece(part: Part) -> dict[str, Any] | None:
    """The delta of a part; None for one that a stream says nothing of."""
    match part:
        case ReasoningText(text):
            return reasoning_fields(text)
        case ContentText(text):
            return {"content": text}
        case ToolCallBegin(index, name):
            function = {"name": name, "arguments": ""}
            return {"tool_calls": [{"index": index, "id": new_call_id(), "type": "function", "function": function}]}
        case ToolCallArguments(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}
        case ToolCallEnd():
            return None
