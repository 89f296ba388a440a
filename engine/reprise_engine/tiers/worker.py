"""The disk tier in the background: one thread that reads, one that writes, between slots of host memory and a store.

The engine's thread asks and is told; it never waits here. Both threads run at a lower priority: where all cores are
busy computing, a load gets a tenth of one, and all of it where nothing else runs.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from time import monotonic
from typing import Protocol, TypeVar

from reprise_engine.step import SlotId
from reprise_engine.tiers.disk_tier import DiskCounters, DiskDone
from reprise_engine.tiers.host import TierBlock
from reprise_engine.tiers.keys import BlockKey

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

_CLEAR_PATIENCE = 1.0
"""Seconds that a reset waits for the disk; all requests wait with it."""
_NICE = 10
"""Linux gives such a thread about a tenth of what one of normal priority gets."""


class StoreStats(Protocol):
    @property
    def records(self) -> int: ...
    @property
    def bytes(self) -> int: ...
    @property
    def capacity(self) -> int: ...
    @property
    def evictions(self) -> int: ...
    @property
    def damaged(self) -> int: ...
    @property
    def failures(self) -> int: ...


class Store(Protocol):
    """What is needed of `DiskStore`; its methods may be called from any thread."""

    def __contains__(self, key: BlockKey) -> bool: ...

    def touch(self, keys: Iterable[BlockKey]) -> None: ...

    def read(self, key: BlockKey, *, parent: BlockKey | None, tokens: bytes, into: memoryview) -> bool: ...

    def write(self, key: BlockKey, *, parent: BlockKey | None, tokens: bytes, payload: memoryview) -> bool: ...

    def forget(self) -> None: ...

    def clear(self) -> int: ...

    def stats(self) -> StoreStats: ...

    def hurry(self, seconds: float) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class _Job:
    slot: SlotId
    block: TierBlock


@dataclass(frozen=True, slots=True)
class _Clear:
    freed: Future[int | None]


_Jobs = queue.SimpleQueue[_Job | _Clear | None]


class DiskWorker:
    """A `DiskTier` over a store. `view` gives the bytes of a slot."""

    def __init__(self, store: Store, view: Callable[[SlotId], memoryview]) -> None:
        self._store = store
        self._view = view
        self._reads: _Jobs = queue.SimpleQueue()
        self._writes: _Jobs = queue.SimpleQueue()
        self._done: deque[DiskDone] = deque()
        self._told = threading.Event()
        self._broke_down = False
        self._threads = [
            threading.Thread(target=self._work, args=(self._reads, self._read), name="tier-reader", daemon=True),
            threading.Thread(target=self._work, args=(self._writes, self._write), name="tier-writer", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._store

    def touch(self, keys: Sequence[BlockKey]) -> None:
        self._store.touch(keys)

    def read(self, slot: SlotId, block: TierBlock) -> None:
        self._reads.put(_Job(slot, block))

    def write(self, slot: SlotId, block: TierBlock) -> None:
        self._writes.put(_Job(slot, block))

    def completed(self) -> list[DiskDone]:
        self._told.clear()
        done: list[DiskDone] = []
        while self._done:
            done.append(self._done.popleft())
        return done

    def wait(self, seconds: float) -> None:
        self._told.wait(seconds)

    def clear(self) -> int | None:
        """Nothing that was there is served from now on; how many records were deleted, where that took at most a
        second. Otherwise None, and it goes on."""
        with suppress(queue.Empty):
            while (job := self._writes.get_nowait()) is not None:
                if isinstance(job, _Clear):
                    job.freed.set_result(None)  # the one below does its work
                else:
                    self._tell(DiskDone(job.slot, is_read=False, good=False))
        self._store.forget()
        clear = _Clear(Future())
        self._writes.put(clear)
        try:
            return clear.freed.result(_CLEAR_PATIENCE)
        except TimeoutError:
            return None

    def counters(self) -> DiskCounters:
        stats = self._store.stats()
        return DiskCounters(
            records=stats.records,
            size=stats.bytes,
            capacity=stats.capacity,
            evictions=stats.evictions,
            failures=stats.damaged + stats.failures,
        )

    def hurry(self, seconds: float) -> None:
        self._store.hurry(seconds)

    def close(self, seconds: float) -> None:
        """What is not written in time is lost; a thread that hangs in the disk ends with the process."""
        deadline = monotonic() + seconds
        self._reads.put(None)
        self._writes.put(None)
        for thread in self._threads:
            thread.join(max(0.0, deadline - monotonic()))
        if any(thread.is_alive() for thread in self._threads):
            logger.warning("the prefix cache's disk did not end within %.1f s; what was not written is lost", seconds)
            return
        self._store.close()

    # --- in the threads

    def _work(self, jobs: _Jobs, do: Callable[[_Job], DiskDone]) -> None:
        with suppress(OSError):  # not allowed in some sandboxes
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        while (job := jobs.get()) is not None:
            if isinstance(job, _Clear):
                job.freed.set_result(self._guarded(self._store.clear))
            else:
                self._tell(do(job))

    def _read(self, job: _Job) -> DiskDone:
        block = job.block
        good = self._guarded(
            lambda: self._store.read(block.key, parent=block.parent, tokens=block.tokens, into=self._view(job.slot))
        )
        return DiskDone(job.slot, is_read=True, good=bool(good))

    def _write(self, job: _Job) -> DiskDone:
        block = job.block
        good = self._guarded(
            lambda: self._store.write(block.key, parent=block.parent, tokens=block.tokens, payload=self._view(job.slot))
        )
        return DiskDone(job.slot, is_read=False, good=bool(good))

    def _guarded(self, operation: Callable[[], _T]) -> _T | None:
        """A store does not raise; if it does all the same, requests must not wait for a thread that has died."""
        try:
            return operation()
        except Exception:
            if not self._broke_down:
                logger.exception("the prefix cache's disk tier failed; what it had is computed")
                self._broke_down = True
            return None

    def _tell(self, done: DiskDone) -> None:
        self._done.append(done)
        self._told.set()
