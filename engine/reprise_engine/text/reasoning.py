"""Reasoning and answer of a model that thinks in `<think>…</think>` before it answers, as Qwen3 and QwQ do.

Pure and incremental: however the text is cut into deltas, the same reasoning and the same answer come out.
"""

from __future__ import annotations

from enum import Enum, auto

from reprise_engine.text.stop import partial_end

BEGIN = "<think>"
END = "</think>"


class ReasoningStart(Enum):
    """What the prompt says about the first token that is generated."""

    UNDECIDED = auto()
    """The model may open a block itself, as the first thing it says."""
    OPEN = auto()
    """The chat template has opened the block: what comes is reasoning."""
    CLOSED = auto()
    """The block is over, or empty: thinking is off, or a message is continued behind it."""


def reasoning_start(prompt: str, *, continued: str | None = None) -> ReasoningStart:
    """How the generation begins behind `prompt`. `continued` is the text of a final message that is to go on.

    Only the prompt's very end counts: a user may write the marks too.
    """
    end = prompt.rstrip()
    if end.endswith(BEGIN):
        return ReasoningStart.OPEN
    if end.endswith(END):
        return ReasoningStart.CLOSED
    if continued:
        is_open = continued.lstrip().startswith(BEGIN) and END not in continued
        return ReasoningStart.OPEN if is_open else ReasoningStart.CLOSED
    return ReasoningStart.UNDECIDED


class _State(Enum):
    UNDECIDED = auto()
    REASONING = auto()
    BEHIND = auto()
    CONTENT = auto()


class ReasoningSplitter:
    """Push the text of one sequence; what may be a mark, or line ends beside one, is held back until it is decided.

    The marks are dropped, and the line ends beside them, which Qwen's templates write anew when the message comes back.
    """

    def __init__(self, start: ReasoningStart) -> None:
        self._state = {
            ReasoningStart.UNDECIDED: _State.UNDECIDED,
            ReasoningStart.OPEN: _State.REASONING,
            ReasoningStart.CLOSED: _State.CONTENT,
        }[start]
        self._held = ""
        self._may_open = True
        """Whether the opening mark may still come; a model may repeat the one that the template has written."""
        self._begun = False
        """Whether any reasoning has been given out."""

    @property
    def undecided(self) -> bool:
        """Whether the first word is still out."""
        return self._state is _State.UNDECIDED

    @property
    def reasoning(self) -> bool:
        """Whether what comes next is reasoning."""
        return self._state is _State.REASONING

    def push(self, text: str) -> tuple[str, str]:
        """(reasoning, content) that may be shown, in this order."""
        text = self._held + text
        self._held = ""
        if self._state is _State.UNDECIDED:
            bare = text.lstrip()
            if bare.startswith(BEGIN):
                self._state, text = _State.REASONING, bare
            elif BEGIN.startswith(bare):
                self._held = text
                return "", ""
            else:
                self._state = _State.CONTENT
        reasoning = ""
        if self._state is _State.REASONING:
            reasoning, text = self._push_reasoning(text)
        if self._state is _State.BEHIND:
            text = text.lstrip("\n")
            if text:
                self._state = _State.CONTENT
        return reasoning, text

    def _push_reasoning(self, text: str) -> tuple[str, str]:
        """(reasoning, what is behind its end)."""
        if self._may_open:
            bare = text.lstrip()
            if not bare.startswith(BEGIN) and BEGIN.startswith(bare):
                self._held = text
                return "", ""
            text = bare.removeprefix(BEGIN) if bare.startswith(BEGIN) else text
            self._may_open = False
        if not self._begun:
            text = text.lstrip("\n")
        end = text.find(END)
        if end >= 0:
            self._state = _State.BEHIND
            return text[:end].rstrip("\n"), text[end + len(END) :]
        shown = text[: len(text) - partial_end(text, (END,))].rstrip("\n")
        self._held = text[len(shown) :]
        self._begun = self._begun or bool(shown)
        return shown, ""

    def finish(self) -> tuple[str, str]:
        """The rest, at the end of the sequence."""
        held, self._held = self._held, ""
        if self._state is _State.REASONING:
            return held.rstrip("\n") if self._begun else held.strip("\n"), ""
        return "", held
