"""Status as kstatus and kubectl read it: progress, readiness, times."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from reprise_operator.conditions import timestamp
from reprise_operator.observed import Observed
from tests.support.factories import (
    NOT_READY,
    NOW,
    OLD,
    child,
    deployment_status,
    failing,
    failure,
    metrics,
    observed,
    planned,
    pod,
    settled_status,
)
from tests.support.statuses import READY, RECONCILING, STALLED, conditions, kstatus, message, reason, status_of


def test_the_first_status_already_says_not_ready() -> None:
    """kstatus takes an object without a Ready condition for Current."""
    status = status_of(planned(generation=4), Observed(at=NOW))
    assert status["observedGeneration"] == 4
    assert kstatus(status) == RECONCILING
    assert reason(status) == "Applying"
    assert conditions(status)["Available"] == ("False", "NoReadyPod")
    assert status["selector"] == "serving.reprise.io/name=qwen"
    assert status["url"] == "http://qwen.llm.svc:8000/v1"
    assert status["model"] == "qwen"
    assert (status["replicas"], status["readyReplicas"]) == (0, 0)
    assert all(item["observedGeneration"] == 4 for item in status["conditions"])


def test_each_condition_is_there_once() -> None:
    """The API server refuses a status with two of a type, and with it every later one."""
    everything = {
        "auth": {"apiKeySecretRef": {"name": "keys"}},
        "autoscaling": {"maxReplicas": 2},
        "gateway": {"parentRefs": [{"name": "g"}]},
        "monitoring": {"podMonitor": {}},
    }
    for spec in ({}, everything):
        types = [item["type"] for item in status_of(planned(spec), Observed(at=NOW))["conditions"]]
        assert sorted(types) == sorted(set(types))


def test_ready() -> None:
    plan = planned({"replicas": 2})
    seen = observed(
        plan,
        pod("qwen-a", metrics=metrics()),
        pod("qwen-b", metrics=metrics()),
        status=settled_status(2),
    )
    status = status_of(plan, seen)
    assert kstatus(status) == READY
    assert message(status, "Ready") == "2 of 2 pods are ready."
    assert conditions(status)["Available"] == ("True", "Serving")
    assert [status[key] for key in ("replicas", "readyReplicas", "updatedReplicas", "availableReplicas")] == [2] * 4
    engine = {"version": "0.1.0", "blockSize": 16, "kvBlocks": 500, "maxModelLen": 4096, "memoryUtilization": 0.9}
    assert status["engine"] == engine
    assert status["memory"] == {
        "effective": 0.9,
        "reason": "automatic: maxModelLen is unset or at most 32768",
        "deviceOutOfMemory": False,
        "inputsHash": plan.tuning.inputs_hash,
        "steps": 0,
    }
    assert conditions(status)["MemoryTuned"] == ("False", "Automatic")


@pytest.mark.parametrize(
    "figures",
    [
        deployment_status(replicas=1, updated=0, ready=1, available=1),
        deployment_status(replicas=2, updated=1, ready=2, available=2),
        deployment_status(replicas=2, updated=1, ready=1, available=1),
        deployment_status(seen=2),
        deployment_status(ready=0, available=0),
        {},
    ],
)
def test_pods_of_an_older_template_do_not_make_it_ready(figures: dict[str, Any]) -> None:
    """Fault operator 6: Ready while the counted pods were of the old generation."""
    plan = planned()
    status = status_of(plan, observed(plan, pod(template=OLD), status=figures))
    assert kstatus(status) == RECONCILING


def test_it_is_not_ready_before_the_new_spec_is_applied() -> None:
    """Fault operator 6: the Deployment is fine, but it is still that of the spec before."""
    before, after = planned(), planned({"prefixCaching": {"enabled": False}}, generation=2)
    status = status_of(after, observed(before, pod()))
    assert kstatus(status) == RECONCILING
    assert message(status, "Ready") == "Deployment/qwen is being applied."
    assert status["observedGeneration"] == 2


def test_it_is_not_ready_while_its_init_container_fails() -> None:
    """Fault operator 6: Ready while an init container crash-loops."""
    plan = planned()
    cause = failure("CrashLoopBackOff", words="no route", code=1, container="fetch", init=True)
    status = status_of(plan, failing(plan, cause))
    assert kstatus(status) == STALLED
    assert message(status, "Stalled") == "Pod qwen-a, container fetch fails (exit code 1): no route"


def test_a_service_without_its_network_service_is_not_ready() -> None:
    plan = planned()
    seen = replace(observed(plan, pod()), children=(child(plan.workload, **deployment_status()),))
    assert kstatus(status_of(plan, seen)) == RECONCILING


@pytest.mark.parametrize(
    ("spec", "expected"), [({"suspend": True, "replicas": 3}, "Suspended"), ({"replicas": 0}, "ScaledToZero")]
)
def test_no_pods_wanted_and_none_there_is_ready_but_not_available(spec: dict[str, Any], expected: str) -> None:
    plan = planned(spec)
    status = status_of(plan, observed(plan, status=settled_status(0)))
    assert kstatus(status) == READY
    assert reason(status) == expected
    assert conditions(status)["Available"][0] == "False"


def test_suspending_is_in_progress_until_the_pods_are_gone() -> None:
    plan = planned({"suspend": True})
    assert kstatus(status_of(plan, observed(plan, pod()))) == RECONCILING


def test_a_degraded_service_is_available_and_says_how_far_it_is() -> None:
    plan = planned({"replicas": 2})
    seen = observed(
        plan,
        pod("qwen-a"),
        pod("qwen-b", ready=False),
        status=deployment_status(replicas=2, updated=2, ready=1, available=1),
    )
    status = status_of(plan, seen)
    assert kstatus(status) == RECONCILING
    assert message(status, "Ready") == "1 of 2 pods of the present template are ready."
    assert conditions(status)["Available"][0] == "True"


def test_transition_times_move_with_the_status_only() -> None:
    plan = planned()
    first = status_of(plan, observed(plan, pod(ready=False), status=NOT_READY))
    second = status_of(plan, observed(plan, pod()), first, now=NOW + 100)
    third = status_of(plan, observed(plan, pod()), second, now=NOW + 200)
    times = [{item["type"]: item["lastTransitionTime"] for item in status["conditions"]} for status in (first, second)]
    assert times[0]["Ready"] == timestamp(NOW)
    assert times[1]["Ready"] == timestamp(NOW + 100)
    assert times[1]["Stalled"] == timestamp(NOW)
    assert third == second


def test_the_schemas_default_condition_is_replaced() -> None:
    pending = {"type": "Ready", "status": "Unknown", "reason": "Pending", "message": "", "lastTransitionTime": "1970"}
    status = status_of(planned(), Observed(at=NOW), {"conditions": [pending]})
    assert [item["type"] for item in status["conditions"]].count("Ready") == 1
    assert status["conditions"][0]["lastTransitionTime"] == timestamp(NOW)


def test_informational_conditions_never_decide() -> None:
    """Fault operator 11: Argo CD was Progressing for ever because of an informational condition."""
    plan = planned()
    status = status_of(plan, observed(plan, pod(metrics=metrics())))
    found = conditions(status)
    assert found["PrefixCacheEffective"][0] == "Unknown"
    assert found["MemoryTuned"][0] == "False"
    assert kstatus(status) == READY
