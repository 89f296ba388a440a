"""Who decides the number of pods: a HorizontalPodAutoscaler, or KEDA's ScaledObject (which makes one). Pure.

Both target the workload itself, never the InferenceService: its spec is the user's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from reprise_operator.children.load import GAUGES, RESOURCES, default_target, load_query
from reprise_operator.children.pod import CONTAINER
from reprise_operator.kinds import HORIZONTAL_POD_AUTOSCALERS, SCALED_OBJECTS, ResourceType
from reprise_operator.naming import child_metadata, stamped
from reprise_operator.resource import InferenceService, SpecError
from reprise_operator.settings import Settings
from reprise_operator.spec_types import AutoscalingSpec

PAUSED_ANNOTATION = "autoscaling.keda.sh/paused"
SCALE_DOWN = {
    "stabilizationWindowSeconds": 300,
    # A pod takes its prefix cache with it, and a new one loads for minutes: one goes at a time.
    "policies": [{"type": "Pods", "value": 1, "periodSeconds": 60}],
}


def autoscaler_type(asked: AutoscalingSpec) -> ResourceType:
    """The kind of object that does what `asked` asks."""
    return SCALED_OBJECTS if asked.provider == "keda" else HORIZONTAL_POD_AUTOSCALERS


def build_autoscaler(
    service: InferenceService, settings: Settings, *, asked: AutoscalingSpec, workload: Mapping[str, Any]
) -> dict[str, Any]:
    """The manifest of the autoscaler of `workload`, the manifest whose pods it counts.

    Raises SpecError, `InvalidSpec`, when KEDA is to ask Prometheus and nobody says where that is.
    """
    target = {key: workload[key] for key in ("apiVersion", "kind")} | {"name": workload["metadata"]["name"]}
    if asked.provider == "keda":
        return _manifest(
            service,
            SCALED_OBJECTS,
            # Suspended, KEDA leaves the workload alone: else it would bring back the pods that the operator takes away.
            annotations={PAUSED_ANNOTATION: "true"} if service.spec.suspend else {},
            spec={
                "scaleTargetRef": target,
                "minReplicaCount": asked.min_replicas,
                "maxReplicaCount": asked.max_replicas,
                "triggers": [_trigger(service, settings, asked, workload=workload["metadata"]["name"])],
                "advanced": {
                    # Where KEDA goes, the pods stay as many as they are.
                    "restoreToOriginalReplicaCount": False,
                    "horizontalPodAutoscalerConfig": {"behavior": {"scaleDown": SCALE_DOWN}},
                },
            },
        )
    return _manifest(
        service,
        HORIZONTAL_POD_AUTOSCALERS,
        annotations={},
        spec={
            "scaleTargetRef": target,
            "minReplicas": asked.min_replicas,
            "maxReplicas": asked.max_replicas,
            "metrics": [_metric(asked)],
            "behavior": {"scaleDown": SCALE_DOWN},
        },
    )


def _manifest(
    service: InferenceService, kind: ResourceType, *, annotations: Mapping[str, str], spec: Mapping[str, Any]
) -> dict[str, Any]:
    identity = service.identity
    metadata: dict[str, Any] = child_metadata(identity)
    if annotations:
        metadata["annotations"] = dict(annotations)
    return stamped({"apiVersion": kind.api_version, "kind": kind.kind, "metadata": metadata, "spec": dict(spec)})


def _target(asked: AutoscalingSpec) -> int:
    target = default_target(asked.metric) if asked.target is None else asked.target
    assert target is not None, "scaling_rules.py asks for a target where there is no default"
    return target


def _metric(asked: AutoscalingSpec) -> dict[str, Any]:
    target = _target(asked)
    if asked.metric in RESOURCES:
        # Of our container alone: a sidecar without requests would make the whole pod's figure unknown.
        utilization = {"type": "Utilization", "averageUtilization": target}
        source = {"name": asked.metric, "container": CONTAINER, "target": utilization}
        return {"type": "ContainerResource", "containerResource": source}
    gauge = GAUGES.get(asked.metric)
    quantity = f"{10 * target}m" if gauge is not None and gauge.is_share else str(target)
    average = {"type": "AverageValue", "averageValue": quantity}
    return {"type": "Pods", "pods": {"metric": {"name": asked.metric}, "target": average}}


def _trigger(service: InferenceService, settings: Settings, asked: AutoscalingSpec, *, workload: str) -> dict[str, Any]:
    target = str(_target(asked))
    if asked.metric in RESOURCES:
        metadata = {"value": target, "containerName": CONTAINER}
        return {"type": asked.metric, "metricType": "Utilization", "metadata": metadata}
    server = asked.prometheus.server_address or settings.prometheus_url
    if server is None:
        raise SpecError(
            "InvalidSpec",
            "spec.autoscaling.prometheus.serverAddress is needed, since the operator was started without "
            "--prometheus-url (prometheus.url in the chart): KEDA reads the load from Prometheus.",
        )
    to_zero = asked.min_replicas == 0
    query = asked.prometheus.query or load_query(
        asked.metric,
        namespace=service.identity.namespace,
        workload=workload,
        to_zero=to_zero,
    )
    return {
        "type": "prometheus",
        "metricType": "AverageValue",
        "metadata": {
            "serverAddress": server,
            "query": query,
            "threshold": target,
            # No series is no load only where there may be no pod; else it is a fault, and no reason to scale down.
            "ignoreNullValues": "true" if to_zero else "false",
        },
    }
