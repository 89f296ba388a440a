"""Share of prompt tokens found in the prefix cache, over a moving window, from the engines' counters. Pure.

Counters live in pods: a restarted container starts again at 0, and a pod that is gone takes its counter along. So the
window keeps differences, not values: what each pod served between two scrapes, until that is older than the window.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from reprise_operator.observed import ObservedPod


@dataclass(frozen=True, slots=True, kw_only=True)
class CounterSample:
    """A pod's counters, in tokens, as read at `at` (Unix seconds)."""

    at: float
    queries: float
    hits: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CounterDelta:
    """Tokens one pod looked up and found between two scrapes, the later one at `at`."""

    at: float
    pod: str
    queries: float
    hits: float


@dataclass(frozen=True, slots=True, kw_only=True)
class HitFigures:
    """Sums over the window, in tokens. Without traffic both are 0 and there is no percentage."""

    queried_tokens: int
    hit_tokens: int

    @property
    def percent(self) -> int | None:
        """Whole percent; None without traffic: no traffic is no figure, never 0 %."""
        if self.queried_tokens <= 0:
            return None
        return round(100 * self.hit_tokens / self.queried_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class HitRateWindow:
    """What was seen of one service's counters. Immutable: `observe` returns the next one.

    `started_at` is when this process began to look; before `started_at + seconds` the window is not full.
    """

    seconds: float
    started_at: float
    latest: Mapping[str, CounterSample] = field(default_factory=dict)
    """Pod UID → its newest sample."""
    deltas: tuple[CounterDelta, ...] = ()

    def observe(self, pods: Iterable[ObservedPod]) -> HitRateWindow:
        """Take in the newest scrape of each pod. A scrape already seen, or without counters, changes nothing."""
        latest = dict(self.latest)
        deltas = list(self.deltas)
        newest: float | None = None
        seen = set()
        for pod in pods:
            seen.add(pod.uid)
            sample = _sample(pod)
            if sample is None:
                continue
            newest = sample.at if newest is None else max(newest, sample.at)
            before = latest.get(pod.uid) or self._baseline(pod, sample)
            if sample.at == before.at and pod.uid in latest:
                continue
            latest[pod.uid] = sample
            delta = _difference(pod.uid, before, sample)
            if delta.queries > 0:
                deltas.append(delta)
        if newest is None:
            newest = max((sample.at for sample in latest.values()), default=self.started_at)
        return HitRateWindow(
            seconds=self.seconds,
            # A clock that was set back before the start would keep the window from filling.
            started_at=newest if newest < self.started_at - self.seconds else self.started_at,
            latest={uid: sample for uid, sample in latest.items() if uid in seen},
            # The same clock leaves differences of the future, which would not grow old.
            deltas=tuple(delta for delta in deltas if abs(newest - delta.at) < self.seconds),
        )

    def figures(self, now: float, *, pod_uid: str | None = None) -> HitFigures:
        """Sums over the last `seconds` up to `now`, of every pod or of one."""
        since = now - self.seconds
        inside = [d for d in self.deltas if d.at > since and (pod_uid is None or d.pod == pod_uid)]
        return HitFigures(
            queried_tokens=round(sum(d.queries for d in inside)), hit_tokens=round(sum(d.hits for d in inside))
        )

    def is_full(self, now: float) -> bool:
        """Whether this process has watched for a whole window."""
        return now - self.started_at >= self.seconds

    def _baseline(self, pod: ObservedPod, sample: CounterSample) -> CounterSample:
        """What a pod seen for the first time is compared with: nothing served yet if it began under our eyes."""
        if pod.started_at is not None and pod.started_at >= self.started_at:
            return CounterSample(at=pod.started_at, queries=0, hits=0)
        return sample


def _sample(pod: ObservedPod) -> CounterSample | None:
    metrics = pod.metrics
    if metrics is None or metrics.prefix_cache_queries is None or metrics.prefix_cache_hits is None:
        return None
    return CounterSample(at=metrics.scraped_at, queries=metrics.prefix_cache_queries, hits=metrics.prefix_cache_hits)


def _difference(pod: str, before: CounterSample, after: CounterSample) -> CounterDelta:
    restarted = after.queries < before.queries or after.hits < before.hits
    base_queries, base_hits = (0.0, 0.0) if restarted else (before.queries, before.hits)
    return CounterDelta(at=after.at, pod=pod, queries=after.queries - base_queries, hits=after.hits - base_hits)
