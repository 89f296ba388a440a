"""The few lines of an engine's /metrics that are needed → EngineMetrics. Pure.

Reads both engines, ours and vllm-ascend: the metric names are vLLM's, what begins with `reprise:` is our addition.
What comes from a pod is not trusted: a figure that makes no sense (not a number, negative, out of any range) is no
figure, or it would end up in a status that the API server refuses.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from reprise_operator.observed import EngineMetrics

QUERIES = "vllm:prefix_cache_queries_total"
HITS = "vllm:prefix_cache_hits_total"
USAGE = "vllm:kv_cache_usage_perc"
CACHE_CONFIG = "vllm:cache_config_info"
ENGINE_INFO = "reprise:engine_info"
MISSES = "reprise:prefix_cache_misses_total"
PROMPT_LENGTHS = "vllm:request_prompt_tokens_bucket"
PROCESS_START = "process_start_time_seconds"
_NEEDED = (QUERIES, HITS, USAGE, CACHE_CONFIG, ENGINE_INFO, MISSES, PROCESS_START)

SHORTER_THAN_BLOCK = "shorter_than_block"
UNEXPLAINED = "unexplained"
"""Requests of vLLM's whose prompt is longer than a block, as far as its histogram tells."""

_MAX_COUNT = 2.0**53
_MAX_INT32 = 2**31 - 1
_MAX_REASONS = 32
_MAX_TEXT = 64
_REASON = re.compile(r"^[a-z][a-z0-9_]{0,63}$")


def parse_metrics(text: str, *, scraped_at: float) -> EngineMetrics:
    """The figures in an exposition. Counters of several engines in one pod (data parallel) are added up, the usage is
    the fullest engine's, of the infos the first counts. What is missing or makes no sense is None.

    Raises ValueError when a needed line is no valid exposition.
    """
    lines = text.splitlines()
    wanted: tuple[str, ...] = _NEEDED
    if not any(line.startswith(MISSES) for line in lines):
        wanted = (*_NEEDED, PROMPT_LENGTHS)
    needed = "\n".join(line for line in lines if line.startswith(wanted)) + "\n"
    samples = _samples(needed)
    config = _labels(samples, CACHE_CONFIG)
    engine = _labels(samples, ENGINE_INFO)
    usages = [sample.value for sample in _named(samples, USAGE) if 0 <= sample.value <= 1]
    block_size = _integer(config.get("block_size"), most=_MAX_INT32)
    return EngineMetrics(
        scraped_at=scraped_at,
        started_at=_within(next((sample.value for sample in _named(samples, PROCESS_START)), None), most=_MAX_COUNT),
        enable_prefix_caching={"true": True, "false": False}.get(config.get("enable_prefix_caching", "").lower()),
        prefix_cache_queries=_sum(_named(samples, QUERIES)),
        prefix_cache_hits=_sum(_named(samples, HITS)),
        misses=_misses(samples) or _short_prompts(samples, block_size),
        kv_cache_usage=max(usages) if usages else None,
        gpu_memory_utilization=_within(_number(config.get("gpu_memory_utilization")), most=1.0),
        block_size=block_size,
        num_gpu_blocks=_integer(config.get("num_gpu_blocks"), most=_MAX_COUNT),
        max_model_len=_integer(engine.get("max_model_len"), most=_MAX_INT32),
        version=engine.get("version", "")[:_MAX_TEXT] or None,
    )


def _samples(text: str) -> list[Sample]:
    try:
        families = text_string_to_metric_families(text)
        return [sample._replace(value=float(sample.value)) for family in families for sample in family.samples]
    except (IndexError, OverflowError) as error:  # the parser's, of labels without a name and of endless numbers
        raise ValueError(f"no valid exposition: {error}") from error


def _misses(samples: Sequence[Sample]) -> Mapping[str, float]:
    """Requests by the reason our engine gives."""
    found: dict[str, list[Sample]] = {}
    for sample in _named(samples, MISSES):
        reason = sample.labels.get("reason", "")
        if _REASON.match(reason) and (reason in found or len(found) < _MAX_REASONS):
            found.setdefault(reason, []).append(sample)
    sums = {reason: _sum(of_reason) for reason, of_reason in found.items()}
    return {reason: total for reason, total in sums.items() if total is not None}


def _short_prompts(samples: Sequence[Sample], block_size: int | None) -> Mapping[str, float]:
    """Requests of an engine that gives no reasons, by the lengths of their prompts: the finest the histogram tells is
    how many had no more tokens than its greatest bound up to a block. Such a prompt fills no block that another one
    could find; vLLM shares nothing less."""
    if block_size is None:
        return {}
    buckets: dict[float, list[Sample]] = {}
    for sample in _named(samples, PROMPT_LENGTHS):
        bound = _number(sample.labels.get("le"))
        if bound is not None and not math.isnan(bound):
            buckets.setdefault(bound, []).append(sample)
    bounds = [bound for bound in buckets if bound <= block_size]
    if not bounds or math.inf not in buckets:
        return {}
    short, total = _sum(buckets[max(bounds)]), _sum(buckets[math.inf])
    if short is None or total is None or short > total:
        return {}
    return {SHORTER_THAN_BLOCK: short, UNEXPLAINED: total - short}


def _named(samples: Iterable[Sample], name: str) -> list[Sample]:
    return [sample for sample in samples if sample.name == name]


def _labels(samples: Sequence[Sample], name: str) -> Mapping[str, str]:
    return next((sample.labels for sample in samples if sample.name == name), {})


def _sum(samples: Sequence[Sample]) -> float | None:
    """Of counters; None when one of them is none."""
    if not samples or not all(_is_count(sample.value) for sample in samples):
        return None
    return _within(sum(sample.value for sample in samples), most=_MAX_COUNT)


def _is_count(value: float) -> bool:
    return math.isfinite(value) and value >= 0


def _within(value: float | None, *, most: float) -> float | None:
    return value if value is not None and math.isfinite(value) and 0 <= value <= most else None


def _number(text: str | None) -> float | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        return None


def _integer(text: str | None, *, most: float) -> int | None:
    """A whole number from 1."""
    value = _number(text)
    return int(value) if value is not None and value.is_integer() and 1 <= value <= most else None
