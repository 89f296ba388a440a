"""Body of an InferenceService → frozen, typed spec. The only reader of the resource's raw dicts.

The API server has already checked the body against the schema and the CEL rules of the CRD. What is checked here again
is what would do harm if an older CRD let it through, and what this release does not honour yet: such a field is refused
by name, never ignored.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pydantic import ValidationError

from reprise_operator.accelerator_checks import check_accelerator
from reprise_operator.cache_checks import check_prefix_caching
from reprise_operator.children.strategy import is_zero
from reprise_operator.resource import (
    UID,
    ClaimModel,
    FetchedModel,
    HostPathModel,
    Identity,
    InferenceService,
    ModelSource,
    SpecError,
)
from reprise_operator.scaling_rules import check_autoscaling, check_disruption
from reprise_operator.spec_types import GatewaySpec, ModelSpec, Runtime, Spec

__all__ = [
    "MAX_CACHED_MODEL_LEN",
    "RESERVED_FLAGS",
    "RESERVED_PATTERN",
    "Identity",
    "InferenceService",
    "SpecError",
    "gateway_of",
    "identity_of",
    "parse",
]

MAX_CACHED_MODEL_LEN = 65_536
"""vllm-ascend serves at most 64k tokens of context with prefix caching (the vendor's page on prefix caching)."""

RESERVED_FLAGS = {
    "model": "model.uri",
    "tokenizer-revision": "model.revision",
    "revision": "model.revision",
    "served-model-name": "model.servedName",
    "max-model-len": "model.maxModelLen",
    "dtype": "model.dtype",
    "enable-prefix-caching": "prefixCaching.enabled",
    "block-size": "prefixCaching.blockSize",
    "prefix-caching-hash-algo": "prefixCaching.hashAlgorithm",
    "prefix-cache-isolation": "prefixCaching.isolation",
    "prefix-cache-isolation-secret": "prefixCaching.isolationSecretRef",
    "prefix-cache-host-memory": "prefixCaching.hostMemory",
    "warmup-prompts": "prefixCaching.warmup",
    "warmup-timeout": "prefixCaching.warmup.timeoutSeconds",
    "gpu-memory-utilization": "memory.utilization",
    "enable-chunked-prefill": "chunkedPrefill.enabled",
    "tensor-parallel-size": "accelerator.count",
    "api-key": "auth.apiKeySecretRef",
    "host": "(the pod's own address)",
    "port": "service.port",
}
"""Engine flags that a typed field renders → that field. extraArgs may not repeat them."""

RESERVED_PATTERN = (
    "^(-tp|--(no[-_])?(" + "|".join(flag.replace("-", "[-_]") for flag in sorted(RESERVED_FLAGS)) + "))([=\\s].*)?$"
)
"""RE2 pattern of a reserved extra argument; the CEL rule of the CRD carries this very text."""

_RESERVED = re.compile(RESERVED_PATTERN, re.DOTALL)
_URI = re.compile(r"^(?P<scheme>[a-z0-9]+)://(?P<rest>.*)$", re.DOTALL)
_CLAIM = re.compile(r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$")
_HUB = re.compile(
    r"^(?P<scheme>hf|modelscope)://(?P<name>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(@(?P<revision>[^/@\s]+))?$", re.ASCII
)
_BUCKET = re.compile(r"^s3://(?P<place>[A-Za-z0-9][\w.-]*(/.*)?)$", re.ASCII | re.DOTALL)


def identity_of(body: Mapping[str, Any]) -> Identity:
    """Read the identity out of a body the API server returned; works for any spec."""
    metadata = body["metadata"]
    return Identity(
        name=metadata["name"],
        namespace=metadata["namespace"],
        uid=UID(metadata["uid"]),
        generation=int(metadata.get("generation", 1)),
    )


def gateway_of(body: Mapping[str, Any]) -> GatewaySpec | None:
    """spec.gateway, also of a service that is refused for another field: its route, if it has one, is still there.
    None when there is none, or none that can be read."""
    gateway = (body.get("spec") or {}).get("gateway")
    try:
        return None if gateway is None else GatewaySpec.model_validate(gateway)
    except ValidationError:
        return None


def parse(body: Mapping[str, Any]) -> InferenceService:
    """Body → typed service.

    Raises:
        SpecError: `InvalidSpec` with the path of each wrong field; `NotSupported` for what this release does not do.
    """
    raw = body.get("spec") or {}
    try:
        spec = Spec.model_validate(raw)
    except ValidationError as error:
        raise SpecError("InvalidSpec", _explain(error)) from None
    service = InferenceService(identity=identity_of(body), spec=spec, source=_source(spec.model))
    _check_conflicts(service)
    return service


def _explain(error: ValidationError) -> str:
    parts = []
    for item in error.errors(include_url=False, include_context=False)[:5]:
        path = ".".join(str(part) for part in ("spec", *item["loc"]))
        parts.append(f"{path}: {item['msg']}" + ("" if item["type"] == "missing" else f" (got {item['input']!r:.100})"))
    return "; ".join(parts)


def _source(model: ModelSpec) -> ModelSource:
    source = _place(model.uri)
    if isinstance(source, FetchedModel):
        return _fetched(model, source)
    fetching = {
        "revision": model.revision,
        "secretRef": model.secret_ref,
        "cache": model.cache if model.cache.model_fields_set else None,
    }
    given = [f"spec.model.{name}" for name, value in fetching.items() if value is not None]
    if given:
        raise SpecError(
            "InvalidSpec",
            f"{', '.join(given)} is of models that are fetched (hf, modelscope, s3), but spec.model.uri is "
            f"{model.uri!r}, which is there already: remove it.",
        )
    return source


def _fetched(model: ModelSpec, source: FetchedModel) -> FetchedModel:
    """`source` with the revision that counts."""
    cache = model.cache
    if cache.claim_name is not None and cache.size_limit is not None:
        raise SpecError(
            "InvalidSpec",
            "spec.model.cache.sizeLimit is of the volume that a pod has without spec.model.cache.claimName: drop one.",
        )
    if model.revision is None:
        return source
    if source.scheme == "s3":
        raise SpecError(
            "InvalidSpec",
            f"spec.model.revision is {model.revision!r}, but a bucket has no revisions: put it into the path.",
        )
    if source.revision is not None:
        raise SpecError(
            "InvalidSpec",
            f"spec.model.revision is {model.revision!r}, and spec.model.uri names @{source.revision}: give one.",
        )
    return replace(source, revision=model.revision)


def _place(uri: str) -> ModelSource:
    if (hub := _HUB.match(uri)) and ".." not in hub["name"]:
        return FetchedModel(
            scheme="hf" if hub["scheme"] == "hf" else "modelscope", location=hub["name"], revision=hub["revision"]
        )
    if (bucket := _BUCKET.match(uri)) and _is_clean(bucket["place"]):
        return FetchedModel(scheme="s3", location=bucket["place"].rstrip("/"))
    match = _URI.match(uri)
    scheme, rest = (match["scheme"], match["rest"]) if match else (None, "")
    if scheme == "hostpath" and rest.startswith("/") and _is_clean(rest[1:]) and rest.strip("/"):
        return HostPathModel(path="/" + rest.strip("/"))
    if scheme == "pvc":
        claim, _, path = rest.partition("/")
        if _CLAIM.match(claim) and _is_clean(path):
            return ClaimModel(claim=claim, path=path.strip("/"))
    raise SpecError(
        "InvalidSpec",
        f"spec.model.uri is {uri!r}; it must be hostpath:///absolute/path or pvc://claim/path, without '..', "
        "hf://org/name[@revision], modelscope://org/name[@revision] or s3://bucket/path.",
    )


def _is_clean(path: str) -> bool:
    return ".." not in path.split("/") and "\0" not in path


def _check_conflicts(service: InferenceService) -> None:
    spec = service.spec
    for argument in spec.runtime.extra_args:
        if _RESERVED.match(argument):
            flag = re.split(r"[=\s]", argument, maxsplit=1)[0]
            raise SpecError(
                "InvalidSpec",
                f"spec.runtime.extraArgs repeats {flag}, which a field of the spec already sets; use that field.",
            )
    memory = spec.memory
    if memory.floor is not None and memory.utilization is not None and memory.floor > memory.utilization:
        raise SpecError(
            "InvalidSpec",
            f"spec.memory.floor is {memory.floor:g}, above spec.memory.utilization {memory.utilization:g}; lower it.",
        )
    check_accelerator(service)
    check_autoscaling(spec)
    check_disruption(spec)
    check_prefix_caching(service)
    if spec.gateway is not None:
        _check_gateway(spec.gateway)
    if is_zero(spec.rollout.max_surge) and is_zero(spec.rollout.max_unavailable):
        raise SpecError(
            "InvalidSpec",
            "spec.rollout.maxSurge and spec.rollout.maxUnavailable are both 0; a change could replace no pod. Raise "
            "one of them, or leave it out.",
        )
    if spec.runtime.name is Runtime.VLLM_ASCEND:
        _check_vllm_ascend(service)
    elif spec.chunked_prefill.enabled is False and spec.model.max_model_len is None:
        raise SpecError(
            "InvalidSpec",
            "spec.model.maxModelLen is needed with spec.chunkedPrefill.enabled: false, since a whole prompt must then "
            "fit one step.",
        )


def _check_gateway(gateway: GatewaySpec) -> None:
    picker = gateway.endpoint_picker
    if not gateway.parent_refs and picker is None:
        raise SpecError(
            "InvalidSpec",
            "spec.gateway asks for nothing: give spec.gateway.parentRefs, the Gateways of a route, or "
            "spec.gateway.endpointPicker, for a pool.",
        )
    if gateway.hostnames and not gateway.parent_refs:
        raise SpecError(
            "InvalidSpec",
            "spec.gateway.hostnames is given without spec.gateway.parentRefs, the Gateways that shall serve them.",
        )
    if gateway.wants_pool and picker is None:
        raise SpecError(
            "InvalidSpec",
            "spec.gateway.inferencePool is true without spec.gateway.endpointPicker: give the name of a picker's "
            "Service, or managed: true.",
        )
    if picker is not None and gateway.inference_pool is False:
        raise SpecError(
            "InvalidSpec",
            "spec.gateway.endpointPicker needs a pool, and spec.gateway.inferencePool is false: remove one of the two.",
        )
    if picker is not None and picker.managed == (picker.name is not None):
        raise SpecError(
            "InvalidSpec",
            "spec.gateway.endpointPicker must have either the name of a picker's Service, or managed: true.",
        )
    if picker is not None and not picker.managed and "resources" in picker.model_fields_set:
        raise SpecError(
            "InvalidSpec", "spec.gateway.endpointPicker.resources is of a managed picker; remove it, or the name."
        )


def _check_vllm_ascend(service: InferenceService) -> None:
    spec = service.spec
    if not service.prefix_caching:
        return
    if spec.chunked_prefill.enabled:
        raise SpecError(
            "InvalidSpec",
            "spec.chunkedPrefill.enabled is true; vllm-ascend cannot combine chunked prefill with prefix caching. "
            "Set one of them to false, or use the reprise runtime, which does both.",
        )
    length = spec.model.max_model_len
    if length is None or length > MAX_CACHED_MODEL_LEN:
        raise SpecError(
            "InvalidSpec",
            f"spec.model.maxModelLen is {length}; vllm-ascend with prefix caching needs one of at most "
            f"{MAX_CACHED_MODEL_LEN}. Set it, disable prefix caching, or use the reprise runtime.",
        )
