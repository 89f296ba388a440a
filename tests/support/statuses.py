"""The status that the operator would write, and what people and kstatus read in it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from reprise_operator.hitrate import HitRateWindow
from reprise_operator.observed import Observed
from reprise_operator.plan import Plan
from reprise_operator.release import Release
from reprise_operator.status import build_status
from tests.support.factories import NOW, SETTINGS, window

READY, RECONCILING, STALLED = ("True", "False", "False"), ("False", "True", "False"), ("False", "False", "True")
"""What `kstatus` answers."""


def status_of(
    of: Plan,
    seen: Observed,
    previous: Mapping[str, Any] | None = None,
    *,
    hits: HitRateWindow | None = None,
    now: float = NOW,
    release: Release | None = None,
) -> dict[str, Any]:
    return build_status(
        of.identity, of, seen, previous or {}, window=hits or window(), now=now, settings=SETTINGS, release=release
    )


def conditions(status: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Condition type → (status, reason)."""
    return {item["type"]: (item["status"], item["reason"]) for item in status["conditions"]}


def message(status: Mapping[str, Any], kind: str) -> str:
    return str(next(item["message"] for item in status["conditions"] if item["type"] == kind))


def kstatus(status: Mapping[str, Any]) -> tuple[str, str, str]:
    """Ready, Reconciling, Stalled."""
    found = conditions(status)
    return found["Ready"][0], found["Reconciling"][0], found["Stalled"][0]


def reason(status: Mapping[str, Any]) -> str:
    return conditions(status)["Ready"][1]
