"""Share of prompt tokens found in the prefix cache, over a moving window, from the engines' counters. Pure.

Counters live in pods: a restarted container starts again at 0, and a pod that is gone takes its counter along. So the
window keeps differences, not values: what each pod served between two scrapes, until that is older than the window.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from reprise_operator.observed import ObservedPod

RESTART_SECONDS = 1.0
"""Two start times of a process that are further apart are those of two processes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CounterSample:
    """A pod's counters, in tokens (misses in requests), as read at `at` (Unix seconds)."""

    at: float
    queries: float
    hits: float
    misses: Mapping[str, float] = field(default_factory=dict)
    started_at: float | None = None
    """When the process began that counts, where it says so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CounterDelta:
    """Tokens one pod looked up and found between two scrapes, the later one at `at`; and the requests of whose prompts
    not all was found, by reason."""

    at: float
    pod: str
    queries: float
    hits: float
    misses: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class HitFigures:
    """Sums over the window, in tokens. Without traffic both are 0 and there is no percentage."""

    queried_tokens: int
    hit_tokens: int
    misses: Mapping[str, int] = field(default_factory=dict)
    """Requests by the reason why their match ended."""

    @property
    def exact_percent(self) -> float | None:
        """None without traffic: no traffic is no figure, never 0 %."""
        return 100 * self.hit_tokens / self.queried_tokens if self.queried_tokens > 0 else None

    @property
    def percent(self) -> int | None:
        """The same in whole percent."""
        return None if self.exact_percent is None else round(self.exact_percent)

    @property
    def main_miss(self) -> str | None:
        """The reason of more than half of the misses, if there is one."""
        total = sum(self.misses.values())
        return next((reason for reason, count in self.misses.items() if 2 * count > total), None)


NOTHING_SERVED = HitFigures(queried_tokens=0, hit_tokens=0)


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
            if sample.at - before.at > self.seconds:
                continue  # nobody knows how much of it was served within the window
            delta = _difference(pod.uid, before, sample)
            if delta.queries > 0 or delta.misses:
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

    def figures(self, now: float) -> HitFigures:
        """Sums over the last `seconds` up to `now`, of every pod, those that are gone too."""
        return _sums([delta for delta in self.deltas if delta.at > now - self.seconds])

    def figures_of_pods(self, now: float) -> Mapping[str, HitFigures]:
        """The same of each pod by its UID; one that served nothing is not among them."""
        found: dict[str, list[CounterDelta]] = {}
        for delta in self.deltas:
            if delta.at > now - self.seconds:
                found.setdefault(delta.pod, []).append(delta)
        return {pod: _sums(deltas) for pod, deltas in found.items()}

    def is_full(self, now: float) -> bool:
        """Whether this process has watched for a whole window."""
        return now - self.started_at >= self.seconds

    def _baseline(self, pod: ObservedPod, sample: CounterSample) -> CounterSample:
        """What a pod seen for the first time is compared with: nothing served yet if it began under our eyes."""
        starts = [start for start in (pod.started_at, sample.started_at) if start is not None]
        if starts and max(starts) >= self.started_at:
            return CounterSample(at=max(starts), queries=0, hits=0)
        return sample


def _sums(deltas: Sequence[CounterDelta]) -> HitFigures:
    misses: Counter[str] = Counter()
    for delta in deltas:
        misses.update({reason: round(count) for reason, count in delta.misses.items()})
    return HitFigures(
        queried_tokens=round(sum(delta.queries for delta in deltas)),
        hit_tokens=round(sum(delta.hits for delta in deltas)),
        misses=dict(misses),
    )


def _sample(pod: ObservedPod) -> CounterSample | None:
    metrics = pod.metrics
    if metrics is None or metrics.prefix_cache_queries is None or metrics.prefix_cache_hits is None:
        return None
    if metrics.enable_prefix_caching is False:
        return None  # what is looked up nowhere is no traffic of the cache
    return CounterSample(
        at=metrics.scraped_at,
        queries=metrics.prefix_cache_queries,
        hits=metrics.prefix_cache_hits,
        misses=metrics.misses,
        started_at=metrics.started_at,
    )


def _difference(pod: str, before: CounterSample, after: CounterSample) -> CounterDelta:
    base = CounterSample(at=before.at, queries=0, hits=0) if _has_restarted(before, after) else before
    queries = after.queries - base.queries
    misses = {reason: count - base.misses.get(reason, 0) for reason, count in after.misses.items()}
    return CounterDelta(
        at=after.at,
        pod=pod,
        queries=queries,
        hits=min(after.hits - base.hits, queries),
        misses={reason: count for reason, count in misses.items() if count > 0},
    )


def _has_restarted(before: CounterSample, after: CounterSample) -> bool:
    """A counter that fell, or another process than before: one that has served more since than the old one ever did
    would look like a small step otherwise."""
    if after.queries < before.queries or after.hits < before.hits:
        return True
    if before.started_at is None or after.started_at is None:
        return False
    return abs(after.started_at - before.started_at) > RESTART_SECONDS
