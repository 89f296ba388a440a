"""The Job of a check and its pods, as the API server returns them → what came of it. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from reprise_operator.cause import end_of
from reprise_operator.observed import ContainerFailure, ObservedPod

Body = Mapping[str, Any]


class CheckState(Enum):
    RUNNING = "running"
    PASSED = "passed"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """`reason` and `message` say what is wrong: for good when FAILED, or, when RUNNING, what it waits for.

    FAILED without a message is one that did not end in time.
    """

    state: CheckState
    reason: str = ""
    message: str = ""


# An image from before the command, or somebody's own entry point: it was pulled and it runs, more cannot be asked.
_NO_COMMAND = re.compile(r"invalid choice: '(?:check|python3)'|unknown command:? .?(?:check|python3)\b")
# ErrImagePull and ImagePullBackOff take turns, the second quoting the first.
_BACK_OFF = re.compile(r'^Back-off pulling image "[^"]*"(: \w+: )?')


# The name is another one each time.
_POD_NAME = re.compile(r'^(Error creating: )?pods "[^"]*" is ')


def outcome_of(job: Body, pods: Sequence[ObservedPod], events: Sequence[Body] = ()) -> Check:
    """What the Job has found so far. `events` are those about the Job itself, of one that has no pod."""
    conditions = {
        condition["type"]: condition
        for condition in (job.get("status") or {}).get("conditions") or ()
        if condition.get("status") == "True"
    }
    if "Complete" in conditions:
        return Check(state=CheckState.PASSED)
    failures = [failure for pod in pods for failure in pod.failures]
    if "Failed" in conditions:
        ended = [failure for failure in failures if failure.exit_code is not None]
        words = end_of(ended[-1].message) if ended else ""
        if _NO_COMMAND.search(words):
            return Check(state=CheckState.PASSED)
        if ended and not words:
            words = f"exit code {ended[-1].exit_code} without a last word"
        return Check(state=CheckState.FAILED, reason="CheckFailed", message=words)
    for failure in failures:
        waits = _waits_for(failure)
        if waits is not None:
            return waits
    for pod in pods:
        if not pod.scheduled and pod.unschedulable_message:
            words = f"its pod has no node: {pod.unschedulable_message}"
            return Check(state=CheckState.RUNNING, reason="Checking", message=words)
    refused = "" if pods else _refusal(events)
    if refused:
        return Check(state=CheckState.RUNNING, reason="PodsRefused", message=refused)
    return Check(state=CheckState.RUNNING, reason="Checking")


def _refusal(events: Sequence[Body]) -> str:
    """Why the Job may not create its pod (a quota, Pod Security, a webhook), which it says nowhere else."""
    refusals = [event for event in events if event.get("reason") == "FailedCreate"]
    newest = max(
        refusals, key=lambda event: str(event.get("lastTimestamp") or event.get("eventTime") or ""), default={}
    )
    return _POD_NAME.sub("its pod is ", end_of(str(newest.get("message") or "")))


def _waits_for(failure: ContainerFailure) -> Check | None:
    """What keeps the container from starting; the kubelet tries on, so it is not the end."""
    if failure.exit_code is not None:
        return None
    image = "Image" in failure.reason or failure.reason in ("RegistryUnavailable", "SignatureValidationFailed")
    reason = "ImagePullFailed" if image else "ContainerConfigInvalid"
    if failure.reason == "FailedMount":
        reason = "VolumeMountFailed"
    words = _BACK_OFF.sub("", failure.message)
    return Check(state=CheckState.RUNNING, reason=reason, message=end_of(words) or failure.reason)
