"""Body of an InferenceService → frozen, typed spec. The only reader of the resource's raw dicts.

The API server has already checked the body against the schema and the CEL rules of the CRD. What is checked here again
is what would do harm if an older CRD let it through, and what this release does not honour yet: such a field is refused
by name, never ignored.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, Literal, NewType

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.alias_generators import to_camel

from reprise_operator.children.profiles import CPU_PROFILE, DEFAULT_PROFILE, PROFILES

UID = NewType("UID", str)

MAX_CACHED_MODEL_LEN = 65_536
"""vllm-ascend serves at most 64k tokens of context with prefix caching (the vendor's page on prefix caching)."""


class SpecError(Exception):
    """The spec cannot be honoured: `reason` is that of the Stalled condition, `message` says what to do."""

    def __init__(self, reason: Literal["NotSupported", "InvalidSpec"], message: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message


class Runtime(StrEnum):
    """Which engine runs in the pods."""

    REPRISE = "reprise"
    VLLM_ASCEND = "vllm-ascend"


class DriverMode(StrEnum):
    """How the NPU driver gets into the container: `hostPath` mounts it, `runtime` lets the container runtime do so."""

    AUTO = "auto"
    HOST_PATH = "hostPath"
    RUNTIME = "runtime"


class _Model(BaseModel):
    model_config = ConfigDict(
        frozen=True, alias_generator=to_camel, populate_by_name=True, extra="forbid", arbitrary_types_allowed=False
    )


class ModelSpec(_Model):
    """Which model, and under which name it is served."""

    uri: str
    served_name: str | None = None
    max_model_len: Annotated[int, Field(ge=1)] | None = None
    """Tokens of prompt and output; None takes the model's own limit."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] | None = None


class EnvVar(_Model):
    """One environment variable, `value` or `valueFrom` as in a pod."""

    name: Annotated[str, Field(min_length=1)]
    value: str | None = None
    value_from: dict[str, Any] | None = None


class LocalReference(_Model):
    """Name of an object in the same namespace."""

    name: Annotated[str, Field(min_length=1)]


class Resources(_Model):
    """Requests and limits of the engine container; quantities as in a pod."""

    requests: dict[str, str | int | float] = {}
    limits: dict[str, str | int | float] = {}


class RuntimeSpec(_Model):
    """The engine container."""

    name: Runtime = Runtime.REPRISE
    image: str | None = None
    image_pull_secrets: tuple[LocalReference, ...] = ()
    extra_args: tuple[str, ...] = ()
    env: tuple[EnvVar, ...] = ()
    resources: Resources = Resources()


class PrefixCachingSpec(_Model):
    """`enabled` is three-valued: unset means on."""

    enabled: bool | None = None
    block_size: Annotated[int, Field(ge=1, le=512)] | None = None
    """Tokens a block; None takes the engine's default for its device."""


class MemorySpec(_Model):
    """Share of the device's memory; `utilization` None means automatic."""

    utilization: Annotated[float, Field(gt=0, le=0.98)] | None = None


class ChunkedPrefillSpec(_Model):
    """Long prompts in pieces between decodes; None takes the engine's default."""

    enabled: bool | None = None


class AcceleratorSpec(_Model):
    """The devices of one pod."""

    profile: str = DEFAULT_PROFILE
    count: Annotated[int, Field(ge=1, le=16)] | None = None
    """Devices a pod; None takes the least the profile's device plugin hands out."""
    resource_name: str | None = None
    runtime_class_name: str | None = None
    driver: DriverMode = DriverMode.AUTO


class ServiceSpec(_Model):
    """The Service in front of the pods."""

    type: Literal["ClusterIP", "NodePort", "LoadBalancer"] = "ClusterIP"
    port: Annotated[int, Field(ge=1, le=65_535)] = 8000
    session_affinity: Literal["None", "ClientIP"] = "None"


class SecretKeyRef(_Model):
    """A key of a Secret in the same namespace."""

    name: Annotated[str, Field(min_length=1)]
    key: Annotated[str, Field(min_length=1)] = "api-key"


class AuthSpec(_Model):
    """Who may use the endpoint."""

    api_key_secret_ref: SecretKeyRef | None = None


class PodMetadata(_Model):
    """Labels and annotations added to the pods."""

    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}


class PodTemplateSpec(_Model):
    """What the user adds to the pod. The nested values are passed on as they are; the API server checks them."""

    metadata: PodMetadata = PodMetadata()
    node_selector: dict[str, str] = {}
    tolerations: tuple[dict[str, Any], ...] = ()
    affinity: dict[str, Any] = {}
    scheduler_name: str | None = None
    service_account_name: str | None = None
    priority_class_name: str | None = None
    volumes: tuple[dict[str, Any], ...] = ()
    volume_mounts: tuple[dict[str, Any], ...] = ()


class Spec(_Model):
    """The whole spec as far as this release honours it."""

    model: ModelSpec
    runtime: RuntimeSpec = RuntimeSpec()
    prefix_caching: PrefixCachingSpec = PrefixCachingSpec()
    memory: MemorySpec = MemorySpec()
    chunked_prefill: ChunkedPrefillSpec = ChunkedPrefillSpec()
    accelerator: AcceleratorSpec = AcceleratorSpec()
    replicas: Annotated[int, Field(ge=0)] = 1
    service: ServiceSpec = ServiceSpec()
    auth: AuthSpec = AuthSpec()
    suspend: bool = False
    pod_template: PodTemplateSpec = PodTemplateSpec()


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Which object this is, and which revision of its spec."""

    name: str
    namespace: str
    uid: UID
    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HostPathModel:
    """`hostpath:///path`: a folder or a .gguf file on the node."""

    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimModel:
    """`pvc://claim/path`: a folder or a .gguf file on a volume. `path` is relative and may be empty."""

    claim: str
    path: str


ModelSource = HostPathModel | ClaimModel


@dataclass(frozen=True, slots=True, kw_only=True)
class InferenceService:
    """One parsed InferenceService."""

    identity: Identity
    spec: Spec
    source: ModelSource

    @property
    def prefix_caching(self) -> bool:
        """Whether the engine is told to cache prefixes: unset means on."""
        return self.spec.prefix_caching.enabled is not False

    @property
    def served_name(self) -> str:
        """The model name clients send; the resource's own name where the spec gives none."""
        return self.spec.model.served_name or self.identity.name


NOT_YET = (
    "model.revision",
    "model.secretRef",
    "prefixCaching.hashAlgorithm",
    "prefixCaching.isolation",
    "prefixCaching.hostMemory",
    "prefixCaching.persistence",
    "prefixCaching.warmup",
    "memory.autoTune",
    "memory.floor",
    "autoscaling",
    "rollout",
    "disruption",
    "gateway",
    "monitoring",
)
"""Fields of the schema that a later release honours."""

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
LATER_SCHEMES = ("hf", "modelscope", "s3")


def identity_of(body: Mapping[str, Any]) -> Identity:
    """Read the identity out of a body the API server returned; works for any spec."""
    metadata = body["metadata"]
    return Identity(
        name=metadata["name"],
        namespace=metadata["namespace"],
        uid=UID(metadata["uid"]),
        generation=int(metadata.get("generation", 1)),
    )


def parse(body: Mapping[str, Any]) -> InferenceService:
    """Body → typed service.

    Raises:
        SpecError: `NotSupported` when a field is set that this release does not honour (all of them are named), else
            `InvalidSpec` with the path of each wrong field.
    """
    raw = body.get("spec") or {}
    unsupported = [path for path in NOT_YET if _is_set(raw, path)]
    scheme = _scheme(raw)
    if scheme in LATER_SCHEMES:
        unsupported.insert(0, f"model.uri ({scheme}://)")
    if unsupported:
        fields = ", ".join(f"spec.{path}" for path in unsupported)
        raise SpecError(
            "NotSupported",
            f"This release does not honour {fields}. Remove it to go on"
            + ("; models are read from hostpath:///path or pvc://claim/path." if scheme in LATER_SCHEMES else "."),
        )
    try:
        spec = Spec.model_validate(raw)
    except ValidationError as error:
        raise SpecError("InvalidSpec", _explain(error)) from None
    service = InferenceService(identity=identity_of(body), spec=spec, source=_source(spec.model.uri))
    _check_conflicts(service)
    return service


def _is_set(raw: Mapping[str, Any], path: str) -> bool:
    value: Any = raw
    for part in path.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return False
        value = value[part]
    return value is not None


def _scheme(raw: Mapping[str, Any]) -> str | None:
    model = raw.get("model")
    uri = model.get("uri") if isinstance(model, Mapping) else None
    match = _URI.match(uri) if isinstance(uri, str) else None
    return match["scheme"] if match else None


def _explain(error: ValidationError) -> str:
    parts = []
    for item in error.errors(include_url=False, include_context=False)[:5]:
        path = ".".join(str(part) for part in ("spec", *item["loc"]))
        parts.append(f"{path}: {item['msg']}" + ("" if item["type"] == "missing" else f" (got {item['input']!r:.100})"))
    return "; ".join(parts)


def _source(uri: str) -> ModelSource:
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
        f"spec.model.uri is {uri!r}; it must be hostpath:///absolute/path or pvc://claim/path, without '..'.",
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
    _check_accelerator(service)
    if spec.runtime.name is Runtime.VLLM_ASCEND:
        _check_vllm_ascend(service)
    elif spec.chunked_prefill.enabled is False and spec.model.max_model_len is None:
        raise SpecError(
            "InvalidSpec",
            "spec.model.maxModelLen is needed with spec.chunkedPrefill.enabled: false, since a whole prompt must then "
            "fit one step.",
        )


def _check_accelerator(service: InferenceService) -> None:
    runtime, accelerator = service.spec.runtime.name, service.spec.accelerator
    profile = PROFILES.get(accelerator.profile)
    if profile is None:
        raise SpecError(
            "InvalidSpec",
            f"spec.accelerator.profile is {accelerator.profile!r}; it must be one of {', '.join(PROFILES)}.",
        )
    if not profile.is_npu:
        if runtime is Runtime.VLLM_ASCEND:
            raise SpecError(
                "InvalidSpec",
                f"spec.accelerator.profile is {CPU_PROFILE}; the vllm-ascend runtime needs an NPU profile.",
            )
        given = accelerator.model_fields_set & {"count", "resource_name", "driver"}
        if given:
            fields = ", ".join(f"spec.accelerator.{to_camel(name)}" for name in sorted(given))
            raise SpecError(
                "InvalidSpec", f"spec.accelerator.profile is {CPU_PROFILE}, which has no device: remove {fields}."
            )
    elif runtime is Runtime.REPRISE and (accelerator.count or 0) > profile.minimum:
        raise SpecError(
            "NotSupported",
            f"This release does not honour spec.accelerator.count {accelerator.count} with the reprise runtime, which "
            f"uses one device a pod. Set it to {profile.minimum} and raise spec.replicas, or use the vllm-ascend "
            "runtime.",
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
