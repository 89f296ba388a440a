"""For how many more pods of a service the nodes have room, devices above all. Pure.

A cautious estimate, not a scheduler: it decides whether a change may add a pod before it takes one. What it does not
know (affinities between pods, topology, volumes) can only make the surge pod wait; then the change goes on without it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from typing import Any

from reprise_operator.quantity import amount

Body = Mapping[str, Any]


def free_pods(
    template: Body, nodes: Iterable[Body], pods: Sequence[Body], *, device: str, ours: Mapping[str, str]
) -> int:
    """Pods of `template` that fit beside `pods`, those of all namespaces.

    Pods that wait for the same `device` come first, but for those with the labels `ours`, the service's own.
    """
    wanted = pod_requests(template["spec"])
    active = [pod for pod in pods if (pod.get("status") or {}).get("phase") not in ("Succeeded", "Failed")]
    room = sum(_fitting(wanted, node, active) for node in nodes if _may_run(template["spec"], node))
    waiting = sum(
        1
        for pod in active
        if not pod["spec"].get("nodeName") and pod_requests(pod["spec"]).get(device) and not _has(pod, ours)
    )
    return max(0, room - waiting)


def pod_requests(spec: Body) -> dict[str, Decimal]:
    """What a pod asks for, by resource: the sum over its containers, or an init container's where that is more."""
    total: dict[str, Decimal] = {"pods": Decimal(1)}
    for container in spec.get("containers") or ():
        for name, asked in _requests(container).items():
            total[name] = total.get(name, Decimal(0)) + asked
    for container in spec.get("initContainers") or ():
        for name, asked in _requests(container).items():
            total[name] = max(total.get(name, Decimal(0)), asked)
    return total


def _requests(container: Body) -> dict[str, Decimal]:
    resources = container.get("resources") or {}
    asked = {**(resources.get("limits") or {}), **(resources.get("requests") or {})}
    return {name: amount(value) for name, value in asked.items()}


def _fitting(wanted: Mapping[str, Decimal], node: Body, pods: Iterable[Body]) -> int:
    name = node["metadata"]["name"]
    allocatable = (node.get("status") or {}).get("allocatable") or {}
    free = {resource: amount(value) for resource, value in allocatable.items()}
    for pod in pods:
        if pod["spec"].get("nodeName") == name:
            for resource, taken in pod_requests(pod["spec"]).items():
                free[resource] = free.get(resource, Decimal(0)) - taken
    asked = {resource: value for resource, value in wanted.items() if value > 0}
    return int(min(max(Decimal(0), free.get(resource, Decimal(0))) // value for resource, value in asked.items()))


def _has(pod: Body, labels: Mapping[str, str]) -> bool:
    present = pod["metadata"].get("labels") or {}
    return all(present.get(key) == value for key, value in labels.items())


def _may_run(spec: Body, node: Body) -> bool:
    conditions = (node.get("status") or {}).get("conditions") or ()
    ready = any(condition["type"] == "Ready" and condition["status"] == "True" for condition in conditions)
    if not ready or (node.get("spec") or {}).get("unschedulable"):
        return False
    labels = node["metadata"].get("labels") or {}
    if any(labels.get(key) != value for key, value in (spec.get("nodeSelector") or {}).items()):
        return False
    return _affine(spec, node) and _tolerated(spec, node)


def _affine(spec: Body, node: Body) -> bool:
    affinity = ((spec.get("affinity") or {}).get("nodeAffinity") or {}).get(
        "requiredDuringSchedulingIgnoredDuringExecution"
    )
    if not affinity:
        return True
    labels = node["metadata"].get("labels") or {}
    fields = {"metadata.name": node["metadata"]["name"]}
    return any(
        (term.get("matchExpressions") or term.get("matchFields"))
        and all(_matches(rule, labels) for rule in term.get("matchExpressions") or ())
        and all(_matches(rule, fields) for rule in term.get("matchFields") or ())
        for term in affinity.get("nodeSelectorTerms") or ()
    )


def _matches(rule: Body, labels: Mapping[str, str]) -> bool:
    value = labels.get(rule["key"])
    values: Sequence[str] = rule.get("values") or ()
    match rule["operator"]:
        case "In":
            return value in values
        case "NotIn":
            return value not in values
        case "Exists":
            return value is not None
        case "DoesNotExist":
            return value is None
        case "Gt" | "Lt" as operator:
            try:
                number, limit = int(value or ""), int(values[0])
            except (ValueError, IndexError):
                return False
            return number > limit if operator == "Gt" else number < limit
    return False


def _tolerated(spec: Body, node: Body) -> bool:
    tolerations = spec.get("tolerations") or ()
    taints = (node.get("spec") or {}).get("taints") or ()
    return all(
        taint["effect"] == "PreferNoSchedule" or any(_tolerates(toleration, taint) for toleration in tolerations)
        for taint in taints
    )


def _tolerates(toleration: Body, taint: Body) -> bool:
    if toleration.get("effect") not in (None, "", taint["effect"]):
        return False
    if toleration.get("operator") == "Exists":
        return toleration.get("key") in (None, "", taint["key"])
    return bool(toleration.get("key") == taint["key"] and toleration.get("value", "") == taint.get("value", ""))
