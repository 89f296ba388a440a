"""Which of the observed workloads is the Plan's, which came before it, and what they amount to together. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from reprise_operator.kinds import WORKLOAD_KINDS
from reprise_operator.naming import NAME_LABEL
from reprise_operator.observed import Observed, ObservedChild
from reprise_operator.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadCounts:
    """Figures of a workload's status; all 0 while there is none."""

    replicas: int = 0
    updated: int = 0
    ready: int = 0
    available: int = 0
    seen: bool = False
    """Whether they are about the workload's present generation."""


def counts(workload: ObservedChild | None) -> WorkloadCounts:
    """Read them from an observed Deployment or StatefulSet, which name them alike."""
    if workload is None:
        return WorkloadCounts()
    status = workload.status
    return WorkloadCounts(
        replicas=int(status.get("replicas", 0)),
        updated=int(status.get("updatedReplicas", 0)),
        ready=int(status.get("readyReplicas", 0)),
        available=int(status.get("availableReplicas", 0)),
        seen=int(status.get("observedGeneration", 0)) >= workload.generation,
    )


def workload_of(plan: Plan, observed: Observed) -> ObservedChild | None:
    """The observed workload that the Plan names."""
    kind, name = plan.workload["kind"], plan.workload["metadata"]["name"]
    return next((child for child in observed.children if (child.kind, child.name) == (kind, name)), None)


def workload_body(plan: Plan | None, observed: Observed) -> Mapping[str, Any] | None:
    """Body of the workload that the Plan names, without a Plan of the one that is there; None where it is not ours."""
    child = next(iter(workloads(observed)), None) if plan is None else workload_of(plan, observed)
    return child.body if child is not None and child.owned else None


def is_workload(child: ObservedChild) -> bool:
    """Whether it makes engine pods: an endpoint picker has a Deployment, too, and selects other pods by it. A
    selector can never change."""
    selector = (child.body.get("spec") or {}).get("selector") or {}
    return child.kind in WORKLOAD_KINDS and NAME_LABEL in (selector.get("matchLabels") or {})


def workloads(observed: Observed) -> tuple[ObservedChild, ...]:
    """All workloads of ours."""
    return tuple(child for child in observed.children if child.owned and is_workload(child))


def predecessors(plan: Plan, observed: Observed) -> tuple[ObservedChild, ...]:
    """Workloads of ours from which the Plan's takes over: of another kind, or with other volumes."""
    planned = workload_of(plan, observed)
    return tuple(child for child in workloads(observed) if child is not planned)


def total(found: tuple[ObservedChild, ...], current: ObservedChild | None) -> WorkloadCounts:
    """The figures of all workloads together; only pods of the current one are of the present template."""
    each = [counts(child) for child in found]
    present = counts(current)
    return WorkloadCounts(
        replicas=sum(figures.replicas for figures in each),
        updated=present.updated,
        ready=sum(figures.ready for figures in each),
        available=sum(figures.available for figures in each),
        seen=present.seen,
    )
