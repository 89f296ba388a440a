"""Bodies and observations as the API server would give them, for tests of the operator's pure half."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from reprise_operator.hitrate import HitRateWindow
from reprise_operator.kinds import OPTIONAL_TYPES, ResourceType
from reprise_operator.observed import ContainerFailure, EngineMetrics, Observed, ObservedChild, ObservedPod, Termination
from reprise_operator.plan import Manifest, Plan, plan
from reprise_operator.settings import Settings
from reprise_operator.spec import parse

UID = "5f0c6a52-0d3c-4d3e-9a0e-1c8a3c1c0001"
NOW = 1_900_000_000.0
SETTINGS = Settings()
CURRENT, OLD = "hash-current", "hash-old"
"""Hashes of pod templates."""

PROMETHEUS = {"serverAddress": "http://prometheus:9090"}
HPA: dict[str, Any] = {"autoscaling": {"minReplicas": 2, "maxReplicas": 5}}
KEDA: dict[str, Any] = {"autoscaling": {**HPA["autoscaling"], "provider": "keda", "prometheus": PROMETHEUS}}
TO_ZERO: dict[str, Any] = {"autoscaling": {**KEDA["autoscaling"], "minReplicas": 0}}
"""Specs of services whose pods an autoscaler counts."""


def body(spec: Mapping[str, Any] | None = None, *, name: str = "qwen", generation: int = 1) -> dict[str, Any]:
    """An InferenceService; `spec` is merged over one that names a model on a node."""
    return {
        "apiVersion": "serving.reprise.io/v1alpha1",
        "kind": "InferenceService",
        "metadata": {"name": name, "namespace": "llm", "uid": UID, "generation": generation},
        "spec": merged({"model": {"uri": "hostpath:///models/qwen"}, "replicas": 1}, spec or {}),
    }


def merged(base: Mapping[str, Any], change: Mapping[str, Any]) -> dict[str, Any]:
    """A deep copy of `base` with `change` merged in, mapping by mapping."""
    result = copy.deepcopy(dict(base))
    for key, value in change.items():
        nested = isinstance(value, Mapping) and isinstance(result.get(key), Mapping)
        result[key] = merged(result[key], value) if nested else copy.deepcopy(value)
    return result


def planned(
    spec: Mapping[str, Any] | None = None,
    *,
    name: str = "qwen",
    generation: int = 1,
    available: frozenset[ResourceType] = frozenset(OPTIONAL_TYPES),
    read_nodes: bool = False,
) -> Plan:
    settings = replace(SETTINGS, read_nodes=read_nodes)
    return plan(parse(body(spec, name=name, generation=generation)), settings, available=available)


def container(of: Plan) -> dict[str, Any]:
    """The engine container of the planned workload."""
    return dict(of.workload["spec"]["template"]["spec"]["containers"][0])


def child(manifest: Manifest, *, owned: bool = True, terminating: bool = False, **status: Any) -> ObservedChild:
    """A child as it is after `manifest` was applied, with some status."""
    stored = merged(
        manifest, {"metadata": {"uid": f"uid-{manifest['kind']}", "resourceVersion": "7"}, "status": status}
    )
    if manifest["kind"] in ("Deployment", "StatefulSet"):
        stored["metadata"]["generation"] = 3
    return ObservedChild(
        api_version=manifest["apiVersion"],
        kind=manifest["kind"],
        name=manifest["metadata"]["name"],
        uid=f"uid-{manifest['kind']}",
        owned=owned,
        generation=stored["metadata"].get("generation", 0),
        terminating=terminating,
        body=stored,
    )


def pod(
    name: str = "qwen-a",
    *,
    ready: bool = True,
    template: str = CURRENT,
    failures: Sequence[ContainerFailure] = (),
    metrics: EngineMetrics | None = None,
) -> ObservedPod:
    return ObservedPod(
        name=name,
        uid=f"uid-{name}",
        ip="10.0.0.7",
        phase="Running",
        ready=ready,
        terminating=False,
        template_hash=template,
        started_at=NOW - 1000,
        scheduled=True,
        failures=tuple(failures),
        metrics=metrics,
        created_at=NOW - 1001,
    )


def failure(
    reason: str,
    *,
    words: str = "",
    code: int | None = None,
    restarts: int = 0,
    container: str = "engine",
    terminated: str | None = None,
    init: bool = False,
) -> ContainerFailure:
    """Why a container does not run; `terminated` is the reason of its last end."""
    return ContainerFailure(
        container=container,
        reason=reason,
        message=words,
        exit_code=code,
        terminated_reason=terminated,
        restart_count=restarts,
        init=init,
    )


def termination(number: int = 1, *, reason: str = "Error", words: str = "", code: int = 1) -> Termination:
    """The end of the engine's previous run, which `kubectl logs --previous` shows."""
    return Termination(
        container="engine",
        container_id=f"containerd://{number}",
        exit_code=code,
        reason=reason,
        message=words,
        finished_at="2026-11-30T00:00:00Z",
        is_previous=True,
    )


def metrics(
    *, at: float = NOW, enabled: bool = True, queries: float = 0, hits: float = 0, usage: float = 0.25
) -> EngineMetrics:
    return EngineMetrics(
        scraped_at=at,
        enable_prefix_caching=enabled,
        prefix_cache_queries=queries,
        prefix_cache_hits=hits,
        kv_cache_usage=usage,
        gpu_memory_utilization=0.9,
        block_size=16,
        num_gpu_blocks=500,
        max_model_len=4096,
        version="0.1.0",
    )


def settled_status(replicas: int) -> dict[str, Any]:
    """A Deployment's status when all of its pods are of the present template and serve."""
    return deployment_status(replicas=replicas, updated=replicas, ready=replicas, available=replicas)


def deployment_status(
    *, replicas: int = 1, updated: int = 1, ready: int = 1, available: int = 1, seen: int = 3
) -> dict[str, Any]:
    """A Deployment's status; the API server leaves zeros out, and so does this."""
    figures = {
        "replicas": replicas,
        "updatedReplicas": updated,
        "readyReplicas": ready,
        "availableReplicas": available,
    }
    return {"observedGeneration": seen} | {key: value for key, value in figures.items() if value}


NOT_READY = deployment_status(ready=0, available=0)
"""A Deployment whose one pod is not ready."""


def observed(of: Plan, *pods: ObservedPod, status: Mapping[str, Any] | None = None, **changes: Any) -> Observed:
    """All children applied, the workload with `status`, and these pods."""
    found = Observed(
        at=NOW,
        children=(
            *(child(manifest) for manifest in of.children if manifest is not of.workload),
            child(of.workload, **(deployment_status() if status is None else status)),
        ),
        pods=pods,
        template_hash=CURRENT,
    )
    return replace(found, **changes)


def failing(of: Plan, *failures: ContainerFailure) -> Observed:
    """The service's one pod does not run, for these reasons."""
    return observed(of, pod(ready=False, failures=failures), status=NOT_READY)


def window(*, started_at: float = NOW - 500, seconds: float = 300.0) -> HitRateWindow:
    return HitRateWindow(seconds=seconds, started_at=started_at)
