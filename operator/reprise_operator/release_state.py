"""status.rollout: what must be remembered of changes to the pod template, over restarts of the operator. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from reprise_operator.conditions import timestamp


@dataclass(frozen=True, slots=True, kw_only=True)
class LastGood:
    """The template that last had all of its pods available. The ReplicaSet of `pod_template_hash` still holds it."""

    template_hash: str | None
    """Ours; None for one that an operator without this memory applied."""
    pod_template_hash: str
    """Kubernetes' own, the ReplicaSet's label."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejected:
    """The template that is not applied (again), and why."""

    template_hash: str
    reason: str
    """RolledBack or CheckFailed."""
    message: str
    pod_template_hash: str | None
    """What runs instead; None leaves the workload's template as it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseState:
    """`template_hash` is our digest of the template that the workload was given last, `started_at` (RFC 3339) when."""

    template_hash: str | None = None
    started_at: str | None = None
    last_good: LastGood | None = None
    rejected: Rejected | None = None
    check_job: str | None = None
    """A check that runs, or is to be deleted."""
    check_waits: str | None = None
    """What that check was last seen to wait for: its pod is gone when its time is over."""

    def seconds_since_start(self, now: float) -> float | None:
        """None where it is not known, or lies ahead: the clock was set back."""
        if self.started_at is None:
            return None
        seconds = now - datetime.fromisoformat(self.started_at).timestamp()
        return seconds if seconds >= 0 else None


def started(template_hash: str, now: float, *, last_good: LastGood | None) -> ReleaseState:
    """A template is given to the workload now."""
    return ReleaseState(template_hash=template_hash, started_at=timestamp(now), last_good=last_good)


def read_state(status: Mapping[str, Any]) -> ReleaseState:
    """From the status as last written. What is not there is None."""
    rollout = status.get("rollout") or {}
    good, rejected = rollout.get("lastGood") or {}, rollout.get("rejected") or {}
    return ReleaseState(
        template_hash=rollout.get("templateHash"),
        started_at=rollout.get("startedAt"),
        last_good=LastGood(template_hash=good.get("templateHash"), pod_template_hash=good["podTemplateHash"])
        if good
        else None,
        rejected=Rejected(
            template_hash=rejected["templateHash"],
            reason=rejected["reason"],
            message=rejected["message"],
            pod_template_hash=rejected.get("podTemplateHash"),
        )
        if rejected
        else None,
        check_job=rollout.get("checkJob"),
        check_waits=rollout.get("checkWaits"),
    )


def state_status(state: ReleaseState) -> dict[str, Any]:
    """`state` as status.rollout."""
    good, rejected = state.last_good, state.rejected
    found: dict[str, Any] = {
        "templateHash": state.template_hash,
        "startedAt": state.started_at,
        "checkJob": state.check_job,
        "checkWaits": state.check_waits,
        "lastGood": good and _known({"templateHash": good.template_hash, "podTemplateHash": good.pod_template_hash}),
        "rejected": rejected
        and _known(
            {
                "templateHash": rejected.template_hash,
                "reason": rejected.reason,
                "message": rejected.message,
                "podTemplateHash": rejected.pod_template_hash,
            }
        ),
    }
    return _known(found)


def _known(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in fields.items() if value is not None}
