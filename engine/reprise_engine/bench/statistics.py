"""Records → figures. Pure. Times are seconds, rates per second; a figure nobody measured is None, never 0."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean

from reprise_engine.bench.result import RequestRecord, Result

DEFAULT_PERCENTILES = (50.0, 90.0, 99.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Distribution:
    """`percentiles` maps p50, p99.9 … to values."""

    count: int
    mean: float
    max: float
    percentiles: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Of the requests that succeeded, where not said otherwise."""

    requests: int
    """All."""
    completed: int
    errors: dict[str, int]
    """Failed requests by kind."""
    duration: float
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int | None
    """None where no answer told."""
    hit_rate: float | None
    """Cached tokens of the prompt tokens of those answers that told."""
    hit_rate_counters: float | None
    """The same by the server's own counters."""
    request_throughput: float
    output_throughput: float
    total_throughput: float
    tokens_per_chunk: float | None
    ttft: Distribution | None
    ttft_from_schedule: Distribution | None
    tpot: Distribution | None
    itl: Distribution | None
    latency: Distribution | None
    latency_from_schedule: Distribution | None
    send_delay: Distribution | None
    """Sending behind schedule; all requests."""
    counted_by: dict[str, int]
    """Requests by who counted their tokens."""

    def as_json(self) -> dict[str, object]:
        return asdict(self)


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Of values in ascending order, interpolated linearly between neighbours (as numpy's default does)."""
    position = (len(ordered) - 1) * percent / 100
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def distribution(
    values: Iterable[float | None], percentiles: Sequence[float] = DEFAULT_PERCENTILES
) -> Distribution | None:
    """None where there is no value."""
    ordered = sorted(value for value in values if value is not None)
    if not ordered:
        return None
    return Distribution(
        count=len(ordered),
        mean=fmean(ordered),
        max=ordered[-1],
        percentiles={f"p{percent:g}": percentile(ordered, percent) for percent in percentiles},
    )


def summarize(result: Result, percentiles: Sequence[float] = DEFAULT_PERCENTILES) -> Summary:
    records = result.records
    done = [record for record in records if record.ok]
    told = [record for record in done if record.cached_tokens is not None]
    cached = sum(record.cached_tokens or 0 for record in told)
    told_prompts = sum(_prompt_tokens(record) for record in told)
    prompt_tokens = sum(_prompt_tokens(record) for record in done)
    output_tokens = sum(record.output_tokens for record in done)
    chunks = sum(len(record.chunk_times) for record in done)
    counters = result.counters

    def of(values: Iterable[float | None]) -> Distribution | None:
        return distribution(values, percentiles)

    def per_second(amount: int) -> float:
        return amount / result.duration if result.duration > 0 else 0.0

    return Summary(
        requests=len(records),
        completed=len(done),
        errors=dict(Counter(record.error.label for record in records if record.error is not None).most_common()),
        duration=result.duration,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        cached_tokens=cached if told else None,
        hit_rate=cached / told_prompts if told_prompts else None,
        hit_rate_counters=counters.hit_tokens / counters.query_tokens if counters and counters.query_tokens else None,
        request_throughput=per_second(len(done)),
        output_throughput=per_second(output_tokens),
        total_throughput=per_second(prompt_tokens + output_tokens),
        tokens_per_chunk=output_tokens / chunks if chunks else None,
        ttft=of(record.ttft for record in done),
        ttft_from_schedule=of(record.ttft_from_schedule for record in done),
        tpot=of(record.tpot for record in done),
        itl=of(gap for record in done for gap in record.itl),
        latency=of(record.latency for record in done),
        latency_from_schedule=of(record.latency_from_schedule for record in done),
        send_delay=of(record.sent_at - record.scheduled_at for record in records),
        counted_by=dict(Counter(record.counted_by for record in done)),
    )


def hit_rate_over_time(records: Iterable[RequestRecord]) -> list[tuple[float, float]]:
    """(time of the first token, share of all prompt tokens so far that were cached), by time."""
    points: list[tuple[float, float]] = []
    cached = prompts = 0
    for record in sorted(
        (record for record in records if record.chunk_times and record.cached_tokens is not None),
        key=lambda record: record.chunk_times[0],
    ):
        cached += record.cached_tokens or 0
        prompts += _prompt_tokens(record)
        points.append((record.chunk_times[0], cached / prompts))
    return points


def compare(on: Summary, off: Summary) -> dict[str, float]:
    """off / on of times, on / off of rates: above 1 the first run was better. What one of them lacks is left out."""
    ratios: dict[str, float] = {}
    for name in ("ttft", "tpot", "itl", "latency"):
        first: Distribution | None = getattr(on, name)
        second: Distribution | None = getattr(off, name)
        if first is None or second is None:
            continue
        pairs = {"mean": (first.mean, second.mean)} | {
            key: (value, second.percentiles[key])
            for key, value in first.percentiles.items()
            if key in second.percentiles
        }
        ratios |= {f"{name} {key}": slow / fast for key, (fast, slow) in pairs.items() if fast > 0}
    for name in ("request_throughput", "output_throughput", "total_throughput"):
        if getattr(off, name) > 0:
            ratios[name] = getattr(on, name) / getattr(off, name)
    if on.duration > 0:
        ratios["duration"] = off.duration / on.duration
    return ratios


def _prompt_tokens(record: RequestRecord) -> int:
    return record.sent_prompt_tokens if record.prompt_tokens is None else record.prompt_tokens
