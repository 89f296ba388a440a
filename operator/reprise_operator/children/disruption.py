"""The PodDisruptionBudget: what a node drain leaves of the pods. Pure."""

from __future__ import annotations

from typing import Any

from reprise_operator.kinds import DISRUPTION_BUDGETS
from reprise_operator.naming import child_metadata, selector_labels, stamped
from reprise_operator.resource import InferenceService
from reprise_operator.spec_types import DisruptionSpec


def build_disruption_budget(service: InferenceService, *, asked: DisruptionSpec) -> dict[str, Any]:
    """The manifest of the budget of all pods of `service`."""
    identity = service.identity
    limits = {"minAvailable": asked.min_available, "maxUnavailable": asked.max_unavailable}
    return stamped(
        {
            "apiVersion": DISRUPTION_BUDGETS.api_version,
            "kind": DISRUPTION_BUDGETS.kind,
            "metadata": child_metadata(identity),
            "spec": {
                "selector": {"matchLabels": selector_labels(identity)},
                **{field: value for field, value in limits.items() if value is not None},
                # A pod that is not ready serves nobody: it must not keep a node from being drained for ever.
                "unhealthyPodEvictionPolicy": "AlwaysAllow",
            },
        }
    )
