"""The figures of status: prefix cache, engine. Pure.

Quantised and rate-limited, so that a service whose state does not change gets the same status again, to the byte.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from reprise_operator.conditions import PREFIX_CACHE_EFFECTIVE, Condition, Status, timestamp
from reprise_operator.diagnosis import current_pods
from reprise_operator.hitrate import HitRateWindow
from reprise_operator.observed import Observed, ObservedPod
from reprise_operator.settings import Settings

MAX_REPLICAS_LISTED = 64

_RATED = ("hitRatePercent", "hitTokens", "queriedTokens", "usagePercent", "windowSeconds", "observedAt", "replicas")
"""Written together, and seldom."""


def reporting_pods(observed: Observed) -> tuple[ObservedPod, ...]:
    """Ready pods with figures: those of the present template, or, before one is ready, the older ones that serve."""
    ready = [pod for pod in observed.pods if pod.ready and not pod.terminating and pod.metrics is not None]
    current = {pod.uid for pod in current_pods(observed)}
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
    pods = reporting_pods(observed)
    serving = any(pod.ready and not pod.terminating for pod in observed.pods)
    enabled = caching_enabled(pods)
    if enabled is None and serving:
        enabled = previous.get("enabled")  # the scrape failed for once; the pods are still the same
    figures: dict[str, Any] = {} if enabled is None else {"enabled": enabled}
    if not enabled:
        return figures
    if (not pods and serving) or _stands(previous, window=window, now=now):
        return figures | {key: previous[key] for key in _RATED if key in previous}
    fresh = _rated(pods, window=window, now=now)
    if not _is_news(fresh, previous, now=now, settings=settings):
        fresh = {key: previous[key] for key in _RATED if key in previous}
    return figures | fresh


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
    usages = [pod.metrics.kv_cache_usage for pod in pods if pod.metrics and pod.metrics.kv_cache_usage is not None]
    if usages:
        figures["usagePercent"] = round(100 * sum(usages) / len(usages))
    figures["replicas"] = [_of_pod(pod, window=window, now=now) for pod in pods[:MAX_REPLICAS_LISTED]]
    return figures


def _of_pod(pod: ObservedPod, *, window: HitRateWindow, now: float) -> dict[str, Any]:
    entry: dict[str, Any] = {"pod": pod.name}
    if pod.metrics is not None and pod.metrics.enable_prefix_caching is not None:
        entry["enabled"] = pod.metrics.enable_prefix_caching
    percent = window.figures(now, pod_uid=pod.uid).percent
    if percent is not None:
        entry["hitRatePercent"] = percent
    return entry


def _is_news(fresh: Mapping[str, Any], previous: Mapping[str, Any], *, now: float, settings: Settings) -> bool:
    """Whether the figures are worth a write: a state flipped, or the rate moved a point and the last write is old."""
    if "observedAt" not in previous or fresh["windowSeconds"] != previous.get("windowSeconds"):
        return True
    if ("hitRatePercent" in fresh) != ("hitRatePercent" in previous):
        return True
    if _pods(fresh) != _pods(previous):
        return True
    if fresh.get("hitRatePercent") == previous.get("hitRatePercent"):
        return False
    # One of the future was written before the clock was set back.
    return not timestamp(now - settings.status_min_interval_seconds) < previous["observedAt"] <= timestamp(now)


def _pods(figures: Mapping[str, Any]) -> list[tuple[Any, Any]]:
    return [(entry.get("pod"), entry.get("enabled")) for entry in figures.get("replicas", ())]


def engine_figures(observed: Observed, previous: Mapping[str, Any]) -> dict[str, Any]:
    """status.engine: what the engine settled on, of the first pod that tells; the last known while a scrape fails."""
    names = (
        ("version", "version"),
        ("blockSize", "block_size"),
        ("kvBlocks", "num_gpu_blocks"),
        ("maxModelLen", "max_model_len"),
    )
    for pod in reporting_pods(observed):
        told = {key: getattr(pod.metrics, attribute) for key, attribute in names}
        known = {key: value for key, value in told.items() if value is not None}
        if known:
            return known
    return dict(previous) if any(pod.ready for pod in observed.pods) else {}


def prefix_cache_condition(observed: Observed, figures: Mapping[str, Any], *, wanted: bool) -> Condition:
    """Informational: whether the cache saves work. Read from the figures as written, so that both agree."""

    def condition(status: Status, reason: str, message: str) -> Condition:
        return Condition(type=PREFIX_CACHE_EFFECTIVE, status=status, reason=reason, message=message)

    enabled = figures.get("enabled")
    if enabled is False or (enabled is None and not wanted):
        return condition("False", "Disabled", "Prefix caching is off.")
    if enabled is None:
        errors = sorted({pod.metrics_error for pod in observed.pods if pod.ready and pod.metrics_error})
        detail = f": {errors[0]}" if errors else "."
        message = "No ready pod reports its prefix cache" + detail
        return condition("Unknown", "MetricsUnavailable", message)
    percent = figures.get("hitRatePercent")
    if percent is None:
        return condition("Unknown", "NoTraffic", "No prompt was served within the window.")
    if figures.get("hitTokens", 0) == 0:
        return condition(
            "False",
            "ZeroHits",
            "No prompt token was found in the cache: the prompts share no whole block, or it was evicted.",
        )
    return condition("True", "Effective", "Prompt tokens are served from the prefix cache; see status.prefixCache.")
