"""The figures of status: prefix cache, engine. Pure.

Quantised and rate-limited, so that a service whose state does not change gets the same status again, to the byte.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from reprise_operator.cache_effect import MISS_REASONS, Effect, effect_of, written_effect
from reprise_operator.conditions import clip, seconds_of, timestamp
from reprise_operator.hitrate import NOTHING_SERVED, HitFigures, HitRateWindow
from reprise_operator.observed import EngineMetrics, Observed, ObservedPod
from reprise_operator.settings import Settings

MAX_REPLICAS_LISTED = 64
MAX_FAULT = 200
"""Characters of a pod's message."""
LEAST_MOVE = 1.0
"""Points of the hit rate that are worth a write."""

_RATED = (
    "hitRatePercent",
    "hitTokens",
    "queriedTokens",
    "missReason",
    "usagePercent",
    "windowSeconds",
    "observedAt",
    "replicas",
)
"""Written together, and seldom."""


def serving_pods(observed: Observed) -> tuple[ObservedPod, ...]:
    """Ready pods: those of the present template, or, before one is ready, the older ones that serve."""
    ready = [pod for pod in observed.pods if pod.ready and not pod.terminating]
    current = {pod.uid for pod in observed.current_pods}
    chosen = [pod for pod in ready if pod.uid in current] or ready
    return tuple(sorted(chosen, key=lambda pod: pod.name))


def caching_enabled(pods: Sequence[ObservedPod]) -> bool | None:
    """What the running pods report, not what the spec asks; None without a report. One pod that is off is off."""
    reports = [pod.metrics.enable_prefix_caching for pod in pods if pod.metrics is not None]
    told = [report for report in reports if report is not None]
    return all(told) if told else None


def prefix_cache_figures(
    observed: Observed,
    previous: Mapping[str, Any],
    *,
    window: HitRateWindow,
    now: float,
    settings: Settings,
) -> dict[str, Any]:
    """status.prefixCache. `previous` is the same field as last written."""
    pods = serving_pods(observed)
    if not pods:
        return {}
    if previous and not window.is_full(now) and not any(pod.metrics for pod in pods):
        # A new operator that was unlucky with its first scrapes knows less than the one before it.
        return dict(previous)
    enabled = caching_enabled(pods)
    if enabled is False and not any(_caches(pod) for pod in pods):
        return {"enabled": False}
    figures: dict[str, Any] = {} if enabled is None else {"enabled": enabled}
    if _stands(previous, window=window, now=now):
        kept = {key: previous[key] for key in _RATED if key in previous}
        return figures | kept | {"replicas": _replicas(pods, window=window, now=now, known=previous)}
    fresh = _rated(pods, window=window, now=now)
    exact = window.figures(now).exact_percent
    if not _is_news(fresh, previous, exact=exact, now=now, settings=settings):
        fresh = {key: previous[key] for key in _RATED if key in previous}
    return figures | fresh


def _caches(pod: ObservedPod) -> bool:
    return pod.metrics is None or pod.metrics.enable_prefix_caching is not False


def _stands(previous: Mapping[str, Any], *, window: HitRateWindow, now: float) -> bool:
    """Whether the last figure, written by an earlier operator process, stands until this one has a whole window."""
    written = previous.get("observedAt")
    inherited = isinstance(written, str) and written < timestamp(window.started_at)
    return inherited and "hitRatePercent" in previous and not window.is_full(now)


def _rated(pods: Sequence[ObservedPod], *, window: HitRateWindow, now: float) -> dict[str, Any]:
    total = window.figures(now)
    figures: dict[str, Any] = {"windowSeconds": round(window.seconds), "observedAt": timestamp(now)}
    if total.percent is not None:
        figures |= {
            "hitRatePercent": total.percent,
            "hitTokens": total.hit_tokens,
            "queriedTokens": total.queried_tokens,
        }
        reason = MISS_REASONS.get(total.main_miss or "")
        if reason is not None:
            figures["missReason"] = reason
    usages = [pod.metrics.kv_cache_usage for pod in pods if pod.metrics and pod.metrics.kv_cache_usage is not None]
    if usages:
        figures["usagePercent"] = round(100 * sum(usages) / len(usages))
    figures["replicas"] = _replicas(pods, window=window, now=now, known={})
    return figures


def _replicas(
    pods: Sequence[ObservedPod], *, window: HitRateWindow, now: float, known: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """An entry a pod, the one in `known` (an earlier status.prefixCache) where there is one."""
    before = {entry.get("pod"): entry for entry in known.get("replicas") or ()}
    served = window.figures_of_pods(now)
    return [
        dict(before[pod.name]) if pod.name in before else _of_pod(pod, served.get(pod.uid, NOTHING_SERVED))
        for pod in pods[:MAX_REPLICAS_LISTED]
    ]


def _of_pod(pod: ObservedPod, figures: HitFigures) -> dict[str, Any]:
    entry: dict[str, Any] = {"pod": pod.name}
    fault = _fault(pod)
    if pod.metrics is not None and pod.metrics.enable_prefix_caching is not None:
        entry["enabled"] = pod.metrics.enable_prefix_caching
    if entry.get("enabled") is False:
        return entry | {"reason": Effect.DISABLED.value}
    if fault is not None:
        return entry | {"reason": Effect.METRICS_UNAVAILABLE.value, "message": clip(fault, limit=MAX_FAULT)}
    entry["reason"] = effect_of(figures).value
    if figures.percent is not None:
        entry |= {
            "hitRatePercent": figures.percent,
            "hitTokens": figures.hit_tokens,
            "queriedTokens": figures.queried_tokens,
        }
    if pod.metrics is not None and pod.metrics.kv_cache_usage is not None:
        entry["usagePercent"] = round(100 * pod.metrics.kv_cache_usage)
    return entry


def _fault(pod: ObservedPod) -> str | None:
    """Why there are no figures of a ready pod; None when there are."""
    if pod.metrics is None:
        return pod.metrics_error or "/metrics has not been read yet"
    if pod.metrics.prefix_cache_queries is None or pod.metrics.prefix_cache_hits is None:
        return "/metrics has no counters of a prefix cache; vLLM's --disable-log-stats takes them away"
    return None


def _is_news(
    fresh: Mapping[str, Any], previous: Mapping[str, Any], *, exact: float | None, now: float, settings: Settings
) -> bool:
    """Whether the figures are worth a write. At once: traffic that begins or ends, another set of pods. At most each
    `status_min_interval_seconds`: a rate that moved a point from what is written, or a state that flipped."""
    written = seconds_of(previous.get("observedAt"))
    if written is None or fresh["windowSeconds"] != previous.get("windowSeconds"):
        return True
    if ("hitRatePercent" in fresh) != ("hitRatePercent" in previous) or _pods(fresh) != _pods(previous):
        return True
    # Far in the future: the clock was set back, and would keep the figures as they are for as long.
    if abs(now - written) < settings.status_min_interval_seconds:
        return False
    moved = exact is not None and abs(exact - previous["hitRatePercent"]) >= LEAST_MOVE
    return moved or _states(fresh) != _states(previous)


def _pods(figures: Mapping[str, Any]) -> list[tuple[Any, Any]]:
    return [(entry.get("pod"), entry.get("enabled")) for entry in figures.get("replicas", ())]


def _states(figures: Mapping[str, Any]) -> list[Any]:
    pods = [(entry.get("pod"), entry.get("reason"), entry.get("message")) for entry in figures.get("replicas", ())]
    return [written_effect(figures), *pods]


def engine_figures(observed: Observed, previous: Mapping[str, Any]) -> dict[str, Any]:
    """status.engine: what the engine settled on, of the first pod that tells; the last known while a scrape fails, and
    while another pod still tells it: pods may differ by a few blocks."""
    pods = serving_pods(observed)
    known = [told for pod in pods if pod.metrics is not None and (told := _engine(pod.metrics))]
    if known:
        return dict(previous) if previous in known else known[0]
    return dict(previous) if any(pod.ready for pod in observed.pods) else {}


def _engine(metrics: EngineMetrics) -> dict[str, Any]:
    told = {
        "version": metrics.version,
        "blockSize": metrics.block_size,
        "kvBlocks": metrics.num_gpu_blocks,
        "maxModelLen": metrics.max_model_len,
        "memoryUtilization": metrics.gpu_memory_utilization,
    }
    return {key: value for key, value in told.items() if value is not None}
