"""Whether the controllers of workloads have seen all there is to see: what they tell is then what is there."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tests.support.kubectl import Kubectl

Body = dict[str, Any]


def caught_up(kubectl: Kubectl) -> bool:
    """Every Deployment, ReplicaSet and StatefulSet of the namespace tells of its last generation and of its pods."""
    deployments, sets, stateful = (kubectl.list(kind) for kind in ("deployments", "replicasets", "statefulsets"))
    if not all(map(_seen, (*deployments, *sets, *stateful))):
        return False
    pods = [pod for pod in kubectl.list("pods") if _is_alive(pod)]
    return all(
        _told(each) == _sum((1, is_ready(pod)) for pod in _of(each, pods)) for each in (*sets, *stateful)
    ) and all(_told(each) == _sum(map(_told, _of(each, sets))) for each in deployments)


def is_ready(pod: Body) -> bool:
    conditions = (pod.get("status") or {}).get("conditions") or ()
    return any((each["type"], each["status"]) == ("Ready", "True") for each in conditions)


def _seen(workload: Body) -> bool:
    return bool((workload.get("status") or {}).get("observedGeneration") == workload["metadata"]["generation"])


def _told(workload: Body) -> tuple[int, int]:
    """How many pods it has, and how many of them are ready."""
    status = workload.get("status") or {}
    return status.get("replicas", 0), status.get("readyReplicas", 0)


def _sum(pairs: Iterable[tuple[int, int]]) -> tuple[int, int]:
    replicas, ready = 0, 0
    for one, other in pairs:
        replicas, ready = replicas + one, ready + other
    return replicas, ready


def _of(owner: Body, bodies: Iterable[Body]) -> list[Body]:
    uid = owner["metadata"]["uid"]
    return [each for each in bodies if uid in {ref["uid"] for ref in each["metadata"].get("ownerReferences") or ()}]


def _is_alive(pod: Body) -> bool:
    ended = (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed")
    return not ended and "deletionTimestamp" not in pod["metadata"]
