"""(InferenceService, Settings) → Plan: the children as they should be. Pure, no I/O, no clock."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from reprise_operator.children.deployment import build_deployment
from reprise_operator.children.memory import MemoryPlan, plan_memory
from reprise_operator.children.prefix_cache import build_warmup
from reprise_operator.children.service import build_service, service_url
from reprise_operator.children.slices import within_slice
from reprise_operator.children.statefulset import build_stateful_set
from reprise_operator.naming import selector_string
from reprise_operator.resource import Identity, InferenceService
from reprise_operator.settings import Settings

Manifest = Mapping[str, Any]
"""One Kubernetes object as it is sent by server-side apply. Never mutated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Everything one InferenceService should own, and the figures status repeats."""

    service: InferenceService
    workload: Manifest
    """What makes the pods: a Deployment, or a StatefulSet where each replica has a volume of its own."""
    network_service: Manifest
    """The Kubernetes Service."""
    warmup: Manifest | None
    """The ConfigMap with the warm-up's prompts, where the spec holds them."""
    replicas: int
    """Pods wanted now: 0 while suspended."""
    memory: MemoryPlan
    url: str
    """Where clients inside the cluster go, ending in /v1."""
    selector: str

    @property
    def identity(self) -> Identity:
        return self.service.identity

    @property
    def deployment(self) -> Manifest:
        """The workload, whichever kind it is."""
        return self.workload

    @property
    def children(self) -> tuple[Manifest, ...]:
        """In the order they are applied."""
        return tuple(child for child in (self.network_service, self.warmup, self.workload) if child is not None)

    @property
    def secret_names(self) -> tuple[str, ...]:
        """Secrets without which a pod cannot start; observe.py looks whether they exist."""
        spec = self.service.spec
        names = [reference.name for reference in spec.runtime.image_pull_secrets]
        if spec.auth.api_key_secret_ref is not None:
            names.append(spec.auth.api_key_secret_ref.name)
        if self.service.prefix_caching and spec.prefix_caching.isolation_secret_ref is not None:
            names.append(spec.prefix_caching.isolation_secret_ref.name)
        return tuple(dict.fromkeys(names))

    @property
    def claim_names(self) -> tuple[str, ...]:
        """PersistentVolumeClaims without which a pod cannot start."""
        volumes = self.workload["spec"]["template"]["spec"].get("volumes", ())
        claims = (v["persistentVolumeClaim"]["claimName"] for v in volumes if "persistentVolumeClaim" in v)
        return tuple(dict.fromkeys(claims))

    @property
    def config_map_names(self) -> tuple[str, ...]:
        """ConfigMaps of the user's that pods read; a pod starts without them."""
        warmup = self.service.warmup
        reference = None if warmup is None else warmup.config_map_key_ref
        return () if reference is None else (reference.name,)


def plan(service: InferenceService, settings: Settings) -> Plan:
    """Decide every child of `service`. The same arguments give the same Plan."""
    memory = within_slice(plan_memory(service), service)
    replicas = 0 if service.spec.suspend else service.spec.replicas
    persistence = service.persistence
    own_volumes = persistence is not None and persistence.size is not None
    build = build_stateful_set if own_volumes else build_deployment
    return Plan(
        service=service,
        workload=build(service, settings, replicas=replicas, memory=memory),
        network_service=build_service(service),
        warmup=build_warmup(service),
        replicas=replicas,
        memory=memory,
        url=service_url(service),
        selector=selector_string(service.identity),
    )
