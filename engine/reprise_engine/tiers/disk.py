"""The disk tier: KV of blocks in files, shared by all processes that are given the same folder.

One file a record, not one big file: a record appears by rename, whole or not at all; whoever reads it keeps it though
another evicts it; deleting it gives the disk its space back. A block is 0.2 to 8 MB, so a file costs next to nothing
beside it, and the file system does the allocation that one big file would have to do itself, across processes.

Who knows what: each process keeps the names, sizes and order of use of all records in memory (`books.py`) and learns of
the others' changes from the journal (`journal.py`): before each of its own, and once a second, in a thread.
So `in` does no I/O, and may be wrong for a second; `read` has the last word.

The bound holds for the folder, all identities together: before a record is put in place, least recently used ones go
until the sum, with it, is within `capacity_bytes` of who writes. Processes with different bounds each hold their own,
so the sum is never above the largest. Beyond it there is only what is being written: one temporary file a writing
thread, and a journal of 1 MiB. The order of use is exact within a process; others see it in the times of the files,
which the store's thread renews, at most once a minute a record.

Threads: `_commit` serialises the changes of this process and is held while waiting for the lock of the folder. The
books have a lock of their own, never held during I/O. Reads take neither but for an instant.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from reprise_engine.errors import ConfigError
from reprise_engine.tiers.books import Books, Entry
from reprise_engine.tiers.folder import create_file
from reprise_engine.tiers.identity import CacheIdentity
from reprise_engine.tiers.journal import Change
from reprise_engine.tiers.keys import BLOCK_KEY_BYTES, BlockKey
from reprise_engine.tiers.record_files import (
    RecordName,
    allocated_bytes,
    delete_records,
    has_place,
    open_record,
    record_mtime,
    record_path,
    scan_records,
    set_record_mtime,
)
from reprise_engine.tiers.records import Found, read_record, record_head, record_size, smallest_record, write_record
from reprise_engine.tiers.session import open_session
from reprise_engine.tiers.stats import Counters, DiskStats
from reprise_engine.tiers.trouble import Trouble

WATCH_SECONDS = 1.0
TOUCH_SECONDS = 60.0
_TIME_TOLERANCE = 1.0
_CLEAR_BATCH = 1000


class DiskStore:
    """Records of KV, each of `payload_bytes`, of one identity. Thread-safe.

    Raises ConfigError, naming --prefix-cache-dir or --prefix-cache-disk-size, where one cannot be used.
    """

    def __init__(self, folder: Path, *, capacity_bytes: int, identity: CacheIdentity, payload_bytes: int) -> None:
        self._smallest = smallest_record(payload_bytes)
        least = allocated_bytes(self._smallest)
        if capacity_bytes < least:
            raise ConfigError(
                f"--prefix-cache-disk-size is {capacity_bytes} bytes, but the KV of one block takes {least} bytes on "
                "the disk. Raise --prefix-cache-disk-size, or leave --prefix-cache-dir out."
            )
        self._given = folder
        self._capacity = capacity_bytes
        self._payload_bytes = payload_bytes
        self._identity = identity.digest()
        self._books = Books()
        self._counters = Counters()
        self._trouble = Trouble(folder)
        self._commit = threading.Lock()
        self._closed = threading.Event()
        self._forgotten = False
        self._session, records = open_session(folder)
        self._start(records)
        self._watch = threading.Thread(target=self._watch_others, name="reprise-disk-store", daemon=True)
        self._watch.start()

    # What is there

    def __contains__(self, key: BlockKey) -> bool:
        """Whether the record is there, as far as known: O(1), no I/O, no lock."""
        return self._name(key) in self._books and not (self._forgotten or self._closed.is_set())

    def touch(self, keys: Iterable[BlockKey]) -> None:
        """Makes these the most recently used records, the last key last: O(1) a key, no I/O.

        A read does so for its own record. Whoever uses a whole chain touches it from its end to its root afterwards,
        so that what is evicted first is the end, without which the rest is still of use.
        """
        self._books.touch(map(self._name, keys))

    def stats(self) -> DiskStats:
        """The figures of this moment."""
        return replace(self._counters.now, records=len(self._books), bytes=self._books.bytes, capacity=self._capacity)

    # Reading

    def read(self, key: BlockKey, *, parent: BlockKey | None, tokens: bytes, into: memoryview) -> bool:
        """Fills `into` and says so, where the record is whole and of exactly this key, parent and tokens.

        Otherwise False: `into` may have been written to, and the record is forgotten (and deleted, if it is there).
        """
        if into.nbytes != self._payload_bytes:
            raise ValueError(f"into has {into.nbytes} bytes, a payload {self._payload_bytes}")
        if self._closed.is_set():
            return False
        served = not self._forgotten and self._read(key, self._head(key, parent, tokens), into.cast("B"))
        if served:
            self._counters.add(hits=1)
        else:
            self._counters.add(misses=1)
        return served

    def _read(self, key: BlockKey, head: bytes, into: memoryview) -> bool:
        name = self._name(key)
        entry = self._books.get(name)
        try:
            fd = open_record(self._session.folder, name)
        except FileNotFoundError:
            if entry is not None:
                self._books.remove_if_same(name, entry)
            return False
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENOTDIR):  # a link where a record should be
                self._discard(name, damaged=True)
            else:
                self._unreadable(entry, error)
            return False
        try:
            found = read_record(fd, head, into)
            if found is Found.WHOLE:
                self._books.touch((name,))
                return True
        except OSError as error:
            self._unreadable(entry, error)
            return False
        finally:
            os.close(fd)
        self._discard(name, damaged=found is Found.DAMAGED)
        return False

    def _unreadable(self, entry: Entry | None, error: OSError) -> None:
        """It may be whole, so it is not deleted: it counts until it is evicted or written again."""
        if entry is not None:
            entry.readable = False
        self._failed("read", error)

    def _discard(self, name: RecordName, *, damaged: bool) -> None:
        if damaged:
            self._counters.add(damaged=1)
            self._trouble.damaged(self._path(name), count=self._counters.now.damaged)
        try:
            with self._exclusive():
                self._remove([name])
        except OSError as error:
            self._failed("delete", error)

    # Writing

    def write(self, key: BlockKey, *, parent: BlockKey | None, tokens: bytes, payload: memoryview) -> bool:
        """Whether the record is there now. False where it could not be written, which is warned of once."""
        if payload.nbytes != self._payload_bytes:
            raise ValueError(f"payload has {payload.nbytes} bytes, not {self._payload_bytes}")
        name = self._name(key)
        if self._closed.is_set() or self._trouble.is_waiting():
            return False
        try:
            if self._trouble.folder_lost:
                self._reopen()
            if self._forgotten:
                self.clear()
                if self._forgotten:
                    return False
            if name in self._books and record_mtime(self._session.folder, name) is not None:
                self._books.touch((name,))
                return True
            head = self._head(key, parent, tokens)
            if allocated_bytes(record_size(head, self._payload_bytes)) > self._capacity:
                return False  # the tokens of one block, above a bound that holds no more than its KV
            if not has_place(self._session.folder, name):
                self._counters.add(failures=1)
                self._trouble.obstructed(self._path(name))
                return False
            self._put(name, head, payload.cast("B"))
        except (OSError, ConfigError) as error:
            self._failed("write", error)
            return False
        self._trouble.written()
        return True

    def _put(self, name: RecordName, head: bytes, payload: memoryview) -> None:
        writer = self._session.writer
        temporary = writer.temporary_name()
        with writer.directory() as within:
            fd = create_file(temporary, within=within)
            try:
                try:
                    write_record(fd, head, payload)
                    used = os.fstat(fd).st_mtime
                finally:
                    os.close(fd)
                with self._exclusive():
                    self._install(name, record_size(head, payload.nbytes), temporary, within, used)
            except BaseException:
                with suppress(OSError):
                    os.unlink(temporary, dir_fd=within)
                raise
        self._counters.add(writes=1)

    def _install(self, name: RecordName, size: int, temporary: str, within: int, used: float) -> None:
        """Makes room, tells the others, and puts the file in place. The folder is locked."""
        if name in self._books and record_mtime(self._session.folder, name) is not None:
            os.unlink(temporary, dir_fd=within)  # another thread or process was faster
            self._books.touch((name,))
            return
        if self._books.knows(name):
            self._remove([name])  # gone or unreadable
        self._make_room(allocated_bytes(size))
        self._session.journal.append([Change(name, size)])
        identity, fan_out, file = record_path(name)
        try:
            with self._session.folder.directory(identity, fan_out, create=True) as target:
                os.rename(temporary, file, src_dir_fd=within, dst_dir_fd=target)
        except OSError:
            with suppress(OSError):
                self._remove([name])
            raise
        self._books.add(name, size, used=used)

    def _make_room(self, size: int) -> None:
        """Removes least recently used records until `size` more bytes are within the bound. The folder is locked."""
        victims: list[RecordName] = []
        try:
            while self._books.bytes + size > self._capacity and (oldest := self._books.oldest()) is not None:
                name, entry = oldest
                mtime = record_mtime(self._session.folder, name)
                if mtime is not None and mtime > entry.used + _TIME_TOLERANCE:  # another process has used it
                    self._books.defer(name, used=mtime)
                    continue
                delete_records(self._session.folder, [name])
                self._books.remove(name)
                victims.append(name)
        finally:
            if victims:
                self._counters.add(evictions=len(victims))
                self._session.journal.append([Change(name, None) for name in victims])

    def _remove(self, names: Sequence[RecordName]) -> None:
        """The folder is locked."""
        delete_records(self._session.folder, names)
        for name in names:
            self._books.remove(name)
        self._session.journal.append([Change(name, None) for name in names])

    def forget(self) -> None:
        """Serves none of the records that are there, until clear() has deleted them."""
        self._forgotten = True

    def clear(self) -> int:
        """Deletes all records of this identity; how many. What cannot be deleted is counted as a failure, and not
        served: the next write tries again."""
        self._forgotten = True
        freed = 0
        try:
            with self._exclusive():
                names = [name for _, name, _ in scan_records(self._session.folder, self._identity, tidy=True)]
            for start in range(0, len(names), _CLEAR_BATCH):  # others get their turn in between
                batch = names[start : start + _CLEAR_BATCH]
                with self._exclusive():
                    self._remove(batch)
                freed += len(batch)
            self._forgotten = False
        except OSError as error:
            self._failed("delete", error)
        return freed

    # The folder, and the others in it

    def _start(self, records: list[tuple[float, RecordName, int]]) -> None:
        """Takes over what an earlier process left: too much of it, or cut short, goes at once."""
        self._books.replace(records)
        torn = [n for _, n, size in records if n.startswith(self._identity) and size < self._smallest]
        try:
            with self._exclusive():
                if torn:
                    self._counters.add(damaged=len(torn))
                    self._remove(torn)
                self._make_room(0)
        except OSError as error:
            self._failed("delete", error)

    def _reopen(self) -> None:
        """Starts anew after the folder was removed or replaced. Raises ConfigError."""
        with self._commit:
            if not self._closed.is_set():
                session, records = open_session(self._given)
                self._session.close()
                self._session = session
                self._books.replace(records)
                self._trouble.folder_lost = False

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        """Holds the folder, with the books up to date. Raises OSError."""
        with self._commit:
            if self._closed.is_set():
                raise OSError(errno.ESHUTDOWN, "the store is closed")
            with self._session.journal.locked() as changes:
                self._apply(changes)
                yield

    def _apply(self, changes: Sequence[Change] | None) -> None:
        if changes is None:
            self._books.replace(scan_records(self._session.folder, tidy=True))
            return
        now = time.time()
        for change in changes:
            if change.size is None:
                self._books.remove(change.name)
            else:
                self._books.add(change.name, change.size, used=now)

    def _watch_others(self) -> None:
        while not self._closed.wait(WATCH_SECONDS):
            with suppress(OSError):  # whoever writes next tells of it
                if self._has_news():
                    with self._exclusive():
                        pass
                self._tell_of_use()

    def _tell_of_use(self) -> None:
        """Renews the times of files, in the order in which the records were used; not by more than is needed."""
        now = time.time()
        for count, (name, entry) in enumerate(self._books.take_touched()):
            if now - entry.used >= TOUCH_SECONDS:
                entry.used = now + count * 1e-6
                with suppress(OSError):  # it is gone, or the folder became read-only: served all the same
                    set_record_mtime(self._session.folder, name, entry.used)

    def _has_news(self) -> bool:
        with self._commit:
            return not self._closed.is_set() and self._session.journal.has_news()

    def hurry(self, seconds: float) -> None:
        """The process ends: from now on the lock of the folder is waited for at most so long, all in all."""
        self._session.journal.hurry(seconds)

    def close(self) -> None:
        """Waits for the change under way; later calls find nothing and write nothing."""
        if self._closed.is_set():
            return
        self._closed.set()
        self._watch.join()
        self._tell_of_use()
        with self._commit:
            self._session.close()

    # Small things

    def _path(self, name: RecordName) -> Path:
        return self._session.folder.path.joinpath(*record_path(name))

    def _name(self, key: BlockKey) -> RecordName:
        return RecordName(self._identity + key)

    def _head(self, key: BlockKey, parent: BlockKey | None, tokens: bytes) -> bytes:
        for part in (key, parent):
            if part is not None and len(part) != BLOCK_KEY_BYTES:
                raise ValueError(f"a block key has {len(part)} bytes, not {BLOCK_KEY_BYTES}")
        return record_head(
            identity=self._identity, key=key, parent=parent, tokens=tokens, payload_bytes=self._payload_bytes
        )

    def _failed(self, what: str, error: OSError | ConfigError) -> None:
        if not self._closed.is_set():
            self._counters.add(failures=1)
            self._trouble.failed(what, error)
