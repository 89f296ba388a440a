"""The endpoint picker: what tells a gateway which pod has a prompt's prefix in its cache. Pure.

It runs llm-d's picker as that project's chart does, with what only this operator knows filled in. Whoever may write an
InferenceService says only that there shall be one: the image and the service account, whose token is in the pod, are
settings of the operator, so nobody comes by a token or an image that the administrator did not choose.
"""

from __future__ import annotations

import json
from typing import Any

from reprise_operator.children.accelerator import profile_of
from reprise_operator.kinds import INFERENCE_POOLS
from reprise_operator.naming import child_labels, child_metadata, child_name, shorten, stamped
from reprise_operator.resource import Identity, InferenceService
from reprise_operator.settings import GROUP, Settings
from reprise_operator.spec_types import EndpointPickerSpec, Runtime

PICKER_LABEL = f"{GROUP}/endpoint-picker"
"""Selects the picker's pods. They do not carry the engine pods' label: they would get the clients' requests."""

GRPC_PORT, HEALTH_PORT, METRICS_PORT = 9002, 9003, 9090
GRACE_SECONDS = 130
"""It ends after the engine pods of its pool."""
LEAST_BLOCK = 64
"""Tokens. The picker takes no smaller blocks: its memory grows with their number."""
_DEFAULT_BLOCK = {"npu": 128, "cpu": 16}
"""Tokens a block that the engines choose by themselves."""


def picker_name(identity: Identity) -> str:
    """Of its Service and Deployment."""
    return shorten(f"{child_name(identity)}-endpoint-picker")


def engine_block_size(service: InferenceService) -> int:
    """Tokens a block in the engine: what the spec says, else what the engine takes on its device."""
    npu = service.spec.runtime.name is Runtime.VLLM_ASCEND or profile_of(service).is_npu
    return service.spec.prefix_caching.block_size or _DEFAULT_BLOCK["npu" if npu else "cpu"]


def picker_config(service: InferenceService) -> dict[str, Any]:
    """llm-d's EndpointPickerConfig. The picker remembers by itself which pod got which blocks of a prompt; with
    autoTune it goes by the block size and the number of blocks that the pods report, once they do."""
    load = [("queue-scorer", 2), ("kv-cache-utilization-scorer", 2)]
    plugins: list[dict[str, Any]] = []
    scorers = load
    if service.prefix_caching:
        block = max(engine_block_size(service), LEAST_BLOCK)
        parameters = {"autoTune": True, "blockSizeTokens": block}
        plugins.append({"type": "approx-prefix-cache-producer", "parameters": parameters})
        scorers = [("prefix-cache-scorer", 3), *load]
    plugins += [{"type": scorer} for scorer, _ in scorers]
    plugins += [{"type": "max-score-picker"}, {"type": "single-profile-handler"}]
    chosen = [{"pluginRef": scorer, "weight": weight} for scorer, weight in scorers]
    return {
        "apiVersion": "llm-d.ai/v1alpha1",
        "kind": "EndpointPickerConfig",
        "plugins": plugins,
        "schedulingProfiles": [{"name": "default", "plugins": [*chosen, {"pluginRef": "max-score-picker"}]}],
    }


def build_picker(
    service: InferenceService, settings: Settings, picker: EndpointPickerSpec
) -> tuple[dict[str, Any], dict[str, Any]]:
    """(Service, Deployment) of a picker for this service alone."""
    return _service(service, picker), _deployment(service, settings, picker)


def _service(service: InferenceService, picker: EndpointPickerSpec) -> dict[str, Any]:
    ports = [
        {
            "name": "grpc-ext-proc",
            "port": picker.port,
            "protocol": "TCP",
            "targetPort": "grpc",
            "appProtocol": "kubernetes.io/h2c",
        }
    ]
    spec = {"type": "ClusterIP", "selector": _selector(service), "ports": ports}
    return stamped({"apiVersion": "v1", "kind": "Service", "metadata": _metadata(service), "spec": spec})


def _deployment(service: InferenceService, settings: Settings, picker: EndpointPickerSpec) -> dict[str, Any]:
    container: dict[str, Any] = {
        "name": "epp",
        "image": settings.endpoint_picker_image,
        "args": _args(service),
        "ports": [
            {"name": "grpc", "containerPort": GRPC_PORT, "protocol": "TCP"},
            {"name": "grpc-health", "containerPort": HEALTH_PORT, "protocol": "TCP"},
            {"name": "metrics", "containerPort": METRICS_PORT, "protocol": "TCP"},
        ],
        "env": [
            {"name": name, "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": path}}} for name, path in _ENV
        ],
        "livenessProbe": {**_PROBE, "initialDelaySeconds": 5, "periodSeconds": 10},
        "readinessProbe": {**_PROBE, "periodSeconds": 2},
        "resources": _resources(picker),
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": True,
        },
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],  # noqa: S108 - a path inside the container
    }
    pod: dict[str, Any] = {
        "serviceAccountName": settings.endpoint_picker_service_account,
        "automountServiceAccountToken": True,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": GRACE_SECONDS,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": 65532,
            "runAsGroup": 65532,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [container],
        "volumes": [{"name": "tmp", "emptyDir": {}}],
    }
    secrets = service.spec.runtime.image_pull_secrets
    if secrets:
        pod["imagePullSecrets"] = [{"name": secret.name} for secret in secrets]
    labels = {
        **_selector(service),
        "app.kubernetes.io/name": "endpoint-picker",
        "app.kubernetes.io/instance": child_name(service.identity),
        "app.kubernetes.io/component": "endpoint-picker",
        "app.kubernetes.io/part-of": "reprise",
    }
    return stamped(
        {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": _metadata(service),
            "spec": {
                "replicas": 0 if service.spec.suspend else 1,
                # One, since what it remembers is in its memory; two would each know half of it.
                "strategy": {"type": "Recreate"},
                "selector": {"matchLabels": _selector(service)},
                "template": {"metadata": {"labels": labels}, "spec": pod},
            },
        }
    )


_ENV = (("NAMESPACE", "metadata.namespace"), ("POD_NAME", "metadata.name"))
_PROBE: dict[str, Any] = {"grpc": {"port": HEALTH_PORT, "service": "inference-extension"}}
_REQUESTS = {"cpu": "500m", "memory": "512Mi"}
_LIMITS = {"memory": "4Gi"}


def _args(service: InferenceService) -> list[str]:
    return [
        f"--pool-name={child_name(service.identity)}",
        f"--pool-namespace={service.identity.namespace}",
        f"--pool-group={INFERENCE_POOLS.group}",
        # In the arguments, and not in a ConfigMap: a change starts the picker anew by itself.
        f"--config-text={json.dumps(picker_config(service))}",
        f"--grpc-port={GRPC_PORT}",
        f"--grpc-health-port={HEALTH_PORT}",
        f"--metrics-port={METRICS_PORT}",
        # Its check of scrapers would need rights on the cluster; the engines' own metrics are open, too.
        "--metrics-endpoint-auth=false",
        "--tracing=false",
        "--zap-encoder=json",
    ]


def _resources(picker: EndpointPickerSpec) -> dict[str, Any]:
    asked = picker.resources
    # Ours may be less than what is asked for, and a limit below a request is refused.
    limits = asked.limits if "memory" in asked.requests else {**_LIMITS, **asked.limits}
    return {"requests": {**_REQUESTS, **asked.requests}, "limits": dict(limits)}


def _selector(service: InferenceService) -> dict[str, str]:
    return {PICKER_LABEL: child_name(service.identity)}


def _metadata(service: InferenceService) -> dict[str, Any]:
    identity = service.identity
    return child_metadata(
        identity,
        name=picker_name(identity),
        labels={**child_labels(identity), "app.kubernetes.io/component": "endpoint-picker"},
    )
