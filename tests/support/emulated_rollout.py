"""What the Deployment controller decides: pure functions of Deployments, ReplicaSets and pods."""

from __future__ import annotations

import hashlib
import json
import math
from datetime import datetime
from typing import Any

Json = dict[str, Any]
REVISION = "deployment.kubernetes.io/revision"
HASH = "pod-template-hash"
STATUS_COUNTS = ("replicas", "updatedReplicas", "readyReplicas", "availableReplicas", "unavailableReplicas")


def share(value: int | str, total: int, *, up: bool) -> int:
    """`3` or `25%` of a total, rounded up or down."""
    if isinstance(value, int):
        return value
    exact = int(value.rstrip("%")) * total / 100
    return math.ceil(exact) if up else math.floor(exact)


def template_hash(template: Json) -> str:
    digest = hashlib.sha256(json.dumps(template, sort_keys=True).encode()).digest()
    return "".join("bcdfghjklmnpqrstvwxz2456789"[byte % 27] for byte in digest[:9])


def template_of(replica_set: Json) -> Json:
    """Its pod template as the Deployment wrote it."""
    template: Json = json.loads(json.dumps(replica_set["spec"]["template"]))
    template["metadata"]["labels"].pop(HASH, None)
    return template


def rollout_scale(deployment: Json, new: Json, old: list[Json]) -> dict[str, int]:
    """The next replicas of each ReplicaSet, by name; those that stay are left out. Pure.

    As `rolling.go` of the Deployment controller: surge first, then take away what is not needed for availability.
    """
    spec = deployment["spec"]
    desired, strategy = spec["replicas"], spec.get("strategy", {})
    names = {each["metadata"]["name"]: replicas_of(each) for each in old}
    if strategy.get("type") == "Recreate":
        if any(names.values()):
            return {name: 0 for name, replicas in names.items() if replicas}
        waiting = any(each.get("status", {}).get("replicas", 0) for each in old)
        return {} if waiting or replicas_of(new) == desired else {new["metadata"]["name"]: desired}
    limits = strategy.get("rollingUpdate", {})
    surge = share(limits.get("maxSurge", "25%"), desired, up=True)
    unavailable = min(share(limits.get("maxUnavailable", "25%"), desired, up=False), desired)
    if surge == 0 and unavailable == 0:
        unavailable = 1
    total = replicas_of(new) + sum(names.values())
    if replicas_of(new) > desired:
        return {new["metadata"]["name"]: desired}
    room = min(desired + surge - total, desired - replicas_of(new))
    if room > 0:
        return {new["metadata"]["name"]: replicas_of(new) + room}
    least = desired - unavailable
    removable = total - least - (replicas_of(new) - available_of(new))
    changes: dict[str, int] = {}
    for each in sorted(old, key=lambda each: str(each["metadata"]["creationTimestamp"])):  # the unhealthy ones first
        dead = min(names[each["metadata"]["name"]] - available_of(each), removable)
        if dead > 0:
            changes[each["metadata"]["name"]] = names[each["metadata"]["name"]] - dead
            removable -= dead
    if changes:
        return changes
    spare = min(removable, available_of(new) + sum(map(available_of, old)) - least)
    for name, replicas in names.items():
        taken = min(replicas, spare)
        if taken > 0:
            changes[name] = replicas - taken
            spare -= taken
    return changes


def replicas_of(replica_set: Json) -> int:
    return int(replica_set["spec"].get("replicas", 1))


def available_of(replica_set: Json) -> int:
    return int(replica_set.get("status", {}).get("availableReplicas", 0))


def deployment_status(deployment: Json, new: Json | None, every: list[Json], now: datetime) -> Json:
    """The status of a Deployment from those of its ReplicaSets. Pure."""
    old, desired = deployment.get("status", {}), deployment["spec"]["replicas"]
    counts = {key: sum(each.get("status", {}).get(key, 0) for each in every) for key in STATUS_COUNTS}
    counts["updatedReplicas"] = new.get("status", {}).get("replicas", 0) if new else 0
    counts["unavailableReplicas"] = max(0, max(desired, counts["replicas"]) - counts["availableReplicas"])
    limits = deployment["spec"].get("strategy", {}).get("rollingUpdate", {})
    unavailable = share(limits.get("maxUnavailable", 0), desired, up=False)
    enough = counts["availableReplicas"] >= desired - unavailable
    complete = counts["updatedReplicas"] == counts["replicas"] == counts["availableReplicas"] == desired
    before = {each["type"]: each for each in old.get("conditions", [])}
    progressed = any(counts[key] > old.get(key, 0) for key in ("updatedReplicas", "readyReplicas", "availableReplicas"))
    since = before.get("Progressing", {}).get("lastUpdateTime", _time(now))
    late = (now - datetime.fromisoformat(since)).total_seconds() > deployment["spec"].get(
        "progressDeadlineSeconds", 600
    )
    current = old.get("observedGeneration") == deployment["metadata"]["generation"]
    name = new["metadata"]["name"] if new else ""
    if complete:
        progress = ("True", "NewReplicaSetAvailable", f'ReplicaSet "{name}" has successfully progressed.')
    elif late and current and not progressed:
        progress = ("False", "ProgressDeadlineExceeded", f'ReplicaSet "{name}" has timed out progressing.')
    else:
        progress = ("True", "ReplicaSetUpdated", f'ReplicaSet "{name}" is progressing.')
    reason = "MinimumReplicasAvailable" if enough else "MinimumReplicasUnavailable"
    message = f"Deployment {'has' if enough else 'does not have'} minimum availability."
    conditions = [
        _condition(before, "Available", (str(enough), reason, message), now, touch=False),
        _condition(before, "Progressing", progress, now, touch=progressed or not current),
    ]
    shown = {key: value for key, value in counts.items() if value}
    return {"observedGeneration": deployment["metadata"]["generation"], **shown, "conditions": conditions}


def _condition(before: dict[str, Json], kind: str, now_is: tuple[str, str, str], now: datetime, *, touch: bool) -> Json:
    status, reason, message = now_is
    old = before.get(kind, {})
    moved = old.get("lastTransitionTime", _time(now)) if old.get("status") == status else _time(now)
    same = not touch and (old.get("status"), old.get("reason")) == (status, reason)
    updated = old["lastUpdateTime"] if same else _time(now)
    about = {"type": kind, "status": status, "reason": reason, "message": message}
    return {**about, "lastUpdateTime": updated, "lastTransitionTime": moved}


def seconds_since(since: str, now: datetime) -> float:
    return (now - datetime.fromisoformat(since)).total_seconds()


def _time(moment: datetime) -> str:
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")


def revision_of(replica_set: Json) -> int:
    return int(replica_set["metadata"].get("annotations", {}).get(REVISION, 0))


def ready_since(pod: Json) -> str:
    """When the pod became ready, or an empty string."""
    for condition in pod.get("status", {}).get("conditions", []):
        if condition["type"] == "Ready" and condition["status"] == "True":
            return str(condition.get("lastTransitionTime") or pod["metadata"]["creationTimestamp"])
    return ""


def worth(pod: Json) -> tuple[bool, bool, bool, float]:
    """The order in which a ReplicaSet gives pods up: not placed, not running, not ready, then the youngest."""
    running = pod.get("status", {}).get("phase") == "Running"
    born = datetime.fromisoformat(pod["metadata"]["creationTimestamp"]).timestamp()
    return bool(pod["spec"].get("nodeName")), running, bool(ready_since(pod)), -born
