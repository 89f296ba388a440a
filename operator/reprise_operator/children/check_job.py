"""The Job that tries a change before the last serving pod is taken for it. Pure.

It runs the new image with the new arguments and the model mounted as the pods have it, but on no device: `reprise
check` reads arguments, configuration and tokenizer, and for vllm-ascend `vllm_check.py` does what that image lets it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from reprise_operator.children.accelerator import driver_volumes
from reprise_operator.children.pod import CONTAINER
from reprise_operator.children.prefix_cache import CACHE_VOLUME
from reprise_operator.children.vllm_check import SCRIPT
from reprise_operator.naming import (
    CHECK_LABEL,
    NAME_LABEL,
    child_labels,
    child_metadata,
    child_name,
    shorten,
)
from reprise_operator.resource import InferenceService
from reprise_operator.spec_types import Runtime

DEADLINE_SECONDS = 1800
"""The image may have to be pulled over a slow line; the engine's own part takes seconds."""
LEFTOVER_SECONDS = 3600
"""After its end a Job that nobody pruned, since the operator was away, is deleted by Kubernetes."""
REQUESTS = {"cpu": "100m", "memory": "512Mi"}

_POD_FIELDS = (
    "affinity",
    "nodeSelector",
    "tolerations",
    "schedulerName",
    "serviceAccountName",
    "priorityClassName",
    "imagePullSecrets",
    "securityContext",
    "automountServiceAccountToken",
    "enableServiceLinks",
)
_CONTAINER_FIELDS = ("image", "imagePullPolicy", "env", "envFrom", "securityContext", "terminationMessagePolicy")


def check_job_name(service: InferenceService, template_hash: str) -> str:
    """One name for each template, so that a new operator process finds the Job of the old one."""
    suffix = f"-check-{template_hash[:10]}"
    return shorten(child_name(service.identity), limit=63 - len(suffix)) + suffix


def build_check_job(
    service: InferenceService, template: Mapping[str, Any], *, template_hash: str, node: str | None
) -> dict[str, Any]:
    """The Job's manifest for the pod `template`; on `node`, where the serving pod is, if it has room: there the image
    will be wanted, and there a volume that only one node may have is attached."""
    identity = service.identity
    labels = {key: value for key, value in child_labels(identity).items() if key in _JOB_LABELS}
    labels |= {CHECK_LABEL: child_name(identity), "app.kubernetes.io/component": "check"}
    metadata = template["metadata"]
    pod_labels = {key: value for key, value in metadata["labels"].items() if key not in _TRAFFIC_LABELS} | labels
    pod_metadata: dict[str, Any] = {"labels": pod_labels}
    if metadata.get("annotations"):
        pod_metadata["annotations"] = dict(metadata["annotations"])
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": child_metadata(identity, name=check_job_name(service, template_hash), labels=labels),
        "spec": {
            "backoffLimit": 0,
            "activeDeadlineSeconds": DEADLINE_SECONDS,
            "ttlSecondsAfterFinished": LEFTOVER_SECONDS,
            # A drained node says nothing about the change: the Job takes another one.
            "podFailurePolicy": {
                "rules": [
                    {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                ]
            },
            "template": {"metadata": pod_metadata, "spec": _pod_spec(service, template["spec"], node)},
        },
    }


_JOB_LABELS = frozenset(
    {
        "app.kubernetes.io/managed-by",
        "app.kubernetes.io/name",
        "app.kubernetes.io/instance",
        "app.kubernetes.io/part-of",
    }
)
_TRAFFIC_LABELS = frozenset({NAME_LABEL, "llm-d.ai/engine-type"})
"""By which requests find pods: this one serves nothing."""


def _pod_spec(service: InferenceService, spec: Mapping[str, Any], node: str | None) -> dict[str, Any]:
    container = next(item for item in spec["containers"] if item["name"] == CONTAINER)
    # A model that an init container fetches is not there: then only the arguments and the image are looked at.
    fetched = bool(spec.get("initContainers"))
    driver, _ = driver_volumes(service)
    # Nor the volume for blocks: the pod that serves may be the only one that can mount it.
    left_out = {volume["name"] for volume in driver} | {"shm", CACHE_VOLUME}
    volumes = [volume for volume in spec.get("volumes", ()) if volume["name"] not in left_out]
    pod = {key: spec[key] for key in _POD_FIELDS if key in spec}
    if node is not None:
        pod["affinity"] = _near(pod.get("affinity") or {}, node)
    return {
        **pod,
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": 5,
        "containers": [
            {
                **{key: container[key] for key in _CONTAINER_FIELDS if key in container},
                "name": CONTAINER,
                "args": check_args(service, container["args"], fetched=fetched),
                "resources": {"requests": dict(REQUESTS)},
                "volumeMounts": [mount for mount in container["volumeMounts"] if mount["name"] not in left_out],
            }
        ],
        "volumes": volumes,
    }


def check_args(service: InferenceService, args: Sequence[str], *, fetched: bool) -> list[str]:
    """The arguments of the engine container → those that check them."""
    flags = ["--arguments-only"] if fetched else []
    if service.spec.runtime.name is Runtime.VLLM_ASCEND:
        _, _, *serve = args  # "vllm", "serve"
        return ["python3", "-c", SCRIPT, *flags, *serve]
    _, *serve = args
    return ["check", *flags, *serve]


def _near(affinity: Mapping[str, Any], node: str) -> dict[str, Any]:
    """The affinity, with a strong preference for one node."""
    of_nodes: Mapping[str, Any] = affinity.get("nodeAffinity") or {}
    here = {"matchFields": [{"key": "metadata.name", "operator": "In", "values": [node]}]}
    preferred = [*(of_nodes.get("preferredDuringSchedulingIgnoredDuringExecution") or ())]
    preferred.append({"weight": 100, "preference": here})
    return {**affinity, "nodeAffinity": {**of_nodes, "preferredDuringSchedulingIgnoredDuringExecution": preferred}}
