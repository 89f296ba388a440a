"""An engine's /metrics → figures: of both engines, and of what makes no sense."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reprise_operator.exposition import SHORTER_THAN_BLOCK, UNEXPLAINED, parse_metrics

OURS = """\
# HELP vllm:prefix_cache_queries_total Prefix cache queries, in tokens.
# TYPE vllm:prefix_cache_queries_total counter
vllm:prefix_cache_queries_total{engine="0",model_name="smollm2"} 3000.0
vllm:prefix_cache_hits_total{engine="0",model_name="smollm2"} 1500.0
vllm:kv_cache_usage_perc{engine="0",model_name="smollm2"} 0.25
vllm:cache_config_info{block_size="16",enable_prefix_caching="True",gpu_memory_utilization="0.9",num_gpu_blocks="600"} 1
vllm:time_to_first_token_seconds_bucket{le="0.001"} this line is never parsed
reprise:engine_info{max_model_len="4096",version="0.1.0"} 1.0
"""
VLLM_TWO_ENGINES = """\
vllm:prefix_cache_queries_total{engine="0",model_name="q"} 10.0
vllm:prefix_cache_queries_total{engine="1",model_name="q"} 30.0
vllm:prefix_cache_queries_created{engine="1",model_name="q"} 1.7e9
vllm:prefix_cache_hits_total{engine="0",model_name="q"} 0.0
vllm:prefix_cache_hits_total{engine="1",model_name="q"} 8.0
vllm:kv_cache_usage_perc{engine="0",model_name="q"} 0.1
vllm:kv_cache_usage_perc{engine="1",model_name="q"} 0.7
vllm:cache_config_info{block_size="128",enable_prefix_caching="False",\
gpu_memory_utilization="0.85",num_gpu_blocks="None"} 1
"""


def test_the_figures_of_our_engine() -> None:
    metrics = parse_metrics(OURS, scraped_at=7.0)
    assert metrics.scraped_at == 7.0
    assert (metrics.prefix_cache_queries, metrics.prefix_cache_hits) == (3000.0, 1500.0)
    assert (metrics.enable_prefix_caching, metrics.gpu_memory_utilization) == (True, 0.9)
    assert (metrics.kv_cache_usage, metrics.block_size, metrics.num_gpu_blocks) == (0.25, 16, 600)
    assert (metrics.max_model_len, metrics.version) == (4096, "0.1.0")


def test_several_engines_in_a_vllm_pod_are_added_up() -> None:
    metrics = parse_metrics(VLLM_TWO_ENGINES, scraped_at=7.0)
    assert (metrics.prefix_cache_queries, metrics.prefix_cache_hits) == (40.0, 8.0)
    assert metrics.kv_cache_usage == 0.7
    assert metrics.enable_prefix_caching is False
    assert metrics.gpu_memory_utilization == 0.85
    assert (metrics.block_size, metrics.num_gpu_blocks) == (128, None)
    assert (metrics.max_model_len, metrics.version) == (None, None)


def test_an_engine_that_reports_nothing_has_no_figures_rather_than_zeros() -> None:
    metrics = parse_metrics("up 1\n", scraped_at=7.0)
    assert metrics.prefix_cache_queries is None
    assert metrics.enable_prefix_caching is None


def test_a_malformed_exposition_is_an_error() -> None:
    with pytest.raises(ValueError, match="could not convert string to float"):
        parse_metrics('vllm:kv_cache_usage_perc{engine="0"} half\n', scraped_at=7.0)


MISSES = """\
reprise:prefix_cache_misses_total{engine="0",model_name="q",reason="shorter_than_block"} 5.0
reprise:prefix_cache_misses_total{engine="0",model_name="q",reason="evicted"} 2.0
reprise:prefix_cache_misses_created{engine="0",model_name="q",reason="evicted"} 1.7e9
process_start_time_seconds 1.9e+09
"""


def test_why_prompts_were_not_found_and_since_when_is_counted() -> None:
    metrics = parse_metrics(OURS + MISSES, scraped_at=7.0)
    assert metrics.misses == {SHORTER_THAN_BLOCK: 5.0, "evicted": 2.0}
    assert metrics.started_at == 1.9e9
    assert parse_metrics(OURS, scraped_at=7.0).misses == {}


def lengths(*counts: tuple[str, float], engine: str = "0") -> str:
    name = "vllm:request_prompt_tokens_bucket"
    return "".join(f'{name}{{engine="{engine}",le="{le}",model_name="q"}} {count}\n' for le, count in counts)


def test_of_vllm_the_lengths_of_the_prompts_tell_which_were_too_short() -> None:
    """Its histogram's bounds are not those of the blocks: of the prompts up to 128 tokens those up to 100 are known."""
    text = lengths(("1.0", 0), ("50.0", 3), ("100.0", 7), ("200.0", 9), ("+Inf", 10))
    metrics = parse_metrics(VLLM_TWO_ENGINES + text, scraped_at=7.0)
    assert metrics.misses == {SHORTER_THAN_BLOCK: 7.0, UNEXPLAINED: 3.0}
    both = parse_metrics(VLLM_TWO_ENGINES + text + lengths(("100.0", 1), ("+Inf", 4), engine="1"), scraped_at=7.0)
    assert both.misses == {SHORTER_THAN_BLOCK: 8.0, UNEXPLAINED: 6.0}
    assert parse_metrics(text, scraped_at=7.0).misses == {}, "without a block size nothing is short"
    only_longer = parse_metrics(VLLM_TWO_ENGINES + lengths(("200.0", 1), ("+Inf", 4)), scraped_at=7.0)
    assert only_longer.misses == {}


def test_our_engines_own_reasons_go_before_its_histogram() -> None:
    text = OURS + MISSES + lengths(("10.0", 50), ("+Inf", 60))
    assert parse_metrics(text, scraped_at=7.0).misses == {SHORTER_THAN_BLOCK: 5.0, "evicted": 2.0}


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-Inf", "-3", "1e300"])
def test_a_figure_that_makes_no_sense_is_none(value: str) -> None:
    metrics = parse_metrics(
        f"vllm:prefix_cache_queries_total {value}\n"
        f"vllm:prefix_cache_hits_total {value}\n"
        f"vllm:kv_cache_usage_perc {value}\n"
        f"process_start_time_seconds {value}\n"
        f'reprise:prefix_cache_misses_total{{reason="evicted"}} {value}\n'
        f'vllm:cache_config_info{{block_size="{value}",num_gpu_blocks="{value}",'
        f'gpu_memory_utilization="{value}",enable_prefix_caching="{value}"}} 1\n'
        f'reprise:engine_info{{max_model_len="{value}",version="{"v" * 500}"}} 1\n',
        scraped_at=7.0,
    )
    assert (metrics.prefix_cache_queries, metrics.prefix_cache_hits, metrics.kv_cache_usage) == (None, None, None)
    assert (metrics.block_size, metrics.num_gpu_blocks, metrics.max_model_len) == (None, None, None)
    assert (metrics.gpu_memory_utilization, metrics.enable_prefix_caching, metrics.started_at) == (None, None, None)
    assert metrics.misses == {}
    assert metrics.version == "v" * 64


def test_labels_cannot_fill_the_memory() -> None:
    text = "".join(f'reprise:prefix_cache_misses_total{{reason="r{i}"}} 1\n' for i in range(1000))
    assert len(parse_metrics(text, scraped_at=7.0).misses) == 32
    odd = 'reprise:prefix_cache_misses_total{reason="<b>"} 1\nreprise:prefix_cache_misses_total 1\n'
    assert parse_metrics(odd, scraped_at=7.0).misses == {}


NAMES = ("vllm:prefix_cache_queries_total", "vllm:cache_config_info", "reprise:prefix_cache_misses_total")


@pytest.mark.parametrize("rest", ["9" * 400, '{ ="x"} 1', "1 " + "9" * 400, "{", '{a="', "", '{a="b" 1', "0x1"])
def test_a_line_that_the_parser_stumbles_over_is_a_value_error(rest: str) -> None:
    name = "vllm:prefix_cache_queries_total"
    with pytest.raises(ValueError):  # noqa: PT011 - the words are the parser's, where it has any
        parse_metrics(f"{name} {rest}\n{name}{rest}\n", scraped_at=7.0)


@given(st.lists(st.tuples(st.sampled_from(NAMES), st.text(max_size=30)), max_size=6))
def test_garbage_is_figures_that_make_sense_or_a_value_error(lines: list[tuple[str, str]]) -> None:
    text = "\n".join(f"{name}{rest}" for name, rest in lines)
    try:
        metrics = parse_metrics(text, scraped_at=7.0)
    except ValueError:
        return
    for figure in (metrics.prefix_cache_queries, *metrics.misses.values()):
        assert figure is None or (math.isfinite(figure) and figure >= 0)
