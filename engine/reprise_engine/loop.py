"""The engine's loop on one screen: schedule → run → commit. Free of torch; the runner behind the Protocol is not."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Protocol

from reprise_engine.cache_report import PrefixCacheReport
from reprise_engine.errors import RepriseError, RequestError
from reprise_engine.grammar_queue import GrammarCompiler, GrammarQueue
from reprise_engine.kv.events import KVEvent
from reprise_engine.messages import SchedulerStats
from reprise_engine.request import EngineRequest, RequestId, RequestOutput
from reprise_engine.scheduler import Scheduler
from reprise_engine.step import Step, StepResult

_DISK_PATIENCE = 0.01
"""Seconds that a step may wait for the disk, or for a grammar, where nothing else is to be done; then whoever drives it
looks around."""
_CLOSE_PATIENCE = 2.0
"""Seconds for the record that is being written."""
FLUSH_SECONDS = 5.0
"""At the end, for what is to go to the disk. The API process waits twice as long."""
_LOCK_PATIENCE = 1.0
"""Seconds of them for another process that has locked the folder."""


class Runner(Protocol):
    """Turns a Step into tokens. Knows tensors, and of requests only what the Step says."""

    def run(self, step: Step) -> StepResult:
        """Moves and copies blocks in the Step's order, computes and writes the KV of all token_ids, samples where
        `samples` is True."""
        ...


class KVEventSink(Protocol):
    """Takes the events of the prefix cache to whoever follows it. Never waits."""

    @property
    def published(self) -> int: ...

    @property
    def dropped(self) -> int: ...

    @property
    def owes_snapshot(self) -> bool:
        """Whether something was lost, so that a batch must follow that says all that is cached."""
        ...

    @property
    def wants_snapshot(self) -> bool:
        """Whether that batch would be taken now."""
        ...

    def publish(self, events: Sequence[KVEvent]) -> None: ...

    def close(self) -> None: ...


class OtherRanks(Protocol):
    """The processes that compute beside this one."""

    def watch(self, on_death: Callable[[RepriseError], None]) -> None:
        """Has a thread call `on_death` when one of them has ended and nobody found that out by a step's failure."""
        ...

    def close(self) -> None: ...


class EngineCore:
    """A scheduler and a runner, driven step by step by whoever owns it (the engine process, or `LLM` in its own)."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        clock: Callable[[], float] = time.monotonic,
        *,
        kv_events: KVEventSink | None = None,
        grammars: GrammarCompiler | None = None,
        ranks: OtherRanks | None = None,
    ) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._clock = clock
        self._kv_events = kv_events
        self._ranks = ranks
        self._grammars = GrammarQueue(grammars)

    def submit(self, requests: Iterable[EngineRequest]) -> tuple[RequestOutput, ...]:
        """Queues requests. A request that can never be served comes back as an output with `error` set; where that is
        because of its grammar, from a later step."""
        refused = []
        for request in requests:
            structured = request.sampling.structured
            try:
                if structured is None:
                    self._scheduler.add(request)
                else:
                    self._grammars.add(request, structured)
            except RequestError as error:
                refused.append(RequestOutput(request_id=request.request_id, error=error))
        return tuple(refused)

    def abort(self, request_ids: Iterable[RequestId]) -> tuple[RequestOutput, ...]:
        """Ends requests at once; unknown and finished ones are ignored."""
        request_ids = tuple(request_ids)
        return (*self._grammars.abort(request_ids), *self._scheduler.abort(request_ids))

    def has_work(self) -> bool:
        return self._scheduler.has_work() or len(self._grammars) > 0

    def step(self) -> tuple[RequestOutput, ...]:
        """One forward pass; nothing where there is no work. Waits a moment where there is some, but the disk has it, or
        a grammar is being compiled."""
        refused = self._let_in()
        step = self._scheduler.schedule(self._clock())
        if step is None:
            self._publish()  # a request that waits for the disk may have pushed others out
            if len(self._grammars) and not self._scheduler.has_work():
                self._grammars.wait(_DISK_PATIENCE)
            elif self._owes_snapshot and not (self._scheduler.has_work() or self._scheduler.has_background_work()):
                time.sleep(_DISK_PATIENCE)  # until the queue of batches has room
            else:
                self._scheduler.wait(_DISK_PATIENCE)
            return refused
        try:
            result = self._runner.run(step)
        except BaseException:  # Ctrl-C in a notebook too
            self._scheduler.discard(step)
            raise
        outputs = self._scheduler.commit(step, result, self._clock())
        self._publish()
        return (*refused, *outputs)

    def _let_in(self) -> tuple[RequestOutput, ...]:
        """Queues the requests whose grammar is ready. Returns the refusals of others."""
        if not len(self._grammars):
            return ()
        ready, refused = self._grammars.take()
        for request in ready:
            try:
                self._scheduler.add(request)
            except RequestError as error:
                refused.append(RequestOutput(request_id=request.request_id, error=error))
        return tuple(refused)

    def has_background_work(self) -> bool:
        """Whether step() has something to do besides requests: blocks are on their way to the disk, or consumers of
        events lost some, and learn of it only when something follows."""
        return self._scheduler.has_background_work() or self._owes_snapshot

    def flush(self, seconds: float = FLUSH_SECONDS) -> bool:
        """Ends every request and carries down what is to go to the disk. False where the time did not suffice.

        To be followed by close(): from now on a folder that another process has locked is waited for only a moment.
        """
        self._grammars.abort_all()
        self._scheduler.abort_all()
        self._scheduler.hurry(_LOCK_PATIENCE)
        deadline = self._clock() + seconds
        while self._scheduler.has_background_work() and self._clock() < deadline:
            self.step()
        return not self._scheduler.has_background_work()

    def reset_tiers(self) -> tuple[int, int | None]:
        """Returns the freed blocks of host memory, and of the disk (None: it is still at it); see `Scheduler`."""
        return self._scheduler.reset_tiers()

    def stats(self) -> SchedulerStats:
        stats, sink = self._scheduler.stats(), self._kv_events
        if len(self._grammars):
            stats = replace(stats, num_waiting=stats.num_waiting + len(self._grammars))
        if sink is None:
            return stats
        return replace(stats, num_kv_events_published=sink.published, num_kv_events_dropped=sink.dropped)

    def close(self) -> None:
        """Publishes the last events, ends all threads and other ranks. To be called once, at the end; see flush()."""
        if self._ranks is not None:
            self._ranks.close()
        self._grammars.close()
        self._scheduler.close(_CLOSE_PATIENCE)
        if self._kv_events is not None:
            self._kv_events.close()

    def watch_ranks(self, on_death: Callable[[RepriseError], None]) -> None:
        """See OtherRanks; without any, nothing."""
        if self._ranks is not None:
            self._ranks.watch(on_death)

    def reset_prefix_cache(self, *, include_pins: bool = False) -> tuple[bool, int]:
        """Returns (success, freed blocks); see `Scheduler.reset_prefix_cache`."""
        result = self._scheduler.reset_prefix_cache(include_pins=include_pins)
        self._publish()
        return result

    def unpin(self, name: str) -> bool:
        """See `Scheduler.unpin`."""
        return self._scheduler.unpin(name)

    def inspect_prefix_cache(self) -> PrefixCacheReport:
        """See `Scheduler.inspect_prefix_cache`."""
        return self._scheduler.inspect_prefix_cache()

    @property
    def _owes_snapshot(self) -> bool:
        return self._kv_events is not None and self._kv_events.owes_snapshot

    def _publish(self) -> None:
        sink, kv = self._kv_events, self._scheduler.kv
        if sink is None:
            return
        if sink.wants_snapshot:
            sink.publish(kv.snapshot_events())
        elif events := kv.take_events():
            sink.publish(events)
