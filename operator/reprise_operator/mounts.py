"""Why a pod that waits for its volumes waits: the kubelet says so in events about the pod, and nowhere else."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from reprise_operator.api import ClusterError, Fault
from reprise_operator.cause import without_secrets
from reprise_operator.observed import ContainerFailure, ObservedPod

Body = Mapping[str, Any]

PATIENCE_SECONDS = 20.0
"""A volume that is being attached fails to mount a few times first."""
INTERVAL_SECONDS = 30.0
_FAILURES = frozenset({"FailedMount", "FailedAttachVolume"})


class PodEvents(Protocol):
    """The part of cluster.py that is needed."""

    async def events_about(self, namespace: str, uid: str) -> Sequence[Body]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _Look:
    at: float
    failure: ContainerFailure | None


class MountReader:
    """Asks for the events of pods that wait, of each at most every half a minute."""

    def __init__(self, *, interval: float = INTERVAL_SECONDS, clock: Callable[[], float] = time.time) -> None:
        self._interval = interval
        self._clock = clock
        self._last: dict[str, _Look] = {}

    async def look(self, events: PodEvents, namespace: str, pods: Sequence[ObservedPod]) -> tuple[ObservedPod, ...]:
        """The pods; those whose newest event is a volume that cannot be mounted have it as a failure.

        Raises ClusterError.
        """
        return tuple(await asyncio.gather(*(self._look(events, namespace, pod) for pod in pods)))

    def forget(self, uids: Iterable[str]) -> None:
        """Drops what is known of pods that are gone."""
        for uid in uids:
            self._last.pop(uid, None)

    async def _look(self, events: PodEvents, namespace: str, pod: ObservedPod) -> ObservedPod:
        now = self._clock()
        if not pod.awaits_volumes or pod.terminating or now - (pod.created_at or now) < PATIENCE_SECONDS:
            return pod
        last = self._last.get(pod.uid)
        if last is None or now - last.at >= self._interval:
            try:
                failure = mount_failure(await events.events_about(namespace, pod.uid))
            except ClusterError as error:
                if error.fault is not Fault.FORBIDDEN:
                    raise
                failure = None
            last = self._last[pod.uid] = _Look(at=now, failure=failure)
        return pod if last.failure is None else replace(pod, failures=(*pod.failures, last.failure))


def mount_failure(events: Sequence[Body]) -> ContainerFailure | None:
    """The newest of a pod's events, if it says that a volume cannot be mounted: once it is, another one follows."""
    # Within one second, which is as fine as most events tell the time, the failure is what counts.
    newest = max(events, key=lambda event: (_moment(event), event.get("reason") in _FAILURES), default=None)
    if newest is None or newest.get("reason") not in _FAILURES:
        return None
    words = without_secrets(str(newest.get("message") or ""))
    return ContainerFailure(container="", reason="FailedMount", message=words)


def _moment(event: Body) -> str:
    """RFC 3339 in UTC, to be compared as text; that of a series moves."""
    series = event.get("series") or {}
    found = series.get("lastObservedTime") or event.get("lastTimestamp") or event.get("eventTime")
    return str(found or event["metadata"].get("creationTimestamp") or "").replace("Z", "")
