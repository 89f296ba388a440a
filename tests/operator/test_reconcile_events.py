"""Events tell of transitions, once; a repetition is counted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from reprise_operator.api import ClusterError, Fault
from reprise_operator.events import Happening, Recorder, transitions
from tests.support.factories import body

CRASH = Happening(type="Warning", reason="Crash", action="Ready", note="boom")


class FakeCluster:
    """Holds events as the API server would; it can fail."""

    def __init__(self) -> None:
        self.events: dict[str, dict[str, Any]] = {}
        self.requests = 0
        self.fault: ClusterError | None = None

    async def create_event(self, namespace: str, event: Mapping[str, Any]) -> None:
        self._answer()
        assert event["metadata"]["namespace"] == namespace
        self.events[event["metadata"]["name"]] = dict(event)

    async def patch_event(self, _: str, name: str, change: Mapping[str, Any]) -> None:
        self._answer()
        self.events[name].update(change)

    def _answer(self) -> None:
        self.requests += 1
        if self.fault is not None:
            raise self.fault


class Time:
    now = 1_900_000_000.0

    def __call__(self) -> float:
        return self.now


def recorder() -> tuple[Recorder, FakeCluster, Time]:
    cluster, time = FakeCluster(), Time()
    return Recorder(cluster, instance="me", clock=time), cluster, time  # type: ignore[arg-type]


async def test_a_repetition_is_counted_and_written_at_most_once_a_minute() -> None:
    record, cluster, time = recorder()
    for _ in range(30):
        await record.record(body(), CRASH)
        time.now += 10
    (event,) = cluster.events.values()
    assert event["count"] == 25  # the passes at 60, 120, 180, 240 s were written
    assert cluster.requests == 5
    assert event["lastTimestamp"] > event["firstTimestamp"]
    assert event["involvedObject"]["uid"] == body()["metadata"]["uid"]


async def test_another_service_or_note_or_a_long_silence_is_a_new_event() -> None:
    record, cluster, time = recorder()
    other = body(name="other")
    other["metadata"]["uid"] = "other"
    await record.record(body(), CRASH)
    await record.record(other, CRASH)
    await record.record(body(), Happening(type="Warning", reason="Crash", action="Ready", note="bang"))
    time.now += 1801
    await record.record(body(), CRASH)
    assert len(cluster.events) == 4


async def test_a_long_note_is_cut_and_a_fault_is_only_logged() -> None:
    record, cluster, _ = recorder()
    await record.record(body(), Happening(type="Normal", reason="R", action="A", note="x" * 3000))
    (event,) = cluster.events.values()
    assert len(event["message"]) == 1024
    cluster.fault = ClusterError(Fault.FORBIDDEN, "the namespace terminates")
    await record.record(body(), CRASH)
    cluster.fault = None
    await record.record(body(), CRASH)
    assert len(cluster.events) == 2


def status(**conditions: tuple[str, str]) -> dict[str, Any]:
    return {
        "conditions": [
            {"type": kind, "status": value, "reason": reason, "message": f"{reason}!"}
            for kind, (value, reason) in conditions.items()
        ]
    }


def told(before: dict[str, Any], after: dict[str, Any]) -> list[tuple[str, str]]:
    return [(happening.type, happening.reason) for happening in transitions(before, after)]


def test_what_is_told() -> None:
    progressing = status(Ready=("False", "Progressing"), Stalled=("False", "Progressing"))
    ready = status(Ready=("True", "Ready"), Stalled=("False", "Ready"))
    broken = status(Ready=("False", "Crash"), Stalled=("True", "Crash"))
    no_image = status(Ready=("False", "ImagePullFailed"), Stalled=("True", "ImagePullFailed"))
    assert told({}, progressing) == [], "what was never ready has lost nothing"
    assert told(progressing, ready) == [("Normal", "Ready")]
    assert told(ready, ready) == []
    assert told(ready, progressing) == [("Warning", "Progressing")]
    assert told(
        ready, {"conditions": [*progressing["conditions"], *status(Reconciling=("True", "x"))["conditions"]]}
    ) == [("Normal", "Progressing")]
    assert told(ready, broken) == [("Warning", "Crash")], "once, not for Ready and Stalled"
    assert told(broken, no_image) == [("Warning", "ImagePullFailed")]
    assert told(broken, progressing) == []


def test_memory_steps_are_told() -> None:
    asked, lowered = status(MemoryTuned=("False", "Requested")), status(MemoryTuned=("True", "LoweredAfterOutOfMemory"))
    assert told({}, asked) == []
    assert told(asked, lowered) == [("Normal", "LoweredAfterOutOfMemory")]
    assert told(lowered, lowered) == []
    (again,) = lowered["conditions"]
    further = {"conditions": [{**again, "message": "further down"}]}
    assert told(lowered, further) == [("Normal", "LoweredAfterOutOfMemory")], "each step"
    floor = status(MemoryTuned=("True", "FloorReached"))
    assert told(lowered, floor) == [("Warning", "FloorReached")]
    assert told({}, floor) == [("Warning", "FloorReached")], "the process ended before it could tell"
    assert told(floor, asked) == [("Normal", "Requested")]
