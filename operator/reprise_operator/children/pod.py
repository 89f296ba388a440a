"""The engine pod. Every input of the engine is in this template, so a change of any of them rolls out. Pure."""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from reprise_operator.children.accelerator import (
    HWHIAIUSER_GROUP,
    accelerator_env,
    container_resources,
    driver_volumes,
    profile_of,
    runtime_class_name,
    scheduler_annotations,
    scheduler_labels,
    with_node_affinity,
)
from reprise_operator.children.args import MODEL_MOUNT, engine_args, is_file
from reprise_operator.children.fetch import FSGROUP, build_fetch_container, cache_volume
from reprise_operator.children.memory import MemoryPlan
from reprise_operator.children.prefix_cache import (
    cache_annotations,
    cache_env,
    cache_volumes,
    volume_security,
    warmup_seconds,
    with_host_memory,
)
from reprise_operator.naming import pod_labels, reserved_labels
from reprise_operator.resource import ClaimModel, FetchedModel, HostPathModel, InferenceService
from reprise_operator.settings import ENGINE_PORT, Settings
from reprise_operator.spec_types import EnvVar, Runtime

CONTAINER = "engine"
GRACE_SECONDS = 120
STARTUP_SECONDS = 3600
"""Loading a large model from a network volume takes tens of minutes; the pod must not be killed meanwhile."""
PROBE_SECONDS = 5
NPU_SHM = "8Gi"
CPU_SHM = "1Gi"

# Endpoints forget a terminating pod within a few seconds; our engine then drains by itself on SIGTERM. vLLM drops what
# is running on SIGTERM, so there the drain is the wait before it.
_DRAIN_SECONDS = {Runtime.REPRISE: 5, Runtime.VLLM_ASCEND: 60}
_API_KEY_ENV = {Runtime.REPRISE: "REPRISE_API_KEY", Runtime.VLLM_ASCEND: "VLLM_API_KEY"}


def build_pod_template(service: InferenceService, settings: Settings, memory: MemoryPlan) -> dict[str, Any]:
    """metadata and spec of the Deployment's pods."""
    user = service.spec.pod_template
    labels = {**pod_labels(service.identity), **scheduler_labels(service), **user.metadata.labels}
    metadata: dict[str, Any] = {"labels": labels}
    metadata["labels"] |= reserved_labels(service.identity)
    annotations = {**scheduler_annotations(service), **user.metadata.annotations, **cache_annotations(service)}
    if annotations:
        metadata["annotations"] = annotations
    volumes, mounts = _volumes(service)
    affinity = with_node_affinity(user.affinity, profile_of(service))
    optional: dict[str, Any] = {
        "affinity": affinity,
        "nodeSelector": dict(user.node_selector),
        "tolerations": [dict(item) for item in user.tolerations],
        "schedulerName": user.scheduler_name,
        "serviceAccountName": user.service_account_name,
        # Its old name, which the API server fills in, and from which it would bring back an account that was removed.
        "serviceAccount": user.service_account_name,
        "priorityClassName": user.priority_class_name,
        "runtimeClassName": runtime_class_name(service),
        "imagePullSecrets": [{"name": secret.name} for secret in service.spec.runtime.image_pull_secrets],
    }
    if isinstance(service.source, FetchedModel):
        user_env = [_env_entry(item) for item in service.spec.runtime.env]
        fetching = build_fetch_container(
            service, service.source, image=fetch_image(service, settings), user_env=user_env, mounts=mounts
        )
        optional["initContainers"] = [{**fetching, "imagePullPolicy": pull_policy(fetching["image"])}]
    spec: dict[str, Any] = {
        "containers": [_container(service, settings, memory, mounts)],
        "volumes": volumes,
        "securityContext": _pod_security(service),
        "automountServiceAccountToken": False,
        # A Service called "vllm" would otherwise inject VLLM_PORT=tcp://…, which vLLM takes for its own setting.
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": GRACE_SECONDS,
        **{key: value for key, value in optional.items() if value},
    }
    return {"metadata": metadata, "spec": spec}


def engine_image(service: InferenceService, settings: Settings) -> str:
    """The spec's image, else the default of its runtime (vllm-ascend has one a chip)."""
    runtime = service.spec.runtime
    if runtime.image:
        return runtime.image
    if runtime.name is Runtime.VLLM_ASCEND:
        return settings.vllm_ascend_image + profile_of(service).image_suffix
    return settings.reprise_image


def pull_policy(image: str) -> str:
    """Kubernetes' own default. Said, since it is filled in only once, and would be that of the first image for ever."""
    name, _, digest = image.partition("@")
    tag = name.rpartition("/")[2].partition(":")[2] or ("" if digest else "latest")
    return "Always" if tag == "latest" else "IfNotPresent"


def fetch_image(service: InferenceService, settings: Settings) -> str:
    """Of the init container that fetches the model."""
    if settings.fetch_image is not None:
        return settings.fetch_image
    return engine_image(service, settings) if service.spec.runtime.name is Runtime.REPRISE else settings.reprise_image


def startup_seconds(service: InferenceService) -> int:
    """How long a pod may take to become ready, its warm-up included."""
    return STARTUP_SECONDS + warmup_seconds(service)


def _container(
    service: InferenceService, settings: Settings, memory: MemoryPlan, mounts: list[dict[str, Any]]
) -> dict[str, Any]:
    container: dict[str, Any] = {
        "name": CONTAINER,
        "image": engine_image(service, settings),
        "imagePullPolicy": pull_policy(engine_image(service, settings)),
        "args": engine_args(service, memory),
        "ports": [{"name": "http", "containerPort": ENGINE_PORT, "protocol": "TCP"}],
        "env": _env(service),
        "volumeMounts": mounts,
        "securityContext": _container_security(service),
        "lifecycle": {"preStop": {"sleep": {"seconds": _DRAIN_SECONDS[service.spec.runtime.name]}}},
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "startupProbe": _probe(failures=startup_seconds(service) // PROBE_SECONDS),
        "readinessProbe": _probe(failures=3),
        # A busy engine may answer late; only one that has been silent for minutes is restarted.
        "livenessProbe": {**_probe(failures=6), "periodSeconds": 20, "timeoutSeconds": 10},
    }
    resources = with_host_memory(container_resources(service), service)
    if resources:
        container["resources"] = resources
    return container


def _probe(*, failures: int) -> dict[str, Any]:
    return {
        "httpGet": {"path": "/health", "port": "http", "scheme": "HTTP"},
        "periodSeconds": PROBE_SECONDS,
        "timeoutSeconds": 5,
        "failureThreshold": failures,
        "successThreshold": 1,
    }


def _env(service: InferenceService) -> list[dict[str, Any]]:
    """Ours, then the user's. One entry a name: a duplicate would fail the whole apply, so the user's replaces ours."""
    runtime = service.spec.runtime.name
    env: list[dict[str, Any]] = [
        {"name": "POD_IP", "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": "status.podIP"}}},
        # Nothing is fetched unless the URI says so, and then by the init container: an engine never asks a hub.
        {"name": "HF_HUB_OFFLINE", "value": "1"},
        {"name": "TRANSFORMERS_OFFLINE", "value": "1"},
        *accelerator_env(service),
    ]
    if runtime is Runtime.REPRISE:
        # The root file system is read-only; caches go to the emptyDir.
        env.append({"name": "HOME", "value": "/tmp"})  # noqa: S108 - a path inside the container
    else:
        env.append({"name": "VLLM_NO_USAGE_STATS", "value": "1"})
    secret = service.spec.auth.api_key_secret_ref
    if secret is not None:
        reference = {"name": secret.name, "key": secret.key}
        env.append({"name": _API_KEY_ENV[runtime], "valueFrom": {"secretKeyRef": reference}})
    env += cache_env(service)
    return _merge(env, (_env_entry(item) for item in service.spec.runtime.env), key=_name)


def _env_entry(variable: EnvVar) -> dict[str, Any]:
    if variable.value_from is not None:
        return {"name": variable.name, "valueFrom": dict(variable.value_from)}
    return {"name": variable.name, "value": variable.value or ""}


def _volumes(service: InferenceService) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(volumes, mounts): ours, the driver's, then the user's, who may replace ours by name or by path."""
    user = service.spec.pod_template
    shm = NPU_SHM if profile_of(service).is_npu else CPU_SHM
    driver, driver_mounts = driver_volumes(service)
    cache, cache_mounts = cache_volumes(service)
    volumes: list[dict[str, Any]] = [
        {"name": "model", **_model_volume(service)},
        {"name": "tmp", "emptyDir": {}},
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": shm}},
        *driver,
        *cache,
    ]
    mounts: list[dict[str, Any]] = [
        {"name": "model", "mountPath": MODEL_MOUNT, "readOnly": True},
        {"name": "tmp", "mountPath": "/tmp"},  # noqa: S108 - a path inside the container
        {"name": "shm", "mountPath": "/dev/shm"},  # noqa: S108 - the same
        *driver_mounts,
        *cache_mounts,
    ]
    return _merge(volumes, user.volumes, key=_name), _merge(mounts, user.volume_mounts, key=_place)


def _model_volume(service: InferenceService) -> dict[str, Any]:
    match service.source:
        case HostPathModel(path=path):
            # Of a file its folder is mounted. The type: without it the kubelet would make a folder that is not there,
            # and leave it on the node. mounts.py brings its refusal into the status.
            folder = (path.rpartition("/")[0] or "/") if is_file(path) else path
            return {"hostPath": {"path": folder, "type": "Directory"}}
        case ClaimModel(claim=claim):
            return {"persistentVolumeClaim": {"claimName": claim, "readOnly": True}}
        case FetchedModel():
            return cache_volume(service.spec.model.cache)


def _pod_security(service: InferenceService) -> dict[str, Any]:
    context: dict[str, Any] = {"seccompProfile": {"type": "RuntimeDefault"}}
    if service.spec.runtime.name is Runtime.REPRISE:
        context["runAsNonRoot"] = True
    if profile_of(service).is_npu:
        context["supplementalGroups"] = [HWHIAIUSER_GROUP]
    context |= volume_security(service)
    if isinstance(service.source, FetchedModel) and service.spec.model.cache.claim_name is not None:
        # A new volume belongs to root. Only where its root does: the files of a large model would take minutes.
        context |= {"fsGroup": FSGROUP, "fsGroupChangePolicy": "OnRootMismatch"}
    return context


def _container_security(service: InferenceService) -> dict[str, Any]:
    return {
        "allowPrivilegeEscalation": False,
        "privileged": False,
        "capabilities": {"drop": ["ALL"]},
        # The vllm-ascend image is not ours: it runs as root and writes to its home and working directory.
        "readOnlyRootFilesystem": service.spec.runtime.name is Runtime.REPRISE,
    }


def _merge(
    ours: Iterable[Mapping[str, Any]], theirs: Iterable[Mapping[str, Any]], *, key: Callable[[Mapping[str, Any]], str]
) -> list[dict[str, Any]]:
    """One entry for each `key`, in order of first appearance; a later entry replaces an earlier one."""
    merged: dict[str, dict[str, Any]] = {}
    for entry in (*ours, *theirs):
        merged[key(entry)] = dict(entry)
    return list(merged.values())


def _name(entry: Mapping[str, Any]) -> str:
    return str(entry.get("name"))


def _place(mount: Mapping[str, Any]) -> str:
    """The path without a slash at its end: two mounts of one place hide one another."""
    return posixpath.normpath(str(mount.get("mountPath")))
