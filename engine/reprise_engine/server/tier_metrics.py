"""The series of the prefix cache's tiers below the pool; there are none of a tier that is off."""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge

from reprise_engine.cache_report import Tier, TierStats

_COUNTERS = {
    "queries": ("query_tokens", "Prompt tokens that no faster tier had."),
    "hits": ("hit_tokens", "Prompt tokens that came from this tier."),
    "stores": ("stores", "Blocks that came down to this tier."),
    "evictions": ("evictions", "Blocks that this tier gave up for others."),
    "failures": ("failures", "Blocks that could not come down to this tier, or not up again."),
}
_GAUGES = {
    "blocks": ("blocks", "Blocks in this tier."),
    "bytes": ("used_bytes", "Bytes of this tier in use."),
    "capacity_bytes": ("capacity_bytes", "Bytes that this tier may use."),
}


class TierMetrics:
    """`labels` are the values of model_name and engine."""

    def __init__(self, registry: CollectorRegistry, labels: tuple[str, str]) -> None:
        names = ("model_name", "engine")
        self._labels = labels
        self._told: dict[Tier, TierStats] = {}
        self._counters = {
            field: Counter(f"reprise:prefix_cache_tier_{name}", text, (*names, "tier"), registry=registry)
            for name, (field, text) in _COUNTERS.items()
        }
        self._gauges = {
            field: Gauge(f"reprise:prefix_cache_tier_{name}", text, (*names, "tier"), registry=registry)
            for name, (field, text) in _GAUGES.items()
        }
        # vLLM's external cache is what ours has below the pool; its series are there without one too.
        self._external_queries = Counter(
            "vllm:external_prefix_cache_queries", "Prompt tokens that the pool did not have.", names, registry=registry
        ).labels(*labels)
        self._external_hits = Counter(
            "vllm:external_prefix_cache_hits", "Those of them that came from a tier below it.", names, registry=registry
        ).labels(*labels)

    def engine_stats(self, tiers: Sequence[TierStats]) -> None:
        """Totals since the start of the engine, the fastest tier first."""
        for place, now in enumerate(tiers):
            told = self._told.get(now.tier, TierStats(tier=now.tier))
            labels = (*self._labels, now.tier.value)
            for field, counter in self._counters.items():
                counter.labels(*labels).inc(getattr(now, field) - getattr(told, field))
            for field, gauge in self._gauges.items():
                gauge.labels(*labels).set(getattr(now, field))
            if place == 0:
                self._external_queries.inc(now.query_tokens - told.query_tokens)
            self._external_hits.inc(now.hit_tokens - told.hit_tokens)
            self._told[now.tier] = now
