"""How a service is doing, as readiness.py finds and status.py tells it. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class State(Enum):
    """kstatus: Current, InProgress, Failed."""

    READY = "ready"
    PROGRESSING = "progressing"
    STALLED = "stalled"


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """`reason` is CamelCase, `message` for people: what is wrong and what to do."""

    state: State
    reason: str
    message: str


def stalled(reason: str, message: str) -> Diagnosis:
    """A person is needed."""
    return Diagnosis(state=State.STALLED, reason=reason, message=message)
