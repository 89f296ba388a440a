"""What was seen of one InferenceService's children at one moment. Frozen and free of I/O: made by bodies.py and
observe.py, read by rollout.py and status.py, written by hand in tests.

Times are Unix seconds (time.time()) since they are compared with the cluster's own timestamps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from reprise_operator.naming import PLAN_HASH_ANNOTATION
from reprise_operator.references import ObjectRef, ObservedReference


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMetrics:
    """The lines read from one pod's /metrics. None where the engine does not report the figure.

    queries and hits are counters in tokens since the engine started, misses in requests.
    """

    scraped_at: float
    started_at: float | None = None
    """When the process that counts began: its counters begin at 0 there."""
    enable_prefix_caching: bool | None = None
    prefix_cache_queries: float | None = None
    prefix_cache_hits: float | None = None
    misses: Mapping[str, float] = field(default_factory=dict)
    """Why prompts were not found, as our engine's label says it (`shorter_than_block`, `evicted` …) → requests; of
    vLLM's, which does not say, its short prompts and the others (exposition.py). Empty where neither is known."""
    kv_cache_usage: float | None = None
    """0 to 1."""
    gpu_memory_utilization: float | None = None
    block_size: int | None = None
    num_gpu_blocks: int | None = None
    max_model_len: int | None = None
    version: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerFailure:
    """Why a container is not running: waiting reason or last termination.

    Also the last termination of a container that runs again but is not ready yet, so that a crash loop reads the same
    in all its phases; and, with `container` empty, a volume that cannot be mounted (reason FailedMount).
    """

    container: str
    reason: str
    """As the kubelet says it: CrashLoopBackOff, ImagePullBackOff, CreateContainerConfigError, OOMKilled, Error …"""
    message: str = ""
    """The waiting message, or the termination message (our engine's last words)."""
    exit_code: int | None = None
    terminated_reason: str | None = None
    """Reason of the last termination (OOMKilled, Error …), also while `reason` is CrashLoopBackOff."""
    restart_count: int = 0
    init: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Termination:
    """How a run of one of the pod's containers ended, init containers aside; that run's place may have been taken by
    another since, also by one that serves."""

    container: str
    container_id: str
    """Of that run."""
    exit_code: int
    reason: str
    """The kubelet's: Completed, Error, OOMKilled …"""
    message: str
    finished_at: str
    """RFC 3339, "" where the kubelet does not know."""
    is_previous: bool
    """Whether `kubectl logs --previous` shows that run."""
    log: str = ""
    """The end of its log, where it has been read (log_tails.py)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedPod:
    name: str
    uid: str
    ip: str | None
    phase: str
    ready: bool
    terminating: bool
    template_hash: str | None
    """Label pod-template-hash (Deployment) or controller-revision-hash (StatefulSet)."""
    started_at: float | None
    scheduled: bool
    started: bool = False
    """Whether every container has passed its startup probe: such a pod has served, though it may not be ready now."""
    unschedulable_message: str | None = None
    failures: tuple[ContainerFailure, ...] = ()
    terminations: tuple[Termination, ...] = ()
    metrics: EngineMetrics | None = None
    """The last that were read, unless that is too long ago; None of a pod that is not ready."""
    metrics_error: str | None = None
    """Why the last attempt to read them failed; the words do not change while the fault does not."""
    created_at: float | None = None
    """metadata.creationTimestamp."""
    node: str | None = None
    """Where it runs."""
    awaits_volumes: bool = False
    """It has a node, but no container was tried yet: volumes, network or images are being set up."""
    initializing: str | None = None
    """Name of the init container that runs now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedChild:
    """One object the API server holds under a name the Plan uses, or that carries our owner UID."""

    api_version: str
    kind: str
    name: str
    uid: str
    owned: bool
    """Whether its controller owner reference is this very InferenceService (by UID)."""
    generation: int
    terminating: bool
    body: Mapping[str, Any]

    @property
    def status(self) -> Mapping[str, Any]:
        status = self.body.get("status", {})
        return status if isinstance(status, Mapping) else {}

    def is_applied_from(self, manifest: Mapping[str, Any]) -> bool:
        """Whether it was applied from this very manifest of a Plan, not from an older spec."""
        annotations = self.body.get("metadata", {}).get("annotations") or {}
        wanted = manifest["metadata"]["annotations"][PLAN_HASH_ANNOTATION]
        return bool(annotations.get(PLAN_HASH_ANNOTATION) == wanted)


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """Everything level-triggered decisions look at; the `missing_…` are names of objects that do not exist."""

    at: float
    children: tuple[ObservedChild, ...] = ()
    pods: tuple[ObservedPod, ...] = ()
    missing_secrets: tuple[str, ...] = ()
    missing_claims: tuple[str, ...] = ()
    references: Mapping[ObjectRef, ObservedReference] = field(default_factory=dict)
    """The Secrets and ConfigMaps that the pods read at their start; one that we may not read is not among them."""
    missing_config_maps: tuple[str, ...] = ()
    template_hash: str | None = None
    """pod-template-hash of the Deployment's newest ReplicaSet, or the StatefulSet's update revision: pods that carry it
    are the current ones."""
    templates: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """pod-template-hash → pod template, of each of a Deployment's ReplicaSets: what it can be rolled back to. Empty
    where the workload is a StatefulSet."""
    apply_errors: Mapping[str, str] = field(default_factory=dict)
    """"Kind/name" → the API server's message, for children whose last apply it refused."""
    apply_faults: Mapping[str, str] = field(default_factory=dict)
    """The same for those whose apply it could not carry out, and which is tried again: a webhook that is down."""

    @property
    def current_pods(self) -> tuple[ObservedPod, ...]:
        """Pods of the present template that are meant to stay; none while the template's hash is not known yet.

        What an older template's pod suffers says nothing about the present spec, which may be the cure.
        """
        if self.template_hash is None:
            return ()
        return tuple(pod for pod in self.pods if pod.template_hash == self.template_hash and not pod.terminating)
