"""Why a pod template was taken back: the words that status.rollout remembers. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from reprise_operator.cause import MAX_CAUSE, end_of
from reprise_operator.children.pod import CONTAINER
from reprise_operator.observed import Observed
from reprise_operator.plan import Plan
from reprise_operator.readiness import why_not_ready

MAX_REMEMBERED = 1000
"""Characters of a rejection's message; what a condition shows of it is its end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogSource:
    """A container whose log may say what nothing else does."""

    pod: str
    container: str
    previous: bool


def cause_of(plan: Plan, observed: Observed, log: str | None, *, now: float) -> str:
    """Why no pod of the present template became ready; `log` is that of `log_source`, where it was read."""
    found = why_not_ready(plan, observed, now=now)
    told = "" if found is None else f"{found.reason}: {end_of(found.message)}"
    if log and log.strip():
        end = f"The log ends: {end_of(log)}"
        return f"{told} {end}" if told else f"no pod of it became ready. {end}"
    return told or "no pod of it became ready."


def log_source(observed: Observed) -> LogSource | None:
    """The container to ask, where its pod's status has no words of it."""
    for pod in sorted(observed.current_pods, key=lambda pod: pod.name):
        if pod.ready or not pod.scheduled:
            continue
        spoken = any(failure.message for failure in pod.failures)
        if spoken or any(failure.exit_code is None for failure in pod.failures):
            continue  # its words are known, or it never ran
        failed = next(iter(pod.failures), None)
        if failed is None:
            return LogSource(pod=pod.name, container=CONTAINER, previous=False)
        return LogSource(pod=pod.name, container=failed.container, previous=failed.restart_count > 0)
    return None


def clipped(message: str) -> str:
    """`message` in at most `MAX_REMEMBERED` characters, without its middle."""
    if len(message) <= MAX_REMEMBERED:
        return message
    head = MAX_REMEMBERED - MAX_CAUSE
    return f"{message[:head].rstrip()} … {message[-(MAX_CAUSE - 3) :].lstrip()}"
