"""How long an event loop is kept from running: on the clock, and in processor time of its own thread."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(slots=True)
class LoopProbe:
    """The longest time between two ticks of the loop, in seconds.

    `busy` counts only what the loop's own thread computed: other processes do not matter to it. `blocked` is on the
    clock: it also counts what another thread did while it held the interpreter's lock. `used` is all that the loop's
    thread computed, the sum of which `busy` is the greatest part.
    """

    busy: float = 0.0
    used: float = 0.0
    blocked: float = 0.0
    ticks: int = 0
    stopping: bool = False

    async def run(self) -> None:
        clock, thread = time.perf_counter(), time.thread_time()
        while not self.stopping:
            await asyncio.sleep(0.001)
            now, used = time.perf_counter(), time.thread_time()
            self.blocked = max(self.blocked, now - clock)
            self.busy = max(self.busy, used - thread)
            self.used += used - thread
            self.ticks += 1
            clock, thread = now, used


@contextmanager
def probing(loop: asyncio.AbstractEventLoop) -> Iterator[LoopProbe]:
    """Probes a loop that runs in another thread, for the time of the block."""
    probe = LoopProbe()
    running = asyncio.run_coroutine_threadsafe(probe.run(), loop)
    try:
        yield probe
    finally:
        probe.stopping = True
        running.result(60)  # one more tick: what lies before it counts too
