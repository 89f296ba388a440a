"""Prometheus metrics under vLLM's names: gateways, dashboards, autoscalers and our operator read them.

Counters of the engine process arrive as totals; their differences are added here, so no figure can be forgotten
between two scrapes. Counters carry `_total` on the wire.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, ProcessCollector, generate_latest

from reprise_engine.cache_report import MissReason
from reprise_engine.config import ResolvedConfig
from reprise_engine.messages import SchedulerStats
from reprise_engine.request import FinishReason, RequestTimes
from reprise_engine.server.tier_metrics import TierMetrics

LABELS = ("model_name", "engine")
ENGINE_INDEX = "0"
"""There is one engine process; vLLM numbers them from 0."""

_TTFT_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_TOKEN_BUCKETS = (
    0.01,
    0.025,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.4,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    7.5,
    10.0,
    20.0,
    40.0,
    80.0,
)
_REQUEST_BUCKETS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_LENGTH_BUCKETS = tuple(step * 10**power for power in range(6) for step in (1, 2, 5))


class Metrics:
    """All series of one server, in a registry of its own."""

    def __init__(self, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self._values = (model_name, ENGINE_INDEX)
        self._told = SchedulerStats()
        ProcessCollector(registry=self.registry)

        self._running = self._gauge("vllm:num_requests_running", "Requests in the running batch.")
        self._waiting = self._gauge("vllm:num_requests_waiting", "Requests that wait to be scheduled.")
        self._usage = self._gauge("vllm:kv_cache_usage_perc", "KV cache in use by requests and pins; 1 is all.")
        self._cached_blocks = self._gauge("reprise:prefix_cache_blocks", "Blocks held in the prefix index.")
        self._pinned_blocks = self._gauge("reprise:prefix_cache_pinned_blocks", "Blocks that pins keep in the cache.")

        self._queries = self._counter("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.")
        self._hits = self._counter("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache.")
        self._preemptions = self._counter("vllm:num_preemptions", "Preemptions by the scheduler.")
        self._evictions = self._counter("reprise:prefix_cache_evictions", "Cached blocks given to something else.")
        self._events_published = self._counter("reprise:kv_events_published", "Events of the KV cache published.")
        self._events_dropped = self._counter("reprise:kv_events_dropped", "Those that some consumer did not get.")
        misses = Counter(
            "reprise:prefix_cache_misses",
            "Requests of whose prompt not all was cached, by the reason why the match ended.",
            (*LABELS, "reason"),
            registry=self.registry,
        )
        self._misses = [misses.labels(*self._values, reason.value) for reason in MissReason]
        self._tiers = TierMetrics(self.registry, self._values)
        self._prompt = self._counter("vllm:prompt_tokens", "Prompt tokens of requests that got their first token.")
        self._prompt_cached = self._counter("vllm:prompt_tokens_cached", "Those of them that were cached.")
        self._generated = self._counter("vllm:generation_tokens", "Tokens generated.")
        success = Counter(
            "vllm:request_success",
            "Requests that ended, by reason.",
            (*LABELS, "finished_reason"),
            registry=self.registry,
        )
        self._refused = self._counter("reprise:requests_refused", "Requests refused because the queue was full.")
        self._success = {reason: success.labels(*self._values, reason.value) for reason in FinishReason}

        self._ttft = self._histogram("vllm:time_to_first_token_seconds", "Arrival to first token.", _TTFT_BUCKETS)
        self._itl = self._histogram("vllm:inter_token_latency_seconds", "Token to token.", _TOKEN_BUCKETS)
        self._tpot = self._histogram(
            "vllm:request_time_per_output_token_seconds", "Mean token to token time of a request.", _TOKEN_BUCKETS
        )
        self._e2e = self._histogram("vllm:e2e_request_latency_seconds", "Arrival to last token.", _REQUEST_BUCKETS)
        self._queue = self._histogram("vllm:request_queue_time_seconds", "Arrival to schedule.", _REQUEST_BUCKETS)
        self._prefill = self._histogram(
            "vllm:request_prefill_time_seconds", "Schedule to first token.", _REQUEST_BUCKETS
        )
        self._decode = self._histogram("vllm:request_decode_time_seconds", "First to last token.", _REQUEST_BUCKETS)
        self._prompt_length = self._histogram("vllm:request_prompt_tokens", "Length of prompts.", _LENGTH_BUCKETS)
        self._output_length = self._histogram("vllm:request_generation_tokens", "Length of outputs.", _LENGTH_BUCKETS)

    # --- what happens

    def configured(self, config: ResolvedConfig) -> None:
        """Called once, when the model is loaded."""
        cache = {
            "block_size": config.block_size,
            "num_gpu_blocks": config.num_gpu_blocks,
            "enable_prefix_caching": config.enable_prefix_caching,
            "gpu_memory_utilization": config.gpu_memory_utilization,
        }
        engine = {
            "version": config.version,
            "max_model_len": config.max_model_len,
            "device": config.device,
            "dtype": config.dtype,
            "enable_chunked_prefill": config.enable_chunked_prefill,
        }
        for name, help_text, values in (
            ("vllm:cache_config", "Configuration of the KV cache.", cache),
            ("reprise:engine", "What the engine settled on.", engine),
        ):
            info = Info(name, help_text, LABELS, registry=self.registry)
            info.labels(*self._values).info({key: str(value) for key, value in values.items()})
        lora = {"max_lora": "0", "waiting_lora_adapters": "", "running_lora_adapters": ""}
        gauge = Gauge("vllm:lora_requests_info", "LoRA adapters in use: none.", tuple(lora), registry=self.registry)
        gauge.labels(**lora).set(time.time())

    def engine_stats(self, stats: SchedulerStats) -> None:
        told, self._told = self._told, stats
        self._running.set(stats.num_running)
        self._waiting.set(stats.num_waiting)
        self._usage.set(stats.kv_cache_usage)
        self._cached_blocks.set(stats.num_cached_blocks)
        self._pinned_blocks.set(stats.num_pinned_blocks)
        self._queries.inc(stats.prefix_cache_queries - told.prefix_cache_queries)
        self._hits.inc(stats.prefix_cache_hits - told.prefix_cache_hits)
        for counter, now, before in zip(self._misses, stats.prefix_cache_misses, told.prefix_cache_misses, strict=True):
            counter.inc(now - before)
        self._preemptions.inc(stats.num_preemptions - told.num_preemptions)
        self._evictions.inc(stats.num_evicted_blocks - told.num_evicted_blocks)
        self._tiers.engine_stats(stats.tiers)
        self._events_published.inc(stats.num_kv_events_published - told.num_kv_events_published)
        self._events_dropped.inc(stats.num_kv_events_dropped - told.num_kv_events_dropped)

    def refused(self) -> None:
        """A request that the queue has no room for."""
        self._refused.inc()

    def first_token(self, *, prompt_tokens: int, cached_tokens: int, times: RequestTimes | None) -> None:
        """Once a sequence. `times` are seconds of time.monotonic()."""
        self._prompt.inc(prompt_tokens)
        self._prompt_cached.inc(cached_tokens)
        self._prompt_length.observe(prompt_tokens)
        if times is not None and times.first_token is not None:
            self._ttft.observe(times.first_token - times.arrival)
            if times.first_scheduled is not None:
                self._queue.observe(times.first_scheduled - times.arrival)
                self._prefill.observe(times.first_token - times.first_scheduled)

    def tokens(self, count: int, *, since_previous: float | None) -> None:
        """`since_previous` is the time since the previous tokens of this sequence, in seconds."""
        self._generated.inc(count)
        if since_previous is not None:
            self._itl.observe(since_previous)

    def finished(self, reason: FinishReason, *, output_tokens: int, times: RequestTimes | None) -> None:
        """Once a sequence, whatever ended it."""
        self._success[reason].inc()
        if reason is FinishReason.ABORT:
            return
        self._output_length.observe(output_tokens)
        if times is not None and times.first_token is not None and times.last_token is not None:
            self._e2e.observe(times.last_token - times.arrival)
            decode = times.last_token - times.first_token
            self._decode.observe(decode)
            if output_tokens > 1:
                self._tpot.observe(decode / (output_tokens - 1))

    def render(self) -> bytes:
        """The text format of Prometheus, version 0.0.4."""
        return generate_latest(self.registry)

    # --- making series

    def _gauge(self, name: str, help_text: str) -> Gauge:
        return Gauge(name, help_text, LABELS, registry=self.registry).labels(*self._values)

    def _counter(self, name: str, help_text: str) -> Counter:
        return Counter(name, help_text, LABELS, registry=self.registry).labels(*self._values)

    def _histogram(self, name: str, help_text: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(name, help_text, LABELS, buckets=buckets, registry=self.registry).labels(*self._values)
