"""The Deployment of the engine pods. Pure."""

from __future__ import annotations

from typing import Any

from reprise_operator.children.accelerator import profile_of
from reprise_operator.children.memory import MemoryPlan
from reprise_operator.children.pod import STARTUP_SECONDS, build_pod_template
from reprise_operator.naming import child_labels, child_name, owner_reference, selector_labels, stamped
from reprise_operator.resource import FetchedModel, InferenceService
from reprise_operator.settings import Settings

PROGRESS_DEADLINE_SECONDS = STARTUP_SECONDS + 300
"""More than a pod may take to start, or a rollout would be called failed while a model loads."""

FETCH_SECONDS = 6 * 3600
"""For a fetch on top of it: 700 GB at 32 MB a second."""


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
                "progressDeadlineSeconds": _progress_deadline(service),
                "revisionHistoryLimit": 3,
                "template": build_pod_template(service, settings, memory),
            },
        }
    )


def _progress_deadline(service: InferenceService) -> int:
    fetching = FETCH_SECONDS if isinstance(service.source, FetchedModel) else 0
    return PROGRESS_DEADLINE_SECONDS + fetching


def _rolling_update(service: InferenceService) -> dict[str, int]:
    """NPUs are scarce: a surge pod would often wait for a device for ever. A CPU has room for one more."""
    if profile_of(service).is_npu:
        return {"maxSurge": 0, "maxUnavailable": 1}
    return {"maxSurge": 1, "maxUnavailable": 0}
