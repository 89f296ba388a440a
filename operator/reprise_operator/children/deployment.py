"""The Deployment of the engine pods. Pure."""

from __future__ import annotations

from typing import Any

from reprise_operator.children.memory import MemoryPlan
from reprise_operator.children.pod import STARTUP_SECONDS, build_pod_template
from reprise_operator.children.strategy import default_strategy
from reprise_operator.naming import child_labels, child_name, owner_reference, selector_labels, stamped
from reprise_operator.resource import FetchedModel, InferenceService
from reprise_operator.settings import Settings

PROGRESS_DEADLINE_SECONDS = STARTUP_SECONDS + 300
"""More than a pod may take to start, or a rollout would be called failed while a model loads."""

FETCH_SECONDS = 6 * 3600
"""For a fetch on top of it: 700 GB at 32 MB a second."""


def build_deployment(
    service: InferenceService, settings: Settings, *, replicas: int | None, memory: MemoryPlan
) -> dict[str, Any]:
    """The Deployment's manifest; `replicas` None leaves their number out, for somebody else to decide."""
    identity = service.identity
    strategy = default_strategy(service)
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
                **({} if replicas is None else {"replicas": replicas}),
                "selector": {"matchLabels": selector_labels(identity)},
                "strategy": {"type": "RollingUpdate", "rollingUpdate": strategy.manifest()},
                "progressDeadlineSeconds": progress_deadline(service),
                "revisionHistoryLimit": 3,
                "template": build_pod_template(service, settings, memory),
            },
        }
    )


def progress_deadline(service: InferenceService) -> int:
    """Seconds without progress after which a change has failed."""
    asked = service.spec.rollout.progress_deadline_seconds
    fetching = FETCH_SECONDS if isinstance(service.source, FetchedModel) else 0
    return PROGRESS_DEADLINE_SECONDS + fetching if asked is None else asked
