"""What `spec.prefixCaching` says together with the rest of the spec: refused where it cannot be honoured. Pure."""

from __future__ import annotations

import re

from reprise_operator.children.prefix_cache import (
    CACHE_VOLUME,
    ISOLATION_SECRET_ENV,
    WARMUP_VOLUME,
    disk_limit,
    host_memory,
    prompts_file,
)
from reprise_operator.children.strategy import is_zero
from reprise_operator.quantity import amount, whole
from reprise_operator.resource import InferenceService, SpecError
from reprise_operator.spec_types import Isolation, PersistenceSpec, Runtime

MAX_PROMPTS_BYTES = 1_000_000
"""An object of the API server holds about 1.5 MB, and a ConfigMap 1 MiB."""
API_KEY_ENV = ("REPRISE_API_KEY", "VLLM_API_KEY")
"""Variables from which the engine takes API keys."""

_DISK_FLAG = re.compile(r"^--(prefix-cache-dir|prefix-cache-disk-size)(=.*)?$", re.DOTALL)


def check_prefix_caching(service: InferenceService) -> None:
    """Raises SpecError with the field, the value and what to do."""
    if service.spec.runtime.name is Runtime.VLLM_ASCEND:
        _check_vllm_ascend(service)
    _check_isolation(service)
    _check_host_memory(service)
    if service.persistence is not None:
        _check_persistence(service, service.persistence)
    _check_warmup(service)


def _check_vllm_ascend(service: InferenceService) -> None:
    cache = service.spec.prefix_caching
    reasons = {
        "isolation: perKey": (
            cache.isolation is Isolation.PER_KEY,
            "that runtime makes no salts of API keys; let clients send a cache_salt",
        ),
        "hostMemory": (cache.host_memory is not None, "that runtime's cache is on the device alone"),
        "persistence": (cache.persistence is not None, "that runtime's cache is on the device alone"),
        "warmup": (cache.warmup is not None, "that runtime computes no prompts before it is ready"),
    }
    given = {field: why for field, (is_given, why) in reasons.items() if is_given}
    if given:
        told = "; ".join(f"spec.prefixCaching.{field} ({why})" for field, why in given.items())
        raise SpecError(
            "NotSupported",
            f"The vllm-ascend runtime cannot honour {told}. Remove it, or use the reprise runtime.",
        )


def _check_isolation(service: InferenceService) -> None:
    cache = service.spec.prefix_caching
    if cache.isolation is not Isolation.PER_KEY:
        if cache.isolation_secret_ref is not None:
            raise _invalid("spec.prefixCaching.isolationSecretRef goes with isolation: perKey; set that, or remove it.")
        return
    variables = {variable.name for variable in service.spec.runtime.env}
    if service.spec.auth.api_key_secret_ref is None and not variables & set(API_KEY_ENV):
        raise _invalid(
            "spec.prefixCaching.isolation is perKey, but there are no API keys to tell callers apart by: set "
            "spec.auth.apiKeySecretRef to a Secret with a key a line."
        )
    secret = cache.isolation_secret_ref is not None or ISOLATION_SECRET_ENV in variables
    if service.persistence is not None and not secret:
        raise _invalid(
            "spec.prefixCaching.isolation is perKey, and without isolationSecretRef the engine draws a new secret at "
            "each start, so that nothing on the volume of spec.prefixCaching.persistence could be found again: set "
            "isolationSecretRef to a Secret of at least 16 characters."
        )


def _check_host_memory(service: InferenceService) -> None:
    if not host_memory(service):
        return
    resources = service.spec.runtime.resources
    for kind, quantities in (("requests", resources.requests), ("limits", resources.limits)):
        try:
            whole(quantities.get("memory", 0))
        except ValueError as error:
            raise _invalid(
                f"spec.runtime.resources.{kind}.memory: {error}; spec.prefixCaching.hostMemory is added to it."
            ) from None


def _check_persistence(service: InferenceService, persistence: PersistenceSpec) -> None:
    where = "spec.prefixCaching.persistence"
    if (persistence.claim_name is None) == (persistence.size is None):
        raise _invalid(f"{where} needs either claimName (a claim that exists) or size (a claim of each replica's own).")
    if persistence.claim_name is not None and persistence.storage_class_name is not None:
        raise _invalid(f"{where}.storageClassName goes with size; with claimName the claim has its class already.")
    scaling = service.spec.autoscaling
    most = ("replicas", service.spec.replicas) if scaling is None else ("autoscaling.maxReplicas", scaling.max_replicas)
    if persistence.claim_name is not None and most[1] > 1 and not persistence.is_shared:
        raise _invalid(
            f"{where}.claimName is one volume, and spec.{most[0]} is {most[1]}. Use size for a volume of "
            "each replica's own, or say accessModes: [ReadWriteMany] where the claim is such a volume."
        )
    if persistence.access_modes and set(persistence.access_modes) == {"ReadOnlyMany"}:
        raise _invalid(f"{where}.accessModes is ReadOnlyMany, but blocks are written: add ReadWriteOnce.")
    if persistence.size is not None and not amount(persistence.size):
        raise _invalid(f"{where}.size is {persistence.size}; give a size such as 100Gi, or remove persistence.")
    limit = disk_limit(persistence)
    if limit is not None and limit < 1:
        raise _invalid(f"{where}.limit is {persistence.limit}; give a size such as 90Gi, or remove it.")
    if limit is not None and persistence.size is not None and limit > amount(persistence.size):
        raise _invalid(
            f"{where}.limit is {persistence.limit}, more than the volume's size {persistence.size}; lower it, or "
            "remove it to use nine tenths of the volume."
        )
    for argument in service.spec.runtime.extra_args:
        if _DISK_FLAG.match(argument.replace("_", "-")):
            flag = argument.partition("=")[0]
            raise _invalid(f"spec.runtime.extraArgs has {flag}, which {where} sets already: remove one of the two.")
    _check_volume(service, CACHE_VOLUME, where)
    _check_rollout(service, persistence, where)


def _check_rollout(service: InferenceService, persistence: PersistenceSpec, where: str) -> None:
    """No pod can be added while another one holds the volume, and a StatefulSet replaces one pod at a time."""
    asked, own = service.spec.rollout, persistence.size is not None
    if persistence.is_shared and not own:
        return
    one = "a StatefulSet, which replaces pods one by one" if own else "one pod, whose volume its successor needs"
    if asked.max_surge is not None and not is_zero(asked.max_surge):
        raise SpecError(
            "NotSupported",
            f"spec.rollout.maxSurge is {asked.max_surge}, and {where} makes the pods those of {one}: no pod can be "
            "added. Set it to 0, or leave it out.",
        )
    if asked.max_unavailable is not None and (is_zero(asked.max_unavailable) or (own and asked.max_unavailable != 1)):
        raise SpecError(
            "NotSupported",
            f"spec.rollout.maxUnavailable is {asked.max_unavailable}, and {where} makes the pods those of {one}: set "
            "it to 1, or leave it out.",
        )


def _check_warmup(service: InferenceService) -> None:
    warmup, where = service.spec.prefix_caching.warmup, "spec.prefixCaching.warmup"
    if warmup is None:
        return
    if bool(warmup.prompts) == (warmup.config_map_key_ref is not None):
        raise _invalid(f"{where} needs either prompts or configMapKeyRef.")
    size = len(prompts_file(warmup.prompts).encode())
    if size > MAX_PROMPTS_BYTES:
        raise _invalid(
            f"{where}.prompts take {size} bytes, and a ConfigMap holds {MAX_PROMPTS_BYTES}: warm up fewer or shorter "
            "prompts. What is shared is the beginning of a prompt."
        )
    _check_volume(service, WARMUP_VOLUME, where)


def _check_volume(service: InferenceService, name: str, where: str) -> None:
    if any(volume.get("name") == name for volume in service.spec.pod_template.volumes):
        raise _invalid(f"spec.podTemplate.volumes has a volume {name!r}, which {where} makes: give yours another name.")


def _invalid(message: str) -> SpecError:
    return SpecError("InvalidSpec", message)
