"""Who decides the number of pods, and how it passes from one to the other without a jump. Pure.

A fixed number is a field of the applied workload like any other. An autoscaler's is left out of it, but server-side
apply takes a field away from the object with its last owner, and the API server's default for it is 1. So before it is
left out, another field manager of ours applies the number that is there (`hand_over`): then somebody owns it until the
autoscaler writes it. Back to a fixed number the order is: the autoscaler is deleted, seen gone, and only then the
number is ours again, or the two would write in turns.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from reprise_operator.kinds import AUTOSCALER_TYPES
from reprise_operator.observed import Observed, ObservedChild
from reprise_operator.plan import Manifest, Plan
from reprise_operator.settings import FIELD_MANAGER
from reprise_operator.workloads import predecessors

PATIENCE_SECONDS = 60.0
"""How long a deletion of an autoscaler is waited for before the number of pods is taken back all the same: KEDA that
was removed before its objects never ends their deletion, and scales nothing any more either."""

_KINDS = frozenset(kind.kind for kind in AUTOSCALER_TYPES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Replicas:
    """What an apply of the workload does to its number of pods."""

    claimed: int | None
    """In the manifest, hence ours; None: left out of it."""
    hand_over: int | None = None
    """The number that is there, to be applied by the other field manager first; None: nothing of ours would be lost."""


def replicas_of(plan: Plan, workload: ObservedChild | None, observed: Observed) -> Replicas:
    """The decision about the workload as it was observed, None when there is none yet."""
    if workload is None:
        return Replicas(claimed=_first(plan, observed))
    present, owned = _present(workload), owns_replicas(workload.body)
    if not plan.autoscaled:
        return _left(present, owned) if leaving(plan, observed) else Replicas(claimed=plan.replicas)
    asked = plan.service.spec.autoscaling
    assert asked is not None
    # No autoscaler counts up from 0 but KEDA from its own: one that we (suspended) or a person wrote we must end.
    if present == 0 and plan.replicas > 0 and (asked.min_replicas > 0 or owned is True):
        return Replicas(claimed=plan.replicas)
    return _left(present, owned)


def _first(plan: Plan, observed: Observed) -> int:
    """Pods of a workload that is made now: where an autoscaler decided for the one before it, as many as that has."""
    asked, before = plan.service.spec.autoscaling, predecessors(plan, observed)
    if not plan.autoscaled or asked is None or not before:
        return plan.replicas
    return min(max(plan.replicas, sum(_present(child) for child in before)), asked.max_replicas)


def _left(present: int, owned: bool | None) -> Replicas:
    return Replicas(claimed=None, hand_over=None if owned is False else present)


def with_replicas(manifest: Manifest, claimed: int | None) -> Manifest:
    """`manifest` with the number of pods in it, or without. Its plan hash stays: who decides is not in the spec."""
    if manifest["spec"].get("replicas") == claimed:
        return manifest
    spec: dict[str, Any] = {key: value for key, value in manifest["spec"].items() if key != "replicas"}
    if claimed is not None:
        spec = {"replicas": claimed, **spec}
    return {**manifest, "spec": spec}


def wanted_replicas(plan: Plan, workload: ObservedChild | None) -> int:
    """Pods there should be now: the spec's number, or what the autoscaler has made of it."""
    return _present(workload) if plan.autoscaled and workload is not None else plan.replicas


def owns_replicas(body: Mapping[str, Any]) -> bool | None:
    """Whether an apply of ours that leaves spec.replicas out would take it away. None: the API server does not say."""
    entries = body["metadata"].get("managedFields")
    if entries is None:
        return None
    return any(
        entry.get("manager") == FIELD_MANAGER
        and entry.get("operation") == "Apply"
        and "f:replicas" in ((entry.get("fieldsV1") or {}).get("f:spec") or {})
        for entry in entries
    )


def leaving(plan: Plan, observed: Observed) -> tuple[ObservedChild, ...]:
    """Autoscalers of ours that the Plan does not name and that may still write: no other may be made meanwhile."""
    return tuple(child for child in unplanned_autoscalers(plan, observed) if not _is_stuck(child, observed.at))


def unplanned_autoscalers(plan: Plan, observed: Observed) -> tuple[ObservedChild, ...]:
    """Autoscalers of ours that are there and that the Plan does not name, also those whose deletion hangs."""
    planned = plan.autoscaler["kind"] if plan.autoscaler is not None else None
    return tuple(child for child in observed.children if child.owned and child.kind in _KINDS and child.kind != planned)


def _is_stuck(child: ObservedChild, now: float) -> bool:
    deleted_at = child.body["metadata"].get("deletionTimestamp")
    return deleted_at is not None and now - datetime.fromisoformat(deleted_at).timestamp() >= PATIENCE_SECONDS


def _present(workload: ObservedChild) -> int:
    # The API server always has a number; 1 is its default.
    return int(workload.body["spec"].get("replicas", 1))
