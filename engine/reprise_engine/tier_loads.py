"""Requests whose prefix comes up from the tiers: admitted, with their blocks, but not computed until it is there.

A load is another way of computing: a block that a Step has loaded is committed as one that a forward has filled, so it
enters the index, is shared, counted and evicted like any other. Where the load ends, early or not, the rest is
computed.

The engine's thread copies between steps' forwards, so how much it may do is a matter of time: at most a share of what
the shortest of the last steps took, while somebody waits for tokens. Alone, a load has all of it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from reprise_engine.cache_accounting import CacheAccounting
from reprise_engine.cache_report import Tier
from reprise_engine.kv.manager import KVCacheManager
from reprise_engine.kv.sequence import Match
from reprise_engine.kv.tiering import Tiering
from reprise_engine.request_state import RequestState
from reprise_engine.step import BlockId, BlockLoad, Step, StepResult
from reprise_engine.step_builder import StepBuilder
from reprise_engine.tiers.host import TierBlock

_SHARE = 0.05
"""Of a step's time. The goal is that loads make other requests' tokens at most 1.2 times as slow."""
_REMEMBERED_STEPS = 16
_MOST_BYTES = 64 * 2**20
"""A step, also where nothing else runs: an abort takes effect between two steps."""
_ASSUMED_BYTES_PER_SECOND = 2e9
"""Until it was measured."""


class TransferBudget:
    """How many blocks a step may move between the pool and host memory."""

    def __init__(self, *, bytes_per_block: int) -> None:
        self._most = max(1, _MOST_BYTES // bytes_per_block)
        self._seconds_per_block = bytes_per_block / _ASSUMED_BYTES_PER_SECOND
        self._steps: deque[float] = deque(maxlen=_REMEMBERED_STEPS)
        """Seconds of the last steps that computed, transfers left out."""

    def blocks(self, *, alone: bool) -> int:
        """At least one, so everything gets on. `alone`: the step computes nothing."""
        if alone or not self._steps or self._seconds_per_block <= 0:
            return self._most
        # The least of both before int(): where transfers take no time at all, the other one is infinite.
        return max(1, int(min(self._most, _SHARE * min(self._steps) / self._seconds_per_block)))

    def observe(self, step: Step, result: StepResult, seconds: float) -> None:
        """`seconds` is all that the step took."""
        if step.requests:
            self._steps.append(seconds - result.transfer_seconds)
        if count := len(step.stores) + len(step.loads):
            self._seconds_per_block += 0.25 * (result.transfer_seconds / count - self._seconds_per_block)


class TierLoads:
    """The scheduler's dealings with the tiers."""

    def __init__(self, kv: KVCacheManager, tiering: Tiering, books: CacheAccounting) -> None:
        self.tiering = tiering
        self._kv = kv
        self._books = books
        self._budget = TransferBudget(bytes_per_block=tiering.bytes_per_block)
        self._issued: list[RequestState] = []
        """Loading in the step that runs."""
        self._scheduled_at = 0.0

    @property
    def in_flight(self) -> Iterable[RequestState]:
        """Whose blocks the running step loads."""
        return self._issued

    def probe(self, state: RequestState, match: Match) -> list[TierBlock]:
        """What the tiers have where `match` ends; see Tiering.probe."""
        return self.tiering.probe(state.blocks, match, len(state.tokens))

    def begin(self, state: RequestState, blocks: list[TierBlock], match: Match, now: float) -> None:
        """To be called before the request's own blocks are allocated, which may push others out of the tiers."""
        state.load = self.tiering.begin(blocks, first=len(match.shared), now=now)

    def ready(self, running: Sequence[RequestState], now: float) -> list[RequestState]:
        """Those of `running` that may compute; a load that has ended is accounted for."""
        self.tiering.poll()
        ready: list[RequestState] = []
        for state in running:
            if state.load is not None:
                self.tiering.advance(state.load, now)
                if not state.load.done:
                    continue
                self._finish(state)
            ready.append(state)
        return ready

    def collect(self, running: Iterable[RequestState], builder: StepBuilder, now: float) -> None:
        """Adds to the step what may come up and go down with it."""
        self._scheduled_at = now
        budget = self._budget.blocks(alone=not builder.parts)
        for state in running:
            load, left = state.load, budget - len(builder.loads)
            if load is None or left <= 0:
                continue
            before = len(builder.loads)
            while left and (slot := self.tiering.next_slot(load)) is not None:
                builder.loads.append(BlockLoad(slot, state.blocks.blocks[load.first + load.issued]))
                load.issued += 1
                left -= 1
            if len(builder.loads) > before:
                self._issued.append(state)
        written = self._written(builder) if self.tiering.has_due else frozenset()
        builder.stores += self.tiering.collect_stores(written, budget=max(0, budget - len(builder.loads)))

    def commit(self, step: Step, result: StepResult, now: float) -> list[RequestState]:
        """What the step moved is where it belongs. Returns the requests that it loaded for."""
        self._budget.observe(step, result, now - self._scheduled_at)
        self.tiering.committed()
        loaded, self._issued = self._issued, []
        for state in loaded:
            load = state.load
            assert load is not None, f"{state.request_id} has lost its load while a step ran"
            self.tiering.loaded(load, now)
            # Of the last block all but one token counts: at least one is computed.
            state.computed = min((load.first + load.loaded) * self._kv.block_size, len(state.tokens) - 1)
            self._kv.commit(state.blocks, state.tokens, state.computed)
        return loaded

    def discard(self) -> list[RequestState]:
        """The step failed. Returns the requests that it loaded for."""
        self.tiering.committed(good=False)
        loading, self._issued = self._issued, []
        return loading

    def cancel(self, state: RequestState) -> None:
        """Gives up the request's load, if it has one."""
        if state.load is not None:
            self.tiering.cancel(state.load)
            state.load = None

    def _finish(self, state: RequestState) -> None:
        load, size = state.load, self._kv.block_size
        assert load is not None
        match = self._kv.reused(state.blocks, state.computed)
        before = load.first * size
        tokens = dict.fromkeys(Tier, 0)
        for i, tier in enumerate(load.tiers):
            tokens[tier] += min(size, state.computed - before - i * size)
        state.load = None
        self._books.admitted(state, match, match, from_tiers=tokens)

    def _written(self, builder: StepBuilder) -> set[BlockId]:
        size = self._kv.block_size
        written = {copy.target for copy in builder.copies}
        written.update(load.target for load in builder.loads)
        for part in builder.parts:
            end = part.start + len(part.token_ids)
            written.update(part.block_table[part.start // size : -(-end // size)])
        return written
