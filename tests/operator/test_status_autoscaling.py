"""Status of a service whose pods an autoscaler counts: Ready, the figures, and what AutoscalingActive says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from reprise_operator.events import transitions
from reprise_operator.kinds import HORIZONTAL_POD_AUTOSCALERS, OPTIONAL_TYPES, SCALED_OBJECTS
from reprise_operator.observed import Observed, ObservedChild
from reprise_operator.plan import Plan
from tests.support.factories import (
    CURRENT,
    HPA,
    KEDA,
    NOW,
    OLD,
    PROMETHEUS,
    TO_ZERO,
    child,
    deployment_status,
    failure,
    merged,
    observed,
    planned,
    pod,
)
from tests.support.statuses import READY, RECONCILING, STALLED, conditions, kstatus, message, reason, status_of


def scaled(plan: Plan, wanted: int, *conditions: tuple[str, str, str], **figures: int) -> Observed:
    """Everything applied; the workload has `wanted` in its spec, the autoscaler these (type, status, reason)."""
    counted = {"replicas": wanted, "updated": wanted, "ready": wanted, "available": wanted} | figures
    said = [{"type": t, "status": s, "reason": r, "message": f"{r}, it says."} for t, s, r in conditions]

    def made(manifest: Any) -> ObservedChild:
        if manifest is plan.workload:
            return child(merged(manifest, {"spec": {"replicas": wanted}}), **deployment_status(**counted))
        is_autoscaler = manifest["kind"] in ("HorizontalPodAutoscaler", "ScaledObject")
        return child(manifest, conditions=said) if is_autoscaler else child(manifest)

    pods = tuple(pod(f"qwen-{number}") for number in range(counted["available"]))
    children = tuple(made(manifest) for manifest in plan.children)
    return Observed(at=NOW, children=children, pods=pods, template_hash=CURRENT)


ACTIVE = ("ScalingActive", "True", "ValidMetricFound")


def autoscaling(plan: Plan, seen: Observed) -> tuple[str, str]:
    return conditions(status_of(plan, seen))["AutoscalingActive"]


@pytest.mark.parametrize(
    ("figures", "expected", "words"),
    [
        ({}, (READY, "Ready"), "4 of 4 pods are ready."),
        ({"ready": 3, "available": 3}, (READY, "Ready"), "3 of 4 pods are ready; the autoscaler asked for more"),
        ({"replicas": 3, "updated": 3, "ready": 3, "available": 3}, (READY, "Ready"), "3 of 4 pods are ready;"),
        ({"ready": 1, "available": 1}, (RECONCILING, "Progressing"), "of 4 pods of the present template"),
        ({"updated": 2}, (RECONCILING, "Progressing"), "2 of an older one to be replaced"),
        ({"seen": 2}, (RECONCILING, "Progressing"), "has not seen the present template"),
    ],
    ids=["all", "loading", "to-come", "below-the-least", "old-template", "unseen"],
)
def test_more_pods_for_more_load_do_not_make_a_service_unready(
    figures: dict[str, int], expected: tuple[Any, str], words: str
) -> None:
    plan = planned(HPA)
    status = status_of(plan, scaled(plan, 4, ACTIVE, **figures))
    assert (kstatus(status), reason(status)) == expected
    assert words in message(status, "Ready")


def test_a_peak_without_room_is_said_and_no_fault() -> None:
    plan = planned(HPA)
    waiting = replace(pod("qwen-d", ready=False), scheduled=False, unschedulable_message="0/3 nodes: no NPU.")
    seen = replace(scaled(plan, 4, ACTIVE, ready=3, available=3), pods=(pod(), waiting))
    status = status_of(plan, seen)
    assert kstatus(status) == READY
    assert "Pod qwen-d has no node: 0/3 nodes: no NPU." in message(status, "Ready")
    below = status_of(plan, replace(scaled(plan, 2, ACTIVE, ready=1, available=1), pods=(pod(), waiting)))
    assert (kstatus(below), reason(below)) == (STALLED, "Unschedulable")


def test_a_pod_that_fails_is_a_fault_however_many_serve() -> None:
    """Fault operator 6: Ready while an init container crash-loops."""
    plan = planned(HPA)
    failing = pod(
        "qwen-d",
        ready=False,
        failures=[failure("CrashLoopBackOff", code=1, restarts=4)],
    )
    status = status_of(plan, replace(scaled(plan, 4, ACTIVE, ready=3, available=3), pods=(pod(), failing)))
    assert (kstatus(status), reason(status)) == (STALLED, "ContainerCrashing")


def test_pods_of_an_older_template_do_not_count() -> None:
    plan = planned(HPA)
    seen = replace(scaled(plan, 3, ACTIVE, replicas=4, updated=2, ready=3, available=3), pods=(pod(template=OLD),))
    assert kstatus(status_of(plan, seen)) == RECONCILING


def test_the_figures_are_the_workloads() -> None:
    plan = planned(HPA)
    status = status_of(plan, scaled(plan, 4, ACTIVE, ready=3, available=3))
    assert (status["replicas"], status["readyReplicas"], status["availableReplicas"]) == (4, 3, 3)
    assert status["selector"] == "serving.reprise.io/name=qwen"


def test_at_zero_by_keda_it_is_ready_without_pods() -> None:
    plan = planned(TO_ZERO)
    status = status_of(plan, scaled(plan, 0, ("Ready", "True", "ScaledObjectReady"), ("Active", "False", "NotActive")))
    assert (kstatus(status), reason(status)) == (READY, "ScaledToZero")
    assert message(status, "Ready") == "The autoscaler found no load; no pod runs."
    assert status["replicas"] == 0


NO_METRIC = ("ScalingActive", "False", "FailedGetPodsMetric")


@pytest.mark.parametrize(
    ("spec", "said", "figures", "expected", "words"),
    [
        (HPA, [ACTIVE], {}, ("True", "Scaling"), "Between 2 and 5 pods, by vllm:num_requests_waiting."),
        (HPA, [], {}, ("Unknown", "Pending"), "HorizontalPodAutoscaler/qwen has not been looked at yet"),
        (HPA, [NO_METRIC], {}, ("False", "MetricsUnavailable"), "custom.metrics.k8s.io"),
        (HPA, [NO_METRIC], {}, ("False", "MetricsUnavailable"), "FailedGetPodsMetric, it says."),
        (HPA, [NO_METRIC], {"ready": 0, "available": 0}, ("Unknown", "WaitingForPods"), "No pod is ready"),
        (HPA, [("ScalingActive", "False", "ScalingDisabled")], {}, ("False", "ScalingDisabled"), "it says."),
        (HPA, [("ScalingActive", "False", "AmbiguousSelector")], {}, ("False", "AmbiguousSelector"), "it says."),
        (HPA, [("AbleToScale", "False", "FailedGetScale"), ACTIVE], {}, ("False", "FailedGetScale"), "it says."),
        (
            {
                "autoscaling": {"maxReplicas": 5, "metric": "cpu"},
                "runtime": {"resources": {"requests": {"cpu": 1}}},
            },
            [("ScalingActive", "False", "FailedGetContainerResourceMetric")],
            {},
            ("False", "MetricsUnavailable"),
            "metrics server",
        ),
        (KEDA, [("Ready", "True", "ScaledObjectReady")], {}, ("True", "Scaling"), "Between 2 and 5 pods"),
        (KEDA, [], {}, ("Unknown", "Pending"), "does KEDA's operator run?"),
        (KEDA, [("Ready", "Unknown", "x")], {}, ("Unknown", "Pending"), "does KEDA's operator run?"),
        (KEDA, [("Ready", "False", "TriggerError")], {}, ("False", "MetricsUnavailable"), "TriggerError, it says."),
        (
            KEDA,
            [("Ready", "False", "TriggerError")],
            {"ready": 0, "available": 0},
            ("Unknown", "WaitingForPods"),
            "No pod is ready",
        ),
        (
            KEDA,
            [("Ready", "True", "x"), ("Paused", "True", "ScaledObjectPaused")],
            {},
            ("False", "Paused"),
            "is paused",
        ),
        (TO_ZERO, [("Ready", "True", "x")], {}, ("True", "Scaling"), "At 0 pods nothing measures"),
        (HPA | {"suspend": True}, [ACTIVE], {}, ("False", "Suspended"), "rests"),
        (HPA | {"replicas": 4}, [ACTIVE], {}, ("True", "Scaling"), "spec.replicas (4) is only what a service starts"),
    ],
)
def test_what_autoscaling_says(
    spec: dict[str, Any], said: list[Any], figures: dict[str, int], expected: tuple[str, str], words: str
) -> None:
    plan = planned(spec)
    seen = scaled(plan, 3, *said, **figures)
    assert autoscaling(plan, seen) == expected
    assert words in message(status_of(plan, seen), "AutoscalingActive")


def test_a_query_of_the_users_may_wake_from_zero() -> None:
    prometheus = {**PROMETHEUS, "query": "sum(x)"}
    plan = planned({"autoscaling": {**TO_ZERO["autoscaling"], "target": 3, "prometheus": prometheus}})
    told = message(status_of(plan, scaled(plan, 1, ("Ready", "True", "x"))), "AutoscalingActive")
    assert told == "Between 0 and 5 pods, by spec.autoscaling.prometheus.query."


@pytest.mark.parametrize(
    ("spec", "missing", "expected"),
    [(KEDA, SCALED_OBJECTS, "KedaNotInstalled"), (HPA, HORIZONTAL_POD_AUTOSCALERS, "AutoscalerUnavailable")],
)
def test_a_kind_that_is_not_there_is_named_and_the_service_serves_on(
    spec: dict[str, Any], missing: Any, expected: str
) -> None:
    plan = planned(spec, available=frozenset(OPTIONAL_TYPES) - {missing})
    status = status_of(plan, scaled(plan, 3))
    assert kstatus(status) == READY
    assert conditions(status)["AutoscalingActive"] == ("False", expected)
    assert "the number of pods stays as it is" in message(status, "AutoscalingActive")


def test_the_new_autoscaler_waits_for_the_old_one_and_says_so() -> None:
    plan, old = planned(HPA), planned(KEDA).autoscaler
    assert old is not None
    going = child(merged(old, {"metadata": {"finalizers": ["finalizer.keda.sh"]}}), terminating=True)
    full = scaled(plan, 3)
    kept = tuple(item for item in full.children if item.kind != "HorizontalPodAutoscaler")
    status = status_of(plan, replace(full, children=(*kept, going)))
    assert conditions(status)["AutoscalingActive"] == ("Unknown", "Pending")
    assert "waits until ScaledObject/qwen is gone" in message(status, "AutoscalingActive")


def test_a_fixed_number_has_no_such_condition() -> None:
    plan = planned()
    assert "AutoscalingActive" not in conditions(status_of(plan, observed(plan, pod())))


def test_what_is_told_as_an_event() -> None:
    plan = planned(HPA)
    fine, missing = status_of(plan, scaled(plan, 3, ACTIVE)), status_of(plan, scaled(plan, 3, NO_METRIC))
    pending = status_of(plan, scaled(plan, 3))
    suspended = planned(HPA | {"suspend": True})
    resting = status_of(suspended, scaled(suspended, 0, ACTIVE))

    def told(before: Any, after: Any) -> list[tuple[str, str]]:
        news = transitions(before, after)
        return [(item.type, item.reason) for item in news if item.action == "AutoscalingActive"]

    assert told(pending, missing) == [("Warning", "MetricsUnavailable")]
    assert told(missing, fine) == [("Normal", "Scaling")]
    assert told(fine, fine) == []
    assert told(fine, resting) == []
    assert told(missing, pending) == []
