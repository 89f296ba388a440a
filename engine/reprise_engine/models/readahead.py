"""Reads a model's weights from disk while torch and transformers are still being imported. Free of both."""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from pathlib import Path

from reprise_engine.errors import ModelError
from reprise_engine.models.files import find_weights


def read_ahead(model: str) -> None:
    """Asks the operating system, from a thread of its own, to have the weights of the local path `model` in memory
    soon. Never fails: what is wrong with the model is told when it is loaded."""
    if hasattr(os, "posix_fadvise") and Path(model).expanduser().exists():
        threading.Thread(target=_ask, args=(model,), name="read-ahead", daemon=True).start()


def _ask(model: str) -> None:
    with suppress(ModelError, OSError):
        files = find_weights(model)
        for path in files.weight_paths():
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_WILLNEED)
            finally:
                os.close(descriptor)
