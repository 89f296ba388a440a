"""For a consumer that came late, or missed something: the last batches, and what the older ones amount to."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from reprise_engine.kv.events import CachedBlocks, KVEvent


@dataclass(frozen=True, slots=True)
class PublishedBatch:
    sequence: int
    timestamp: float
    """Seconds since 1970."""
    events: Sequence[KVEvent]


class ReplayLog:
    """The last `capacity` batches. Those before them are summed up, so a replay always leads to the exact set."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._batches: deque[PublishedBatch] = deque()
        self._older = CachedBlocks()
        self._last_older: PublishedBatch | None = None

    def append(self, batch: PublishedBatch) -> None:
        self._batches.append(batch)
        while len(self._batches) > self._capacity:
            self._last_older = self._batches.popleft()
            self._older.apply(self._last_older.events)

    def since(self, sequence: int) -> Iterator[PublishedBatch]:
        """The batches from `sequence` on.

        Where some of them are too old, the first is a summary under the number of the last of these: it clears
        everything, then stores what was there.
        """
        older = self._last_older
        if older is not None and sequence <= older.sequence:
            yield PublishedBatch(older.sequence, older.timestamp, self._older.events())
        for batch in self._batches:
            if batch.sequence >= sequence:
                yield batch
