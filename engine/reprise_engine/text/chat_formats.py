"""In which formats a model writes tool calls and reasoning: told by a flag, or by its chat template."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from reprise_engine.parser_names import ReasoningParser, ToolCallParser
from reprise_engine.text import reasoning, tool_calls
from reprise_engine.text.answer import AnswerParser
from reprise_engine.text.chat_template import ChatTemplate
from reprise_engine.text.reasoning import ReasoningSplitter, ReasoningStart
from reprise_engine.text.tokenizer import Tokenizer
from reprise_engine.text.tool_calls import HermesToolCalls


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatFormats:
    """None: the model has no such thing, or none that we read."""

    tool_calls: Literal["hermes"] | None = None
    reasoning: Literal["qwen3"] | None = None
    special_marks: bool = False
    """Whether the tokenizer counts marks among the special tokens, which are left out of texts otherwise."""

    def described(self) -> str:
        """For the log."""
        return f"tool calls: {self.tool_calls or 'none'}, reasoning: {self.reasoning or 'none'}"

    def parser(self, start: ReasoningStart, *, tools: bool, single: bool) -> AnswerParser:
        """For one answer. `tools` looks for calls, `single` for the first one only."""
        return AnswerParser(
            reasoning=None if self.reasoning is None else ReasoningSplitter(start),
            tools=HermesToolCalls(single=single) if tools and self.tool_calls is not None else None,
        )


def chat_formats(
    tokenizer: Tokenizer, *, tool_call_parser: ToolCallParser = "auto", reasoning_parser: ReasoningParser = "auto"
) -> ChatFormats:
    """`auto` takes a format where the model's chat template itself writes its marks, and nothing where it does not."""
    template = tokenizer.chat_template
    has_calls = tool_call_parser == "hermes" or (template is not None and _writes_hermes(template))
    has_reasoning = reasoning_parser == "qwen3" or (
        reasoning_parser == "auto"
        and template is not None
        and reasoning.BEGIN in template.source
        and reasoning.END in template.source
    )
    return ChatFormats(
        tool_calls="hermes" if has_calls else None,
        reasoning="qwen3" if has_reasoning else None,
        special_marks=(has_calls and tokenizer.is_special(tool_calls.BEGIN))
        or (has_reasoning and tokenizer.is_special(reasoning.END)),
    )


def _writes_hermes(template: ChatTemplate) -> bool:
    """Qwen3-Coder and later write XML (`<function=…>`) between the same marks: that is another format."""
    source = template.source
    return (
        template.reads("tools")
        and tool_calls.BEGIN in source
        and tool_calls.END in source
        and "arguments" in source
        and "<function=" not in source
    )
