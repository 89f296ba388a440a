"""Deployment, ReplicaSet and garbage collection, for an API server that has no kube-controller-manager beside it.

`python -m tests.support.emulated_controllers --kubeconfig FILE` works over plain HTTP, on a real or an emulated server,
until its stdin closes. Level-triggered: whenever anything has changed it lists everything and corrects what is wrong.

Like the real controllers: pod-template-hash and revisions, rolling updates within maxSurge and maxUnavailable,
Recreate, pause, history limit, progress deadline, the status fields and conditions; background, foreground and
orphaning deletion by owner references. Unlike them: no proportional scaling in mid-rollout, no events, no other kinds
of workload.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import ssl
import sys
import threading
import time
import traceback
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import yaml

Json = dict[str, Any]
PASS_SECONDS = 0.1
"""The least time between two looks at the server."""
REVISION = "deployment.kubernetes.io/revision"
HASH = "pod-template-hash"
STATUS_COUNTS = ("replicas", "updatedReplicas", "readyReplicas", "availableReplicas", "unavailableReplicas")


@dataclass(frozen=True, slots=True)
class Kind:
    """One listable resource: its path prefix, name and kind."""

    prefix: str
    plural: str
    kind: str

    def path(self, item: Json) -> str:
        namespace = item["metadata"].get("namespace")
        where = f"namespaces/{namespace}/" if namespace else ""
        return f"{self.prefix}/{where}{self.plural}/{item['metadata']['name']}"


DEPLOYMENTS = Kind("/apis/apps/v1", "deployments", "Deployment")
REPLICA_SETS = Kind("/apis/apps/v1", "replicasets", "ReplicaSet")
PODS = Kind("/api/v1", "pods", "Pod")


@dataclass
class World:
    """What one pass sees: all objects by kind, and all by owner."""

    objects: dict[Kind, list[Json]]
    now: datetime = field(default_factory=lambda: datetime.now(UTC))

    def owned(self, kind: Kind, owner: Json) -> list[Json]:
        uid = owner["metadata"]["uid"]
        return [
            item for item in self.objects[kind] if any(r["uid"] == uid and r.get("controller") for r in _owners(item))
        ]


def _owners(item: Json) -> list[Json]:
    owners: list[Json] = item["metadata"].get("ownerReferences", [])
    return owners


def _owner(kind: Kind, item: Json) -> Json:
    about = {"apiVersion": kind.prefix.removeprefix("/apis/"), "kind": kind.kind, "name": item["metadata"]["name"]}
    return {**about, "uid": item["metadata"]["uid"], "controller": True, "blockOwnerDeletion": True}


def share(value: int | str, total: int, *, up: bool) -> int:
    """`3` or `25%` of a total, rounded up or down."""
    if isinstance(value, int):
        return value
    exact = int(value.rstrip("%")) * total / 100
    return math.ceil(exact) if up else math.floor(exact)


def template_hash(template: Json) -> str:
    digest = hashlib.sha256(json.dumps(template, sort_keys=True).encode()).digest()
    return "".join("bcdfghjklmnpqrstvwxz2456789"[byte % 27] for byte in digest[:9])


def _template(replica_set: Json) -> Json:
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
    names = {each["metadata"]["name"]: _replicas(each) for each in old}
    if strategy.get("type") == "Recreate":
        if any(names.values()):
            return {name: 0 for name, replicas in names.items() if replicas}
        waiting = any(each.get("status", {}).get("replicas", 0) for each in old)
        return {} if waiting or _replicas(new) == desired else {new["metadata"]["name"]: desired}
    limits = strategy.get("rollingUpdate", {})
    surge = share(limits.get("maxSurge", "25%"), desired, up=True)
    unavailable = min(share(limits.get("maxUnavailable", "25%"), desired, up=False), desired)
    if surge == 0 and unavailable == 0:
        unavailable = 1
    total = _replicas(new) + sum(names.values())
    if _replicas(new) > desired:
        return {new["metadata"]["name"]: desired}
    room = min(desired + surge - total, desired - _replicas(new))
    if room > 0:
        return {new["metadata"]["name"]: _replicas(new) + room}
    least = desired - unavailable
    removable = total - least - (_replicas(new) - _available(new))
    changes: dict[str, int] = {}
    for each in sorted(old, key=lambda each: str(each["metadata"]["creationTimestamp"])):  # the unhealthy ones first
        dead = min(names[each["metadata"]["name"]] - _available(each), removable)
        if dead > 0:
            changes[each["metadata"]["name"]] = names[each["metadata"]["name"]] - dead
            removable -= dead
    if changes:
        return changes
    spare = min(removable, _available(new) + sum(map(_available, old)) - least)
    for name, replicas in names.items():
        taken = min(replicas, spare)
        if taken > 0:
            changes[name] = replicas - taken
            spare -= taken
    return changes


def _replicas(replica_set: Json) -> int:
    return int(replica_set["spec"].get("replicas", 1))


def _available(replica_set: Json) -> int:
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


def _age(since: str, now: datetime) -> float:
    return (now - datetime.fromisoformat(since)).total_seconds()


def _time(moment: datetime) -> str:
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")


class Controllers:
    """One pass at a time over the whole server. A refused or outdated write is tried again in the next pass."""

    def __init__(self, client: httpx.Client) -> None:
        self._client = client

    def run(self, stop: threading.Event) -> None:
        seen, busy = "", True
        while not stop.wait(PASS_SECONDS):
            try:
                version = self._get("/apis/apps/v1/deployments?limit=1")["metadata"]["resourceVersion"]
                if version != seen or busy:
                    busy = self.step()
                    seen = version
            except (httpx.HTTPError, KeyError, TypeError, ValueError):
                traceback.print_exc()
                busy = True
                time.sleep(0.5)

    def step(self) -> bool:
        """One pass; returns whether something is unfinished that only time will move."""
        world = World({kind: self._list(kind) for kind in self._kinds()})
        for each in world.objects[REPLICA_SETS]:
            if not each["metadata"].get("deletionTimestamp"):
                self._replica_set(world, each)
        for each in world.objects[DEPLOYMENTS]:
            if not each["metadata"].get("deletionTimestamp"):
                self._deployment(world, each)
        self._collect(world)
        return any(
            each.get("status", {}).get("unavailableReplicas") or "status" not in each
            for each in world.objects[DEPLOYMENTS]
        )

    def _kinds(self) -> list[Kind]:
        groups = [group["preferredVersion"]["groupVersion"] for group in self._get("/apis")["groups"]]
        prefixes = ["/api/v1", *(f"/apis/{each}" for each in groups if not each.startswith("apiregistration.k8s.io"))]
        return [
            Kind(prefix, each["name"], each["kind"])
            for prefix in prefixes
            for each in self._get(prefix).get("resources", [])
            if "/" not in each["name"] and {"list", "delete"} <= {*each["verbs"]} and each["kind"] != "Event"
        ]

    def _list(self, kind: Kind) -> list[Json]:
        items: list[Json] = self._get(f"{kind.prefix}/{kind.plural}").get("items", [])
        return items

    def _get(self, path: str) -> Json:
        found: Json = self._client.get(path).json()
        return found

    def _send(self, method: str, path: str, body: Json) -> Json | None:
        """The answer, or None where the server refused; conflicts and objects that are gone are expected."""
        kind = "application/merge-patch+json" if method == "PATCH" else "application/json"
        answer = self._client.request(method, path, content=json.dumps(body), headers={"Content-Type": kind})
        if answer.is_success:
            accepted: Json = answer.json()
            return accepted
        if answer.status_code not in (404, 409):
            print(f"{method} {path}: {answer.text}", file=sys.stderr, flush=True)
        return None

    def _patch(self, kind: Kind, item: Json, body: Json, subresource: str = "") -> Json | None:
        version = {"metadata": {**body.get("metadata", {}), "resourceVersion": item["metadata"]["resourceVersion"]}}
        return self._send("PATCH", kind.path(item) + subresource, {**body, **version})

    def _delete(self, kind: Kind, item: Json) -> None:
        options = {"apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": "Background"}
        self._send("DELETE", kind.path(item), {**options, "preconditions": {"uid": item["metadata"]["uid"]}})

    def _replica_set(self, world: World, rs: Json) -> None:
        pods = [
            each for each in world.owned(PODS, rs) if each.get("status", {}).get("phase") not in ("Failed", "Succeeded")
        ]
        active = [each for each in pods if not each["metadata"].get("deletionTimestamp")]
        ready = [each for each in active if _ready_since(each)]
        seconds = rs["spec"].get("minReadySeconds", 0)
        available = [each for each in ready if not seconds or _age(_ready_since(each), world.now) >= seconds]
        missing = _replicas(rs) - len(active)
        for _ in range(missing):
            template = rs["spec"]["template"]
            metadata = {"generateName": f"{rs['metadata']['name']}-", "ownerReferences": [_owner(REPLICA_SETS, rs)]}
            metadata = {**template["metadata"], **metadata}
            path = f"/api/v1/namespaces/{rs['metadata']['namespace']}/pods"
            pod = self._send(
                "POST", path, {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}
            )
            if pod is not None:
                world.objects[PODS].append(pod)
                active.append(pod)
        for each in sorted(active, key=_worth)[: max(0, -missing)]:
            self._delete(PODS, each)
            active.remove(each)
        status = {
            "replicas": len(active),
            "fullyLabeledReplicas": len(active),
            "readyReplicas": len(ready),
            "availableReplicas": len(available),
            "observedGeneration": rs["metadata"]["generation"],
        }
        old = rs.get("status", {})
        if any(old.get(key, 0) != value for key, value in status.items()):
            changed = self._patch(REPLICA_SETS, rs, {"status": status}, "/status")
            rs |= changed or {}

    def _deployment(self, world: World, deployment: Json) -> None:
        every = [
            each for each in world.owned(REPLICA_SETS, deployment) if not each["metadata"].get("deletionTimestamp")
        ]
        every.sort(key=lambda each: int(each["metadata"].get("annotations", {}).get(REVISION, 0)))
        new = next((each for each in every if _template(each) == deployment["spec"]["template"]), None)
        old = [each for each in every if each is not new]
        paused = deployment["spec"].get("paused", False)
        if new is None and not paused:
            new = self._new_replica_set(deployment, old)
            every = [*old, *([new] if new else [])]
        elif new is not None and old and new is not every[-1] and not paused:  # back to an earlier template
            annotations = {REVISION: str(_revision(every[-1]) + 1)}
            new |= self._patch(REPLICA_SETS, new, {"metadata": {"annotations": annotations}}) or {}
        if new is not None:
            if deployment["metadata"].get("annotations", {}).get(REVISION) != str(_revision(new)):
                annotations = {REVISION: str(_revision(new))}
                deployment |= self._patch(DEPLOYMENTS, deployment, {"metadata": {"annotations": annotations}}) or {}
            changes = rollout_scale(deployment, new, [] if paused else old)
            for each in every:
                replicas = changes.get(each["metadata"]["name"])
                if replicas is not None:
                    each |= self._patch(REPLICA_SETS, each, {"spec": {"replicas": replicas}}) or {}
        idle = [each for each in old if not _replicas(each) and not each.get("status", {}).get("replicas")]
        for each in idle[: max(0, len(idle) - deployment["spec"].get("revisionHistoryLimit", 10))]:
            self._delete(REPLICA_SETS, each)
        status = deployment_status(deployment, new, every, world.now)
        cleared: Json = dict.fromkeys(STATUS_COUNTS)
        if {key: deployment.get("status", {}).get(key) for key in {*cleared, *status}} != {**cleared, **status}:
            deployment |= self._patch(DEPLOYMENTS, deployment, {"status": {**cleared, **status}}, "/status") or {}

    def _new_replica_set(self, deployment: Json, old: list[Json]) -> Json | None:
        spec, meta = deployment["spec"], deployment["metadata"]
        label = {HASH: template_hash(spec["template"])}
        template = json.loads(json.dumps(spec["template"]))
        template["metadata"]["labels"] |= label
        selector = {**spec["selector"], "matchLabels": {**spec["selector"].get("matchLabels", {}), **label}}
        metadata = {
            "name": f"{meta['name']}-{label[HASH]}",
            "namespace": meta["namespace"],
            "labels": template["metadata"]["labels"],
            "annotations": {REVISION: str(max(map(_revision, old), default=0) + 1)},
            "ownerReferences": [_owner(DEPLOYMENTS, deployment)],
        }
        wanted = {
            "replicas": 0,
            "selector": selector,
            "template": template,
            "minReadySeconds": spec.get("minReadySeconds", 0),
        }
        body = {"apiVersion": "apps/v1", "kind": "ReplicaSet", "metadata": metadata, "spec": wanted}
        return self._send("POST", f"/apis/apps/v1/namespaces/{meta['namespace']}/replicasets", body)

    def _collect(self, world: World) -> None:
        """Deletes what has lost all its owners, and finishes foreground and orphaning deletions."""
        alive = {item["metadata"]["uid"] for items in world.objects.values() for item in items}
        listed = {kind.kind for kind in world.objects}
        for kind, items in world.objects.items():
            for item in items:
                owners = _owners(item)
                if owners and all(each["kind"] in listed and each["uid"] not in alive for each in owners):
                    self._delete(kind, item)
                if item["metadata"].get("deletionTimestamp") and item["metadata"].get("finalizers"):
                    self._finish(world, kind, item)

    def _finish(self, world: World, kind: Kind, item: Json) -> None:
        finalizers = item["metadata"]["finalizers"]
        done = {"kubernetes.io/pvc-protection"} & {*finalizers}
        uid = item["metadata"]["uid"]
        everything = [(each, found) for each, items in world.objects.items() for found in items]
        dependents = [(each, found) for each, found in everything if any(r["uid"] == uid for r in _owners(found))]
        if "orphan" in finalizers:
            for other, each in dependents:
                kept = [owner for owner in _owners(each) if owner["uid"] != uid]
                self._patch(other, each, {"metadata": {"ownerReferences": kept or None}})
            done |= set() if dependents else {"orphan"}
        if "foregroundDeletion" in finalizers:
            for other, each in dependents:
                if not each["metadata"].get("deletionTimestamp"):
                    self._delete(other, each)
            done |= set() if dependents else {"foregroundDeletion"}
        if done:
            kept = [each for each in finalizers if each not in done]
            self._patch(kind, item, {"metadata": {"finalizers": kept or None}})


def _revision(replica_set: Json) -> int:
    return int(replica_set["metadata"].get("annotations", {}).get(REVISION, 0))


def _ready_since(pod: Json) -> str:
    """When the pod became ready, or an empty string."""
    for condition in pod.get("status", {}).get("conditions", []):
        if condition["type"] == "Ready" and condition["status"] == "True":
            return str(condition.get("lastTransitionTime") or pod["metadata"]["creationTimestamp"])
    return ""


def _worth(pod: Json) -> tuple[bool, bool, bool, float]:
    """The order in which a ReplicaSet gives pods up: not placed, not running, not ready, then the youngest."""
    running = pod.get("status", {}).get("phase") == "Running"
    born = datetime.fromisoformat(pod["metadata"]["creationTimestamp"]).timestamp()
    return bool(pod["spec"].get("nodeName")), running, bool(_ready_since(pod)), -born


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kubeconfig", type=Path, required=True)
    config = yaml.safe_load(parser.parse_args().kubeconfig.read_text())
    cluster, user = config["clusters"][0]["cluster"], config["users"][0]["user"]
    authority = cluster.get("certificate-authority")
    stop = threading.Event()
    with httpx.Client(
        base_url=cluster["server"],
        headers={"Authorization": f"Bearer {user['token']}", "User-Agent": "kube-controller-manager/emulated"},
        verify=ssl.create_default_context(cafile=authority) if authority else False,
        timeout=30,
    ) as client:
        thread = threading.Thread(target=Controllers(client).run, args=(stop,))
        thread.start()
        print("ready", flush=True)
        sys.stdin.read()
        stop.set()
        thread.join()
    return 0


if __name__ == "__main__":
    sys.exit(main())
