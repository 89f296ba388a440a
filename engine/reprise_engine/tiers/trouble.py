"""What the store does about errors of the file system: says so once, waits, and says when it is over."""

from __future__ import annotations

import errno
import logging
import threading
import time
from pathlib import Path
from typing import Literal

from reprise_engine.errors import ConfigError

logger = logging.getLogger(__name__)

RETRY_SECONDS = 10.0
WARNING_SECONDS = 60.0


class Trouble:
    """One store's. Thread-safe."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._retry_at: float | None = None
        self._warned_at: dict[str, float] = {}
        self.folder_lost = False
        """Whether the folder has to be opened anew."""

    def is_waiting(self) -> bool:
        """Whether a write should not even be tried."""
        retry_at = self._retry_at
        return retry_at is not None and time.monotonic() < retry_at

    def failed(self, what: str, error: OSError | ConfigError) -> None:
        """Something could not be done. Warned of when it begins."""
        with self._lock:
            begins = self._retry_at is None
            self._retry_at = time.monotonic() + RETRY_SECONDS
            if isinstance(error, OSError) and error.errno in (errno.ENOENT, errno.ESTALE):
                self.folder_lost = True
        if begins:
            logger.warning(
                "The disk cache in %s cannot %s: %s Serving goes on without; it is tried again every %g s.",
                self._folder,
                what,
                _explained(error),
                RETRY_SECONDS,
            )

    def written(self) -> None:
        """A write went well."""
        with self._lock:
            over, self._retry_at = self._retry_at is not None, None
        if over:
            logger.info("The disk cache in %s is written to again.", self._folder)

    def damaged(self, path: Path, *, count: int) -> None:
        """A file was no whole record. Warned of at most once a minute."""
        if not self._is_due("damaged"):
            return
        logger.warning(
            "A record of the disk cache was damaged and is deleted, not served: %s (%d so far). If there was no power "
            "loss, check the disk behind --prefix-cache-dir.",
            path,
            count,
        )

    def obstructed(self, path: Path) -> None:
        """Something that is no record is in a record's place. Warned of at most once a minute."""
        if self._is_due("obstructed"):
            logger.warning(
                "The disk cache cannot write %s: something else is there, or in the place of its folders. This record "
                "is left out; remove what is there.",
                path,
            )

    def _is_due(self, warning: Literal["damaged", "obstructed"]) -> bool:
        now = time.monotonic()
        with self._lock:
            warned_at = self._warned_at.get(warning)
            if warned_at is not None and now - warned_at < WARNING_SECONDS:
                return False
            self._warned_at[warning] = now
            return True


def _explained(error: OSError | ConfigError) -> str:
    if isinstance(error, ConfigError):
        return str(error)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"{error.strerror}. Free space on that disk, or lower --prefix-cache-disk-size."
    return f"{error.strerror}. Check the volume behind --prefix-cache-dir."
