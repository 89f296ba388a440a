"""Which records there are, as this process knows it: their sizes, their sum, and the order in which they were used."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable
from operator import itemgetter

from reprise_engine.tiers.record_files import RecordName, allocated_bytes


class Entry:
    """One record. A new one each time it is added, so that what was learnt of an old one is not done to a new one."""

    __slots__ = ("readable", "size", "used")

    def __init__(self, size: int, used: float) -> None:
        self.size = size
        """Bytes on the disk."""
        self.readable = True
        """False after an error of the disk: it counts, but is not offered."""
        self.used = used
        """The time of the file as far as known, in seconds: `touch` moves a record without telling the disk."""


class Books:
    """Thread-safe; every operation is O(1) but for `replace`. `in` takes no lock."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: OrderedDict[RecordName, Entry] = OrderedDict()
        self._bytes = 0
        self._touched: OrderedDict[RecordName, None] = OrderedDict()

    def __contains__(self, name: RecordName) -> bool:
        entry = self._entries.get(name)
        return entry is not None and entry.readable

    def knows(self, name: RecordName) -> bool:
        """Whether it is counted, readable or not."""
        return name in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def bytes(self) -> int:
        """Of all records, on the disk."""
        return self._bytes

    def get(self, name: RecordName) -> Entry | None:
        """The entry of a record; None where it is not known."""
        return self._entries.get(name)

    def replace(self, records: Iterable[tuple[float, RecordName, int]]) -> None:
        """Starts anew with (time, name, size) of what is there."""
        in_order = sorted(records, key=itemgetter(0))
        entries = OrderedDict((name, Entry(allocated_bytes(size), used)) for used, name, size in in_order)
        total = sum(entry.size for entry in entries.values())
        with self._lock:
            self._entries, self._bytes = entries, total
            self._touched.clear()

    def add(self, name: RecordName, size: int, *, used: float) -> None:
        """A record that was just written, as the most recently used one."""
        with self._lock:
            self._forget(name)
            entry = self._entries[name] = Entry(allocated_bytes(size), used)
            self._bytes += entry.size

    def remove(self, name: RecordName) -> None:
        """One that is not known is no error."""
        with self._lock:
            self._forget(name)

    def remove_if_same(self, name: RecordName, entry: Entry) -> None:
        """Removes `entry`, but nothing that was added under its name since."""
        with self._lock:
            if self._entries.get(name) is entry:
                self._forget(name)

    def touch(self, names: Iterable[RecordName]) -> None:
        """Makes them the most recently used ones, the last of them last; the disk is still to be told."""
        with self._lock:
            for name in names:
                if name in self._entries:
                    self._entries.move_to_end(name)
                    self._touched[name] = None
                    self._touched.move_to_end(name)

    def take_touched(self) -> list[tuple[RecordName, Entry]]:
        """What was touched since the last time, in that order."""
        with self._lock:
            touched = [(name, self._entries[name]) for name in self._touched if name in self._entries]
            self._touched.clear()
        return touched

    def defer(self, name: RecordName, *, used: float) -> None:
        """Another process has used it, at that time."""
        with self._lock:
            entry = self._entries.get(name)
            if entry is not None:
                self._entries.move_to_end(name)
                entry.used = used

    def oldest(self) -> tuple[RecordName, Entry] | None:
        """The least recently used record."""
        with self._lock:
            return next(iter(self._entries.items()), None)

    def _forget(self, name: RecordName) -> None:
        entry = self._entries.pop(name, None)
        if entry is not None:
            self._bytes -= entry.size
