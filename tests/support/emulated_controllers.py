"""Deployment, ReplicaSet, StatefulSet and garbage collection, for an API server without a kube-controller-manager.

`python -m tests.support.emulated_controllers --kubeconfig FILE` works over plain HTTP, on a real or an emulated server,
until its stdin closes. Level-triggered: whenever anything has changed it lists everything and corrects what is wrong.

Like the real controllers: pod-template-hash and revisions, rolling updates within maxSurge and maxUnavailable,
Recreate, pause, history limit, progress deadline, the status fields and conditions; Jobs of one pod without retries
(emulated_jobs.py); StatefulSets (emulated_statefulsets.py); background, foreground and orphaning deletion by owner
references. Unlike them: no proportional scaling in mid-rollout, no events, no other kinds of workload.
"""

from __future__ import annotations

import argparse
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

import httpx
import yaml

from .emulated_jobs import job_pod, job_status
from .emulated_rollout import (
    HASH,
    REVISION,
    STATUS_COUNTS,
    Json,
    deployment_status,
    ready_since,
    replicas_of,
    revision_of,
    rollout_scale,
    seconds_since,
    template_hash,
    template_of,
    worth,
)
from .emulated_statefulsets import Step, next_step, revision, stateful_status

PASS_SECONDS = 0.1
"""The least time between two looks at the server."""
COLLECT_SECONDS = 0.5
"""The least time between two garbage collections, which read every kind."""
DISCOVER_SECONDS = 5.0


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
STATEFUL_SETS = Kind("/apis/apps/v1", "statefulsets", "StatefulSet")
PODS = Kind("/api/v1", "pods", "Pod")
JOBS = Kind("/apis/batch/v1", "jobs", "Job")
CLAIMS = Kind("/api/v1", "persistentvolumeclaims", "PersistentVolumeClaim")


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


class Controllers:
    """One pass at a time over the whole server. A refused or outdated write is tried again in the next pass."""

    def __init__(self, client: httpx.Client) -> None:
        self._client = client
        self._collected = 0.0
        self._known: tuple[float, list[Kind]] = (-math.inf, [])

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
        kinds = (DEPLOYMENTS, REPLICA_SETS, STATEFUL_SETS, PODS, CLAIMS, JOBS)
        world = World({kind: self._list(kind) for kind in kinds})
        for each in world.objects[DEPLOYMENTS]:
            if not each["metadata"].get("deletionTimestamp"):
                self._deployment(world, each)
        for each in world.objects[REPLICA_SETS]:
            if not each["metadata"].get("deletionTimestamp"):
                self._replica_set(world, each)
        for each in world.objects[JOBS]:
            if not each["metadata"].get("deletionTimestamp"):
                self._job(world, each)
        for each in world.objects[STATEFUL_SETS]:
            if not each["metadata"].get("deletionTimestamp"):
                self._stateful_set(world, each)
        if time.monotonic() - self._collected < COLLECT_SECONDS:
            return True
        self._collect(World({kind: self._list(kind) for kind in self._kinds()}))
        self._collected = time.monotonic()
        return any(
            each.get("status", {}).get("unavailableReplicas") or "status" not in each
            for each in world.objects[DEPLOYMENTS]
        ) or any(each.get("status", {}).get("active") for each in world.objects[JOBS])

    def _kinds(self) -> list[Kind]:
        """All that can be listed and deleted; asked for anew every few seconds, since definitions come and go."""
        if time.monotonic() - self._known[0] < DISCOVER_SECONDS:
            return self._known[1]
        groups = [group["preferredVersion"]["groupVersion"] for group in self._get("/apis")["groups"]]
        prefixes = ["/api/v1", *(f"/apis/{each}" for each in groups if not each.startswith("apiregistration.k8s.io"))]
        kinds = [
            Kind(prefix, each["name"], each["kind"])
            for prefix in prefixes
            for each in self._get(prefix).get("resources", [])
            if "/" not in each["name"] and {"list", "delete"} <= {*each["verbs"]} and each["kind"] != "Event"
        ]
        self._known = (time.monotonic(), kinds)
        return kinds

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
        ready = [each for each in active if ready_since(each)]
        seconds = rs["spec"].get("minReadySeconds", 0)
        available = [each for each in ready if not seconds or seconds_since(ready_since(each), world.now) >= seconds]
        missing = replicas_of(rs) - len(active)
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
        for each in sorted(active, key=worth)[: max(0, -missing)]:
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

    def _job(self, world: World, job: Json) -> None:
        """Of one pod, without retries; ends and deadlines."""
        pods = world.owned(PODS, job)
        status = job_status(job, pods, world.now)
        if status is None:
            path = f"/api/v1/namespaces/{job['metadata']['namespace']}/pods"
            self._send("POST", path, job_pod(job, _owner(JOBS, job)))
            return
        if status != {key: value for key, value in job.get("status", {}).items() if value is not None}:
            job |= self._patch(JOBS, job, {"status": {"active": None, **status}}, "/status") or {}
        if any(condition["type"] == "Failed" for condition in status.get("conditions", ())):
            for each in pods:  # those that run on, past a deadline
                if each.get("status", {}).get("phase") not in ("Succeeded", "Failed"):
                    self._delete(PODS, each)

    def _stateful_set(self, world: World, stateful: Json) -> None:
        namespace = stateful["metadata"]["namespace"]
        pods = world.owned(PODS, stateful)
        claims = {each["metadata"]["name"] for each in world.objects[CLAIMS]}
        step: Step = next_step(stateful, pods, claims, owner=_owner(STATEFUL_SETS, stateful), namespace=namespace)
        for claim in step.claims:
            self._send("POST", f"/api/v1/namespaces/{namespace}/persistentvolumeclaims", claim)
        for pod in step.pods:
            made = self._send("POST", f"/api/v1/namespaces/{namespace}/pods", pod)
            pods += [] if made is None else [made]
        for each in step.doomed:
            self._delete(PODS, each)
        status = stateful_status(stateful, pods, revision(stateful))
        if any(stateful.get("status", {}).get(key) != value for key, value in status.items()):
            stateful |= self._patch(STATEFUL_SETS, stateful, {"status": status}, "/status") or {}

    def _deployment(self, world: World, deployment: Json) -> None:
        every = [
            each for each in world.owned(REPLICA_SETS, deployment) if not each["metadata"].get("deletionTimestamp")
        ]
        every.sort(key=lambda each: int(each["metadata"].get("annotations", {}).get(REVISION, 0)))
        new = next((each for each in every if template_of(each) == deployment["spec"]["template"]), None)
        old = [each for each in every if each is not new]
        paused = deployment["spec"].get("paused", False)
        if new is None and not paused:
            new = self._new_replica_set(deployment, old)
            every = [*old, *([new] if new else [])]
            world.objects[REPLICA_SETS] += every[len(old) :]
        elif new is not None and old and new is not every[-1] and not paused:  # back to an earlier template
            annotations = {REVISION: str(revision_of(every[-1]) + 1)}
            new |= self._patch(REPLICA_SETS, new, {"metadata": {"annotations": annotations}}) or {}
        if new is not None:
            if deployment["metadata"].get("annotations", {}).get(REVISION) != str(revision_of(new)):
                annotations = {REVISION: str(revision_of(new))}
                deployment |= self._patch(DEPLOYMENTS, deployment, {"metadata": {"annotations": annotations}}) or {}
            changes = rollout_scale(deployment, new, [] if paused else old)
            for each in every:
                replicas = changes.get(each["metadata"]["name"])
                if replicas is not None:
                    each |= self._patch(REPLICA_SETS, each, {"spec": {"replicas": replicas}}) or {}
        idle = [each for each in old if not replicas_of(each) and not each.get("status", {}).get("replicas")]
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
            "annotations": {REVISION: str(max(map(revision_of, old), default=0) + 1)},
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
        listed = {kind.kind: kind for kind in world.objects}
        owned = [(kind, item) for kind, items in world.objects.items() for item in items if _owners(item)]
        doomed = True
        while doomed:  # what loses its owner in this very pass goes in it too
            doomed = False
            for kind, item in owned:
                lost = all(each["kind"] in listed and each["uid"] not in alive for each in _owners(item))
                if (
                    lost
                    and item["metadata"]["uid"] in alive
                    and all(self._is_gone(listed, item, r) for r in _owners(item))
                ):
                    self._delete(kind, item)
                    alive.discard(item["metadata"]["uid"])
                    doomed = True
        for kind, items in world.objects.items():
            for item in items:
                if item["metadata"].get("deletionTimestamp") and item["metadata"].get("finalizers"):
                    self._finish(world, kind, item)

    def _is_gone(self, kinds: dict[str, Kind], item: Json, owner: Json) -> bool:
        """Asks the server, since an owner may be younger than the list it was not found in."""
        kind, namespace = kinds[owner["kind"]], item["metadata"].get("namespace")
        for where in (namespace, None):  # an owner is in the same namespace, or in none
            about = {"metadata": {"name": owner["name"], "namespace": where}}
            answer = self._client.get(kind.path(about))
            if answer.is_success and answer.json()["metadata"]["uid"] == owner["uid"]:
                return False
        return True

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
