"""What engines and clocks do to a reconciler: figures are lost for as long as they are wrong, and nothing else is."""

from __future__ import annotations

import pytest

from tests.operator.reconcile_bench import Bench

GARBAGE = {
    "half a page": b'vllm:prefix_cache_queries_total{model_name="a',
    "not text": bytes(range(256)) * 64,
    "no number": b"vllm:prefix_cache_queries_total many\nvllm:prefix_cache_hits_total 1\n",
    "nothing": b"",
    "somebody else's": b"<html><body>404 page not found</body></html>",
    "not a number": b"vllm:prefix_cache_queries_total NaN\nvllm:prefix_cache_hits_total NaN\n"
    b"vllm:kv_cache_usage_perc NaN\n"
    b'vllm:cache_config_info{enable_prefix_caching="True",num_gpu_blocks="many",block_size="-1"} 1\n',
    "endless": b"vllm:prefix_cache_queries_total +Inf\nvllm:prefix_cache_hits_total +Inf\n"
    b"vllm:kv_cache_usage_perc +Inf\n"
    b'vllm:cache_config_info{enable_prefix_caching="True"} 1\n',
    "going down": b"vllm:prefix_cache_queries_total -7\nvllm:prefix_cache_hits_total -9\n"
    b'vllm:cache_config_info{enable_prefix_caching="True"} 1\n',
}


@pytest.mark.parametrize("garbage", GARBAGE.values(), ids=GARBAGE.keys())
async def test_metrics_that_are_garbage_cost_the_figures_and_nothing_else(bench: Bench, garbage: bytes) -> None:
    bench.apply()
    bench.engine.queries, bench.engine.hits = 1000, 500
    await bench.make_ready()
    bench.engine.queries, bench.engine.hits = 3000, 1500
    bench.clock.now += 61
    await bench.settle()
    assert bench.status()["prefixCache"]["hitRatePercent"] == 50
    bench.engine.instead = garbage
    written = []
    for _ in range(10):
        bench.clock.now += 61
        written += await bench.writes()
    assert len(written) <= 4, written
    assert bench.condition("Ready")[0] == "True", "an engine that serves is ready, whatever it says about its cache"
    assert await bench.writes() == []
    value = bench.reconciler.metrics.registry.get_sample_value
    assert value("reprise_operator_reconcile_total", {"outcome": "error"}) == 0.0
    bench.engine.instead = None
    for _ in range(3):
        bench.clock.now += 61
        bench.engine.queries += 1000
        bench.engine.hits += 750
        await bench.reconcile()
    bench.clock.now += 300
    bench.engine.queries += 1000
    bench.engine.hits += 750
    await bench.settle()
    assert bench.status()["prefixCache"]["hitRatePercent"] == 75
    assert bench.condition("PrefixCacheEffective")[:2] == ("True", "Effective")


async def writes_under_traffic(bench: Bench) -> list[tuple[str, str]]:
    """What the passes of six minutes write while nine of ten tokens are found."""
    written = []
    for _ in range(12):
        bench.clock.now += 30
        bench.engine.queries += 100
        bench.engine.hits += 90
        written += await bench.writes()
    return written


@pytest.mark.parametrize("jump", [-86_400, -3600, 3600, 86_400])
async def test_a_clock_that_jumps_holds_nothing_up(bench: Bench, jump: int) -> None:
    """Corrected by hand or by NTP: scraping goes on at once, and within a window the figure is right again."""
    bench.apply()
    await bench.make_ready()
    bench.engine.queries, bench.engine.hits = 1000, 500
    bench.clock.now += 61
    await bench.settle()
    assert bench.status()["prefixCache"]["hitRatePercent"] == 50
    bench.clock.now += jump
    written = await writes_under_traffic(bench)
    assert bench.status()["prefixCache"]["hitRatePercent"] == 90
    assert 1 <= len(written) <= 12, written
    assert bench.condition("Ready")[0] == "True"
    assert await writes_under_traffic(bench) == [], "and then there is no news"
