"""Memory that engines of one machine have been promised and not taken yet: they share it, and no cgroup parts it.

KV pages are taken from the machine when they are first written, so engines that start one after the other, or at once,
all see the same memory free. Each therefore writes down what it may grow to, in a file of a folder that is private to
this user, and holds a lock on the file for as long as it lives; the kernel drops the lock however the process ends, and
whoever comes next removes the file. Under a cgroup limit (a pod) nothing is shared, and nothing is written.
"""

from __future__ import annotations

import fcntl
import logging
import os
import stat
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4

import psutil

logger = logging.getLogger(__name__)


class MemoryPromises:
    """This engine's promise among those of the others. Without a usable folder it promises nothing, with a warning."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder or Path(tempfile.gettempdir()) / f"reprise-{os.getuid()}"
        self._file: int | None = None
        self._path = self._folder / f"engine-{uuid4().hex}"
        try:
            make_private(self._folder)
            with self._alone():
                self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            logger.warning(
                "Memory is not shared out among the engines of this machine: %s cannot be used: %s", self._folder, error
            )

    @contextmanager
    def sharing_out(self) -> Iterator[int]:
        """Gives the bytes that others were promised and have not taken, and keeps all from planning meanwhile."""
        if self._file is None:
            yield 0
            return
        with self._alone():
            yield self._outstanding()

    def promise(self, growth: int) -> None:
        """This process may take `growth` bytes more than it holds now. Within `sharing_out` only."""
        if self._file is not None:
            total = psutil.Process().memory_info().rss + growth
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, f"{os.getpid()} {total}\n".encode(), 0)

    def close(self) -> None:
        """Gives the promise up."""
        if self._file is not None:
            with suppress(OSError):
                self._path.unlink(missing_ok=True)
            os.close(self._file)
            self._file = None

    @contextmanager
    def _alone(self) -> Iterator[None]:
        lock = os.open(self._folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        finally:
            os.close(lock)

    def _outstanding(self) -> int:
        promised: Counter[int] = Counter()
        for path in self._folder.glob("engine-*"):
            if path != self._path and (promise := _read(path)) is not None:
                pid, total = promise
                promised[pid] += total
        outstanding = 0
        for pid, total in promised.items():
            with suppress(psutil.Error):
                outstanding += max(0, total - psutil.Process(pid).memory_info().rss)
        return outstanding


def _read(path: Path) -> tuple[int, int] | None:
    """(process, bytes) of a promise; None, and the file is removed, where its owner has ended."""
    try:
        file = os.open(path, os.O_RDWR)
    except FileNotFoundError:
        return None
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            with suppress(ValueError):  # made, but nothing promised yet
                pid, total = os.pread(file, 64, 0).split()
                return int(pid), int(total)
        else:
            path.unlink(missing_ok=True)
        return None
    finally:
        os.close(file)


def make_private(folder: Path) -> None:
    """Raises OSError where the folder is not, or cannot be, this user's alone: others could write promises there."""
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise PermissionError(f"it is not a folder that only user {os.getuid()} may use (mode 0700)")
