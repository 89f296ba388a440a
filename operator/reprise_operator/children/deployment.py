"""The Deployment of the engine pods. Pure."""

from __future__ import annotations

from typing import Any

from reprise_operator.children.memory import MemoryPlan
from reprise_operator.children.pod import build_pod_template, startup_seconds
from reprise_operator.children.strategy import default_strategy
from reprise_operator.naming import child_metadata, selector_labels, stamped
from reprise_operator.resource import FetchedModel, InferenceService
from reprise_operator.settings import Settings

FETCH_SECONDS = 6 * 3600
"""For a fetch on top of it: 700 GB at 32 MB a second."""


def progress_deadline_seconds(service: InferenceService) -> int:
    """Seconds without progress after which a change has failed.

    What the spec says; else more than a pod may take to start, or a change would fail while a model loads.
    """
    fetching = FETCH_SECONDS if isinstance(service.source, FetchedModel) else 0
    return service.spec.rollout.progress_deadline_seconds or startup_seconds(service) + 300 + fetching


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
            "metadata": child_metadata(identity),
            "spec": {
                **({} if replicas is None else {"replicas": replicas}),
                "selector": {"matchLabels": selector_labels(identity)},
                "strategy": {"type": "RollingUpdate", "rollingUpdate": strategy.manifest()},
                "progressDeadlineSeconds": progress_deadline_seconds(service),
                # `kubectl rollout pause` would keep every change from the pods, and the status from saying why.
                "paused": False,
                "revisionHistoryLimit": 3,
                "template": build_pod_template(service, settings, memory),
            },
        }
    )
