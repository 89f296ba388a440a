"""Bodies of children, pods and ReplicaSets, as the API server returns them → what was observed. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any

from reprise_operator.cause import without_secrets
from reprise_operator.observed import ContainerFailure, ObservedChild, ObservedPod, Termination

Body = Mapping[str, Any]

TEMPLATE_HASH_LABEL = "pod-template-hash"
STATEFUL_SET_HASH_LABEL = "controller-revision-hash"
REVISION_ANNOTATION = "deployment.kubernetes.io/revision"

# A container that is merely being set up waits with one of these.
_STARTING = frozenset({"ContainerCreating", "PodInitializing"})


def observed_child(body: Body, *, api_version: str, kind: str, owned: bool) -> ObservedChild:
    """A child's body; `api_version` and `kind` are those it was asked for by."""
    metadata = body["metadata"]
    return ObservedChild(
        api_version=api_version,
        kind=kind,
        name=metadata["name"],
        uid=metadata["uid"],
        owned=owned,
        generation=metadata.get("generation", 0),
        terminating="deletionTimestamp" in metadata,
        body=body,
    )


def observed_pod(body: Body) -> ObservedPod:
    """A pod's body, as the API server returns it, without figures from its engine."""
    metadata, status = body["metadata"], body.get("status") or {}
    conditions = {condition["type"]: condition for condition in status.get("conditions") or ()}
    scheduled = conditions.get("PodScheduled", {})
    labels, containers = metadata.get("labels") or {}, status.get("containerStatuses") or ()
    is_scheduled = scheduled.get("status") == "True" or bool((body.get("spec") or {}).get("nodeName"))
    return ObservedPod(
        name=metadata["name"],
        uid=metadata["uid"],
        ip=status.get("podIP") or None,
        phase=status.get("phase") or "Pending",
        ready=conditions.get("Ready", {}).get("status") == "True",
        terminating="deletionTimestamp" in metadata,
        template_hash=labels.get(TEMPLATE_HASH_LABEL) or labels.get(STATEFUL_SET_HASH_LABEL),
        started_at=_seconds(status.get("startTime")),
        created_at=_seconds(metadata.get("creationTimestamp")),
        node=(body.get("spec") or {}).get("nodeName"),
        scheduled=is_scheduled,
        started=bool(containers) and all(container.get("started") for container in containers),
        unschedulable_message=None if is_scheduled else scheduled.get("message"),
        failures=_failures(status),
        terminations=_terminations(status),
        initializing=_initializing(status),
        awaits_volumes=is_scheduled and status.get("phase", "Pending") == "Pending" and _is_being_set_up(status),
    )


def current_template_hash(workload: Body | None, replica_sets: Iterable[Body]) -> str | None:
    """What pods of the present template are labelled with: the update revision of a StatefulSet, of a Deployment the
    pod-template-hash of the ReplicaSet that carries its newest revision.

    None while there is none, and while the controller has not seen the workload's present generation: what it says may
    then still be about the old template.
    """
    if workload is None:
        return None
    metadata, status = workload["metadata"], workload.get("status") or {}
    if status.get("observedGeneration") != metadata.get("generation"):
        return None
    if workload["kind"] == "StatefulSet":
        return status.get("updateRevision") or None
    owned = [replica_set["metadata"] for replica_set in replica_sets if _is_of(workload, replica_set)]
    if not owned:
        return None
    newest = max(owned, key=_revision)
    return (newest.get("labels") or {}).get(TEMPLATE_HASH_LABEL)


def templates(workload: Body | None, replica_sets: Iterable[Body]) -> dict[str, Body]:
    """pod-template-hash → pod template of each ReplicaSet of a Deployment, as the Deployment once had it."""
    found: dict[str, Body] = {}
    for replica_set in replica_sets:
        name = (replica_set["metadata"].get("labels") or {}).get(TEMPLATE_HASH_LABEL)
        if workload is None or name is None or not _is_of(workload, replica_set):
            continue
        template = replica_set["spec"]["template"]
        labels = {key: value for key, value in template["metadata"]["labels"].items() if key != TEMPLATE_HASH_LABEL}
        found[name] = {**template, "metadata": {**template["metadata"], "labels": labels}}
    return found


def _is_of(workload: Body, replica_set: Body) -> bool:
    owners = replica_set["metadata"].get("ownerReferences") or ()
    return any(owner.get("uid") == workload["metadata"]["uid"] for owner in owners)


def _revision(metadata: Body) -> int:
    try:
        return int((metadata.get("annotations") or {}).get(REVISION_ANNOTATION, 0))
    except ValueError:
        return 0


def _failures(status: Body) -> tuple[ContainerFailure, ...]:
    init = ((container, True) for container in status.get("initContainerStatuses") or ())
    main = ((container, False) for container in status.get("containerStatuses") or ())
    found = (_failure(container, init=is_init) for container, is_init in (*init, *main))
    return tuple(failure for failure in found if failure is not None)


def _is_being_set_up(status: Body) -> bool:
    """Whether no container was tried yet."""
    containers = [*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())]
    reasons = [((container.get("state") or {}).get("waiting") or {}).get("reason") for container in containers]
    tried = any(container.get("lastState") for container in containers)
    return not tried and all(reason in _STARTING for reason in reasons)


def _initializing(status: Body) -> str | None:
    running = (c["name"] for c in status.get("initContainerStatuses") or () if (c.get("state") or {}).get("running"))
    return next(running, None)


def _failure(container: Body, *, init: bool) -> ContainerFailure | None:
    """Why a container does not run, None for one that does, or ended well, or is being set up.

    One that runs again after a crash and is not ready yet keeps its last termination as its failure: else a crash loop
    would count as sound between two crashes.
    """
    state, last = container.get("state") or {}, (container.get("lastState") or {}).get("terminated")
    waiting, ended = state.get("waiting"), state.get("terminated")
    restarts = int(container.get("restartCount") or 0)
    if waiting is not None:
        reason = waiting.get("reason") or "Waiting"
        if reason in _STARTING and last is None:
            return None
        # The kubelet's own message of a crash loop is only "back-off 5m0s restarting failed container"; the
        # container's last words say why.
        words = (last or {}).get("message") or waiting.get("message") or ""
    elif ended is not None:
        if ended.get("exitCode") == 0 and (init or restarts == 0):
            return None
        reason, last = ended.get("reason") or "Error", ended
        words = ended.get("message") or ""
    elif last is not None and not container.get("ready", False) and last.get("exitCode") != 0:
        reason, words = last.get("reason") or "Error", last.get("message") or ""
    else:
        return None
    return ContainerFailure(
        container=container["name"],
        reason=reason,
        message=without_secrets(words),
        exit_code=(last or {}).get("exitCode"),
        terminated_reason=(last or {}).get("reason"),
        restart_count=restarts,
        init=init,
    )


def _terminations(status: Body) -> tuple[Termination, ...]:
    """The last run that ended of each container, and the one before it as long as no new one has been started."""
    found = []
    for container in status.get("containerStatuses") or ():
        for key in ("state", "lastState"):
            ended = (container.get(key) or {}).get("terminated")
            if ended is None:
                continue
            found.append(
                Termination(
                    container=container["name"],
                    container_id=ended.get("containerID") or f"run-{int(container.get('restartCount') or 0)}-{key}",
                    exit_code=int(ended.get("exitCode") or 0),
                    reason=ended.get("reason") or "",
                    message=ended.get("message") or "",
                    finished_at=ended.get("finishedAt") or "",
                    is_previous=key == "lastState",
                )
            )
    return tuple(found)


def _seconds(timestamp: str | None) -> float | None:
    """RFC 3339, as Kubernetes writes it, → Unix seconds."""
    return None if timestamp is None else datetime.fromisoformat(timestamp).timestamp()
