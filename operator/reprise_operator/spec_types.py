"""The fields of spec as types: frozen, and free of raw dicts but where a value is passed on as it is.

What several fields say together is checked by spec.py and the modules it names.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

from reprise_operator.children.profiles import DEFAULT_PROFILE
from reprise_operator.quantity import Quantity

HOSTNAME_PATTERN = "^([*][.])?[a-z0-9]([-a-z0-9]*[a-z0-9])?([.][a-z0-9]([-a-z0-9]*[a-z0-9])?)*$"
"""HTTPRoute's own: lower case, at most one wildcard, as the first label. The CEL rule of the CRD carries this text."""
DURATION_PATTERN = "^(0|(([0-9]+)y)?(([0-9]+)w)?(([0-9]+)d)?(([0-9]+)h)?(([0-9]+)m)?(([0-9]+)s)?(([0-9]+)ms)?)$"
"""Prometheus' own. The CEL rule of the CRD carries this text, too."""


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


class LocalReference(_Model):
    """Name of an object in the same namespace."""

    name: Annotated[str, Field(min_length=1)]


class ModelCacheSpec(_Model):
    """Where a fetched model is kept: on a claim, else on a volume of each pod's own that is gone with the pod."""

    claim_name: Annotated[str, Field(min_length=1)] | None = None
    size_limit: str | int | float | None = None
    """A quantity: the most that the pod's own volume may hold."""


class ModelSpec(_Model):
    """Which model, and under which name it is served."""

    uri: str
    served_name: str | None = None
    max_model_len: Annotated[int, Field(ge=1)] | None = None
    """Tokens of prompt and output; None takes the model's own limit."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] | None = None
    revision: Annotated[str, Field(min_length=1)] | None = None
    """Branch, tag or commit of a hub's model; None takes that of the URI, else the hub's default branch."""
    secret_ref: LocalReference | None = None
    """Credentials of the hub or bucket; which keys, says children/fetch.py."""
    cache: ModelCacheSpec = ModelCacheSpec()


class EnvVar(_Model):
    """One environment variable, `value` or `valueFrom` as in a pod."""

    name: Annotated[str, Field(min_length=1)]
    value: str | None = None
    value_from: dict[str, Any] | None = None


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


class Isolation(StrEnum):
    """Whether callers share prefixes: `none` all that send the same cache_salt, `perKey` those of one API key."""

    NONE = "none"
    PER_KEY = "perKey"


class IsolationSecretRef(_Model):
    """A key of a Secret in the same namespace: the secret under which salts are made."""

    name: Annotated[str, Field(min_length=1)]
    key: Annotated[str, Field(min_length=1)] = "isolation-secret"


class ConfigMapKeyRef(_Model):
    """A key of a ConfigMap in the same namespace."""

    name: Annotated[str, Field(min_length=1)]
    key: Annotated[str, Field(min_length=1)]


SHARED_MODE = "ReadWriteMany"
"""The access mode of a volume that pods on several nodes mount at once."""

AccessMode = Literal["ReadWriteOnce", "ReadOnlyMany", "ReadWriteMany", "ReadWriteOncePod"]


class PersistenceSpec(_Model):
    """Where blocks outlive a pod: `claim_name`, one claim that exists; or `size`, a claim of each replica's own."""

    claim_name: Annotated[str, Field(min_length=1)] | None = None
    size: Quantity | None = None
    storage_class_name: str | None = None
    access_modes: tuple[AccessMode, ...] = ()
    """With size, those of the claims that are made (ReadWriteOnce when unset); with claim_name, what that claim is."""
    limit: Quantity | None = None
    """Bytes the engine keeps there at most. Unset: nine tenths of size, and with claim_name the engine's default."""

    @property
    def is_shared(self) -> bool:
        """Whether several pods may mount one claim."""
        return SHARED_MODE in self.access_modes


class WarmupSpec(_Model):
    """Prompts computed and pinned before a pod is ready: here, or a file in a ConfigMap."""

    prompts: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    config_map_key_ref: ConfigMapKeyRef | None = None
    timeout_seconds: Annotated[int, Field(ge=1, le=86_400)] | None = None
    """For all of them; None takes the engine's default."""


class PrefixCachingSpec(_Model):
    """`enabled` is three-valued: unset means on. Where it is off, nothing else here is in force, and volumes stay."""

    enabled: bool | None = None
    block_size: Annotated[int, Field(ge=1, le=512)] | None = None
    """Tokens a block; None takes the engine's default for its device."""
    hash_algorithm: Literal["sha256", "sha256_cbor", "xxhash", "xxhash_cbor"] | None = None
    """How blocks are named to the outside; None takes the engine's default."""
    isolation: Isolation = Isolation.NONE
    isolation_secret_ref: IsolationSecretRef | None = None
    host_memory: Quantity | None = None
    """Bytes of host memory for blocks that leave the device; on top of runtime.resources."""
    persistence: PersistenceSpec | None = None
    warmup: WarmupSpec | None = None


class MemorySpec(_Model):
    """Share of the device's memory; `utilization` None means automatic."""

    utilization: Annotated[float, Field(gt=0, le=0.98)] | None = None
    auto_tune: bool = True
    """Whether it is lowered, step by step, when memory has run out."""
    floor: Annotated[float, Field(gt=0, le=0.98)] | None = None
    """The least it is lowered to; None is four steps below the first value."""


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


class PrometheusSpec(_Model):
    """Where KEDA asks for the load, and what: None takes the operator's own server, and a query made from `metric`."""

    server_address: str | None = None
    query: str | None = None
    """PromQL whose one value is the load of all pods together."""


class AutoscalingSpec(_Model):
    """Who decides the number of pods between two bounds, and by which load of a pod."""

    min_replicas: Annotated[int, Field(ge=0)] = 1
    max_replicas: Annotated[int, Field(ge=1)]
    metric: Annotated[str, Field(min_length=1)] = "vllm:num_requests_waiting"
    target: Annotated[int, Field(ge=1)] | None = None
    """Load of one pod to hold; percent for shares (cpu, memory, KV cache). None takes the metric's default."""
    provider: Literal["hpa", "keda"] = "hpa"
    prometheus: PrometheusSpec = PrometheusSpec()


class DisruptionSpec(_Model):
    """What a node drain must leave: one of the two, a number of pods or a percentage ("50%")."""

    min_available: int | str | None = None
    max_unavailable: int | str | None = None


PodShare = Annotated[int, Field(ge=0)] | Annotated[str, Field(pattern=r"^[0-9]+%$")]
"""A number of pods, or a percentage of the replicas."""


class RolloutSpec(_Model):
    """How a change replaces pods. What is None is decided by children/strategy.py."""

    max_surge: PodShare | None = None
    max_unavailable: PodShare | None = None
    progress_deadline_seconds: Annotated[int, Field(ge=10)] | None = None
    """Seconds without progress after which a change is rolled back."""


class ServiceSpec(_Model):
    """The Service in front of the pods."""

    type: Literal["ClusterIP", "NodePort", "LoadBalancer"] = "ClusterIP"
    port: Annotated[int, Field(ge=1, le=65_535)] = 8000
    session_affinity: Literal["None", "ClientIP"] | None = None
    """None leaves it to the operator: ClientIP where a gateway is asked for and cannot be had."""


class ParentRef(_Model):
    """A gateway, or one of its listeners, as in an HTTPRoute."""

    group: str = "gateway.networking.k8s.io"
    kind: str = "Gateway"
    namespace: str | None = None
    name: Annotated[str, Field(min_length=1)]
    section_name: str | None = None
    port: Annotated[int, Field(ge=1, le=65_535)] | None = None


class EndpointPickerSpec(_Model):
    """Who picks a pod for each request: the Service `name`, or with `managed` one that the operator runs."""

    name: Annotated[str, Field(min_length=1)] | None = None
    managed: bool = False
    port: Annotated[int, Field(ge=1, le=65_535)] = 9002
    failure_mode: Literal["FailOpen", "FailClose"] = "FailOpen"
    resources: Resources = Resources()
    """Of a managed picker's container."""


class GatewaySpec(_Model):
    """How requests come from outside: a route at `parent_refs`, to a pool where an endpoint picker is given."""

    parent_refs: tuple[ParentRef, ...] = ()
    hostnames: tuple[Annotated[str, Field(pattern=HOSTNAME_PATTERN)], ...] = ()
    inference_pool: bool | None = None
    endpoint_picker: EndpointPickerSpec | None = None

    @property
    def wants_pool(self) -> bool:
        """Unset means: where there is an endpoint picker."""
        return self.endpoint_picker is not None if self.inference_pool is None else self.inference_pool


class SecretKeyRef(_Model):
    """A key of a Secret in the same namespace."""

    name: Annotated[str, Field(min_length=1)]
    key: Annotated[str, Field(min_length=1)] = "api-key"


class AuthSpec(_Model):
    """Who may use the endpoint."""

    api_key_secret_ref: SecretKeyRef | None = None


class PodMonitorSpec(_Model):
    """A PodMonitor of the engine pods; given and not disabled means there is one."""

    enabled: bool = True
    interval: Annotated[str, Field(pattern=DURATION_PATTERN)] | None = None
    """A Prometheus duration; None takes the Prometheus' own."""
    labels: dict[str, str] = {}


class MonitoringSpec(_Model):
    """How the engine's metrics are collected."""

    pod_monitor: PodMonitorSpec | None = None


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
    """Pods; with `autoscaling` only the number to start from."""
    autoscaling: AutoscalingSpec | None = None
    disruption: DisruptionSpec | None = None
    rollout: RolloutSpec = RolloutSpec()
    service: ServiceSpec = ServiceSpec()
    gateway: GatewaySpec | None = None
    auth: AuthSpec = AuthSpec()
    monitoring: MonitoringSpec = MonitoringSpec()
    suspend: bool = False
    pod_template: PodTemplateSpec = PodTemplateSpec()
