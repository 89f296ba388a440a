"""/metrics: the names that gateways, dashboards, autoscalers and the operator read, and values that add up."""

from __future__ import annotations

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from reprise_engine.cache_report import Tier, TierStats
from reprise_engine.messages import SchedulerStats
from reprise_engine.request import FinishReason, RequestTimes
from reprise_engine.server.metrics import Metrics
from tests.support.engine_server import fake_options, running_server

LABELS = {"model_name": "counter", "engine": "0"}


def parse(text: str) -> dict[str, list[tuple[dict[str, str], float]]]:
    samples: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            samples.setdefault(sample.name, []).append((sample.labels, sample.value))
    return samples


def value(samples: dict[str, list[tuple[dict[str, str], float]]], name: str, **labels: str) -> float:
    [found] = [number for has, number in samples[name] if has == LABELS | labels]
    return found


def scrape(client: httpx.Client) -> dict[str, list[tuple[dict[str, str], float]]]:
    response = client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    return parse(response.text)


@pytest.mark.parametrize("caching", [True, False])
def test_the_names_and_values_of_vllm(tmp_path_factory: pytest.TempPathFactory, caching: bool) -> None:
    options = fake_options(tmp_path_factory.mktemp("model"), prefix_caching=caching)
    with running_server(options) as server:
        for _ in range(2):
            server.client.post("/v1/completions", json={"prompt": "a" * 9, "max_tokens": 5}).raise_for_status()
        server.client.post("/v1/completions", json={"prompt": ["xx", "wx"]}).raise_for_status()
        samples = scrape(server.client)
    hits = 8.0 if caching else 0.0
    assert value(samples, "vllm:prefix_cache_hits_total") == hits
    assert value(samples, "vllm:prefix_cache_queries_total") == (22.0 if caching else 0.0)
    assert value(samples, "vllm:prompt_tokens_cached_total") == hits
    assert value(samples, "vllm:prompt_tokens_total") == 22.0
    assert value(samples, "vllm:generation_tokens_total") == 2 * 5 + 2 * 3
    assert value(samples, "vllm:request_success_total", finished_reason="length") == 2.0
    assert value(samples, "vllm:request_success_total", finished_reason="stop") == 2.0
    assert value(samples, "vllm:request_success_total", finished_reason="abort") == 0.0
    assert value(samples, "vllm:num_preemptions_total") == 0.0
    for gauge in ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"):
        assert value(samples, gauge) == 0.0
    for histogram in (
        "vllm:time_to_first_token_seconds",
        "vllm:request_time_per_output_token_seconds",
        "vllm:e2e_request_latency_seconds",
        "vllm:request_queue_time_seconds",
        "vllm:request_prefill_time_seconds",
        "vllm:request_decode_time_seconds",
        "vllm:request_prompt_tokens",
        "vllm:request_generation_tokens",
    ):
        assert value(samples, f"{histogram}_count") == 4.0, histogram
    assert value(samples, "vllm:inter_token_latency_seconds_count") == 2 * 4 + 2 * 2
    assert value(samples, "vllm:request_prompt_tokens_sum") == 22.0
    assert value(samples, "vllm:e2e_request_latency_seconds_sum") > 0.0
    [(cache, one)] = samples["vllm:cache_config_info"]
    assert one == 1.0
    assert cache == LABELS | {
        "block_size": "4",
        "num_gpu_blocks": "64",
        "enable_prefix_caching": str(caching),
        "gpu_memory_utilization": "0.9",
    }
    [(engine, _)] = samples["reprise:engine_info"]
    assert (engine["version"], engine["max_model_len"]) == ("0.1.0", "200")
    assert "vllm:lora_requests_info" in samples


def test_the_engines_counters_are_taken_over_as_differences() -> None:
    metrics = Metrics("counter")
    for queries, hits, preemptions in ((10, 4, 0), (10, 4, 0), (30, 20, 2)):
        metrics.engine_stats(
            SchedulerStats(
                num_running=3,
                num_waiting=1,
                kv_cache_usage=0.25,
                prefix_cache_queries=queries,
                prefix_cache_hits=hits,
                num_preemptions=preemptions,
            )
        )
    samples = parse(metrics.render().decode())
    assert value(samples, "vllm:prefix_cache_queries_total") == 30.0
    assert value(samples, "vllm:prefix_cache_hits_total") == 20.0
    assert value(samples, "vllm:num_preemptions_total") == 2.0
    assert value(samples, "vllm:num_requests_running") == 3.0
    assert value(samples, "vllm:kv_cache_usage_perc") == 0.25


def test_latencies_come_from_the_engines_times() -> None:
    metrics = Metrics("counter")
    times = RequestTimes(arrival=10.0, first_scheduled=10.5, first_token=12.0, last_token=16.0)
    metrics.first_token(prompt_tokens=7, cached_tokens=4, times=times)
    metrics.tokens(1, since_previous=None)
    metrics.finished(FinishReason.STOP, output_tokens=5, times=times)
    samples = parse(metrics.render().decode())
    sums = {
        "vllm:request_queue_time_seconds": 0.5,
        "vllm:request_prefill_time_seconds": 1.5,
        "vllm:time_to_first_token_seconds": 2.0,
        "vllm:request_decode_time_seconds": 4.0,
        "vllm:request_time_per_output_token_seconds": 1.0,
        "vllm:e2e_request_latency_seconds": 6.0,
        "vllm:inter_token_latency_seconds": 0.0,
    }
    assert {name: value(samples, f"{name}_sum") for name in sums} == sums


def test_the_tiers_below_the_pool_have_series_of_their_own() -> None:
    metrics = Metrics("counter")
    assert "tier=" not in metrics.render().decode()
    for tokens, blocks, stores in ((10, 3, 4), (25, 2, 9)):
        host = TierStats(tier=Tier.HOST, blocks=blocks, query_tokens=4 * tokens, hit_tokens=tokens, stores=stores)
        disk = TierStats(tier=Tier.DISK, used_bytes=700, query_tokens=3 * tokens, hit_tokens=2, failures=1)
        metrics.engine_stats(SchedulerStats(tiers=(host, disk)))
    samples = parse(metrics.render().decode())
    prefix = "reprise:prefix_cache_tier_"
    assert value(samples, f"{prefix}hits_total", tier="host") == 25.0
    assert value(samples, f"{prefix}queries_total", tier="host") == 100.0
    assert value(samples, f"{prefix}blocks", tier="host") == 2.0
    assert value(samples, f"{prefix}stores_total", tier="host") == 9.0
    assert value(samples, f"{prefix}bytes", tier="disk") == 700.0
    assert value(samples, f"{prefix}failures_total", tier="disk") == 1.0
    # vLLM's external cache: all that is below the pool.
    assert value(samples, "vllm:external_prefix_cache_queries_total") == 100.0
    assert value(samples, "vllm:external_prefix_cache_hits_total") == 27.0
