"""(InferenceService, Settings) → Plan: the children as they should be. Pure, no I/O, no clock."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from reprise_operator.children.deployment import build_deployment
from reprise_operator.children.gateway import GatewayPlan, plan_gateway
from reprise_operator.children.memory import MemoryPlan, plan_memory
from reprise_operator.children.monitor import build_pod_monitor
from reprise_operator.children.service import build_service, service_url
from reprise_operator.hostnames import HostnameTaken
from reprise_operator.kinds import POD_MONITORS, ResourceType
from reprise_operator.naming import selector_string
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
    gateway: GatewayPlan | None
    pod_monitor: Manifest | None
    asks: frozenset[ResourceType]
    """The optional kinds (kinds.py) the spec asks for, available or not: when one comes or goes, the Plan changes."""

    @property
    def identity(self) -> Identity:
        return self.service.identity

    @property
    def children(self) -> tuple[Manifest, ...]:
        """In the order they are applied."""
        gateway = self.gateway.children if self.gateway is not None else ()
        monitor = () if self.pod_monitor is None else (self.pod_monitor,)
        return (self.network_service, self.deployment, *gateway, *monitor)

    @property
    def secret_names(self) -> tuple[str, ...]:
        """Secrets without which a pod cannot start; observe.py looks whether they exist."""
        spec = self.service.spec
        names = [reference.name for reference in spec.runtime.image_pull_secrets]
        if spec.auth.api_key_secret_ref is not None:
            names.append(spec.auth.api_key_secret_ref.name)
        return tuple(dict.fromkeys(names))

    @property
    def claim_names(self) -> tuple[str, ...]:
        """PersistentVolumeClaims without which a pod cannot start."""
        volumes = self.deployment["spec"]["template"]["spec"].get("volumes", ())
        claims = (v["persistentVolumeClaim"]["claimName"] for v in volumes if "persistentVolumeClaim" in v)
        return tuple(dict.fromkeys(claims))


def plan(
    service: InferenceService,
    settings: Settings,
    *,
    available: frozenset[ResourceType] = frozenset(),
    taken: HostnameTaken | None = None,
) -> Plan:
    """Decide every child of `service`. The same arguments give the same Plan.

    `available` are the optional kinds that can be used now; what the spec asks of others is left out. `taken` is an
    older service's claim to one of the host names: then there is no route.
    """
    gateway = plan_gateway(service, settings, available=available, taken=taken)
    monitor = service.spec.monitoring.pod_monitor
    monitored = monitor is not None and monitor.enabled
    asks = (gateway.asks if gateway is not None else frozenset()) | ({POD_MONITORS} if monitored else frozenset())
    memory = plan_memory(service)
    replicas = 0 if service.spec.suspend else service.spec.replicas
    return Plan(
        service=service,
        deployment=build_deployment(service, settings, replicas=replicas, memory=memory),
        network_service=build_service(service, sticky=gateway is not None and not gateway.is_reached),
        replicas=replicas,
        memory=memory,
        url=service_url(service),
        selector=selector_string(service.identity),
        gateway=gateway,
        pod_monitor=(
            build_pod_monitor(service, monitor) if monitor is not None and POD_MONITORS in asks & available else None
        ),
        asks=asks,
    )
