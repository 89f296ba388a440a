"""Tool calls in Hermes format, as Qwen2.5 and Qwen3 write them: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`.

Pure and incremental: however the text is cut into deltas, the same content and the same calls come out. Arguments are
given out as the model writes them, so what comes back in the next turn renders to the tokens that are in the cache.
"""

from __future__ import annotations

from collections.abc import Generator
from enum import Enum, auto

from reprise_engine.text.answer_parts import ContentText, Part, ToolCallArguments, joined
from reprise_engine.text.hermes_call import HermesCall
from reprise_engine.text.stop import partial_end

BEGIN = "<tool_call>"
END = "</tool_call>"

_Parsing = Generator[Part, None, str]
"""Yields parts, returns the text that is left."""


class _State(Enum):
    TEXT = auto()
    CALL = auto()
    BROKEN = auto()
    BEHIND = auto()


class HermesToolCalls:
    """Push the text of one sequence.

    Blanks before, between and behind the calls are dropped, and of text before a call one line end, which the template
    writes anew. What stands behind a mark and is no call (no JSON, no name) is content, the mark included. JSON that
    breaks off inside the arguments is passed on as it is: OpenAI's clients have to check arguments anyway.
    With `single` everything behind the first call is dropped, and `complete` says that it is there.
    """

    def __init__(self, *, single: bool = False) -> None:
        self._single = single
        self._state = _State.TEXT
        self._held = ""
        self._blank = True
        """Only blanks since the beginning, or since the last call; they are held."""
        self._dropped = ""
        """What was left out before the call that has begun."""
        self._calls = 0
        self._call = HermesCall(0)
        self.complete = False
        """Whether no more is wanted."""

    def push(self, text: str) -> list[Part]:
        return joined(self._push(text))

    def finish(self) -> list[Part]:
        """The rest, at the end of the sequence."""
        return joined(self._finish())

    def _push(self, text: str) -> Generator[Part, None, None]:
        text = self._held + text
        self._held = ""
        while text and not self.complete:
            if self._state is _State.TEXT:
                text = yield from self._text(text)
            elif self._state is _State.CALL:
                text = yield from self._in_call(text)
            elif self._state is _State.BROKEN:
                text = yield from self._broken(text)
            else:
                text = self._behind(text)

    def _finish(self) -> Generator[Part, None, None]:
        held, self._held = self._held, ""
        if self._state is _State.TEXT:
            if held.strip() or not self._calls:
                yield ContentText(held)
        elif self._state is _State.CALL:
            if self._call.begun:
                yield from self._call.cut_off()
            else:
                yield ContentText(self._dropped + BEGIN + self._call.raw)
        elif self._state is _State.BROKEN and not self._call.arguments_ended:
            yield ToolCallArguments(self._call.index, held.rstrip())

    def _text(self, text: str) -> _Parsing:
        at = text.find(BEGIN)
        if at >= 0:
            before = text[:at]
            shown = "" if self._blank and not before.strip() else before.removesuffix("\n")
            yield ContentText(shown)
            self._dropped = before[len(shown) :]
            self._state, self._call = _State.CALL, HermesCall(self._calls)
            return text[at + len(BEGIN) :]
        shown = text[: len(text) - partial_end(text, (BEGIN,))].removesuffix("\n")
        if self._blank and not shown.strip():
            shown = ""
        self._blank = self._blank and not shown
        self._held = text[len(shown) :]
        yield ContentText(shown)
        return ""

    def _in_call(self, text: str) -> _Parsing:
        call = self._call
        for at, character in enumerate(text):
            if not call.push(character):
                if call.begun:
                    yield from call.cut_off()
                    self._calls += 1
                    self._state = _State.BROKEN
                    self.complete = self._single and call.arguments_ended
                else:
                    yield ContentText(self._dropped + BEGIN + call.raw)
                    self._blank = False
                    self._state = _State.TEXT
                return text[at:]
            if call.complete:
                yield from call.taken()
                self._calls += 1
                self._state = _State.BEHIND
                self.complete = self._single
                return text[at + 1 :]
        yield from call.taken()
        return ""

    def _broken(self, text: str) -> _Parsing:
        """Behind arguments that have ended nothing of it is wanted, else it is their rest."""
        at = text.find(END)
        wanted = not self._call.arguments_ended
        if at >= 0:
            if wanted:
                yield ToolCallArguments(self._call.index, text[:at].rstrip())
            self._state, self._blank = _State.TEXT, True
            self.complete = self._single
            return text[at + len(END) :]
        shown = text[: len(text) - partial_end(text, (END,))].rstrip()
        self._held = text[len(shown) :]
        if wanted:
            yield ToolCallArguments(self._call.index, shown)
        return ""

    def _behind(self, text: str) -> str:
        bare = text.lstrip(" \t\r\n}")  # one brace too many is small models' commonest slip
        if not bare.startswith(END) and END.startswith(bare):
            self._held = text
            return ""
        self._state, self._blank = _State.TEXT, True
        return bare.removeprefix(END)
