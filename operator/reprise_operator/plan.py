"""(InferenceService, Settings) → Plan: the children as they should be. Pure, no I/O, no clock."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from reprise_operator.children.autoscaler import autoscaler_type, build_autoscaler
from reprise_operator.children.deployment import build_deployment
from reprise_operator.children.disruption import build_disruption_budget
from reprise_operator.children.gateway import GatewayPlan, plan_gateway
from reprise_operator.children.memory import MemoryPlan
from reprise_operator.children.monitor import build_pod_monitor
from reprise_operator.children.prefix_cache import build_warmup
from reprise_operator.children.service import build_service, service_url
from reprise_operator.children.statefulset import build_stateful_set
from reprise_operator.children.strategy import needs_free_devices
from reprise_operator.hostnames import HostnameTaken
from reprise_operator.kinds import AUTOSCALER_TYPES, DISRUPTION_BUDGETS, POD_MONITORS, ResourceType
from reprise_operator.naming import selector_string
from reprise_operator.references import Reference, references_of
from reprise_operator.resource import Identity, InferenceService, SpecError
from reprise_operator.settings import Settings
from reprise_operator.tuning import MemoryState, carried

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
    """Pods wanted now: 0 while suspended. With `autoscaled` only the number to start from."""
    memory: MemoryPlan
    tuning: MemoryState
    """Where `memory` comes from."""
    url: str
    """Where clients inside the cluster go, ending in /v1."""
    selector: str
    gateway: GatewayPlan | None
    pod_monitor: Manifest | None
    asks: frozenset[ResourceType]
    """The optional kinds (kinds.py) the spec asks for, available or not: when one comes or goes, the Plan changes."""
    autoscaled: bool = False
    """Whether the number of pods is an autoscaler's to decide now, there or not."""
    autoscaler: Manifest | None = None
    disruption_budget: Manifest | None = None

    @property
    def identity(self) -> Identity:
        return self.service.identity

    @property
    def children(self) -> tuple[Manifest, ...]:
        """In the order they are applied."""
        # Of a service that is suspended the autoscaler is told first, or it would bring the pods back.
        before = self.autoscaler if self.service.spec.suspend else None
        after = None if self.service.spec.suspend else self.autoscaler
        gateway = self.gateway.children if self.gateway is not None else ()
        optional = (
            self.network_service,
            self.warmup,
            before,
            self.workload,
            after,
            self.disruption_budget,
            *gateway,
            self.pod_monitor,
        )
        return tuple(manifest for manifest in optional if manifest is not None)

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
    def references(self) -> tuple[Reference, ...]:
        """Secrets and ConfigMaps whose content the pods take in: rotation.py reads them, a change rolls the pods."""
        return references_of(self.service)

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


def plan(
    service: InferenceService,
    settings: Settings,
    *,
    available: frozenset[ResourceType] = frozenset(),
    taken: HostnameTaken | None = None,
    tuning: MemoryState | None = None,
) -> Plan:
    """Decide every child of `service`. The same arguments give the same Plan.

    `available` are the optional kinds that can be used now; what the spec asks of others is left out. `taken` is an
    older service's claim to one of the host names: then there is no route. `tuning` None: nothing is known of memory
    having run out. Raises SpecError where the spec needs a setting that the operator was not given.
    """
    if needs_free_devices(service) and not settings.read_nodes:
        raise SpecError(
            "InvalidSpec",
            "spec.rollout.maxUnavailable is 0, so a change needs free devices, which this operator may not look for: "
            "set it to 1, or let the operator read nodes (rbac.readNodes of its chart, all namespaces).",
        )
    gateway = plan_gateway(service, settings, available=available, taken=taken)
    monitor = service.spec.monitoring.pod_monitor
    monitored = monitor is not None and monitor.enabled
    asks = (gateway.asks if gateway is not None else frozenset()) | ({POD_MONITORS} if monitored else frozenset())
    tuning = tuning or carried(service, settings, {})
    memory = tuning.plan
    replicas = _replicas(service)
    # Where an autoscaler decides, the manifest leaves the number out; replicas.py puts it in when it has to be there.
    autoscaled = service.spec.autoscaling is not None and not service.spec.suspend
    build = build_stateful_set if service.has_own_volumes else build_deployment
    workload = build(service, settings, replicas=None if autoscaled else replicas, memory=memory)
    scaling = _scaling(service, settings, workload=workload)
    usable = {kind: manifest for kind, manifest in scaling.items() if kind in available}
    return Plan(
        service=service,
        workload=workload,
        network_service=build_service(service, sticky=gateway is not None and not gateway.is_reached),
        warmup=build_warmup(service),
        replicas=replicas,
        autoscaled=autoscaled,
        memory=memory,
        tuning=tuning,
        url=service_url(service),
        selector=selector_string(service.identity),
        gateway=gateway,
        pod_monitor=(
            build_pod_monitor(service, monitor) if monitor is not None and POD_MONITORS in asks & available else None
        ),
        asks=asks | frozenset(scaling),
        autoscaler=next((usable[kind] for kind in AUTOSCALER_TYPES if kind in usable), None),
        disruption_budget=usable.get(DISRUPTION_BUDGETS),
    )


def _scaling(service: InferenceService, settings: Settings, *, workload: Manifest) -> dict[ResourceType, Manifest]:
    """The children of spec.autoscaling and spec.disruption, by their kinds."""
    spec, found = service.spec, dict[ResourceType, Manifest]()
    if spec.autoscaling is not None:
        made = build_autoscaler(service, settings, asked=spec.autoscaling, workload=workload)
        found[autoscaler_type(spec.autoscaling)] = made
    if spec.disruption is not None:
        found[DISRUPTION_BUDGETS] = build_disruption_budget(service, asked=spec.disruption)
    return found


def _replicas(service: InferenceService) -> int:
    spec = service.spec
    if spec.suspend:
        return 0
    if spec.autoscaling is None:
        return spec.replicas
    return min(max(spec.replicas, spec.autoscaling.min_replicas), spec.autoscaling.max_replicas)
