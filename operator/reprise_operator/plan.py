"""(InferenceService, Settings) → Plan: the children as they should be. Pure, no I/O, no clock."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from reprise_operator.children.deployment import build_deployment
from reprise_operator.children.memory import MemoryPlan, plan_memory
from reprise_operator.children.service import build_service, service_url
from reprise_operator.naming import selector_string
from reprise_operator.references import Reference, references_of
from reprise_operator.resource import Identity, InferenceService
from reprise_operator.settings import Settings

Manifest = Mapping[str, Any]
"""One Kubernetes object as it is sent by server-side apply. Never mutated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Everything one InferenceService should own, and the figures status repeats."""

    service: InferenceService
    deployment: Manifest
    network_service: Manifest
    """The Kubernetes Service."""
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
    def children(self) -> tuple[Manifest, ...]:
        """In the order they are applied."""
        return (self.network_service, self.deployment)

    @property
    def secret_names(self) -> tuple[str, ...]:
        """Secrets without which a pod cannot start; observe.py looks whether they exist."""
        spec = self.service.spec
        names = [reference.name for reference in spec.runtime.image_pull_secrets]
        if spec.auth.api_key_secret_ref is not None:
            names.append(spec.auth.api_key_secret_ref.name)
        return tuple(dict.fromkeys(names))

    @property
    def references(self) -> tuple[Reference, ...]:
        """Secrets and ConfigMaps whose content the pods take in: rotation.py reads them, a change rolls the pods."""
        return references_of(self.service)

    @property
    def claim_names(self) -> tuple[str, ...]:
        """PersistentVolumeClaims without which a pod cannot start."""
        volumes = self.deployment["spec"]["template"]["spec"].get("volumes", ())
        claims = (v["persistentVolumeClaim"]["claimName"] for v in volumes if "persistentVolumeClaim" in v)
        return tuple(dict.fromkeys(claims))


def plan(service: InferenceService, settings: Settings) -> Plan:
    """Decide every child of `service`. The same arguments give the same Plan."""
    memory = plan_memory(service)
    replicas = 0 if service.spec.suspend else service.spec.replicas
    return Plan(
        service=service,
        deployment=build_deployment(service, settings, replicas=replicas, memory=memory),
        network_service=build_service(service),
        replicas=replicas,
        memory=memory,
        url=service_url(service),
        selector=selector_string(service.identity),
    )
