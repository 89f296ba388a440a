"""The rows beside loads: what is sent when, what is counted, and when there is no figure."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.beside_loads import Pass, judge, order, send_after, tier_values
from benchmarks.measure import MeasureError
from benchmarks.rows import BLOCK_SIZE, FULL, LOAD_PREFIXES, SMOKE, Scale, load_pool_blocks, plan
from benchmarks.servers import launch

SHARED = 2048
LOADS = Pass(
    gaps=(*(0.033,) * 97, 0.044, 0.044, 0.4),
    cached=(SHARED,) * 3,
    loaded={"host": 96, "disk": 3 * SHARED - 96},
    beside=True,
)
CONTROL = Pass(
    gaps=(*(0.030,) * 97, 0.040, 0.040, 0.5),
    cached=(SHARED, SHARED + 1, SHARED),
    loaded={"host": 0, "disk": 0},
    beside=True,
)


def test_the_figure_is_the_ratio_of_the_99th_percentiles() -> None:
    sample = judge([LOADS, LOADS], [CONTROL, CONTROL], tier="disk", shared=SHARED, from_tier=0.9)
    # Of 200 gaps in order, numbered from 0, it lies at 197.01: the last but two, and a hundredth of the way on.
    assert sample.value == pytest.approx((0.044 + 0.01 * 0.356) / (0.040 + 0.01 * 0.46))
    assert sample.cached == SHARED
    assert sample.note == (
        "gaps with loads p99 47.6 ms, median 33.0 ms, greatest 400.0 ms, n = 200; without p99 44.6 ms, median 30.0 ms, "
        "greatest 500.0 ms, n = 200; 6 requests loaded 12,288 tokens, 12,096 of them from the tier disk; "
        "those of the control none"
    )


@pytest.mark.parametrize(
    ("loads", "control", "complaint"),
    [
        (replace(LOADS, loaded={"host": 0, "disk": 2 * SHARED}), CONTROL, "6144 should have come from the tier disk"),
        (replace(LOADS, loaded={"host": 3 * SHARED, "disk": 0}), CONTROL, "6144 tokens came from host memory"),
        (replace(LOADS, cached=(SHARED, SHARED - 16, SHARED)), CONTROL, "with loads reused 2032 of 2048"),
        (replace(LOADS, cached=()), CONTROL, "with loads reused 0 of 2048"),
        (replace(LOADS, beside=False), CONTROL, "with loads ended after the stream"),
        (LOADS, replace(CONTROL, loaded={"host": 16, "disk": 0}), "control 16 tokens were loaded"),
        (LOADS, replace(CONTROL, cached=(SHARED, 0, SHARED)), "of the control reused 0 of 2048"),
        (replace(LOADS, gaps=()), CONTROL, "no gaps"),
    ],
)
def test_no_figure_where_the_loads_were_not_as_they_should_be(loads: Pass, control: Pass, complaint: str) -> None:
    with pytest.raises(MeasureError, match=complaint):
        judge([LOADS, loads] if loads.gaps else [loads], [CONTROL, control], tier="disk", shared=SHARED, from_tier=0.9)


def test_the_kinds_change_places_so_that_drift_is_in_both() -> None:
    assert order(2) == ("control", "loads", "loads", "control")
    assert order(1) == ("control", "loads")


def test_requests_are_spread_over_the_stream() -> None:
    assert send_after(512, 3) == (8, 176, 344)
    assert send_after(6, 3) == (1, 2, 4)


def test_tokens_are_counted_by_tier() -> None:
    exposition = """\
# HELP reprise:prefix_cache_tier_hits_total Prompt tokens that came from this tier.
# TYPE reprise:prefix_cache_tier_hits_total counter
reprise:prefix_cache_tier_hits_total{engine="0",model_name="bench",tier="host"} 96.0
reprise:prefix_cache_tier_hits_total{engine="0",model_name="bench",tier="disk"} 1.2192e+04
# TYPE reprise:prefix_cache_tier_hits_created gauge
reprise:prefix_cache_tier_hits_created{engine="0",model_name="bench",tier="disk"} 1.7e+09
# TYPE reprise:prefix_cache_tier_blocks gauge
reprise:prefix_cache_tier_blocks{engine="0",model_name="bench",tier="disk"} 384.0
"""
    assert tier_values(exposition, "hits") == {"host": 96, "disk": 12192}
    assert tier_values(exposition, "blocks") == {"host": 0, "disk": 384}
    assert tier_values("", "hits") == {"host": 0, "disk": 0}


@pytest.mark.parametrize("scale", [FULL, SMOKE])
def test_the_pool_keeps_the_last_prefix_and_loses_the_one_before_it(scale: Scale) -> None:
    prefix = scale.shared // BLOCK_SIZE
    stream = -(-(scale.decode_prompt + scale.stream_output) // BLOCK_SIZE)
    request = -(-(scale.shared + scale.own + 1) // BLOCK_SIZE)
    idle = load_pool_blocks(scale) - stream - request
    assert 0 < idle < prefix, "beside the request that runs there is room for no other prefix"
    # What the control's requests leave behind besides their prefix.
    assert LOAD_PREFIXES * (request - prefix) + prefix <= load_pool_blocks(scale) - stream


def test_the_99th_percentile_lies_below_the_gaps_with_a_prefill() -> None:
    gaps = FULL.stream_pairs * (FULL.stream_output - 1)
    assert gaps >= 1000
    assert FULL.stream_pairs * LOAD_PREFIXES < 0.01 * gaps - 2


def test_the_servers_have_a_small_pool_above_their_tier() -> None:
    assert [(stage.flavour, stage.rows) for stage in plan((), ("itl-beside-host-loads", "itl-beside-disk-loads"))] == [
        ("host-loads", (("itl-beside-host-loads", 1),)),
        ("disk-loads", (("itl-beside-disk-loads", 1),)),
    ]
    pool = load_pool_blocks(FULL)
    host = launch("reprise", "host-loads", model=Path("m"), port=1, pool_blocks=pool).describe()
    disk = launch("reprise", "disk-loads", model=Path("m"), port=1, cache_folder=Path("d"), pool_blocks=pool).describe()
    for shown in (host, disk):
        assert f"--num-gpu-blocks-override {pool}" in shown
        assert f"--max-model-len {pool * BLOCK_SIZE}" in shown
        assert "--kv-cache-memory-bytes" not in shown
    assert "--prefix-cache-host-memory 2GiB" in host
    assert "--prefix-cache-dir" in disk
    assert "host-memory" not in disk
