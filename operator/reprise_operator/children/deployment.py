"""The Deployment of the engine pods. Pure."""

from __future__ import annotations

from typing import Any

from reprise_operator.children.accelerator import profile_of
from reprise_operator.children.memory import MemoryPlan
from reprise_operator.children.pod import build_pod_template, startup_seconds
from reprise_operator.naming import child_labels, child_name, owner_reference, selector_labels, stamped
from reprise_operator.resource import InferenceService
from reprise_operator.settings import Settings


def progress_deadline_seconds(service: InferenceService) -> int:
    """More than a pod may take to start, or a rollout would be called failed while a model loads."""
    return startup_seconds(service) + 300


def build_deployment(
    service: InferenceService, settings: Settings, *, replicas: int, memory: MemoryPlan
) -> dict[str, Any]:
    """The Deployment's manifest."""
    identity = service.identity
    return stamped(
        {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": {
                "name": child_name(identity),
                "namespace": identity.namespace,
                "labels": child_labels(identity),
                "ownerReferences": [owner_reference(identity)],
            },
            "spec": {
                "replicas": replicas,
                "selector": {"matchLabels": selector_labels(identity)},
                "strategy": {"type": "RollingUpdate", "rollingUpdate": _rolling_update(service)},
                "progressDeadlineSeconds": progress_deadline_seconds(service),
                "revisionHistoryLimit": 3,
                "template": build_pod_template(service, settings, memory),
            },
        }
    )


def _rolling_update(service: InferenceService) -> dict[str, int]:
    """NPUs are scarce: a surge pod would often wait for a device for ever. A CPU has room for one more.

    Nor may a pod wait for a volume that only one node can mount, and that the pod it would replace holds.
    """
    persistence = service.persistence
    if profile_of(service).is_npu or (persistence is not None and not persistence.is_shared):
        return {"maxSurge": 0, "maxUnavailable": 1}
    return {"maxSurge": 1, "maxUnavailable": 0}
