"""The whole life of one InferenceService, as a sequence of the bodies a reader would see: each with what kstatus and
Argo CD must make of it. The statuses are built by the operator's own code, one upon the other.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from reprise_operator.observed import Observed, ObservedPod
from reprise_operator.plan import Plan, plan
from reprise_operator.spec import SpecError, identity_of, parse
from reprise_operator.status import build_status
from tests.support.factories import (
    NOT_READY,
    NOW,
    OLD,
    SETTINGS,
    body,
    deployment_status,
    failure,
    metrics,
    observed,
    pod,
    settled_status,
    window,
)

PENDING = {
    "conditions": [
        {
            "type": "Ready",
            "status": "Unknown",
            "reason": "Pending",
            "message": "Waiting for the operator.",
            "lastTransitionTime": "1970-01-01T00:00:00Z",
        }
    ]
}
"""What the schema puts there at creation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    name: str
    body: Mapping[str, Any]
    kstatus: str
    argo: str

    def __str__(self) -> str:
        return self.name


class _Life:
    def __init__(self) -> None:
        self.spec: dict[str, Any] = {}
        self.generation = 1
        self.status: dict[str, Any] = copy.deepcopy(PENDING)
        self.now = NOW
        self.steps: list[Step] = []

    def body(self) -> dict[str, Any]:
        return {**body(self.spec, generation=self.generation), "status": copy.deepcopy(self.status)}

    def plan(self) -> Plan:
        return plan(parse(self.body()), SETTINGS)

    def see(self, name: str, kstatus: str, argo: str, **metadata: str) -> None:
        """Somebody reads the object now."""
        made = self.body()
        made["metadata"].update(metadata)
        self.steps.append(Step(name=name, body=made, kstatus=kstatus, argo=argo))

    def edit(self, name: str, spec: Mapping[str, Any]) -> None:
        """The user applies another spec; no operator has looked yet."""
        self.spec, self.generation = dict(spec), self.generation + 1
        self.see(name, "InProgress", "Progressing")

    def pass_(self, name: str, kstatus: str, argo: str, seen: Observed) -> None:
        """The operator looks, and writes its status."""
        self.now += 60
        given = self.body()
        outcome: Plan | SpecError
        try:
            outcome = self.plan()
        except SpecError as error:
            outcome = error
        self.status = build_status(
            identity_of(given),
            outcome,
            replace(seen, at=self.now),
            self.status,
            window=window().observe(seen.pods),
            now=self.now,
            settings=SETTINGS,
        )
        self.see(name, kstatus, argo)


INIT_FAILS = failure("CrashLoopBackOff", words="no route", code=1, container="fetch", init=True)
NO_IMAGE = failure("ImagePullBackOff", words="not found")
NONE = settled_status(0)


def whole_life() -> list[Step]:
    """From `kubectl apply` to `kubectl delete`."""
    life = _Life()
    sound, idle = pod(metrics=metrics()), pod(metrics=metrics(queries=50))

    life.see("created", "InProgress", "Progressing")
    life.pass_("first pass", "InProgress", "Progressing", Observed(at=NOW))
    life.pass_("children applied", "InProgress", "Progressing", observed(life.plan(), status={}))
    starting = pod(ready=False)
    life.pass_("pod starts", "InProgress", "Progressing", observed(life.plan(), starting, status=NOT_READY))
    failing = pod(ready=False, failures=[INIT_FAILS])
    life.pass_("init container fails", "Failed", "Degraded", observed(life.plan(), failing, status=NOT_READY))
    # The Deployment's figures lag behind the pod.
    life.pass_("init container fails, Deployment lags", "Failed", "Degraded", observed(life.plan(), failing))
    life.pass_("it recovers", "InProgress", "Progressing", observed(life.plan(), starting, status=NOT_READY))
    life.pass_("ready", "Current", "Healthy", observed(life.plan(), sound))
    life.pass_("ready, the same", "Current", "Healthy", observed(life.plan(), sound))
    blind: ObservedPod = replace(pod(), metrics_error="/metrics answers 401")
    life.pass_("ready, figures unavailable", "Current", "Healthy", observed(life.plan(), blind))
    off = pod(metrics=metrics(enabled=False))
    life.pass_("ready, not as specified", "Current", "Healthy", observed(life.plan(), off))
    life.pass_("ready, without traffic", "Current", "Healthy", observed(life.plan(), idle))

    life.edit("edited", {"prefixCaching": {"enabled": False}})
    before = life.plan()
    old = pod("qwen-old", template=OLD, metrics=metrics())
    unseen = observed(before, old, status=deployment_status(seen=2), template_hash=None)
    life.pass_("edit applied", "InProgress", "Progressing", unseen)
    rolling = observed(before, old, pod("qwen-new", ready=False), status=deployment_status(replicas=2))
    life.pass_("rolls out", "InProgress", "Progressing", rolling)
    broken = replace(rolling, pods=(old, pod("qwen-new", ready=False, failures=[NO_IMAGE])))
    life.pass_("broken", "Failed", "Degraded", broken)
    life.edit("fixed", {"prefixCaching": {"enabled": False}, "runtime": {"image": "there:1"}})
    rolling = observed(life.plan(), old, pod("qwen-new", ready=False), status=deployment_status(replicas=2))
    life.pass_("fix rolls out", "InProgress", "Progressing", rolling)
    # One of each: the counts are those of a sound service, the pod is of the old generation.
    swapped = observed(life.plan(), old)
    life.pass_("only the old pod is ready", "InProgress", "Progressing", swapped)
    life.pass_("fixed and ready", "Current", "Healthy", observed(life.plan(), off))

    life.edit("spec that is not honoured", {"model": {"uri": "pvc://a/../b"}})
    life.pass_("refused", "Failed", "Degraded", observed(before, off))
    life.edit("taken back", {})
    life.pass_("ready again", "Current", "Healthy", observed(life.plan(), sound))

    life.edit("suspended", {"suspend": True})
    life.pass_("pods end", "InProgress", "Progressing", observed(life.plan(), replace(sound, terminating=True)))
    life.pass_("no pod is left", "Current", "Suspended", observed(life.plan(), status=NONE))
    life.edit("scaled to zero instead", {"replicas": 0})
    life.pass_("none wanted", "Current", "Healthy", observed(life.plan(), status=NONE))
    life.edit("resumed", {})
    life.pass_("pod starts again", "InProgress", "Progressing", observed(life.plan(), starting, status=NOT_READY))
    life.pass_("ready at last", "Current", "Healthy", observed(life.plan(), sound))
    life.see("deleted", "Terminating", "Progressing", deletionTimestamp="2030-01-01T00:00:00Z")
    return life.steps
