"""The PodMonitor: how a Prometheus operator finds the engine pods. Pure."""

from __future__ import annotations

from typing import Any

from reprise_operator.kinds import POD_MONITORS
from reprise_operator.naming import NAME_LABEL, child_labels, child_metadata, selector_labels, stamped
from reprise_operator.resource import InferenceService
from reprise_operator.spec_types import PodMonitorSpec


def build_pod_monitor(service: InferenceService, asked: PodMonitorSpec) -> dict[str, Any]:
    """/metrics of each engine pod. It needs no key: the engines keep /metrics open when they ask for one elsewhere."""
    identity = service.identity
    endpoint: dict[str, Any] = {"port": "http", "path": "/metrics", "scheme": "http"}
    if asked.interval is not None:
        endpoint["interval"] = asked.interval
    return stamped(
        {
            "apiVersion": POD_MONITORS.api_version,
            "kind": POD_MONITORS.kind,
            # A Prometheus chooses its monitors by labels: the spec's come first, ours cannot be replaced.
            "metadata": child_metadata(identity, labels={**asked.labels, **child_labels(identity)}),
            "spec": {
                "selector": {"matchLabels": selector_labels(identity)},
                # Which service a pod's series belong to; Prometheus writes the name as serving_reprise_io_name.
                "podTargetLabels": [NAME_LABEL],
                "podMetricsEndpoints": [endpoint],
            },
        }
    )
