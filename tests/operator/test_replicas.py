"""Whose the number of pods is: as a table, and as a story without a jump against a model of server-side apply."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reprise_operator.conditions import timestamp
from reprise_operator.observed import Observed, ObservedChild
from reprise_operator.plan import Plan
from reprise_operator.replicas import (
    PATIENCE_SECONDS,
    Replicas,
    owns_replicas,
    replicas_of,
    wanted_replicas,
    with_replicas,
)
from reprise_operator.rollout import Apply, Delete, decide
from tests.support.factories import HPA, KEDA, NOW, TO_ZERO, child, merged, planned


def managed(manager: str, *, operation: str = "Apply", fields: tuple[str, ...] = ("f:replicas",)) -> dict[str, Any]:
    return {"manager": manager, "operation": operation, "fieldsV1": {"f:spec": {field: {} for field in fields}}}


OURS = [managed("reprise-operator")]
THEIRS = [managed("reprise-operator", fields=("f:template",)), managed("kube-controller-manager", operation="Update")]


def workload(of: Plan, replicas: int, managers: list[dict[str, Any]] | None) -> ObservedChild:
    metadata = {} if managers is None else {"managedFields": managers}
    return child(merged(of.workload, {"spec": {"replicas": replicas}, "metadata": metadata}))


def seen(*children: ObservedChild) -> Observed:
    return Observed(at=NOW, children=children)


@pytest.mark.parametrize(
    ("spec", "present", "claimed"), [(HPA, 4, 4), (HPA, 9, 5), (HPA, 1, 2), ({"replicas": 3}, 4, 3)]
)
def test_a_new_workload_begins_with_as_many_pods_as_the_autoscaler_gave_the_old_one(
    spec: dict[str, Any], present: int, claimed: int
) -> None:
    plan = planned({**spec, "prefixCaching": {"persistence": {"size": "1Gi"}}})
    before = workload(planned(spec), present, THEIRS)
    assert replicas_of(plan, None, seen(before)) == Replicas(claimed=claimed)
    assert replicas_of(plan, None, seen()) == Replicas(claimed=plan.replicas)


@pytest.mark.parametrize(
    ("spec", "present", "managers", "expected"),
    [
        ({"replicas": 3}, 3, OURS, Replicas(claimed=3)),
        ({"replicas": 3}, 7, THEIRS, Replicas(claimed=3)),
        (HPA, 3, OURS, Replicas(claimed=None, hand_over=3)),
        (HPA, 3, THEIRS, Replicas(claimed=None)),
        (HPA, 3, None, Replicas(claimed=None, hand_over=3)),
        (HPA, 9, OURS, Replicas(claimed=None, hand_over=9)),
        (HPA, 0, OURS, Replicas(claimed=2)),
        (HPA, 0, THEIRS, Replicas(claimed=2)),
        (HPA | {"replicas": 4}, 0, OURS, Replicas(claimed=4)),
        (HPA | {"suspend": True}, 3, THEIRS, Replicas(claimed=0)),
        (KEDA, 3, OURS, Replicas(claimed=None, hand_over=3)),
        (TO_ZERO, 0, THEIRS, Replicas(claimed=None)),
        (TO_ZERO, 0, None, Replicas(claimed=None, hand_over=0)),
        (TO_ZERO, 0, OURS, Replicas(claimed=1)),
        (TO_ZERO | {"replicas": 0}, 0, OURS, Replicas(claimed=None, hand_over=0)),
    ],
    ids=[
        *("fixed", "fixed-repaired", "handed-over", "left", "ownership-unknown", "above-the-bounds"),
        *("resumed", "a-zero-by-hand", "resumed-with-more", "suspended", "keda", "scaled-to-zero"),
        *("scaled-to-zero-unknown", "resumed-with-keda", "starts-at-zero"),
    ],
)
def test_whose_the_number_is(
    spec: dict[str, Any], present: int, managers: list[dict[str, Any]] | None, expected: Replicas
) -> None:
    plan = planned(spec)
    there = workload(plan, present, managers)
    assert replicas_of(plan, there, seen(there)) == expected


def test_a_new_workload_starts_with_what_the_spec_says() -> None:
    assert replicas_of(planned(HPA), None, seen()) == Replicas(claimed=2)
    assert replicas_of(planned({"replicas": 4}), None, seen()) == Replicas(claimed=4)


def autoscaler(spec: dict[str, Any], *, deleted_at: float | None = None) -> ObservedChild:
    manifest = planned(spec).autoscaler
    assert manifest is not None
    metadata = {} if deleted_at is None else {"deletionTimestamp": timestamp(deleted_at)}
    return child(merged(manifest, {"metadata": metadata}), terminating=deleted_at is not None)


def test_the_number_is_taken_back_when_the_autoscaler_is_gone() -> None:
    plan = planned({"replicas": 3})
    there = workload(plan, 5, THEIRS)
    assert replicas_of(plan, there, seen(there, autoscaler(HPA))) == Replicas(claimed=None)
    going = autoscaler(KEDA, deleted_at=NOW - 1)
    assert replicas_of(plan, there, seen(there, going)) == Replicas(claimed=None)
    assert replicas_of(plan, there, seen(there)) == Replicas(claimed=3)


def test_a_deletion_that_hangs_does_not_keep_the_number_for_ever() -> None:
    plan = planned({"replicas": 3})
    there = workload(plan, 5, THEIRS)
    stuck = autoscaler(KEDA, deleted_at=NOW - PATIENCE_SECONDS)
    assert replicas_of(plan, there, seen(there, stuck)) == Replicas(claimed=3)


def test_an_autoscaler_of_somebody_else_is_no_matter() -> None:
    plan = planned({"replicas": 3})
    there, theirs = workload(plan, 5, THEIRS), replace(autoscaler(HPA), owned=False)
    assert replicas_of(plan, there, seen(there, theirs)) == Replicas(claimed=3)


@pytest.mark.parametrize("old", [autoscaler(HPA), autoscaler(HPA, deleted_at=NOW - 3600)], ids=["there", "going"])
def test_one_autoscaler_at_a_time(old: ObservedChild) -> None:
    """Fault operator 5: switching hpa → keda was refused, the old child being left over."""
    plan = planned(KEDA)
    there = workload(plan, 3, THEIRS)
    actions = decide(plan, seen(there, child(plan.network_service), old))
    assert "ScaledObject" not in [action.key.kind for action in actions if isinstance(action, Apply)]
    deleted = [action.key.kind for action in actions if isinstance(action, Delete)]
    assert deleted == ([] if old.terminating else ["HorizontalPodAutoscaler"])
    after = decide(plan, seen(there, child(plan.network_service)))
    assert [action.key.kind for action in after if isinstance(action, Apply)][-1] == "ScaledObject"


def test_the_hand_over_goes_with_the_apply_of_the_workload() -> None:
    plan = planned(HPA)
    there = workload(plan, 3, OURS)
    (action,) = [action for action in decide(plan, seen(there)) if action.key.kind == "Deployment"]
    assert isinstance(action, Apply)
    assert action.hand_over == 3
    assert "replicas" not in action.manifest["spec"]


def test_with_replicas_changes_nothing_else() -> None:
    manifest = planned({"replicas": 3}).workload
    assert with_replicas(manifest, 3) is manifest
    without = with_replicas(manifest, None)
    assert "replicas" not in without["spec"]
    assert with_replicas(without, 3) == manifest
    assert without["metadata"] == manifest["metadata"]


@pytest.mark.parametrize(
    ("entries", "owned"),
    [
        (None, None),
        ([], False),
        (OURS, True),
        (THEIRS, False),
        ([managed("reprise-operator", operation="Update")], False),
        ([managed("reprise-operator-replicas")], False),
        ([{"manager": "reprise-operator", "operation": "Apply"}], False),
    ],
)
def test_who_owns_the_number(entries: list[dict[str, Any]] | None, owned: bool | None) -> None:
    metadata = {} if entries is None else {"managedFields": entries}
    assert owns_replicas({"metadata": metadata}) is owned


def test_the_number_wanted_is_the_autoscalers_where_there_is_one() -> None:
    assert wanted_replicas(planned(HPA), workload(planned(HPA), 4, THEIRS)) == 4
    assert wanted_replicas(planned(HPA), None) == 2
    assert wanted_replicas(planned({"replicas": 3}), workload(planned({"replicas": 3}), 4, OURS)) == 3
    assert wanted_replicas(planned(HPA | {"suspend": True}), workload(planned(HPA), 4, OURS)) == 0


# A model of server-side apply ---------------------------------------------------------------------------------------


@dataclass
class Server:
    """The workload's number of pods and its owners, as the API server keeps them; and the autoscalers there are."""

    replicas: int | None = None
    owners: set[str] = field(default_factory=set)
    autoscalers: dict[str, str] = field(default_factory=dict)
    history: list[int] = field(default_factory=list)
    shows_managers: bool = True
    lingering: bool = False
    """Whether a deleted autoscaler stays until `tick`, as a finalizer makes it."""

    def write(self, value: int, manager: str) -> None:
        if value != self.replicas:
            self.owners = set()
            self.history.append(value)
        self.replicas = value
        self.owners.add(manager)

    def leave_out(self, manager: str) -> None:
        if manager in self.owners:
            self.owners.remove(manager)
            if not self.owners:
                self.write(1, "defaults")  # nobody's field any more: the default of the API server
                self.owners = set()

    def observed(self, plan: Plan) -> Observed:
        children = [child(plan.network_service)]
        if self.replicas is not None:
            entries = [managed(owner) for owner in sorted(self.owners)] if self.shows_managers else None
            children.append(workload(plan, self.replicas, entries))
        for kind, state in self.autoscalers.items():
            made = autoscaler(HPA if kind == "HorizontalPodAutoscaler" else KEDA, deleted_at=NOW if state else None)
            children.append(made)
        return seen(*children)

    def execute(self, plan: Plan) -> None:
        for action in decide(plan, self.observed(plan)):
            if isinstance(action, Delete):
                if self.lingering:
                    self.autoscalers[action.key.kind] = "going"
                else:
                    del self.autoscalers[action.key.kind]
            elif action.key.kind == "Deployment":
                if action.hand_over is not None:
                    assert self.replicas == action.hand_over
                    self.write(action.hand_over, "reprise-operator-replicas")
                claimed = action.manifest["spec"].get("replicas")
                if claimed is None:
                    if self.replicas is None:
                        self.write(1, "defaults")
                    self.leave_out("reprise-operator")
                else:
                    self.write(claimed, "reprise-operator")
            elif action.key.kind in ("HorizontalPodAutoscaler", "ScaledObject"):
                self.autoscalers.setdefault(action.key.kind, "")
                assert len(self.autoscalers) == 1, "two autoscalers of one workload"

    def tick(self) -> None:
        """Finalizers have done their work."""
        self.autoscalers = {kind: state for kind, state in self.autoscalers.items() if not state}


_fixed = st.integers(1, 6).map(lambda count: {"replicas": count})
_steps = st.lists(
    st.one_of(_fixed, st.just(HPA), st.just(KEDA), st.just({**HPA, "suspend": True}), st.integers(2, 5)),
    min_size=1,
    max_size=12,
)


@given(steps=_steps, shows_managers=st.booleans(), lingering=st.booleans(), passes=st.integers(0, 3))
@settings(max_examples=300, deadline=None)
def test_no_value_appears_that_nobody_asked_for(
    steps: list[Any], shows_managers: bool, lingering: bool, passes: int
) -> None:
    """Whatever the order of fixed numbers, autoscalers and their writes, and however few passes lie between them."""
    server = Server(shows_managers=shows_managers, lingering=lingering)
    plan = planned({"replicas": 3})
    for _ in range(3):
        server.execute(plan)
    allowed = {3}
    for step in steps:
        if isinstance(step, int):
            if plan.autoscaled and server.autoscalers:
                server.write(step, "kube-controller-manager")
                allowed.add(step)
            continue
        plan = planned(step)
        if not plan.autoscaled:
            allowed.add(plan.replicas)
        elif server.replicas == 0:
            allowed.add(plan.replicas)  # resumed: it starts anew
        for _ in range(passes):
            server.execute(plan)
            server.tick()
    assert set(server.history) <= allowed
    for _ in range(4):
        server.tick()
        server.execute(plan)
    if plan.autoscaled:
        assert len(server.autoscalers) == 1
        assert "reprise-operator" not in server.owners
        assert server.replicas == server.history[-1] != 0
    else:
        assert server.replicas == plan.replicas
        assert set(server.autoscalers) == ({"HorizontalPodAutoscaler"} if plan.service.spec.suspend else set())
