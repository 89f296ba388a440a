"""The threads of the disk tier: what they are told they do and tell, a store that raises or hangs stops nobody."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

import pytest

from reprise_engine.step import SlotId
from reprise_engine.tiers.disk_tier import DiskCounters, DiskDone
from reprise_engine.tiers.host import TierBlock
from reprise_engine.tiers.keys import BlockKey
from reprise_engine.tiers.stats import DiskStats
from reprise_engine.tiers.worker import DiskWorker

ONE = TierBlock(BlockKey(b"1" * 32), None, b"tokens of one")
TWO = TierBlock(BlockKey(b"2" * 32), ONE.key, b"tokens of two")


@dataclass
class MemoryStore:
    """The store's interface over a dictionary. `gate` holds up writes while it is closed."""

    records: dict[BlockKey, tuple[BlockKey | None, bytes, bytes]] = field(default_factory=dict)
    gate: threading.Event = field(default_factory=threading.Event)
    error: Exception | None = None
    closed: bool = False
    forgotten: bool = False
    hurried: float | None = None
    writing: threading.Event = field(default_factory=threading.Event)
    """Set by every write that begins."""

    def __contains__(self, key: BlockKey) -> bool:
        return key in self.records

    def touch(self, keys: Iterable[BlockKey]) -> None:
        for key in keys:
            self.records[key] = self.records.pop(key)

    def read(self, key: BlockKey, *, parent: BlockKey | None, tokens: bytes, into: memoryview) -> bool:
        if self.error is not None:
            raise self.error
        found = self.records.get(key)
        if found is None or found[:2] != (parent, tokens):
            return False
        into[:] = found[2]
        return True

    def write(self, key: BlockKey, *, parent: BlockKey | None, tokens: bytes, payload: memoryview) -> bool:
        self.writing.set()
        self.gate.wait()
        if self.error is not None:
            raise self.error
        self.records[key] = parent, tokens, bytes(payload)
        return True

    def forget(self) -> None:
        self.forgotten = True

    def clear(self) -> int:
        count = len(self.records)
        self.records.clear()
        return count

    def stats(self) -> DiskStats:
        return DiskStats(records=len(self.records), bytes=5, capacity=9, evictions=2, damaged=3, failures=4)

    def hurry(self, seconds: float) -> None:
        self.hurried = seconds

    def close(self) -> None:
        self.closed = True


def make(*, open_gate: bool = True) -> tuple[DiskWorker, MemoryStore, list[bytearray]]:
    store, slots = MemoryStore(), [bytearray(b"a" * 4), bytearray(b"b" * 4), bytearray(4)]
    if open_gate:
        store.gate.set()
    return DiskWorker(store, lambda slot: memoryview(slots[slot])), store, slots


def ended(worker: DiskWorker, count: int) -> list[DiskDone]:
    done: list[DiskDone] = []
    deadline = time.monotonic() + 60
    while len(done) < count:
        assert time.monotonic() < deadline
        worker.wait(1.0)
        done += worker.completed()
    return done


def test_what_is_written_is_read_into_another_slot() -> None:
    worker, _, slots = make()
    worker.write(SlotId(0), ONE)
    worker.write(SlotId(1), TWO)
    assert ended(worker, 2) == [DiskDone(SlotId(0), False, True), DiskDone(SlotId(1), False, True)]
    assert ONE.key in worker
    worker.read(SlotId(2), TWO)
    assert ended(worker, 1) == [DiskDone(SlotId(2), True, True)]
    assert slots[2] == b"bbbb"
    worker.read(SlotId(2), TierBlock(TWO.key, None, TWO.tokens))
    assert ended(worker, 1) == [DiskDone(SlotId(2), True, False)]
    worker.close(60)


def test_a_read_does_not_wait_for_a_write() -> None:
    worker, store, _ = make(open_gate=False)
    store.records[TWO.key] = TWO.parent, TWO.tokens, b"twos"
    worker.write(SlotId(0), ONE)
    worker.read(SlotId(2), TWO)
    assert ended(worker, 1) == [DiskDone(SlotId(2), True, True)]
    assert worker.completed() == []
    store.gate.set()
    assert ended(worker, 1) == [DiskDone(SlotId(0), False, True)]
    worker.close(60)


def test_a_store_that_raises_fails_and_the_threads_go_on(caplog: pytest.LogCaptureFixture) -> None:
    worker, store, _ = make()
    store.error = OSError("gone")
    worker.write(SlotId(0), ONE)
    assert [done.good for done in ended(worker, 1)] == [False]
    worker.read(SlotId(1), ONE)
    assert [done.good for done in ended(worker, 1)] == [False]
    store.error = None
    worker.write(SlotId(0), ONE)
    assert [done.good for done in ended(worker, 1)] == [True]
    worker.close(60)
    assert sum("disk tier failed" in record.message for record in caplog.records) == 1


def test_use_is_told_to_the_store_in_order() -> None:
    worker, store, _ = make()
    worker.write(SlotId(0), ONE)
    worker.write(SlotId(1), TWO)
    ended(worker, 2)
    worker.touch([ONE.key])
    assert list(store.records) == [TWO.key, ONE.key]
    worker.close(10)


def test_clear_forgets_what_waits_to_be_written() -> None:
    worker, store, _ = make(open_gate=False)
    for _ in range(3):
        worker.write(SlotId(0), ONE)
    opened = threading.Timer(0.2, store.gate.set)
    opened.start()
    assert worker.clear() in (0, 1, None)  # the first one may have been under way
    done = ended(worker, 3)
    assert sum(one.good for one in done) <= 1
    assert ONE.key not in worker
    worker.close(60)


def test_a_disk_that_hangs_holds_up_a_reset_for_a_second_and_serves_nothing_older() -> None:
    worker, store, _ = make()
    worker.write(SlotId(0), ONE)
    assert [done.good for done in ended(worker, 1)] == [True]
    store.gate.clear()
    store.writing.clear()
    worker.write(SlotId(1), TWO)
    assert store.writing.wait(60)
    answers: list[int | None] = []
    resets = [threading.Thread(target=lambda: answers.append(worker.clear())) for _ in range(2)]
    for reset in resets:
        reset.start()
    for reset in resets:
        reset.join(60)
        assert not reset.is_alive(), "the engine waits for the disk"
    assert answers == [None, None], "what is not deleted yet is told as a number"
    assert store.forgotten
    store.gate.set()
    ended(worker, 1)
    worker.close(60)
    assert not store.records


def test_that_the_engine_ends_is_told_to_the_store() -> None:
    worker, store, _ = make()
    worker.hurry(0.5)
    assert store.hurried == 0.5
    worker.close(60)


def test_close_writes_what_waits_and_closes_the_store() -> None:
    worker, store, _ = make()
    for slot, block in enumerate((ONE, TWO)):
        worker.write(SlotId(slot), block)
    worker.close(60)
    assert set(store.records) == {ONE.key, TWO.key}
    assert store.closed


def test_close_waits_only_so_long_for_a_disk_that_hangs(caplog: pytest.LogCaptureFixture) -> None:
    worker, store, _ = make(open_gate=False)
    worker.write(SlotId(0), ONE)
    worker.close(0.1)
    assert not store.closed
    assert "did not end within 0.1 s" in caplog.text
    store.gate.set()


def test_the_stores_figures_are_told() -> None:
    worker, _, _ = make()
    assert worker.counters() == DiskCounters(records=0, size=5, capacity=9, evictions=2, failures=7)
    worker.close(60)
