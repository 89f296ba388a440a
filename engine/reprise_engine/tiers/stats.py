"""Figures of the disk store."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskStats:
    """`records`, `bytes` (on the disk) and `capacity` are the folder's, all identities; the counters this process's."""

    records: int = 0
    bytes: int = 0
    capacity: int = 0
    hits: int = 0
    misses: int = 0
    """Reads that were not served."""
    writes: int = 0
    evictions: int = 0
    """Records that this process removed to stay within the bound."""
    damaged: int = 0
    """Files that were no whole record; deleted."""
    failures: int = 0
    """Reads, writes and deletions that an error of the file system ended."""


@dataclass(slots=True)
class Counters:
    """Thread-safe."""

    now: DiskStats = field(default_factory=DiskStats)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(
        self,
        *,
        hits: int = 0,
        misses: int = 0,
        writes: int = 0,
        evictions: int = 0,
        damaged: int = 0,
        failures: int = 0,
    ) -> None:
        """Counts."""
        with self._lock:
            self.now = replace(
                self.now,
                hits=self.now.hits + hits,
                misses=self.now.misses + misses,
                writes=self.now.writes + writes,
                evictions=self.now.evictions + evictions,
                damaged=self.now.damaged + damaged,
                failures=self.now.failures + failures,
            )
