"""Plan and observed autoscaler → the condition AutoscalingActive: does it scale, and if not, what is missing. Pure.

Informational: the service runs on with the pods it has. Only where `spec.autoscaling` is set.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from reprise_operator.children.load import RESOURCES
from reprise_operator.conditions import AUTOSCALING_ACTIVE, Condition, Status
from reprise_operator.observed import Observed, ObservedChild
from reprise_operator.plan import Plan
from reprise_operator.replicas import unplanned_autoscalers
from reprise_operator.rollout import find_child, key_of
from reprise_operator.spec_types import AutoscalingSpec
from reprise_operator.workloads import counts, workload_of


def autoscaling_condition(plan: Plan, observed: Observed) -> list[Condition]:
    """The condition; empty for a service with a fixed number of pods."""
    asked = plan.service.spec.autoscaling
    if asked is None:
        return []
    status, reason, message = _judge(plan, observed, asked)
    if plan.service.spec.replicas not in (1, asked.min_replicas) and plan.autoscaled:
        message += f" spec.replicas ({plan.service.spec.replicas}) is only what a service starts with."
    return [Condition(type=AUTOSCALING_ACTIVE, status=status, reason=reason, message=message)]


_Judgement = tuple[Status, str, str]


def _judge(plan: Plan, observed: Observed, asked: AutoscalingSpec) -> _Judgement:
    if plan.service.spec.suspend:
        return "False", "Suspended", "spec.suspend is true; the autoscaler rests."
    if plan.autoscaler is None:
        return "False", *_unavailable(asked)
    child = find_child(observed, key_of(plan.autoscaler))
    left = unplanned_autoscalers(plan, observed)
    if child is None or not child.owned:
        waits = f" It waits until {left[0].kind}/{left[0].name} is gone." if left else ""
        return "Unknown", "Pending", f"{key_of(plan.autoscaler)} is not there yet.{waits}"
    conditions = {item.get("type"): item for item in child.status.get("conditions") or ()}
    has_pods = counts(workload_of(plan, observed)).available > 0
    if asked.provider == "keda":
        return _judge_scaled_object(child, conditions, asked, has_pods=has_pods)
    return _judge_hpa(child, conditions, asked, has_pods=has_pods)


def _unavailable(asked: AutoscalingSpec) -> tuple[str, str]:
    if asked.provider == "keda":
        return "KedaNotInstalled", (
            "The cluster has no ScaledObject (keda.sh/v1alpha1), or the operator may not use it (rbac.keda in the "
            "chart): install KEDA, or set spec.autoscaling.provider: hpa. Until then the number of pods stays as it is."
        )
    return "AutoscalerUnavailable", (
        "The operator may not use HorizontalPodAutoscalers (autoscaling/v2); see the chart's RBAC. Until then the "
        "number of pods stays as it is."
    )


def _judge_hpa(
    child: ObservedChild, conditions: Mapping[Any, Mapping[str, str]], asked: AutoscalingSpec, *, has_pods: bool
) -> _Judgement:
    able, active = conditions.get("AbleToScale", {}), conditions.get("ScalingActive", {})
    if able.get("status") == "False":
        return "False", _reason(able), f"{_name(child)}: {_words(able)}"
    if active.get("status") == "True":
        return "True", "Scaling", _bounds(asked)
    if not active or active.get("status") == "Unknown":
        return "Unknown", "Pending", f"{_name(child)} has not been looked at yet by the cluster's autoscaler."
    reason = _reason(active)
    if not reason.startswith("FailedGet"):
        return "False", reason, f"{_name(child)}: {_words(active)}"
    if not has_pods:
        return "Unknown", "WaitingForPods", "No pod is ready, so there is no load to measure yet."
    need = (
        "The cluster's metrics server must serve it (metrics.k8s.io)."
        if asked.metric in RESOURCES
        else "An adapter must serve it as a metric of the pods (custom.metrics.k8s.io), such as prometheus-adapter."
    )
    return "False", "MetricsUnavailable", f"The load, {asked.metric}, is not known. {need} {_words(active)}"


def _judge_scaled_object(
    child: ObservedChild, conditions: Mapping[Any, Mapping[str, str]], asked: AutoscalingSpec, *, has_pods: bool
) -> _Judgement:
    ready, paused = conditions.get("Ready", {}), conditions.get("Paused", {})
    if paused.get("status") == "True":
        return "False", "Paused", f"{_name(child)} is paused: {_words(paused)}"
    if ready.get("status") == "True":
        return "True", "Scaling", _bounds(asked) + _warning(asked)
    if ready.get("status") != "False":
        return "Unknown", "Pending", f"{_name(child)} has not been looked at yet: does KEDA's operator run?"
    if not has_pods and asked.min_replicas > 0:
        return "Unknown", "WaitingForPods", "No pod is ready, so there is no load to measure yet."
    where = asked.metric if asked.metric in RESOURCES else "Prometheus must have it, and answer KEDA"
    return "False", "MetricsUnavailable", f"KEDA cannot read the load ({where}). {_name(child)}: {_words(ready)}"


def _warning(asked: AutoscalingSpec) -> str:
    if asked.min_replicas > 0 or asked.prometheus.query is not None:
        return ""
    return (
        f" At 0 pods nothing measures {asked.metric}, and nothing brings one back: give "
        "spec.autoscaling.prometheus.query a load that is measured in front of the pods, or set minReplicas to 1."
    )


def _bounds(asked: AutoscalingSpec) -> str:
    measured = "spec.autoscaling.prometheus.query" if asked.prometheus.query is not None else asked.metric
    return f"Between {asked.min_replicas} and {asked.max_replicas} pods, by {measured}."


def _name(child: ObservedChild) -> str:
    return f"{child.kind}/{child.name}"


def _reason(condition: Mapping[str, str]) -> str:
    return condition.get("reason") or "Unknown"


def _words(condition: Mapping[str, str]) -> str:
    return condition.get("message") or condition.get("reason") or "it gives no reason."
