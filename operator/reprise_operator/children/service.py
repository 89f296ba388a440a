"""The Service in front of the pods. Pure."""

from __future__ import annotations

from typing import Any

from reprise_operator.naming import child_metadata, child_name, selector_labels, stamped
from reprise_operator.resource import InferenceService


def build_service(service: InferenceService, *, sticky: bool) -> dict[str, Any]:
    """The Service's manifest: `spec.service.port` → the container port "http" of the ready pods.

    `sticky`: a client stays on one pod, whose cache knows it, where the spec does not say whether it shall.
    """
    identity, asked = service.identity, service.spec.service
    return stamped(
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": child_metadata(identity),
            "spec": {
                "type": asked.type,
                "selector": selector_labels(identity),
                "sessionAffinity": asked.session_affinity or ("ClientIP" if sticky else "None"),
                "ports": [{"name": "http", "port": asked.port, "protocol": "TCP", "targetPort": "http"}],
            },
        }
    )


def service_url(service: InferenceService) -> str:
    """Base URL for OpenAI clients inside the cluster."""
    identity = service.identity
    return f"http://{child_name(identity)}.{identity.namespace}.svc:{service.spec.service.port}/v1"
