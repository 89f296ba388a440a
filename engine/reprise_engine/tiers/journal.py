"""What the processes that share a folder tell each other: which records were added and removed, in order.

A file of entries of 64 bytes, only ever appended to, and at the same time the lock of the folder: whoever changes the
set of records holds it exclusively (flock), and has read all entries before its own. So every process knows the set,
its total size and thereby the bound exactly, at a cost that follows the changes and not the number of records.

An addition is written before the file appears, a removal after it has gone. A process that is killed in between leaves
an entry without a file: the total is too high until somebody meets it, never too low.

At ROTATE_BYTES a new, empty journal replaces the file. Its header counts on, so that a reader that has the old one to
its end goes on without a gap; one that missed more than that is told to look at the folder itself.
"""

from __future__ import annotations

import fcntl
import math
import os
import secrets
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import xxhash

from reprise_engine.tiers.folder import PrivateFolder, create_file
from reprise_engine.tiers.record_files import RecordName
from reprise_engine.tiers.writers import Writer

JOURNAL_NAME = "journal"
ROTATE_BYTES = 1 << 20
LOCK_TIMEOUT_SECONDS = 10.0
_HEADER = struct.Struct("<16s40xQ")
_MAGIC = b"reprise kv log 1"
_ENTRY = struct.Struct("<I?3xQ48s")
_ENTRY_BYTES = _ENTRY.size
assert _HEADER.size == _ENTRY_BYTES == 64


@dataclass(frozen=True, slots=True)
class Change:
    """A record was added, with its size in bytes, or removed (`size` is None)."""

    name: RecordName
    size: int | None


class Journal:
    """One process's place in the journal. Not thread-safe. Raises OSError throughout."""

    def __init__(self, folder: PrivateFolder, writer: Writer, *, rotate_bytes: int = ROTATE_BYTES) -> None:
        self._folder = folder
        self._writer = writer
        self._rotate_bytes = rotate_bytes
        self._give_up_at = math.inf
        self._fd = self._open()
        self._sequence: int | None = None
        self._offset = 0
        try:
            # Whoever looks at the folder after this sees all that the entries up to here stand for.
            with self.locked() as _:
                pass
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Gives the file back."""
        os.close(self._fd)

    def hurry(self, seconds: float) -> None:
        """From now on the lock is waited for at most so long, all in all. May be called from any thread."""
        self._give_up_at = time.monotonic() + seconds

    @contextmanager
    def locked(self) -> Iterator[list[Change] | None]:
        """Holds the folder; yields what others changed since the last time, None where that cannot be told.

        Raises TimeoutError where another process holds it too long, FileNotFoundError where the journal has gone.
        """
        changes: list[Change] | None = []
        while True:
            self._lock()
            try:
                changes = _joined(changes, self._read())
                successor = self._successor()
            except BaseException:
                fcntl.flock(self._fd, fcntl.LOCK_UN)
                raise
            if successor is None:
                break
            os.close(self._fd)
            self._fd, self._offset = successor, 0
        try:
            yield changes
            self._rotate_if_long()
        finally:
            fcntl.flock(self._fd, fcntl.LOCK_UN)

    def has_news(self) -> bool:
        """Whether `locked` would yield changes. Takes no lock."""
        return os.fstat(self._fd).st_size > self._offset or not self._is_current()

    def append(self, changes: Sequence[Change]) -> None:
        """Tells the others. Only while the lock is held."""
        data = b"".join(_encode(change) for change in changes)
        try:
            written = os.pwrite(self._fd, data, self._offset)
            if written < len(data):
                os.pwrite(self._fd, data[written:], self._offset + written)  # raises the cause
        except OSError:
            with suppress(OSError):
                os.ftruncate(self._fd, self._offset)
            raise
        self._offset += len(data)

    def _open(self) -> int:
        while True:
            with suppress(FileNotFoundError):
                return os.open(JOURNAL_NAME, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self._folder.fd)
            with suppress(FileExistsError):
                return create_file(JOURNAL_NAME, within=self._folder.fd)

    def _lock(self) -> None:
        begun = time.monotonic()
        pause = 0.0005
        while True:
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                now = time.monotonic()
                if now > min(begun + LOCK_TIMEOUT_SECONDS, self._give_up_at):
                    raise TimeoutError(None, f"another process has held its lock for {now - begun:.1f} s") from None
            time.sleep(pause)
            pause = min(2 * pause, 0.01)

    def _is_current(self) -> bool:
        return os.path.samestat(
            os.fstat(self._fd), os.stat(JOURNAL_NAME, dir_fd=self._folder.fd, follow_symlinks=False)
        )

    def _successor(self) -> int | None:
        return (
            None
            if self._is_current()
            else os.open(JOURNAL_NAME, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self._folder.fd)
        )

    def _read(self) -> list[Change] | None:
        """The changes from the present offset to the end; None where some were missed."""
        missed = self._read_header()
        size = os.fstat(self._fd).st_size
        if size < self._offset:
            missed, self._offset = True, _ENTRY_BYTES
        data = os.pread(self._fd, size - self._offset, self._offset)
        whole = len(data) // _ENTRY_BYTES * _ENTRY_BYTES
        self._offset += whole
        if whole < len(data):  # cut short by a kill or a full disk
            os.ftruncate(self._fd, self._offset)
        if missed:
            return None
        changes = [_decode(data[at : at + _ENTRY_BYTES]) for at in range(0, whole, _ENTRY_BYTES)]
        intact = [change for change in changes if change is not None]
        return intact if len(intact) == len(changes) else None

    def _read_header(self) -> bool:
        """Makes a header where there is no good one. Whether entries were missed: this file does not follow the last.

        Read every time: what was damaged may have been started anew, and be longer by now than it was.
        """
        header = os.pread(self._fd, _ENTRY_BYTES, 0)
        if len(header) == _ENTRY_BYTES and header.startswith(_MAGIC):
            sequence = int(_HEADER.unpack(header)[1])
        else:
            sequence = secrets.randbits(63)
            _write_header(self._fd, sequence)
        if self._offset and sequence == self._sequence:
            return False
        missed = self._offset != 0 or self._sequence is None or sequence != self._sequence + 1
        self._sequence, self._offset = sequence, _ENTRY_BYTES
        return missed

    def _rotate_if_long(self) -> None:
        if self._offset < self._rotate_bytes:
            return
        assert self._sequence is not None
        temporary = self._writer.temporary_name()
        # Where there is no room for a new file, the old one grows on until there is.
        with suppress(OSError), self._writer.directory() as within:
            fd = create_file(temporary, within=within)
            try:
                _write_header(fd, self._sequence + 1)
                os.rename(temporary, JOURNAL_NAME, src_dir_fd=within, dst_dir_fd=self._folder.fd)
            except OSError:
                with suppress(OSError):
                    os.unlink(temporary, dir_fd=within)
            finally:
                os.close(fd)


def _write_header(fd: int, sequence: int) -> None:
    os.ftruncate(fd, 0)
    os.pwrite(fd, _HEADER.pack(_MAGIC, sequence), 0)


def _joined(before: list[Change] | None, after: list[Change] | None) -> list[Change] | None:
    return None if before is None or after is None else before + after


def _encode(change: Change) -> bytes:
    body = _ENTRY.pack(0, change.size is not None, change.size or 0, change.name)[4:]
    return xxhash.xxh32_digest(body)[::-1] + body


def _decode(data: bytes) -> Change | None:
    """None for what is no entry."""
    if xxhash.xxh32_digest(data[4:])[::-1] != data[:4]:
        return None
    _, added, size, name = _ENTRY.unpack(data)
    return Change(RecordName(name), size if added else None)
