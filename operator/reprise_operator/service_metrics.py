"""What the operator tells Prometheus of each InferenceService: the status as it was last computed, as numbers.

Read when Prometheus asks, so a service that is gone leaves no series behind.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from typing import Any

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

_PREFIX = "reprise_operator_service"
_LABELS = ("service_namespace", "service_name")
# Not `namespace`: that is the label which Prometheus gives a target, here of the operator itself.

# Name → help, and where in the status it is.
_FIGURES: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("ready_replicas", "Pods that are ready.", ("readyReplicas",)),
    ("replicas", "Pods that there are.", ("replicas",)),
    (
        "hit_rate_percent",
        "Prompt tokens found in the cache, over the window.",
        ("prefixCache", "hitRatePercent"),
    ),
    ("memory_utilization", "Share of the device's memory the engine is told to use.", ("memory", "effective")),
    ("memory_steps", "Steps by which running out of device memory has lowered that share.", ("memory", "steps")),
)


class ServiceFigures(Collector):
    """The services' figures. `tell` and `forget` are called in the event loop, `collect` by the metrics' server."""

    def __init__(self) -> None:
        self._known: dict[Hashable, tuple[str, str, Mapping[str, Any]]] = {}

    def tell(self, namespace: str, name: str, status: Mapping[str, Any]) -> None:
        """`status` is the service's whole status, as it is wanted or written."""
        self._known[namespace, name] = namespace, name, status

    def forget(self, namespace: str, name: str) -> None:
        """The service is gone."""
        self._known.pop((namespace, name), None)

    def describe(self) -> Iterator[GaugeMetricFamily]:
        """Names only: without it registration would collect."""
        yield from self._families().values()

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """One series a figure that is known: what has no figure has no series, rather than 0."""
        families = self._families()
        for namespace, name, status in self._known.values():
            labels = (namespace, name)
            conditions = {item["type"]: item for item in status.get("conditions") or ()}
            if "Ready" in conditions:
                families["ready"].add_metric(labels, float(conditions["Ready"]["status"] == "True"))
            stalled = conditions.get("Stalled", {})
            if stalled.get("status") == "True":
                families["stalled"].add_metric((*labels, stalled["reason"]), 1.0)
            for figure, _, path in _FIGURES:
                value = _at(status, path)
                if value is not None:
                    families[figure].add_metric(labels, value)
        yield from families.values()

    @staticmethod
    def _families() -> dict[str, GaugeMetricFamily]:
        ready = GaugeMetricFamily(f"{_PREFIX}_ready", "1 while the condition Ready is True, else 0.", labels=_LABELS)
        stalled = GaugeMetricFamily(
            f"{_PREFIX}_stalled", "1 while the service needs a person, with the reason.", labels=(*_LABELS, "reason")
        )
        figures = {
            figure: GaugeMetricFamily(f"{_PREFIX}_{figure}", text, labels=_LABELS) for figure, text, _ in _FIGURES
        }
        return {"ready": ready, "stalled": stalled, **figures}


def _at(status: Mapping[str, Any], path: tuple[str, ...]) -> float | None:
    value: Any = status
    for part in path:
        value = value.get(part) if isinstance(value, Mapping) else None
    return float(value) if isinstance(value, int | float) else None
