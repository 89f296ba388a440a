"""Stop strings over streamed text: found wherever tokens and deltas are cut, and never shown by halves."""

from __future__ import annotations

from collections.abc import Sequence


def partial_end(text: str, words: Sequence[str]) -> int:
    """Length of the longest end of `text` that begins one of `words` without being all of it."""
    longest = 0
    for word in words:
        for length in range(min(len(word) - 1, len(text)), longest, -1):
            if text.endswith(word[:length]):
                longest = length
                break
    return longest


class StopStrings:
    """Watches the text of one sequence.

    Text that may be the start of a stop string is held back until it is decided. The match that is complete first
    wins, of two that end together the longer: so the result does not depend on how the text was cut into deltas.
    `include` gives out the stop string as well.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._stops = tuple(stops)
        self._include = include
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str, *, check: bool = True) -> str:
        """The text that may be shown now. After a match (see `matched`) the rest is dropped.

        With `check` False nothing ends in `text`: below min_tokens. A stop string that begins there may end later.
        """
        if self.matched is not None:
            return ""
        if not self._stops:
            return text
        before = len(self._held)
        text = self._held + text
        found = self._find(text, behind=before) if check else None
        if found is not None:
            at, stop = found
            self.matched = stop
            self._held = ""
            return text[: at + len(stop)] if self._include else text[:at]
        keep = partial_end(text, self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """What was held back, when the sequence ends otherwise."""
        held, self._held = self._held, ""
        return held

    def _find(self, text: str, *, behind: int) -> tuple[int, str] | None:
        """Those only that end behind the first `behind` characters: what ended there was not looked for."""
        best: tuple[int, str] | None = None
        for stop in self._stops:
            at = text.find(stop, max(0, behind + 1 - len(stop)))
            if at < 0:
                continue
            if best is None or (at + len(stop), at) < (best[0] + len(best[1]), best[0]):
                best = (at, stop)
        return best
