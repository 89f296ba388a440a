"""What a model's answer is made of, once its text has been parsed: pieces in the order of the text."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ReasoningText:
    text: str


@dataclass(frozen=True, slots=True)
class ContentText:
    text: str


@dataclass(frozen=True, slots=True)
class ToolCallBegin:
    """Call `index` (from 0) of the answer; its arguments follow."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """The next piece of the JSON text of call `index`."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class ToolCallEnd:
    """Call `index` is whole. Missing where the text ended inside it, or its JSON is broken."""

    index: int


Part = ReasoningText | ContentText | ToolCallBegin | ToolCallArguments | ToolCallEnd


def joined(parts: Iterable[Part]) -> list[Part]:
    """The same without empty texts, and with texts of one kind that follow each other made one."""
    result: list[Part] = []
    for part in parts:
        last = result[-1] if result else None
        match part, last:
            case ((ReasoningText("") | ContentText("") | ToolCallArguments(_, "")), _):
                pass
            case ReasoningText(text), ReasoningText(before):
                result[-1] = ReasoningText(before + text)
            case ContentText(text), ContentText(before):
                result[-1] = ContentText(before + text)
            case ToolCallArguments(index, text), ToolCallArguments(same, before) if index == same:
                result[-1] = ToolCallArguments(index, before + text)
            case _:
                result.append(part)
    return result
