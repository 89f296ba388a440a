"""What to do, as a table: (Plan, Observed, last answers) → actions."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from reprise_operator.naming import OWNER_UID_LABEL, owner_reference
from reprise_operator.observed import Observed, ObservedChild
from reprise_operator.plan import Plan
from reprise_operator.rollout import Applied, Apply, ChildKey, Delete, applied, conflicts, decide, key_of
from tests.support.factories import HPA, KEDA, NOW, child, deployment_status, merged, observed, planned
from tests.support.statuses import RECONCILING, kstatus, message, status_of

DEPLOYMENT, SERVICE = ChildKey(kind="Deployment", name="qwen"), ChildKey(kind="Service", name="qwen")


def answers(plan: Plan, seen: Observed) -> Mapping[ChildKey, Applied]:
    """What cluster.py remembers after it applied all of `plan` and was answered with what `seen` shows."""
    found = {key_of(manifest): manifest for manifest in plan.children}
    bodies = {ChildKey(kind=item.kind, name=item.name): item.body for item in seen.children}
    return {key: applied(manifest, bodies[key]) for key, manifest in found.items()}


def edited(seen: Observed, kind: str, change: Mapping[str, Any], *, generation: int | None = None) -> Observed:
    """`seen` after somebody else's edit of one child."""

    def edit(item: ObservedChild) -> ObservedChild:
        if item.kind != kind:
            return item
        body = merged(item.body, change)
        if generation is not None:
            body["metadata"]["generation"] = generation
        return replace(item, body=body, generation=generation or item.generation)

    return replace(seen, children=tuple(edit(item) for item in seen.children))


def test_nothing_there_everything_is_created_without_force() -> None:
    plan = planned()
    assert decide(plan, Observed(at=NOW)) == (
        Apply(key=SERVICE, manifest=plan.network_service, uid=None),
        Apply(key=DEPLOYMENT, manifest=plan.workload, uid=None),
    )


def test_everything_as_applied_nothing_to_do() -> None:
    plan = planned()
    seen = observed(plan)
    assert decide(plan, seen, applied=answers(plan, seen)) == ()


def test_a_new_operator_process_applies_each_child_once_by_its_uid() -> None:
    plan = planned()
    seen = observed(plan)
    assert [(action.key, action.uid) for action in decide(plan, seen)] == [
        (SERVICE, "uid-Service"),
        (DEPLOYMENT, "uid-Deployment"),
    ]


def test_a_changed_spec_is_applied_to_the_child_it_changes() -> None:
    before, after = planned(), planned({"memory": {"utilization": 0.7}})
    seen = observed(before)
    (action,) = decide(after, seen, applied=answers(before, seen))
    assert action == Apply(key=DEPLOYMENT, manifest=after.workload, uid="uid-Deployment")


def test_status_of_a_child_is_no_drift() -> None:
    """Fault operator 17: an idle reconcile rewrote what it had written."""
    plan = planned()
    seen = observed(plan)
    later = observed(plan, status=deployment_status(ready=0, available=0))
    annotated = edited(later, "Deployment", {"metadata": {"annotations": {"deployment.kubernetes.io/revision": "4"}}})
    assert decide(plan, annotated, applied=answers(plan, seen)) == ()


@pytest.mark.parametrize(
    ("kind", "change", "generation"),
    [
        ("Deployment", {"spec": {"replicas": 7}}, 4),
        ("Deployment", {"metadata": {"labels": {"app.kubernetes.io/component": "mine"}}}, None),
        ("Deployment", {"metadata": {"labels": {"llm-d.ai/engine-type": None}}}, None),
        ("Deployment", {"metadata": {"annotations": {"serving.reprise.io/plan-hash": "x"}}}, None),
        ("Deployment", {"metadata": {"ownerReferences": []}}, None),
        ("Service", {"spec": {"sessionAffinity": "ClientIP"}}, None),
        ("Service", {"spec": {"selector": {"app": "other"}}}, None),
        ("Service", {"metadata": {"labels": {"serving.reprise.io/name": "other"}}}, None),
    ],
)
def test_drift_is_repaired(kind: str, change: Mapping[str, Any], generation: int | None) -> None:
    plan = planned()
    seen = observed(plan)
    drifted = edited(seen, kind, change, generation=generation)
    (action,) = decide(plan, drifted, applied=answers(plan, seen))
    assert isinstance(action, Apply)
    assert (action.key.kind, action.uid) == (kind, f"uid-{kind}")


def test_a_child_deleted_by_hand_comes_back() -> None:
    plan = planned()
    seen = observed(plan)
    left = replace(seen, children=tuple(item for item in seen.children if item.kind == "Deployment"))
    assert decide(plan, left, applied=answers(plan, seen)) == (
        Apply(key=SERVICE, manifest=plan.network_service, uid=None),
    )


def test_a_child_that_was_replaced_is_applied_to_the_new_one() -> None:
    plan = planned()
    seen = observed(plan)
    again = edited(seen, "Service", {"metadata": {"uid": "uid-new"}})
    again = replace(again, children=tuple(replace(c, uid=c.body["metadata"]["uid"]) for c in again.children))
    (action,) = decide(plan, again, applied=answers(plan, seen))
    assert isinstance(action, Apply)
    assert action.uid == "uid-new"


def test_a_child_that_is_being_deleted_is_waited_for() -> None:
    plan = planned()
    going = replace(observed(plan), children=(child(plan.network_service), child(plan.workload, terminating=True)))
    assert [action.key for action in decide(plan, going)] == [SERVICE]


def test_a_child_the_plan_does_not_name_is_deleted() -> None:
    plan = planned()
    other = merged(plan.network_service, {"metadata": {"name": "qwen-old"}})
    seen = replace(observed(plan), children=(*observed(plan).children, child(other)))
    assert decide(plan, seen, applied=answers(plan, observed(plan))) == (
        Delete(key=ChildKey(kind="Service", name="qwen-old"), api_version="v1", uid="uid-Service"),
    )


def foreign(plan: Plan, **metadata: Any) -> ObservedChild:
    manifest = copy.deepcopy(dict(plan.network_service))
    manifest["metadata"] = {"name": "qwen", "namespace": "llm", **metadata}
    return child(manifest, owned=False)


@pytest.mark.parametrize(
    "metadata",
    [
        {},
        {"ownerReferences": [{"uid": "other", "controller": True}]},
        {"labels": {OWNER_UID_LABEL: "the UID of an InferenceService that was deleted before"}},
    ],
)
def test_a_name_that_is_taken_is_never_taken_over(metadata: dict[str, Any]) -> None:
    plan = planned()
    seen = replace(observed(plan), children=(foreign(plan, **metadata),))
    assert [action.key for action in decide(plan, seen)] == [DEPLOYMENT]
    (conflict,) = conflicts(plan, seen)
    assert conflict.key == SERVICE
    assert "Service/qwen exists and does not belong to this InferenceService" in conflict.message


def test_a_foreign_child_is_never_deleted() -> None:
    plan = planned()
    other = child(merged(plan.network_service, {"metadata": {"name": "elsewhere"}}), owned=False)
    seen = replace(observed(plan), children=(*observed(plan).children, other))
    assert decide(plan, seen, applied=answers(plan, observed(plan))) == ()


def not_ours(seen: Observed, *kinds: str) -> Observed:
    """The objects of these kinds are somebody else's."""

    def given_away(item: ObservedChild) -> ObservedChild:
        metadata = {key: item.body["metadata"][key] for key in ("name", "uid")}
        return replace(item, owned=False, body={**item.body, "metadata": metadata})

    return replace(seen, children=tuple(given_away(item) if item.kind in kinds else item for item in seen.children))


@pytest.mark.parametrize("spec", [HPA, KEDA])
def test_no_autoscaler_of_ours_scales_a_workload_of_somebody_else(spec: dict[str, Any]) -> None:
    """It names the workload, and would give the foreign one as many pods as we want of ours."""
    plan = planned(spec)
    assert plan.autoscaler is not None
    key = key_of(plan.autoscaler)
    seen = not_ours(observed(plan), "Deployment")
    without = replace(seen, children=tuple(item for item in seen.children if item.kind != key.kind))
    assert [action.key for action in decide(plan, without)] == [SERVICE], "none is made"
    taken_away = [action.key for action in decide(plan, seen) if isinstance(action, Delete)]
    assert taken_away == [key], "and one that was there before goes"
    assert isinstance(next(action for action in decide(plan, observed(plan)) if action.key == key), Apply)


def test_no_route_of_ours_leads_to_a_service_of_somebody_else() -> None:
    """It would open what nobody meant to open, and give it our clients' requests."""
    plan = planned({"gateway": {"parentRefs": [{"name": "main"}]}})
    seen = not_ours(observed(plan), "Service")
    assert [action.key.kind for action in decide(plan, seen) if isinstance(action, Apply)] == ["Deployment"]
    assert [action.key.kind for action in decide(plan, seen) if isinstance(action, Delete)] == ["HTTPRoute"]
    pooled = planned({"gateway": {"parentRefs": [{"name": "main"}], "endpointPicker": {"name": "picker"}}})
    seen = not_ours(observed(pooled), "Service")
    kept = [action.key.kind for action in decide(pooled, seen)]
    assert kept == ["Deployment", "InferencePool", "HTTPRoute"], "to a pool of ours it may lead"


def test_what_is_left_of_a_service_that_had_our_name_is_waited_for() -> None:
    """Deleted and made again at once: the garbage collector has not come yet, and nobody need do anything."""
    plan = planned()
    before = {**owner_reference(plan.identity), "uid": "the UID of the one before"}
    seen = replace(observed(plan), children=(foreign(plan, ownerReferences=[before]),))
    (conflict,) = conflicts(plan, seen)
    assert conflict.leaving
    assert [action.key for action in decide(plan, seen)] == [DEPLOYMENT]
    status = status_of(plan, seen)
    assert kstatus(status) == RECONCILING
    assert message(status, "Reconciling").startswith("Service/qwen is left of the InferenceService that had this name")
    for owner in ({**before, "name": "another"}, {**before, "controller": False}, {**before, "kind": "Else"}):
        (conflict,) = conflicts(plan, replace(seen, children=(foreign(plan, ownerReferences=[owner]),)))
        assert not conflict.leaving, owner


def test_a_quick_edit_and_its_revert_leave_nothing_to_do() -> None:
    """Fault operator 8, as far as deciding goes: what counts is the spec as it is now."""
    plan = planned()
    seen = observed(plan)
    known = answers(plan, seen)
    assert decide(planned({"runtime": {"extraArgs": ["--seed=1"]}}), seen, applied=known) != ()
    assert decide(planned(), seen, applied=known) == ()
