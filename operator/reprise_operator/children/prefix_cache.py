"""What `spec.prefixCaching` adds to the engine pod beside the switch itself: tiers, isolation, warm-up. Pure.

Where caching is off, no flag of these is given, since an engine without a cache refuses them; the volume stays mounted,
so that switching the cache off and on again costs no volume and no other kind of workload.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from reprise_operator.naming import child_metadata, child_name, digest, stamped
from reprise_operator.quantity import amount, text_of_bytes, whole
from reprise_operator.resource import InferenceService
from reprise_operator.settings import GROUP
from reprise_operator.spec_types import Isolation, PersistenceSpec

CACHE_MOUNT = "/var/lib/reprise/prefix-cache"
"""Where the volume for blocks is mounted; the engine makes a private folder of its own in it."""
CACHE_VOLUME = "prefix-cache"
WARMUP_MOUNT = "/etc/reprise/warmup"
WARMUP_VOLUME = "warmup"
WARMUP_HASH_ANNOTATION = f"{GROUP}/warmup-hash"
"""On pods that read prompts of the spec: other prompts, other pods."""
INLINE_KEY = "prompts.jsonl"

ISOLATION_SECRET_ENV = "REPRISE_PREFIX_CACHE_ISOLATION_SECRET"  # noqa: S105 - the variable's name
ENGINE_GROUP = 65532
"""Group of the engine's user: a volume belongs to it, or only root could write there."""

WARMUP_SECONDS = 300
"""The engine's own limit where the spec has none."""


def cache_args(service: InferenceService) -> list[str]:
    """Flags of our engine: tiers, isolation, warm-up. Sizes in bytes, since the two sides abbreviate differently."""
    cache, args = service.spec.prefix_caching, list[str]()
    if not service.prefix_caching:
        return args
    if cache.isolation is Isolation.PER_KEY:
        args += ["--prefix-cache-isolation", "per-key"]
    if host_memory(service):
        args += ["--prefix-cache-host-memory", str(host_memory(service))]
    if cache.persistence is not None:
        args += ["--prefix-cache-dir", CACHE_MOUNT]
        limit = disk_limit(cache.persistence)
        if limit is not None:
            args += ["--prefix-cache-disk-size", str(limit)]
    if service.warmup is not None:
        args += ["--warmup-prompts", f"{WARMUP_MOUNT}/{_warmup_file(service)}"]
        if service.warmup.timeout_seconds is not None:
            args += ["--warmup-timeout", str(service.warmup.timeout_seconds)]
    return args


def cache_env(service: InferenceService) -> list[dict[str, Any]]:
    """The isolation's secret, from its Secret and never an argument."""
    reference = service.spec.prefix_caching.isolation_secret_ref
    if reference is None or not service.prefix_caching:
        return []
    source = {"secretKeyRef": {"name": reference.name, "key": reference.key}}
    return [{"name": ISOLATION_SECRET_ENV, "valueFrom": source}]


def cache_volumes(service: InferenceService) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(volumes, mounts). A claim of each replica's own is in the StatefulSet, so only its mount is here."""
    volumes, mounts = list[dict[str, Any]](), list[dict[str, Any]]()
    persistence = service.persistence
    if persistence is not None:
        mounts.append({"name": CACHE_VOLUME, "mountPath": CACHE_MOUNT})
        if persistence.claim_name is not None:
            volumes.append({"name": CACHE_VOLUME, "persistentVolumeClaim": {"claimName": persistence.claim_name}})
    warmup = service.warmup
    if warmup is not None:
        reference = warmup.config_map_key_ref
        name, key = (warmup_name(service), INLINE_KEY) if reference is None else (reference.name, reference.key)
        # Optional: a warm-up is never worth a pod that does not start. The status says that the ConfigMap is missing.
        source = {"name": name, "items": [{"key": key, "path": _warmup_file(service)}], "optional": True}
        volumes.append({"name": WARMUP_VOLUME, "configMap": source})
        mounts.append({"name": WARMUP_VOLUME, "mountPath": WARMUP_MOUNT, "readOnly": True})
    return volumes, mounts


def cache_annotations(service: InferenceService) -> dict[str, str]:
    """Of the pod template: what makes pods roll though their spec is the same."""
    if service.warmup is None or not service.warmup.prompts:
        return {}
    return {WARMUP_HASH_ANNOTATION: digest(prompts_file(service.warmup.prompts))}


def volume_security(service: InferenceService) -> dict[str, Any]:
    """Of the pod: the volume belongs to the engine's group.

    OnRootMismatch: only a new volume is handed over. At each start anew, the kubelet would open the engine's private
    folder to the group, which the engine then refuses to use.
    """
    if service.persistence is None:
        return {}
    return {"fsGroup": ENGINE_GROUP, "fsGroupChangePolicy": "OnRootMismatch"}


def host_memory(service: InferenceService) -> int:
    """Bytes of the host tier; 0 without one."""
    asked = service.spec.prefix_caching.host_memory
    return whole(asked) if asked is not None and service.prefix_caching else 0


def with_host_memory(resources: Mapping[str, Mapping[str, Any]], service: InferenceService) -> dict[str, Any]:
    """The container's resources with the host tier on top of what the user gave for the engine itself.

    A limit grows by it, or the tier would get the container killed; so does a request, and where there is neither, the
    tier alone is requested, so that the scheduler knows of it.
    """
    tier = host_memory(service)
    if not tier:
        return {key: dict(value) for key, value in resources.items()}
    requests, limits = dict(resources.get("requests", {})), dict(resources.get("limits", {}))
    if "memory" in requests:
        requests["memory"] = text_of_bytes(whole(requests["memory"]) + tier)
    elif "memory" not in limits:  # a limit without a request is the request
        requests["memory"] = text_of_bytes(tier)
    if "memory" in limits:
        limits["memory"] = text_of_bytes(whole(limits["memory"]) + tier)
    return {key: value for key, value in (("requests", requests), ("limits", limits)) if value}


def disk_limit(persistence: PersistenceSpec) -> int | None:
    """Bytes the engine may keep on the volume; None leaves it to the engine."""
    if persistence.limit is not None:
        return whole(persistence.limit)
    # A file system needs some of a volume for itself.
    return None if persistence.size is None else int(amount(persistence.size) * 9 // 10)


def warmup_seconds(service: InferenceService) -> int:
    """How much later a pod may become ready because of its warm-up."""
    return 0 if service.warmup is None else service.warmup.timeout_seconds or WARMUP_SECONDS


def warmup_name(service: InferenceService) -> str:
    """Name of the ConfigMap with the prompts of the spec."""
    return f"{child_name(service.identity)}-warmup"


def build_warmup(service: InferenceService) -> dict[str, Any] | None:
    """The ConfigMap with the prompts of the spec; None where there are none there.

    Its name stays while the prompts change: pods of an older template start with the new prompts rather than with none.
    """
    if service.warmup is None or not service.warmup.prompts:
        return None
    identity = service.identity
    return stamped(
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": child_metadata(identity, name=warmup_name(service)),
            "data": {INLINE_KEY: prompts_file(service.warmup.prompts)},
        }
    )


def prompts_file(prompts: Sequence[str]) -> str:
    """Prompts as the engine reads them: an object a line, since a prompt may have several lines."""
    return "".join(json.dumps({"prompt": prompt}, ensure_ascii=False) + "\n" for prompt in prompts)


def _warmup_file(service: InferenceService) -> str:
    """The engine tells a file of JSON lines by its name."""
    assert service.warmup is not None
    reference = service.warmup.config_map_key_ref
    if reference is None:
        return INLINE_KEY
    return "prompts.jsonl" if reference.key.endswith(".jsonl") else "prompts.txt"
