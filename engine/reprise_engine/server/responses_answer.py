"""The two shapes of an answer of the Responses API: one object, or typed events."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Iterator
from typing import Any

from fastapi.responses import Response

from reprise_engine.request import FinishReason, TokenLogprobs
from reprise_engine.server.errors import SERVER_ERROR, as_api_error
from reprise_engine.server.generation import Generation, Generations, Usage
from reprise_engine.server.json_route import JsonAnswer
from reprise_engine.server.logprobs import chat_logprobs
from reprise_engine.server.parsed_answer import ParsedChoices
from reprise_engine.server.protocol_responses import ResponsesBody
from reprise_engine.server.protocol_tools import AllowedTools, NamedTool
from reprise_engine.server.respond import Deltas
from reprise_engine.server.responses_output import Event, OutputItems
from reprise_engine.server.state import Loaded
from reprise_engine.server.streaming import event
from reprise_engine.text import TextDelta
from reprise_engine.text.answer_parts import ContentText


class ResponsesAnswer:
    def __init__(
        self, *, model: Loaded, body: ResponsesBody, name: str, generations: Generations, parsed: ParsedChoices
    ) -> None:
        self._model = model
        self._body = body
        self._generations = generations
        self._parsed = parsed
        self._output = OutputItems()
        self._untold: tuple[TokenLogprobs, ...] = ()
        """Of tokens whose text is held back."""
        [generation] = generations.generations
        self._choice = parsed[generation]
        sampling = generation.request.sampling
        self._head = {
            "id": f"resp_{generations.batch}",
            "object": "response",
            "created_at": int(time.time()),
            "model": name,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_logprobs": body.top_logprobs or 0,
            "tools": [tool.model_dump() for tool in body.tools or ()],
            "tool_choice": _tool_choice(body),
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "reasoning": {"effort": None if body.reasoning is None else body.reasoning.effort, "summary": None},
            "text": {"format": body.form.model_dump(by_alias=True, exclude_none=True)},
            "truncation": "disabled",
            "background": False,
            "store": False,
            "previous_response_id": None,
            "service_tier": "default",
            "metadata": body.metadata or {},
            "user": None,
        }

    def _response(self, status: str, *, usage: Usage | None = None, error: Event | None = None) -> Event:
        """The object as it is now; `usage` at its end."""
        return self._head | {
            "status": status,
            "error": error,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "completed_at": int(time.time()) if status == "completed" else None,
            "output": self._output.items,
            "usage": None if usage is None else self._usage(usage),
        }

    def _usage(self, usage: Usage) -> Event:
        caches = self._model.resolved.enable_prefix_caching
        details: Event = {
            "cached_tokens": usage.cached_tokens,
            # What is computed stays in the cache, until its room is needed.
            "cache_write_tokens": usage.prompt_tokens - usage.cached_tokens if caches else 0,
        }
        if usage.explanations:
            [details["cache_explanation"]] = usage.explained()
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": details,
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens or 0},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }

    def _take(self, generation: Generation, delta: TextDelta) -> Iterator[Event]:
        reasoned = self._choice.reasoning_tokens
        parts = self._choice.take(generation, delta)
        # Only those of the content are told.
        self._untold = () if self._choice.reasoning_tokens > reasoned else self._untold + delta.logprobs
        for part in parts:
            logprobs = self._logprobs() if isinstance(part, ContentText) else []
            self._untold = ()
            yield from self._output.add(part, logprobs=logprobs)
        if self._choice.finish_reason is not None:
            yield from self._output.finish(complete=self._choice.finish_reason != FinishReason.LENGTH.value)

    def _logprobs(self) -> list[dict[str, Any]]:
        if not self._body.include:
            return []
        told = chat_logprobs(self._model.tokenizer, self._untold, top=self._body.top_logprobs or 0)
        return list(told["content"])

    @property
    def _status(self) -> str:
        return "incomplete" if self._choice.finish_reason == FinishReason.LENGTH.value else "completed"

    async def whole(self, deltas: Deltas) -> Response:
        async for generation, delta in deltas:
            for _ in self._take(generation, delta):
                pass  # nobody is told before the end
        return JsonAnswer(self._response(self._status, usage=await self._parsed.final_usage()))

    async def stream(self, deltas: Deltas) -> AsyncGenerator[bytes, None]:
        number = 0
        async for happened in self._events(deltas):
            yield event(happened | {"sequence_number": number}, name=happened["type"])
            number += 1

    async def _events(self, deltas: Deltas) -> AsyncGenerator[Event, None]:
        yield {"type": "response.created", "response": self._response("in_progress")}
        yield {"type": "response.in_progress", "response": self._response("in_progress")}
        try:
            async for generation, delta in deltas:
                for happened in self._take(generation, delta):
                    yield happened
        except Exception as error:
            answer = as_api_error(error)
            if answer is None:
                raise
            told = {"code": SERVER_ERROR, "message": answer.body["error"]["message"]}
            yield {
                "type": "response.failed",
                "response": self._response("failed", usage=self._parsed.usage(), error=told),
            }
            return
        usage = await self._parsed.final_usage()
        yield {"type": f"response.{self._status}", "response": self._response(self._status, usage=usage)}


def _tool_choice(body: ResponsesBody) -> str | Event:
    match body.tool_choice:
        case NamedTool(name):
            return {"type": "function", "name": name}
        case AllowedTools(names, required):
            mode = "required" if required else "auto"
            return {"type": "allowed_tools", "mode": mode, "tools": [{"type": "function", "name": n} for n in names]}
        case choice:
            return choice or "auto"
