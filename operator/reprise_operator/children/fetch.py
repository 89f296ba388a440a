"""The init container that fetches a model onto a volume, and that volume. Pure.

It runs `reprise fetch` of our engine's image for either runtime: no shell, no hub client in the engine, and of the
pod's containers the only one that is given the credentials of the hub.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from reprise_operator.children.args import MODEL_MOUNT, fetched_folder, literal
from reprise_operator.children.prefix_cache import CACHE_VOLUME, WARMUP_VOLUME
from reprise_operator.resource import FetchedModel, InferenceService
from reprise_operator.spec_types import ModelCacheSpec

FETCH_CONTAINER = "fetch"
FSGROUP = 65_532
"""The group of our image's user."""

CREDENTIALS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "hf": (("HF_TOKEN",), ()),
    "modelscope": (("MODELSCOPE_API_TOKEN",), ()),
    "s3": (
        ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"),
        ("AWS_SESSION_TOKEN", "AWS_REGION", "AWS_ENDPOINT_URL"),
    ),
}
"""Scheme → the keys of spec.model.secretRef that must be there, and those that may. Each becomes the variable of its
name, and no other key of the Secret reaches the container."""


def build_fetch_container(
    service: InferenceService,
    source: FetchedModel,
    *,
    image: str,
    user_env: Sequence[Mapping[str, Any]],
    mounts: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """The container. `user_env` are the entries of spec.runtime.env, which say where a mirror or a proxy is; `mounts`
    are the engine's, in which the model's folder is read-only."""
    args = ["fetch", literal(source.uri)]
    if source.revision is not None:
        args.append(f"--revision={literal(source.revision)}")
    args.append(f"--to={MODEL_MOUNT}/{fetched_folder(source)}")
    container: dict[str, Any] = {
        "name": FETCH_CONTAINER,
        "image": image,
        "args": args,
        "env": _env(service, source, user_env),
        "volumeMounts": [_writable(mount) for mount in mounts if _is_of_use(mount)],
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "privileged": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": True,
            "runAsNonRoot": True,
        },
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }
    # The engine's own: a pod asks for the larger of the two, so it costs nothing, and keeps the quality of service.
    asked = service.spec.runtime.resources
    resources = {"requests": dict(asked.requests), "limits": dict(asked.limits)}
    if any(resources.values()):
        container["resources"] = {key: value for key, value in resources.items() if value}
    return container


def cache_volume(cache: ModelCacheSpec) -> dict[str, Any]:
    """The volume's source: the claim, else one of the pod's own."""
    if cache.claim_name is not None:
        return {"persistentVolumeClaim": {"claimName": cache.claim_name}}
    return {"emptyDir": {} if cache.size_limit is None else {"sizeLimit": str(cache.size_limit)}}


def _env(
    service: InferenceService, source: FetchedModel, user_env: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    env: dict[str, dict[str, Any]] = {"HOME": {"name": "HOME", "value": "/tmp"}}  # noqa: S108 - inside the container
    secret = service.spec.model.secret_ref
    if secret is not None:
        required, optional = CREDENTIALS[source.scheme]
        for key in (*required, *optional):
            reference: dict[str, Any] = {"name": secret.name, "key": key}
            if key in optional:
                reference["optional"] = True
            env[key] = {"name": key, "valueFrom": {"secretKeyRef": reference}}
    for entry in user_env:
        env[str(entry["name"])] = dict(entry)
    return list(env.values())


def _writable(mount: Mapping[str, Any]) -> dict[str, Any]:
    if mount["name"] != "model":
        return dict(mount)
    return {key: value for key, value in mount.items() if key != "readOnly"}


def _is_of_use(mount: Mapping[str, Any]) -> bool:
    """Not the NPU's driver, nor the shared memory of its processes, nor what only the engine's cache has."""
    return mount["name"] not in ("shm", CACHE_VOLUME, WARMUP_VOLUME) and not str(mount["name"]).startswith("ascend-")
