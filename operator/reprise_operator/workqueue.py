"""Keyed work queue: which InferenceService is reconciled next, and when.

`Schedule` is the pure part, a state machine over times that are passed in; `WorkQueue` runs it with asyncio workers.
The guarantees, each of them tested on `Schedule` alone:

- a key is handed to one worker at a time; a wake-up during its processing is kept and served afterwards;
- wake-ups coalesce: however many arrive, a key that is due is processed once, at the earliest time asked for;
- a failed key comes back after an exponential back-off with jitter, a success forgets its failures;
- a wake-up that reports news ends a pending back-off early, but never makes the failure forgotten.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
import random
import time
from collections.abc import Awaitable, Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Generic, TypeVar

logger = logging.getLogger(__name__)

K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True, slots=True, kw_only=True)
class Backoff:
    """Exponential back-off in seconds; each delay is drawn from [delay × (1 − jitter), delay]."""

    base: float = 0.5
    factor: float = 2.0
    cap: float = 120.0
    jitter: float = 0.25

    def delay(self, failures: int, random_unit: float) -> float:
        """The pause after the n-th failure in a row (n ≥ 1). random_unit is in [0, 1)."""
        # The exponent is bounded so that a key which fails for days does not overflow a float.
        full = min(self.cap, self.base * self.factor ** min(failures - 1, 64))
        return full * (1.0 - self.jitter * random_unit)


class Schedule(Generic[K]):
    """When each key is due. Pure: no clock, no tasks; every method that needs the time is given it, in seconds."""

    def __init__(self, *, backoff: Backoff | None = None, random_unit: Callable[[], float] = random.random) -> None:
        self._backoff = backoff or Backoff()
        self._random_unit = random_unit
        self._due: dict[K, float] = {}
        # Heap entries are lazily deleted: one is valid while it equals _due[key].
        self._heap: list[tuple[float, int, K]] = []
        self._sequence = 0
        self._active: set[K] = set()
        self._failures: dict[K, int] = {}

    def __len__(self) -> int:
        """Keys that wait, due or not."""
        return len(self._due)

    @property
    def active(self) -> frozenset[K]:
        return frozenset(self._active)

    def due(self, now: float) -> int:
        """Keys that could be processed now if there were workers enough."""
        return sum(1 for key, at in self._due.items() if at <= now and key not in self._active)

    def failures(self, key: K) -> int:
        return self._failures.get(key, 0)

    def add(self, key: K, *, at: float) -> None:
        """Asks for `key` at time `at`; an earlier wish stands, a later one is moved forward."""
        present = self._due.get(key)
        if present is not None and present <= at:
            return
        self._due[key] = at
        if key not in self._active:
            self._push(key, at)

    def pop(self, now: float) -> K | None:
        """The next key that is due, now active until `finish`; None when there is none."""
        self._drop_stale()
        if not self._heap or self._heap[0][0] > now:
            return None
        _, _, key = heapq.heappop(self._heap)
        del self._due[key]
        self._active.add(key)
        return key

    def next_due(self) -> float | None:
        """When the earliest key that is not active becomes due."""
        self._drop_stale()
        return self._heap[0][0] if self._heap else None

    def finish(self, key: K, *, now: float, requeue_after: float | None, failed: bool = False) -> None:
        """Ends the processing of `key`. With `failed` the back-off decides when it returns, and requeue_after, if
        given, is the least delay (an API server that says Retry-After)."""
        self._active.discard(key)
        if failed:
            count = self._failures.get(key, 0) + 1
            self._failures[key] = count
            # News that came during the failed pass may be the cure: the shortest pause, but a pause, or a pass that
            # wakes itself and fails would spin.
            woken = self._due.pop(key, None) is not None
            delay = self._backoff.delay(1 if woken else count, self._random_unit())
            self.add(key, at=now + max(delay, requeue_after or 0.0))
            return
        self._failures.pop(key, None)
        if key in self._due:
            self._push(key, self._due[key])
        if requeue_after is not None:
            self.add(key, at=now + requeue_after)

    def _push(self, key: K, at: float) -> None:
        self._sequence += 1
        heapq.heappush(self._heap, (at, self._sequence, key))

    def _drop_stale(self) -> None:
        while self._heap:
            at, _, key = self._heap[0]
            if self._due.get(key) == at and key not in self._active:
                return
            heapq.heappop(self._heap)


class Retry(Exception):
    """Raised by a handler: try this key again with back-off, after `after` seconds at the earliest."""

    def __init__(self, message: str, *, after: float | None = None) -> None:
        super().__init__(message)
        self.after = after


Handler = Callable[[K], Awaitable[float | None]]
"""Processes one key; returns after how many seconds to come back without any news, or None."""


@dataclass(kw_only=True)
class WorkQueue(Generic[K]):
    """Runs `handler` over the keys with a bounded number of workers. An exception of the handler backs the key off and
    never ends a worker; a handler that takes longer than `timeout` seconds is cancelled and counts as failed."""

    handler: Handler[K]
    workers: int = 4
    timeout: float = 120.0
    clock: Callable[[], float] = time.monotonic
    schedule: Schedule[K] = field(default_factory=Schedule)
    on_error: Callable[[K, BaseException], None] | None = None
    context: Callable[[K], AbstractContextManager[object]] = nullcontext
    """Entered around the processing of a key, and what is logged of its outcome."""
    last_progress: float = field(init=False)
    """By `clock`: when a worker last took or finished a key, or found nothing to do."""

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise ValueError(f"workers is {self.workers}; at least 1 is needed")
        self.last_progress = self.clock()
        self._changed = asyncio.Event()

    def add(self, key: K, *, after: float = 0.0) -> None:
        """Wakes `key` in `after` seconds. Call it from the event loop's own thread."""
        self.schedule.add(key, at=self.clock() + after)
        self._changed.set()

    def depth(self) -> int:
        return self.schedule.due(self.clock())

    async def run(self) -> None:
        """Works until cancelled. What is being processed then is cancelled with it: reconciling is safe to repeat."""
        running: set[asyncio.Task[None]] = set()
        try:
            while True:
                while len(running) < self.workers:
                    key = self.schedule.pop(self.clock())
                    if key is None:
                        break
                    self.last_progress = self.clock()
                    running.add(asyncio.create_task(self._process(key), name=f"reconcile {key}"))
                running = await self._wait(running)
                self.last_progress = self.clock()
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def _wait(self, running: set[asyncio.Task[None]]) -> set[asyncio.Task[None]]:
        """Until a worker is free, a key is added, or the next one is due. Returns the tasks that still run."""
        pause: float | None = None
        if len(running) < self.workers:
            due = self.schedule.next_due()
            pause = None if due is None else max(0.0, due - self.clock())
        news = asyncio.create_task(self._changed.wait())
        try:
            await asyncio.wait({news, *running}, timeout=pause, return_when=asyncio.FIRST_COMPLETED)
        finally:
            news.cancel()
        self._changed.clear()
        return {task for task in running if not task.done()}

    async def _process(self, key: K) -> None:
        with self.context(key):
            await self._process_once(key)

    async def _process_once(self, key: K) -> None:
        try:
            async with asyncio.timeout(self.timeout):
                requeue_after = await self.handler(key)
        except asyncio.CancelledError:
            self.schedule.finish(key, now=self.clock(), requeue_after=0.0)
            raise
        except Retry as retry:
            self.schedule.finish(key, now=self.clock(), requeue_after=retry.after, failed=True)
            logger.warning("%s: %s; try %d follows", key, retry, self.schedule.failures(key) + 1)
            self._report(key, retry)
        except Exception as error:  # the boundary: no fault of one key may end the worker
            self.schedule.finish(key, now=self.clock(), requeue_after=None, failed=True)
            logger.error("%s: reconcile failed", key, exc_info=error)
            self._report(key, error)
        else:
            self.schedule.finish(key, now=self.clock(), requeue_after=requeue_after)
        finally:
            self._changed.set()

    def _report(self, key: K, error: BaseException) -> None:
        if self.on_error is not None:
            self.on_error(key, error)
