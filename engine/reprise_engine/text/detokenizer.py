"""Token ids to text, one step at a time, never showing half a character.

The two-offset method of Text Generation Inference and vLLM (`detokenize_incrementally`): decode a short window with and
without the new tokens, and emit the difference, since a token's text may depend on its left neighbour (a leading
space) and a character may be spread over several tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from reprise_engine.request import TokenId

_REPLACEMENT = "\ufffd"
_LEFT_CONTEXT = 6
"""Prompt tokens that the first window starts with; the text of a token depends on its left neighbours only."""
_LONGEST_WINDOW = 64
"""Tokens held for one character at most. A character has 4 bytes, so what is longer is no valid text at all."""


class Decoder(Protocol):
    def decode(self, token_ids: Sequence[TokenId], *, skip_special_tokens: bool = True) -> str: ...


class IncrementalDetokenizer:
    """Text of one growing sequence.

    Invariant: the window is `_ids[_start:]`, of which `_shown` characters of its decoded text have been given out.
    """

    def __init__(
        self, decoder: Decoder, prompt_token_ids: Sequence[TokenId] = (), *, skip_special_tokens: bool = True
    ) -> None:
        self._decoder = decoder
        self._skip = skip_special_tokens
        self._window: list[TokenId] = list(prompt_token_ids[-_LEFT_CONTEXT:])
        self._read = len(self._window)
        self._shown = len(self._decode(self._window))

    def _decode(self, token_ids: Sequence[TokenId]) -> str:
        return self._decoder.decode(token_ids, skip_special_tokens=self._skip)

    def push(self, token_id: TokenId) -> str:
        """The text that this token completes, perhaps none."""
        self._window.append(token_id)
        text = self._decode(self._window)
        if text.endswith(_REPLACEMENT) and len(self._window) - self._read < _LONGEST_WINDOW:
            complete = len(text.rstrip(_REPLACEMENT))
            new = text[self._shown : complete]
            self._shown = max(self._shown, complete)
            return new
        new = text[self._shown :]
        if not new:  # a special token that is skipped: keep the left neighbour that has a text
            self._shown = len(text)
            if len(self._window) - self._read >= _LONGEST_WINDOW:  # none of them has one: decoding must not grow
                del self._window[self._read :]
                self._shown = len(self._decode(self._window))
            return new
        # What was new becomes the left context of what comes next.
        self._window = self._window[self._read :]
        self._read = len(self._window)
        self._shown = len(self._decode(self._window))
        return new

    def finish(self) -> str:
        """The rest, at the end of the sequence: an incomplete character shows as U+FFFD."""
        text = self._decode(self._window)
        new = text[self._shown :]
        self._shown = len(text)
        return new
