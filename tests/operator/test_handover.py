"""One workload takes over from another, and a StatefulSet's pods are replaced: tables of what is decided."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from reprise_operator.handover import Scale, hand_over, replace_pods
from reprise_operator.observed import Observed, ObservedPod
from reprise_operator.plan import Plan
from reprise_operator.rollout import ChildKey, Delete, decide
from tests.support.factories import (
    NOW,
    child,
    deployment_status,
    failure,
    merged,
    observed,
    planned,
    pod,
    settled_status,
)
from tests.support.statuses import RECONCILING, STALLED, kstatus, message, reason, status_of

CRASH = failure("CrashLoopBackOff", words="ConfigError: no", restarts=5)
FULL = "0/3 nodes are available: 3 Insufficient huawei.com/Ascend910."
LABEL = "0/3 nodes are available: 3 node(s) didn't match Pod's node affinity/selector."


def volumes(replicas: int, size: str = "100Gi") -> Plan:
    return planned({"replicas": replicas, "prefixCaching": {"persistence": {"size": size}}})


def switched(
    *, replicas: int, available: int, has: int, waiting: str | None = None, seen: int = 3, plan: Plan | None = None
) -> tuple[Plan, Observed]:
    """A Deployment of `has` pods, and the StatefulSet that takes over from it with `available` pods of `replicas`."""
    made = plan or volumes(replicas)
    before = planned({"replicas": has}).workload
    figures = deployment_status(replicas=replicas, updated=replicas, ready=available, available=available, seen=seen)
    new = [pod(f"new-{number}", ready=number < available) for number in range(replicas)]
    if waiting is not None:
        new[-1] = replace(new[-1], scheduled=False, unschedulable_message=waiting)
    found = observed(made, *new, status=figures)
    old = child(before, **settled_status(has))
    return made, replace(found, children=(*found.children, old))


OLD = ChildKey(kind="Deployment", name="qwen")


def test_an_endpoint_picker_s_deployment_is_no_workload() -> None:
    """It is a child like any other: pruned with the gateway, in nobody's figures, and handed over to nobody."""
    gateway = {"gateway": {"endpointPicker": {"managed": True}}}
    plan, before = volumes(2), planned({"replicas": 2, **gateway})
    picker = next(item for item in before.children if item["kind"] == "Deployment" and item is not before.workload)
    figures = settled_status(1)
    found = observed(plan, pod("a"), pod("b"), status=settled_status(2))
    found = replace(found, children=(*found.children, child(picker, **figures)))
    assert hand_over(plan, found) == ()
    key = ChildKey(kind="Deployment", name=picker["metadata"]["name"])
    assert [action.key for action in decide(plan, found) if isinstance(action, Delete)] == [key]
    assert status_of(plan, found)["replicas"] == 2


def test_an_autoscaled_workload_is_handed_over_by_what_the_autoscaler_asked_for() -> None:
    scaling = {"autoscaling": {"minReplicas": 1, "maxReplicas": 5}}
    plan = planned({"prefixCaching": {"persistence": {"size": "100Gi"}}, **scaling})
    made, found = switched(replicas=4, available=1, has=4, plan=plan)
    asked = merged(dict(made.workload), {"spec": {"replicas": 4}})
    status = deployment_status(replicas=4, updated=4, ready=1, available=1)
    others = [one for one in found.children if one.kind != "StatefulSet"]
    found = replace(found, children=(*others, child(asked, **status)))
    assert hand_over(made, found) == (Scale(key=OLD, uid="uid-Deployment", replicas=3),)


@pytest.mark.parametrize(
    ("case", "left"),
    [
        ({"replicas": 3, "available": 0, "has": 3}, 3),
        ({"replicas": 3, "available": 1, "has": 3}, 2),
        ({"replicas": 3, "available": 2, "has": 3}, 1),
        ({"replicas": 3, "available": 3, "has": 3}, 0),
        ({"replicas": 1, "available": 0, "has": 1}, 1),
        ({"replicas": 1, "available": 1, "has": 1}, 0),
        # More or fewer than before, and pods that gave way already.
        ({"replicas": 2, "available": 0, "has": 5}, 2),
        ({"replicas": 5, "available": 0, "has": 2}, 2),
        ({"replicas": 3, "available": 1, "has": 1}, 1),
        # No device is free: one pod ahead, and no more until it has helped.
        ({"replicas": 3, "available": 0, "has": 3, "waiting": FULL}, 2),
        ({"replicas": 3, "available": 0, "has": 2, "waiting": FULL}, 2),
        ({"replicas": 3, "available": 1, "has": 2, "waiting": FULL}, 1),
        ({"replicas": 1, "available": 0, "has": 1, "waiting": FULL}, 0),
        # What is wrong is not the devices: nobody gives way.
        ({"replicas": 3, "available": 0, "has": 3, "waiting": LABEL}, 3),
        # The controller has not looked yet: its figures are another template's.
        ({"replicas": 3, "available": 3, "has": 3, "seen": 2}, 3),
    ],
)
def test_a_pod_goes_for_each_that_serves(case: dict[str, Any], left: int) -> None:
    plan, seen = switched(**case)
    before = case["has"]
    expected: tuple[Delete | Scale, ...] = ()
    if left == 0:
        expected = (Delete(key=OLD, api_version="apps/v1", uid="uid-Deployment"),)
    elif left < before:
        expected = (Scale(key=OLD, uid="uid-Deployment", replicas=left),)
    assert hand_over(plan, seen) == expected


def test_nothing_is_taken_before_the_successor_is_there() -> None:
    plan, seen = switched(replicas=2, available=2, has=2)
    without = replace(seen, children=tuple(child for child in seen.children if child.kind != "StatefulSet"))
    assert hand_over(plan, without) == ()
    foreign = tuple(replace(child, owned=False) if child.kind == "StatefulSet" else child for child in seen.children)
    assert hand_over(plan, replace(seen, children=foreign)) == ()


def test_a_workload_is_not_pruned_like_other_children() -> None:
    plan, seen = switched(replicas=2, available=0, has=2)
    gone = planned({"prefixCaching": {"warmup": {"prompts": ["a"]}}}).warmup
    assert gone is not None
    seen = replace(seen, children=(*seen.children, child(gone)))
    deleted = [action.key.kind for action in decide(plan, seen) if isinstance(action, Delete)]
    assert deleted == ["ConfigMap"]


def test_a_suspended_service_keeps_no_predecessor() -> None:
    plan = planned({"suspend": True, "prefixCaching": {"persistence": {"size": "1Gi"}}})
    _, seen = switched(replicas=0, available=0, has=2, plan=plan)
    assert hand_over(plan, seen) == (Delete(key=OLD, api_version="apps/v1", uid="uid-Deployment"),)


def test_volumes_of_another_size_are_handed_over_to_as_well() -> None:
    plan, before = volumes(2, "200Gi"), volumes(2, "100Gi").workload
    found = observed(plan, pod(), status=deployment_status(replicas=2, updated=2, ready=1, available=1))
    old = replace(child(before, **deployment_status(replicas=2)), uid="old")
    found = replace(found, children=(*found.children, old))
    assert hand_over(plan, found) == (
        Scale(key=ChildKey(kind="StatefulSet", name=before["metadata"]["name"]), uid="old", replicas=1),
    )


def test_several_predecessors_share_what_is_left() -> None:
    plan, seen = switched(replicas=3, available=1, has=2)
    more = replace(child(volumes(2, "7Gi").workload, **deployment_status(replicas=2)), uid="more")
    actions = hand_over(plan, replace(seen, children=(*seen.children, more)))
    assert [type(action).__name__ for action in actions] == ["Delete"], "two of the first are enough"


# How it is told -----------------------------------------------------------------------------------------------------


def test_a_hand_over_is_progress_and_all_pods_count() -> None:
    plan, seen = switched(replicas=2, available=1, has=2)
    status = status_of(plan, seen)
    assert kstatus(status) == RECONCILING
    assert (status["replicas"], status["readyReplicas"], status["availableReplicas"]) == (4, 3, 3)
    assert status["updatedReplicas"] == 2
    assert "Deployment/qwen gives up a pod for each that serves, 2 serve there" in message(status, "Ready")


def test_it_is_not_ready_while_a_predecessor_is_left() -> None:
    plan, seen = switched(replicas=2, available=2, has=2)
    assert kstatus(status_of(plan, seen)) == RECONCILING


def test_a_pod_of_a_stateful_set_that_never_becomes_ready_is_told() -> None:
    plan = volumes(1)
    late = replace(pod(ready=False), created_at=NOW - 4000)
    seen = observed(plan, late, status=deployment_status(ready=0, available=0))
    status = status_of(plan, seen)
    assert (kstatus(status), reason(status)) == (STALLED, "ProgressDeadlineExceeded")
    assert "qwen-a has not become ready within 3900 s" in message(status, "Stalled")
    young = observed(plan, pod(ready=False), status=deployment_status(ready=0, available=0))
    assert kstatus(status_of(plan, young)) == RECONCILING


def test_a_stateful_set_that_makes_no_pod_says_where_to_look() -> None:
    plan = volumes(1)
    status = status_of(plan, observed(plan, status=settled_status(0)))
    assert f"kubectl describe StatefulSet/{plan.workload['metadata']['name']}" in message(status, "Ready")


def test_a_missing_config_map_is_told_and_no_pod_suffers() -> None:
    plan = planned({"prefixCaching": {"warmup": {"configMapKeyRef": {"name": "prompts", "key": "k"}}}})
    status = status_of(plan, observed(plan, pod(), missing_config_maps=("prompts",)))
    assert reason(status) == "Ready"
    assert "ConfigMap prompts of spec.prefixCaching.warmup does not exist" in message(status, "Ready")
    assert "prompts" not in message(status_of(plan, observed(plan, pod())), "Ready")


# Pods of a StatefulSet ----------------------------------------------------------------------------------------------


def outdated(plan: Plan, number: int = 1, **changes: Any) -> ObservedPod:
    name = plan.workload["metadata"]["name"]
    return replace(pod(f"{name}-{number}", ready=False, template=f"{name}-old"), **changes)


def current(plan: Plan, number: int, **changes: Any) -> ObservedPod:
    name = plan.workload["metadata"]["name"]
    return replace(pod(f"{name}-{number}", template=f"{name}-new"), **changes)


def replaced(plan: Plan, *pods: ObservedPod) -> list[tuple[str, bool]]:
    """(ordinal, whether it was broken) of the pods that go now."""
    name = plan.workload["metadata"]["name"]
    actions = replace_pods(plan, observed(plan, *pods, template_hash=f"{name}-new"))
    assert {action.uid for action in actions} <= {each.uid for each in pods}
    return [(action.name.removeprefix(f"{name}-"), action.broken) for action in actions]


@pytest.mark.parametrize(
    ("changes", "goes"),
    [
        ({"failures": (CRASH,)}, [("1", True)]),
        ({"failures": (CRASH,), "started": True}, [("1", True)]),
        ({}, [("1", True)]),
        ({"scheduled": False}, [("1", True)]),
        ({"started": True}, []),  # it has served, and is too busy for its probe
        ({"ready": True, "started": True}, [("1", False)]),
        ({"terminating": True}, []),
        ({"template_hash": None}, []),
        ({"template_hash": "another-old"}, []),  # a predecessor's
    ],
)
def test_a_pod_of_an_older_template_goes_when_nobody_misses_it(changes: dict[str, Any], goes: Any) -> None:
    plan = volumes(2)
    assert replaced(plan, current(plan, 0), outdated(plan, **changes)) == goes


def test_pods_that_serve_go_one_at_a_time_and_the_last_one_first() -> None:
    plan = volumes(12)
    serving = {"ready": True, "started": True}
    pods = [outdated(plan, number, **serving) for number in range(12)]
    assert replaced(plan, *pods) == [("11", False)]
    assert replaced(plan, *pods[:11]) == [], "its successor is not made yet"
    assert replaced(plan, *pods[:11], current(plan, 11, ready=False)) == [], "or does not serve yet"
    assert replaced(plan, *pods[:11], replace(pods[11], terminating=True)) == []
    assert replaced(plan, *pods[:11], current(plan, 11)) == [("10", False)]
    assert replaced(plan, *(current(plan, number) for number in range(12))) == []


def test_broken_pods_go_before_one_that_serves() -> None:
    plan = volumes(3)
    serving = outdated(plan, 2, ready=True, started=True)
    assert replaced(plan, outdated(plan, 0, failures=(CRASH,)), outdated(plan, 1), serving) == [
        ("0", True),
        ("1", True),
    ]


def test_no_pod_goes_while_the_present_template_is_not_known() -> None:
    plan = volumes(2)
    assert replace_pods(plan, observed(plan, outdated(plan), template_hash=None)) == ()


def test_a_deployment_replaces_its_own_pods() -> None:
    plan = planned()
    assert replace_pods(plan, observed(plan, pod(ready=False, template="qwen-old"))) == ()
