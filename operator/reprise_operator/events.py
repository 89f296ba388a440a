"""Kubernetes Events about InferenceServices: what `kubectl describe` shows.

The same event again is counted, not written anew: one that repeats within `SERIES_SECONDS` is a patch at most every
`PATCH_SECONDS`. Events are a courtesy: one that cannot be written is logged, and nothing else fails.
They are of v1, whose count and times every client shows; the API server offers them under events.k8s.io/v1 as well.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from reprise_operator.api import ClusterError
from reprise_operator.cluster import Cluster
from reprise_operator.conditions import timestamp
from reprise_operator.settings import FIELD_MANAGER, GROUP, KIND, VERSION

logger = logging.getLogger(__name__)

Body = Mapping[str, Any]

SERIES_SECONDS = 1800.0
PATCH_SECONDS = 60.0
REMEMBERED = 4096
MAX_NOTE = 1024
"""Characters: the limit of events.k8s.io/v1."""

EventType = Literal["Normal", "Warning"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Happening:
    """Something worth telling about a service. reason and action are CamelCase, as machines read them."""

    type: EventType
    reason: str
    action: str
    note: str


@dataclass(frozen=True, slots=True)
class _Series:
    name: str
    count: int
    last: float
    patched: float


class Recorder:
    def __init__(self, cluster: Cluster, *, instance: str, clock: Callable[[], float] = time.time) -> None:
        self._cluster = cluster
        self._instance = instance[:128]
        self._clock = clock
        self._series: OrderedDict[tuple[str, Happening], _Series] = OrderedDict()

    async def record(self, service: Body, happening: Happening) -> None:
        """Writes the event, or counts it in the series of the same one."""
        namespace = service["metadata"]["namespace"]
        key = (service["metadata"]["uid"], happening)
        now = self._clock()
        known = self._series.get(key)
        try:
            if known is None or now - known.last > SERIES_SECONDS:
                name = f"{service['metadata']['name'][:200]}.{secrets.token_hex(8)}"
                await self._cluster.create_event(namespace, self._event(service, happening, name, now))
                self._remember(key, _Series(name, 1, now, now))
                return
            series = replace(known, count=known.count + 1, last=now)
            if now - known.patched >= PATCH_SECONDS:
                change = {"count": series.count, "lastTimestamp": timestamp(now)}
                await self._cluster.patch_event(namespace, series.name, change)
                series = replace(series, patched=now)
            self._remember(key, series)
        except ClusterError as error:
            self._series.pop(key, None)
            logger.warning("event %s about %s was not written: %s", happening.reason, key[0], error)

    def _remember(self, key: tuple[str, Happening], series: _Series) -> None:
        self._series[key] = series
        self._series.move_to_end(key)
        while len(self._series) > REMEMBERED:
            self._series.popitem(last=False)

    def _event(self, service: Body, happening: Happening, name: str, now: float) -> Body:
        metadata = service["metadata"]
        note = happening.note
        return {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": name, "namespace": metadata["namespace"]},
            "type": happening.type,
            "reason": happening.reason,
            "action": happening.action,
            "message": note if len(note) <= MAX_NOTE else f"{note[: MAX_NOTE - 1]}…",
            "count": 1,
            "firstTimestamp": timestamp(now),
            "lastTimestamp": timestamp(now),
            "source": {"component": FIELD_MANAGER},
            "reportingComponent": f"{GROUP}/{FIELD_MANAGER}",
            "reportingInstance": self._instance,
            "involvedObject": {
                "apiVersion": f"{GROUP}/{VERSION}",
                "kind": KIND,
                "namespace": metadata["namespace"],
                "name": metadata["name"],
                "uid": metadata["uid"],
                "resourceVersion": metadata.get("resourceVersion"),
            },
        }


_ANNOUNCED = ("Ready", "Stalled", "MemoryTuned", "AutoscalingActive", "ReferencesResolved")
"""Conditions whose changes are told. Reconciling and the figures change too often to be news."""


def transitions(previous: Body, status: Body) -> tuple[Happening, ...]:
    """The news between two statuses: conditions of `_ANNOUNCED` that turned, or hold for another reason than before."""
    before = {condition["type"]: condition for condition in previous.get("conditions") or ()}
    after = {condition["type"]: condition for condition in status.get("conditions") or ()}
    told: list[Happening] = []
    for kind in _ANNOUNCED:
        condition, was = after.get(kind, {}), before.get(kind, {})
        value, reason = condition.get("status"), condition.get("reason")
        same = (was.get("status"), was.get("reason")) == (value, reason)
        # Each step is told: its condition only has another message.
        step = kind == "MemoryTuned" and value == "True" and was.get("message") != condition.get("message")
        if not condition or (same and not step):
            continue
        event_type: EventType = "Normal"
        if kind == "Ready" and value != "True":
            # What Stalled says already is not said twice; what was never ready has not lost anything.
            if was.get("status") != "True" or after.get("Stalled", {}).get("status") == "True":
                continue
            if after.get("Reconciling", {}).get("status") != "True":  # a rollout that is under way is no alarm
                event_type = "Warning"
        elif kind == "Stalled":
            if value != "True":
                continue
            event_type = "Warning"
        elif kind == "AutoscalingActive":
            if value == "Unknown" or reason == "Suspended":
                continue
            event_type = "Normal" if value == "True" else "Warning"
        elif kind == "MemoryTuned":
            if not was and value != "True":
                continue
            if reason == "FloorReached":
                event_type = "Warning"
        elif kind == "ReferencesResolved":
            # What Stalled says already is not said twice, and that all is well is news only after it was not.
            if after.get("Stalled", {}).get("reason") == reason or (value == "True" and was.get("status") != "False"):
                continue
            event_type = "Warning" if value == "False" else "Normal"
        note = condition.get("message") or str(reason)
        told.append(Happening(type=event_type, reason=str(reason), action=kind, note=note))
    return tuple(told)
