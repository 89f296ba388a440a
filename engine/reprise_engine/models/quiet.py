"""Loading without the progress bars of transformers: on stderr they would interleave with a server's log."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from typing import TextIO

from transformers.utils import logging as transformers_logging


@contextmanager
def without_progress_bars() -> Iterator[None]:
    was_enabled = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        # The bar of a GGUF file does not ask whether bars are wanted.
        with redirect_stderr(_WithoutBars(sys.stderr)):
            yield
    finally:
        if was_enabled:
            transformers_logging.enable_progress_bar()  # type: ignore[no-untyped-call]


class _WithoutBars(io.TextIOBase):
    """A stream without bars: what goes back to the beginning of its line, and the line's end that closes a bar."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._in_bar = False

    def write(self, text: str) -> int:
        if text.startswith("\r") or (self._in_bar and text in ("", "\n")):
            self._in_bar = text != "\n"
            return len(text)
        return self._stream.write(text)

    def flush(self) -> None:
        self._stream.flush()

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()
