"""What became of what the spec asks beside its pods: route, pool and picker; monitor. Pure, and informational: the
service itself is Ready when its pods are, whether a gateway has taken it up or not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from reprise_operator.children.gateway import GatewayPlan
from reprise_operator.conditions import GATEWAY_READY, MONITORED, Condition, Status
from reprise_operator.kinds import HTTP_ROUTES, INFERENCE_POOLS, POD_MONITORS, ResourceType
from reprise_operator.observed import Observed, ObservedChild
from reprise_operator.plan import Manifest, Plan
from reprise_operator.rollout import find_child, key_of

_WANTED = ("Accepted", "ResolvedRefs")
"""Conditions that a gateway's controller writes for each parent of a route or pool: True when all is well."""


def attachment_conditions(plan: Plan, observed: Observed) -> tuple[Condition, ...]:
    """One condition for each thing asked for; none for what is not."""
    found = (_gateway(plan.gateway, observed) if plan.gateway else None, _monitored(plan, observed))
    return tuple(condition for condition in found if condition is not None)


def _gateway(gateway: GatewayPlan, observed: Observed) -> Condition:
    def condition(status: Status, reason: str, message: str) -> Condition:
        return Condition(type=GATEWAY_READY, status=status, reason=reason, message=message)

    if gateway.taken is not None:
        return condition("False", "HostnameTaken", gateway.taken.message)
    if HTTP_ROUTES in gateway.asks and gateway.route is None:
        return condition("False", "HTTPRouteUnavailable", f"{_unavailable(HTTP_ROUTES)} {_SERVICE}")
    if HTTP_ROUTES not in gateway.asks and gateway.pool is None:
        return condition("False", "InferencePoolUnavailable", f"{_unavailable(INFERENCE_POOLS)} {_SERVICE}")
    picker = _picker_trouble(gateway, observed)
    if picker is not None:
        return condition("False", "EndpointPickerNotReady", picker)
    for manifest in (gateway.route, gateway.pool):
        refused = _refusal(manifest, observed) if manifest is not None else None
        if refused is not None:
            return condition("False", "NotAccepted", refused)
    if gateway.route is not None:
        waiting = _unanswered(gateway.route, observed)
        if waiting:
            message = f"No gateway has accepted {key_of(gateway.route)} yet: {', '.join(waiting)}."
            return condition("Unknown", "Waiting", message)
        if INFERENCE_POOLS in gateway.asks and gateway.pool is None:
            message = f"{_unavailable(INFERENCE_POOLS)} The route goes to the Service, without an endpoint picker."
            return condition("True", "RoutedToService", message)
        return condition("True", "Routed", f"The gateway has accepted {key_of(gateway.route)}.")
    assert gateway.pool is not None
    return condition("True", "PoolApplied", f"{key_of(gateway.pool)} is there for a route to name.")


_SERVICE = "Clients go to the Service, which keeps each on one pod unless spec.service.sessionAffinity says otherwise."


def _unavailable(kind: ResourceType) -> str:
    return (
        f"{kind.kind} ({kind.api_version}) is not installed, or the operator may not use it (chart value "
        f"{_CHART_VALUE[kind]})."
    )


_CHART_VALUE = {HTTP_ROUTES: "rbac.gateway", INFERENCE_POOLS: "rbac.gateway", POD_MONITORS: "rbac.podMonitors"}


def _picker_trouble(gateway: GatewayPlan, observed: Observed) -> str | None:
    for manifest in gateway.picker:
        child = find_child(observed, key_of(manifest))
        if manifest["kind"] != "Deployment" or manifest["spec"]["replicas"] == 0:
            continue
        if child is not None and int(child.status.get("availableReplicas", 0)) > 0:
            continue
        failures = (
            item.get("message", "")
            for item in (child.status.get("conditions") or () if child else ())
            if item.get("type") == "ReplicaFailure" and item.get("status") == "True"
        )
        why = next(failures, "its pod is not ready yet; see the Deployment.")
        return f"{key_of(manifest)} has no available pod: {why}"
    return None


def _refusal(manifest: Manifest, observed: Observed) -> str | None:
    """What a controller says against it."""
    child = find_child(observed, key_of(manifest))
    if child is None:
        return None
    for parent in _parents(child):
        for item in _current(child, parent):
            if item.get("type") in _WANTED and item.get("status") == "False":
                where = _place(parent.get("parentRef") or {})
                return f"{key_of(manifest)} at {where}: {item.get('reason', '')}: {item.get('message', '')}"
    return None


def _unanswered(manifest: Manifest, observed: Observed) -> list[str]:
    """The parents that have not accepted the route as it is now."""
    child = find_child(observed, key_of(manifest))
    accepted = [
        parent.get("parentRef") or {}
        for parent in (_parents(child) if child is not None else ())
        if child is not None
        and any(item.get("type") == "Accepted" and item.get("status") == "True" for item in _current(child, parent))
    ]
    return [
        _place(wanted)
        for wanted in manifest["spec"]["parentRefs"]
        if not any(_is_answer(wanted, answer) for answer in accepted)
    ]


def _is_answer(wanted: Mapping[str, Any], answer: Mapping[str, Any]) -> bool:
    """A controller repeats the reference, with or without what the API server fills in."""
    namespaces = {wanted.get("namespace"), answer.get("namespace")} - {None}
    same = (answer.get(key, wanted.get(key)) == wanted.get(key) for key in ("kind", "name", "sectionName", "port"))
    return len(namespaces) <= 1 and all(same)


def _parents(child: ObservedChild) -> Iterator[Mapping[str, Any]]:
    yield from child.status.get("parents") or ()


def _current(child: ObservedChild, parent: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Conditions about the present generation; those of an older one say nothing of it."""
    for item in parent.get("conditions") or ():
        if int(item.get("observedGeneration", child.generation)) >= child.generation:
            yield item


def _place(parent: Mapping[str, Any]) -> str:
    section = f" ({parent['sectionName']})" if parent.get("sectionName") else ""
    namespace = f"{parent['namespace']}/" if parent.get("namespace") else ""
    return f"{parent.get('kind', 'Gateway')} {namespace}{parent.get('name', '')}{section}"


def _monitored(plan: Plan, observed: Observed) -> Condition | None:
    def condition(status: Status, reason: str, message: str) -> Condition:
        return Condition(type=MONITORED, status=status, reason=reason, message=message)

    if POD_MONITORS not in plan.asks:
        return None
    if plan.pod_monitor is None:
        return condition("False", "PodMonitorUnavailable", _unavailable(POD_MONITORS))
    key = key_of(plan.pod_monitor)
    if find_child(observed, key) is None:
        return condition("False", "Applying", f"{key} is not there yet.")
    return condition("True", "PodMonitorApplied", f"{key} is there; a Prometheus that selects it reads the pods.")
