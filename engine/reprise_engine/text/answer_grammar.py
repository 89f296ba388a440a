"""The grammar of an answer with tool calls, in Lark's syntax with llguidance's extensions. Pure.

    start: thoughts? call ("\\n" call)*        where a tool must be called
    start: thoughts? prose (call prose)*       where the model may
    start: thoughts? (form | calls)            where what is no call must have a form

Calls are written as Qwen's templates write them, with JSON's separators as `json.dumps` has them, which is what the
models were trained on: so the next turn renders to the same tokens.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from reprise_engine.request import TokenId
from reprise_engine.structured.blanks import with_blanks
from reprise_engine.text import reasoning, tool_calls
from reprise_engine.text.reasoning import ReasoningStart

_SEPARATORS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_NO_ARGUMENTS: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
_ANY_ARGUMENTS: Mapping[str, Any] = {"type": "object"}
_BETWEEN = '"\\n\\n"'
"""What Qwen's templates have between reasoning and answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarFunction:
    """A function that may be called. `parameters` is the JSON schema of its arguments, None for no arguments;
    without `checked` any object will do."""

    name: str
    parameters: Mapping[str, Any] | None
    checked: bool = True

    @property
    def schema(self) -> Mapping[str, Any]:
        if not self.checked:
            return _ANY_ARGUMENTS
        return _NO_ARGUMENTS if self.parameters is None else {**_ANY_ARGUMENTS, **self.parameters}


class AnswerGrammar:
    """`token_id` finds the token of a mark; a mark that is none is spelled. `start` None: the model does not reason."""

    def __init__(self, *, token_id: Callable[[str], TokenId | None], start: ReasoningStart | None) -> None:
        self._token_id = token_id
        self._start = start

    def forced(self, functions: Sequence[GrammarFunction], *, single: bool) -> str:
        """One of the functions is called; without `single` there may be more calls."""
        return self._grammar("call" if single else 'call ("\\n" call)*', self._calls(functions))

    def free(self, functions: Sequence[GrammarFunction]) -> str:
        """Text, and calls in it as the model likes."""
        mark = tool_calls.BEGIN
        prose = f"PROSE: /(.|\\n)*/ & ~/(.|\\n)*{mark}(.|\\n)*/"
        if self._token_id(mark) is not None:
            return self._grammar("PROSE (call PROSE)*", [prose, *self._calls(functions)])
        # Spelled, the mark would be taken for prose as far as it goes: here it is where the prose ends.
        until = f'until[suffix="{mark}"]: /(.|\\n)*/'
        return self._grammar("(until inside)* PROSE", [prose, until, *self._calls(functions)])

    def formed(self, schema: str, functions: Sequence[GrammarFunction] = ()) -> str:
        """JSON of `schema` (its text), or calls."""
        answer = ["form: %json " + with_blanks(schema)]
        if not functions:
            return self._grammar("form", answer)
        return self._grammar('(form | call ("\\n" call)*)', [*answer, *self._calls(functions)])

    def _grammar(self, answer: str, rules: Sequence[str]) -> str:
        begin, thoughts = self._thoughts()
        return "\n".join([f"start: {begin}{answer}", *thoughts, *rules]) + "\n"

    def _thoughts(self) -> tuple[str, list[str]]:
        """What comes before the answer, and its rules."""
        end = self._token_id(reasoning.END)
        spelled = f'thoughts[suffix="{reasoning.END}"]: /(.|\\n)*/'
        inside = spelled if end is None else f"thoughts: /(.|\\n)*/ <[{end}]>"
        match self._start:
            case ReasoningStart.OPEN:
                return f"thoughts {_BETWEEN} ", [inside]
            case ReasoningStart.UNDECIDED:
                return f"({self._mark(reasoning.BEGIN)} thoughts {_BETWEEN})? ", [inside]
            case _:
                return "", []

    def _mark(self, text: str) -> str:
        token_id = self._token_id(text)
        return json.dumps(text) if token_id is None else f"<[{token_id}]>"

    def _calls(self, functions: Sequence[GrammarFunction]) -> list[str]:
        names = " | ".join(f"call_{number}" for number in range(len(functions)))
        rules = [
            f"call: {self._mark(tool_calls.BEGIN)} inside",
            f'inside: "\\n" ({names}) "\\n" {self._mark(tool_calls.END)}',
        ]
        for number, function in enumerate(functions):
            head = '{"name": ' + json.dumps(function.name, ensure_ascii=False) + ', "arguments": '
            schema = json.dumps({**function.schema, "x-guidance": _SEPARATORS}, ensure_ascii=False)
            rules.append(f'call_{number}: {json.dumps(head, ensure_ascii=False)} arguments_{number} "}}"')
            rules.append(f"arguments_{number}: %json {schema}")
        return rules
