"""Conditions as Kubernetes and kstatus understand them. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

Status = Literal["True", "False", "Unknown"]

READY = "Ready"
AVAILABLE = "Available"
RECONCILING = "Reconciling"
STALLED = "Stalled"
PREFIX_CACHE_EFFECTIVE = "PrefixCacheEffective"
MEMORY_TUNED = "MemoryTuned"
AUTOSCALING_ACTIVE = "AutoscalingActive"
GATEWAY_READY = "GatewayReady"
MONITORED = "Monitored"
AS_SPECIFIED = "AsSpecified"
REFERENCES_RESOLVED = "ReferencesResolved"

MAX_MESSAGE = 1024
"""Characters; the schema allows 32,768, but a condition is read in a terminal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """One condition before it gets its times."""

    type: str
    status: Status
    reason: str
    message: str


def timestamp(seconds: float) -> str:
    """Unix seconds → the RFC 3339 form Kubernetes writes."""
    return datetime.fromtimestamp(int(seconds), tz=UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def seconds_of(timestamp: object) -> float | None:
    """The other way round; None for what is no such time."""
    if not isinstance(timestamp, str):
        return None
    try:
        return datetime.fromisoformat(timestamp).timestamp()
    except ValueError:
        return None


def merge(
    conditions: Iterable[Condition], previous: Iterable[Mapping[str, Any]], *, generation: int, now: float
) -> list[dict[str, Any]]:
    """Conditions → status.conditions. lastTransitionTime moves only when a condition's status does."""
    before = {item.get("type"): item for item in previous}
    merged = []
    for condition in conditions:
        old = before.get(condition.type, {})
        same = old.get("status") == condition.status and isinstance(old.get("lastTransitionTime"), str)
        merged.append(
            {
                "type": condition.type,
                "status": condition.status,
                "reason": condition.reason,
                "message": clip(condition.message),
                "observedGeneration": generation,
                "lastTransitionTime": old["lastTransitionTime"] if same else timestamp(now),
            }
        )
    return merged


def clip(message: str, *, limit: int = MAX_MESSAGE) -> str:
    """`message` in at most `limit` characters. The middle goes: the start says where, the end says why."""
    text = message.strip()
    if len(text) <= limit:
        return text
    head = limit // 4
    return f"{text[:head].rstrip()} … {text[-(limit - head - 3) :].lstrip()}"
