"""The text of one answer, taken apart as it comes: reasoning, content, tool calls."""

from __future__ import annotations

from collections.abc import Iterator

from reprise_engine.text.answer_parts import ContentText, Part, ReasoningText, joined
from reprise_engine.text.reasoning import ReasoningSplitter
from reprise_engine.text.tool_calls import HermesToolCalls


class AnswerParser:
    """Feed it the deltas of one sequence. Without parsers everything is content.

    Tool calls are looked for behind the reasoning only: a model may think about calls that it does not make.
    """

    def __init__(self, *, reasoning: ReasoningSplitter | None = None, tools: HermesToolCalls | None = None) -> None:
        self._reasoning = reasoning
        self._tools = tools
        self._undecided_tokens = 0
        self.reasoning_tokens = 0
        """Tokens so far that were generated as reasoning, its marks included."""

    @property
    def complete(self) -> bool:
        """Whether nothing more is wanted: the one call that was asked for is there."""
        return self._tools is not None and self._tools.complete

    def push(self, text: str, *, tokens: int) -> list[Part]:
        """The parts that `text` completes; `tokens` were generated for it."""
        if self._reasoning is None:
            return joined(self._content(text))
        before = self._reasoning.reasoning
        reasoning, content = self._reasoning.push(text)
        if self._reasoning.undecided:
            self._undecided_tokens += tokens
        elif before or self._reasoning.reasoning or reasoning:
            self.reasoning_tokens += tokens + self._undecided_tokens
            self._undecided_tokens = 0
        else:
            self._undecided_tokens = 0
        return joined([ReasoningText(reasoning), *self._content(content)])

    def finish(self) -> list[Part]:
        """The rest, at the end of the sequence."""
        reasoning, content = ("", "") if self._reasoning is None else self._reasoning.finish()
        parts = [ReasoningText(reasoning), *self._content(content)]
        return joined(parts if self._tools is None else [*parts, *self._tools.finish()])

    def _content(self, text: str) -> Iterator[Part]:
        if self._tools is None:
            yield ContentText(text)
        else:
            yield from self._tools.push(text)
