"""What the StatefulSet controller decides, for podManagementPolicy Parallel: pure functions.

Like the real one: pods by ordinal with a claim each for every volumeClaimTemplate, scaled from the end; a rolling
update from the last ordinal to the first that replaces one pod at a time and waits while any pod is not available;
claims that are kept, or go with the StatefulSet. Unlike it: no OrderedReady, no partitions, no history of revisions.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from .emulated_rollout import Json, ready_since, template_hash

REVISION_LABEL = "controller-revision-hash"


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What to do now: objects to create, and pods to delete."""

    claims: list[Json]
    pods: list[Json]
    doomed: list[Json]


def revision(stateful: Json) -> str:
    """The name of the revision of the present template."""
    return f"{stateful['metadata']['name']}-{template_hash(stateful['spec']['template'])}"


def next_step(stateful: Json, pods: list[Json], claims: set[str], *, owner: Json, namespace: str) -> Step:
    """`pods` are the StatefulSet's, `claims` the names of all claims of the namespace."""
    wanted, update = stateful["spec"]["replicas"], revision(stateful)
    by_ordinal = {_ordinal(pod): pod for pod in pods}
    step = Step(claims=[], pods=[], doomed=[])
    for ordinal in range(wanted):
        pod = by_ordinal.get(ordinal)
        if pod is None:
            step.claims.extend(
                claim
                for claim in _claims(stateful, ordinal, owner=owner, namespace=namespace)
                if claim["metadata"]["name"] not in claims
            )
            step.pods.append(_pod(stateful, ordinal, update, owner=owner))
        elif pod.get("status", {}).get("phase") in ("Failed", "Succeeded"):
            step.doomed.append(pod)
    step.doomed.extend(pod for ordinal, pod in by_ordinal.items() if ordinal >= wanted and not _is_ending(pod))
    if step.pods or step.doomed or stateful["spec"].get("updateStrategy", {}).get("type") == "OnDelete":
        return step
    if any(_is_ending(pod) or not ready_since(pod) for pod in pods):
        return step  # one at a time, whatever template the one that is missing is of
    old = [pod for pod in pods if pod["metadata"]["labels"].get(REVISION_LABEL) != update]
    step.doomed.extend(sorted(old, key=_ordinal)[-1:])
    return step


def stateful_status(stateful: Json, pods: list[Json], update: str) -> Json:
    """The status of a StatefulSet from its pods."""
    active = [pod for pod in pods if not _is_ending(pod)]
    ready = [pod for pod in active if ready_since(pod)]
    updated = [pod for pod in active if pod["metadata"]["labels"].get(REVISION_LABEL) == update]
    done = len(updated) == len(active) == len(ready) == stateful["spec"]["replicas"]
    return {
        "observedGeneration": stateful["metadata"]["generation"],
        "replicas": len(active),
        "readyReplicas": len(ready),
        "availableReplicas": len(ready),
        "updatedReplicas": len(updated),
        "updateRevision": update,
        "currentRevision": update if done else stateful.get("status", {}).get("currentRevision", update),
    }


def _pod(stateful: Json, ordinal: int, update: str, *, owner: Json) -> Json:
    name = f"{stateful['metadata']['name']}-{ordinal}"
    template = json.loads(json.dumps(stateful["spec"]["template"]))
    labels = {
        **template["metadata"].get("labels", {}),
        REVISION_LABEL: update,
        "statefulset.kubernetes.io/pod-name": name,
        "apps.kubernetes.io/pod-index": str(ordinal),
    }
    metadata = {**template["metadata"], "name": name, "labels": labels, "ownerReferences": [owner]}
    own = [
        {
            "name": claim["metadata"]["name"],
            "persistentVolumeClaim": {"claimName": _claim_name(stateful, claim, ordinal)},
        }
        for claim in stateful["spec"].get("volumeClaimTemplates", ())
    ]
    names = {volume["name"] for volume in own}
    others = [volume for volume in template["spec"].get("volumes", ()) if volume["name"] not in names]
    spec = {**template["spec"], "hostname": name, "volumes": [*own, *others]}
    if stateful["spec"].get("serviceName"):
        spec["subdomain"] = stateful["spec"]["serviceName"]
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def _claims(stateful: Json, ordinal: int, *, owner: Json, namespace: str) -> list[Json]:
    kept = stateful["spec"].get("persistentVolumeClaimRetentionPolicy", {}).get("whenDeleted", "Retain") == "Retain"
    owners = [] if kept else [{key: owner[key] for key in ("apiVersion", "kind", "name", "uid")}]
    return [
        {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {
                "name": _claim_name(stateful, claim, ordinal),
                "namespace": namespace,
                "labels": {**claim["metadata"].get("labels", {}), **stateful["spec"]["selector"]["matchLabels"]},
                "ownerReferences": owners,
            },
            "spec": claim["spec"],
        }
        for claim in stateful["spec"].get("volumeClaimTemplates", ())
    ]


def _claim_name(stateful: Json, claim: Json, ordinal: int) -> str:
    return f"{claim['metadata']['name']}-{stateful['metadata']['name']}-{ordinal}"


def _ordinal(pod: Json) -> int:
    return int(pod["metadata"]["name"].rpartition("-")[2])


def _is_ending(pod: Json) -> bool:
    return bool(pod["metadata"].get("deletionTimestamp"))
