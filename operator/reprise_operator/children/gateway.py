"""What a gateway needs: an HTTPRoute, an InferencePool, and somebody who picks the pod. Pure.

Without the kinds, the Service does what it can by itself: it keeps a client on one pod, whose cache knows the client's
conversation.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from reprise_operator.children.picker import build_picker, picker_config, picker_name
from reprise_operator.hostnames import HostnameTaken
from reprise_operator.kinds import HTTP_ROUTES, INFERENCE_POOLS, ResourceType
from reprise_operator.naming import child_metadata, child_name, selector_labels, stamped
from reprise_operator.resource import InferenceService
from reprise_operator.settings import ENGINE_PORT, GROUP, Settings
from reprise_operator.spec_types import EndpointPickerSpec, GatewaySpec, ParentRef

PICKER_CONFIG_ANNOTATION = f"{GROUP}/endpoint-picker-config"
"""On an InferencePool whose endpoint picker is somebody else's: the configuration that fits this engine."""

NO_LIMIT = "0s"
"""A generation streams for minutes; the gateway's own limit would cut it off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayPlan:
    """`route` and `pool` are None where they are not asked for, or cannot be had now."""

    asks: frozenset[ResourceType]
    """The optional kinds it is made of, available or not."""
    route: Mapping[str, Any] | None = None
    pool: Mapping[str, Any] | None = None
    picker: tuple[Mapping[str, Any], ...] = ()
    """Service and Deployment of a picker of ours."""
    taken: HostnameTaken | None = None
    """Why there is no route although there could be one."""

    @property
    def children(self) -> tuple[Mapping[str, Any], ...]:
        """In the order they are applied: the pool is there before the route that names it."""
        return (*self.picker, *(manifest for manifest in (self.pool, self.route) if manifest is not None))

    @property
    def is_reached(self) -> bool:
        """Whether requests can come by what was asked for; else clients are left with the Service."""
        return self.route is not None if HTTP_ROUTES in self.asks else self.pool is not None


def plan_gateway(
    service: InferenceService,
    settings: Settings,
    *,
    available: frozenset[ResourceType],
    taken: HostnameTaken | None,
) -> GatewayPlan | None:
    """None when the spec has no gateway. `taken` is the older service that has one of the host names."""
    gateway = service.spec.gateway
    if gateway is None:
        return None
    picker = gateway.endpoint_picker if gateway.wants_pool else None
    asks = frozenset(
        ({HTTP_ROUTES} if gateway.parent_refs else set()) | ({INFERENCE_POOLS} if picker is not None else set())
    )
    pooled = picker is not None and INFERENCE_POOLS in available
    routed = HTTP_ROUTES in asks & available
    return GatewayPlan(
        asks=asks,
        route=_route(service, gateway, pooled=pooled) if routed and taken is None else None,
        pool=_pool(service, picker) if picker is not None and pooled else None,
        picker=build_picker(service, settings, picker) if picker is not None and pooled and picker.managed else (),
        taken=taken if gateway.parent_refs else None,
    )


def _pool(service: InferenceService, picker: EndpointPickerSpec) -> dict[str, Any]:
    manifest = _manifest(
        service,
        INFERENCE_POOLS,
        {
            "selector": {"matchLabels": selector_labels(service.identity)},
            "targetPorts": [{"number": ENGINE_PORT}],
            "endpointPickerRef": {
                "group": "",
                "kind": "Service",
                "name": picker.name or picker_name(service.identity),
                "port": {"number": picker.port},
                "failureMode": picker.failure_mode,
            },
        },
    )
    if picker.managed:
        return stamped(manifest)
    annotations = {PICKER_CONFIG_ANNOTATION: json.dumps(picker_config(service))}
    return stamped({**manifest, "metadata": {**manifest["metadata"], "annotations": annotations}})


def _route(service: InferenceService, gateway: GatewaySpec, *, pooled: bool) -> dict[str, Any]:
    name = child_name(service.identity)
    if pooled:
        backend = {"group": INFERENCE_POOLS.group, "kind": INFERENCE_POOLS.kind, "name": name, "port": ENGINE_PORT}
    else:
        backend = {"group": "", "kind": "Service", "name": name, "port": service.spec.service.port}
    spec: dict[str, Any] = {
        "parentRefs": [_parent(parent) for parent in gateway.parent_refs],
        "rules": [
            {
                "matches": [{"path": {"type": "PathPrefix", "value": "/"}}],
                "backendRefs": [{**backend, "weight": 1}],
                "timeouts": {"request": NO_LIMIT, "backendRequest": NO_LIMIT},
            }
        ],
    }
    if gateway.hostnames:
        spec["hostnames"] = list(gateway.hostnames)
    return stamped(_manifest(service, HTTP_ROUTES, spec))


def _parent(parent: ParentRef) -> dict[str, Any]:
    optional = {"namespace": parent.namespace, "sectionName": parent.section_name, "port": parent.port}
    return {
        "group": parent.group,
        "kind": parent.kind,
        "name": parent.name,
        **{key: value for key, value in optional.items() if value is not None},
    }


def _manifest(service: InferenceService, kind: ResourceType, spec: dict[str, Any]) -> dict[str, Any]:
    identity = service.identity
    return {
        "apiVersion": kind.api_version,
        "kind": kind.kind,
        "metadata": child_metadata(identity),
        "spec": spec,
    }
