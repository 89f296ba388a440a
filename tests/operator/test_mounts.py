"""Volumes that cannot be mounted: read from the pod's events, and no longer than they say so."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from reprise_operator.api import Body, ClusterError, Fault
from reprise_operator.bodies import observed_pod
from reprise_operator.mounts import MountReader, mount_failure
from tests.operator.reconcile_bench import Bench
from tests.support.factories import NOW, pod
from tests.support.kubectl import eventually

REFUSED = 'MountVolume.SetUp failed for volume "model" : hostPath type check failed: /m is not a directory'


def event(reason: str, at: str, message: str = REFUSED, **more: Any) -> dict[str, Any]:
    return {
        "metadata": {"creationTimestamp": "2026-01-01T00:00:00Z"},
        "reason": reason,
        "lastTimestamp": at,
        "message": message,
        **more,
    }


SCHEDULED = event("Scheduled", "2026-01-01T00:00:01Z")
FAILED = event("FailedMount", "2026-01-01T00:02:00Z")
PULLING = event("Pulling", "2026-01-01T00:03:00Z")


@pytest.mark.parametrize(
    ("events", "message"),
    [
        ([], None),
        ([SCHEDULED], None),
        ([FAILED, SCHEDULED], REFUSED),
        ([event("Scheduled", "2026-01-01T00:02:00Z"), FAILED], REFUSED),  # within one second
        ([SCHEDULED, FAILED, PULLING], None),
        ([PULLING, event("FailedMount", "", series={"lastObservedTime": "2026-01-01T00:04:00.5Z"})], REFUSED),
        ([event("FailedAttachVolume", "2026-01-01T00:02:00Z", "Multi-Attach error")], "Multi-Attach error"),
        ([event("FailedMount", "2026-01-01T00:02:00Z", "mount -o password=hunter2")], "mount -o password=[hidden]"),
    ],
)
def test_the_newest_event_counts(events: list[Body], message: str | None) -> None:
    failure = mount_failure(events)
    assert (failure.message if failure else None) == message
    assert failure is None or (failure.container, failure.reason) == ("", "FailedMount")


class Events:
    def __init__(self, *events: Body, fault: Fault | None = None) -> None:
        self.events, self.fault, self.asked = events, fault, 0

    async def events_about(self, namespace: str, uid: str) -> Sequence[Body]:
        self.asked += 1
        if self.fault is not None:
            raise ClusterError(self.fault, "no")
        return self.events


WAITING = replace(pod(ready=False), awaits_volumes=True)


async def test_each_pod_is_asked_about_twice_a_minute_while_it_waits() -> None:
    now = NOW
    events = Events(FAILED)
    reader = MountReader(clock=lambda: now)
    for _ in range(3):
        (found,) = await reader.look(events, "llm", [WAITING])
        assert [failure.message for failure in found.failures] == [REFUSED]
    assert events.asked == 1
    now += 30.0
    await reader.look(events, "llm", [WAITING])
    assert events.asked == 2
    reader.forget([WAITING.uid])
    await reader.look(events, "llm", [WAITING])
    assert events.asked == 3


@pytest.mark.parametrize(
    "other",
    [
        pod(ready=False),
        replace(WAITING, created_at=NOW - 5.0),
        replace(WAITING, terminating=True),
    ],
    ids=["does not wait", "young", "on its way out"],
)
async def test_nobody_asks_about_another_pod(other: Any) -> None:
    events = Events(FAILED)
    assert await MountReader(clock=lambda: NOW).look(events, "llm", [other]) == (other,)
    assert events.asked == 0


async def test_who_may_not_list_events_does_without() -> None:
    reader = MountReader(clock=lambda: NOW)
    assert await reader.look(Events(fault=Fault.FORBIDDEN), "llm", [WAITING]) == (WAITING,)
    with pytest.raises(ClusterError):
        await MountReader(clock=lambda: NOW).look(Events(fault=Fault.UNAVAILABLE), "llm", [WAITING])


@pytest.mark.parametrize(
    ("status", "waits"),
    [
        ({"phase": "Pending"}, True),
        (
            {
                "phase": "Pending",
                "containerStatuses": [{"name": "e", "state": {"waiting": {"reason": "ContainerCreating"}}}],
            },
            True,
        ),
        (
            {
                "phase": "Pending",
                "containerStatuses": [{"name": "e", "state": {"waiting": {"reason": "ErrImagePull"}}}],
            },
            False,
        ),
        (
            {
                "phase": "Pending",
                "initContainerStatuses": [{"name": "fetch", "state": {"running": {}}}],
                "containerStatuses": [{"name": "e", "state": {"waiting": {"reason": "PodInitializing"}}}],
            },
            False,
        ),
        ({"phase": "Running", "containerStatuses": [{"name": "e", "state": {"running": {}}}]}, False),
    ],
)
def test_which_pods_wait(status: dict[str, Any], waits: bool) -> None:
    body = {"metadata": {"name": "p", "uid": "u"}, "spec": {"nodeName": "n"}, "status": status}
    assert observed_pod(body).awaits_volumes is waits
    assert observed_pod({**body, "spec": {}}).awaits_volumes is False


def test_an_init_container_that_runs_is_named() -> None:
    status = {"initContainerStatuses": [{"name": "fetch", "state": {"running": {"startedAt": "x"}}}]}
    body = {"metadata": {"name": "p", "uid": "u"}, "spec": {"nodeName": "n"}, "status": status}
    assert observed_pod(body).initializing == "fetch"
    assert observed_pod({**body, "status": {}}).initializing is None


async def test_a_model_folder_that_is_not_on_the_node_is_told(bench: Bench) -> None:
    bench.apply()
    await bench.settle()
    (found,) = eventually(bench.pods, "there are pods")
    bench.kubelet_says(
        phase="Pending",
        conditions=[{"type": "PodScheduled", "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z"}],
    )
    now = "2026-01-01T00:00:30Z"
    bench.kubectl.apply(
        {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": "refused"},
            "type": "Warning",
            "involvedObject": {
                "apiVersion": "v1",
                "kind": "Pod",
                "namespace": bench.kubectl.namespace,
                "name": found["metadata"]["name"],
                "uid": found["metadata"]["uid"],
            },
            "reason": "FailedMount",
            "message": REFUSED,
            "firstTimestamp": now,
            "lastTimestamp": now,
            "count": 3,
        }
    )
    await bench.settle()
    status, reason, message = bench.condition("Stalled")
    assert (status, reason) == ("True", "VolumeMountFailed")
    assert REFUSED in message
