"""The answers of one HTTP request as parts: reasoning, content and tool calls of each choice, as they come."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from reprise_engine.request import FinishReason
from reprise_engine.server.chat_explanation import ended_in
from reprise_engine.server.chat_prompt import RenderedChat
from reprise_engine.server.generation import Generation, Generations, Usage
from reprise_engine.server.protocol_chat import ChatPrompt
from reprise_engine.server.state import Loaded
from reprise_engine.server.tool_use import ToolUse
from reprise_engine.text import TextDelta
from reprise_engine.text.answer_parts import Part, ToolCallBegin

TOOL_CALLS = "tool_calls"
"""OpenAI's finish_reason of an answer that calls tools."""


class ParsedChoice:
    """One sequence."""

    def __init__(self, model: Loaded, chat: RenderedChat, use: ToolUse) -> None:
        self._parser = model.formats.parser(chat.start, tools=use.parses, single=use.single)
        self._calls = False
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None

    @property
    def reasoning_tokens(self) -> int:
        return self._parser.reasoning_tokens

    def ended(self) -> bool:
        """Whether nothing more is to come; deltas that are under way then say nothing."""
        return self.finish_reason is not None

    def take(self, generation: Generation, delta: TextDelta) -> Sequence[Part]:
        """The parts that a delta completes. Where no more is wanted, the sequence is ended."""
        if self.ended():
            return ()
        parts = self._parser.push(delta.text, tokens=len(delta.token_ids))
        finish_reason = delta.finish_reason
        if finish_reason is None and self._parser.complete:
            finish_reason = FinishReason.STOP
            generation.end(finish_reason)
        if finish_reason is not None:
            parts += self._parser.finish()
        self._calls = self._calls or any(isinstance(part, ToolCallBegin) for part in parts)
        if finish_reason is not None:
            called = self._calls and finish_reason is FinishReason.STOP
            self.finish_reason = TOOL_CALLS if called else finish_reason.value
            self.stop_reason = delta.stop_reason
        return parts


class ParsedChoices:
    """All sequences of a request, by the index of their generation."""

    def __init__(
        self, model: Loaded, body: ChatPrompt, chat: RenderedChat, use: ToolUse, generations: Generations
    ) -> None:
        self._model = model
        self._body = body
        self._chat = chat
        self.reasons = model.formats.reasoning is not None
        """Whether reasoning is told apart, so that the answer has fields for it."""
        self._generations = generations
        self._choices = [ParsedChoice(model, chat, use) for _ in generations.generations]

    def __getitem__(self, generation: Generation) -> ParsedChoice:
        return self._choices[generation.index]

    def usage(self) -> Usage:
        """So far."""
        usage = self._generations.usage()
        if not self.reasons:
            return usage
        return replace(usage, reasoning_tokens=sum(choice.reasoning_tokens for choice in self._choices))

    async def final_usage(self) -> Usage:
        """With all that can be said of the cache, where the request asked for it."""
        usage = self.usage()
        if not usage.explanations:
            return usage
        [explanation] = usage.explanations
        where = await ended_in(self._model.tokenizer, self._body, self._chat, explanation)
        return replace(usage, ended_in=where)
