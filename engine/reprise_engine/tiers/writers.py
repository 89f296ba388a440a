"""Temporary files, and whose they are."""

from __future__ import annotations

import fcntl
import itertools
import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from reprise_engine.tiers.folder import PrivateFolder, create_file

_WRITERS = "writers"
_NAME = re.compile(r"([0-9a-f]{16})\.(lock|[0-9]+\.tmp)")


class Writer:
    """This process among those that write: a locked file says that it lives, and its temporary files bear its name.

    A lock and not a process id: processes that share a volume need not share the numbering of processes. The kernel
    drops the lock with the process, however it ends.
    """

    def __init__(self, folder: PrivateFolder) -> None:
        self._folder = folder
        self._numbers = itertools.count()
        with folder.directory(_WRITERS, create=True) as within:
            while True:
                self.id = secrets.token_hex(8)
                fd = create_file(f"{self.id}.lock", within=within)
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:  # an opener took it for a dead one's in between, and removes it
                    os.close(fd)
                    continue
                except OSError:
                    os.close(fd)
                    os.unlink(f"{self.id}.lock", dir_fd=within)
                    raise
                if os.fstat(fd).st_nlink == 1:
                    break
                os.close(fd)
            _remove_left_over(within)
        self._fd = fd

    def temporary_name(self) -> str:
        """A name that nobody else uses, within `directory()`."""
        return f"{self.id}.{next(self._numbers)}.tmp"

    @contextmanager
    def directory(self) -> Iterator[int]:
        """A descriptor of the folder that temporary files are made in."""
        with self._folder.directory(_WRITERS) as within:
            yield within

    def close(self) -> None:
        """Gives up the lock."""
        with suppress(OSError), self.directory() as within:
            os.unlink(f"{self.id}.lock", dir_fd=within)
        os.close(self._fd)


def _remove_left_over(within: int) -> None:
    """Removes the files of writers that have ended: those whose lock can be had."""
    with os.scandir(within) as entries:
        matches = [match for entry in entries if (match := _NAME.fullmatch(entry.name))]
    for writer in {match[1] for match in matches}:
        try:
            fd = os.open(f"{writer}.lock", os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=within)
        except FileNotFoundError:
            fd = None
        except OSError:
            continue
        try:
            if fd is not None:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The lock goes last: where this is cut short, the next one goes on.
            for name in sorted(
                (match[0] for match in matches if match[1] == writer), key=lambda n: n.endswith(".lock")
            ):
                with suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=within)
        except BlockingIOError:
            pass  # it lives
        finally:
            if fd is not None:
                os.close(fd)
