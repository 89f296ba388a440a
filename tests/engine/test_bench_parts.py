"""The pure parts of `reprise bench`: what is sent, how a stream is read, what figures come of it."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reprise_engine.bench.client import Answer, Failed, counted, read_counter, server_root, take_event
from reprise_engine.bench.report import warnings
from reprise_engine.bench.result import (
    CacheCounters,
    ClientLoad,
    ErrorKind,
    RequestError,
    RequestRecord,
    Result,
    ServerFacts,
)
from reprise_engine.bench.sse import EventParser
from reprise_engine.bench.statistics import compare, distribution, hit_rate_over_time, percentile, summarize
from reprise_engine.bench.text import PromptText, ordinary_ids, word_ids
from reprise_engine.bench.workloads import (
    Workload,
    make_workload,
    poisson_schedule,
    reserved_id,
    warm_up_turns,
)
from reprise_engine.errors import ConfigError
from reprise_engine.text import load_tokenizer
from tests.support.tiny_models import BOS_ID, EOS_ID, PAD_ID, tiny_model_path

# --- workloads


def shared(**changes: object) -> Workload:
    arguments = {"num_prompts": 6, "prefix_len": 20, "num_prefixes": 2, "input_len": 5, "output_len": 3} | changes
    return make_workload("shared-prefix", **arguments)  # type: ignore[arg-type]


def test_shared_prefixes_are_shared_in_turn_and_what_follows_differs_at_once() -> None:
    prompts = [conversation.turns[0].token_ids for conversation in shared().conversations]
    assert [len(prompt) for prompt in prompts] == [25] * 6
    assert len({prompt[:20] for prompt in prompts[0::2]}) == 1
    assert len({prompt[:20] for prompt in prompts[1::2]}) == 1
    assert prompts[0][0] != prompts[1][0]
    assert len({prompt[20] for prompt in prompts}) == 6


def test_random_prompts_differ_in_their_first_token() -> None:
    workload = make_workload("random", num_prompts=50, input_len=4, output_len=1)
    assert len({conversation.turns[0].token_ids[0] for conversation in workload.conversations}) == 50


def test_conversations_begin_with_the_system_prompt_and_add_a_turn_at_a_time() -> None:
    workload = make_workload("multi-turn", num_prompts=2, turns=3, input_len=7, output_len=4, prefix_len=10)
    assert workload.num_requests == 6
    first, second = workload.conversations
    assert [len(turn.token_ids) for turn in first.turns] == [17, 7, 7]
    assert first.turns[0].token_ids[:10] == second.turns[0].token_ids[:10]
    assert first.turns[0].token_ids[10] != second.turns[0].token_ids[10]


def test_the_seed_decides() -> None:
    assert shared(seed=1) == shared(seed=1)
    assert shared(seed=1).conversations != shared(seed=2).conversations


def test_lengths_vary_within_the_ratio_and_prefixes_do_not() -> None:
    workload = shared(num_prompts=200, range_ratio=0.4, input_len=10, output_len=20)
    own = {len(conversation.turns[0].token_ids) - 20 for conversation in workload.conversations}
    outputs = {conversation.turns[0].output_tokens for conversation in workload.conversations}
    assert (min(own), max(own)) == (6, 14)
    assert 12 <= min(outputs) < 15 < 25 < max(outputs) <= 28


def test_warm_up_shares_nothing_with_the_workload() -> None:
    token_ids = range(100, 120)  # so few that a workload of this size uses all it may
    workload = shared(num_prompts=40, token_ids=token_ids)
    turns = warm_up_turns(workload, 3, token_ids=token_ids)
    assert [len(turn.token_ids) for turn in turns] == [25] * 3
    assert {turn.token_ids[0] for turn in turns} == {reserved_id(token_ids)}
    used = {token for conversation in workload.conversations for turn in conversation.turns for token in turn.token_ids}
    assert used == {*token_ids} - {reserved_id(token_ids)}


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("shared-prefix", {"num_prompts": 0}, "--num-prompts is 0; it must be at least 1"),
        ("shared-prefix", {"prefix_len": 0}, "--prefix-len is 0; it must be at least 1"),
        ("random", {"prefix_len": 8}, "--prefix-len is 8, but random shares nothing"),
        ("random", {"turns": 2}, "--turns is 2, but random has one turn"),
        ("multi-turn", {"num_prefixes": 2}, "--num-prefixes is 2"),
        ("random", {"range_ratio": 1.0}, "--range-ratio is 1.0"),
        ("random", {"token_ids": range(3)}, "There are 3 token ids"),
        ("sharegpt", {}, "--workload is 'sharegpt'"),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(name: str, changes: dict[str, object], words: str) -> None:
    arguments = {"num_prompts": 1, "input_len": 1, "output_len": 1} | changes
    with pytest.raises(ConfigError, match=words):
        make_workload(name, **arguments)  # type: ignore[arg-type]


def test_a_poisson_schedule_has_its_rate_and_its_seed() -> None:
    times = poisson_schedule(4000, rate=50.0, seed=3)
    gaps = [later - earlier for earlier, later in pairwise(times)]
    assert times[0] == 0.0
    assert np.mean(gaps) == pytest.approx(1 / 50, rel=0.1)
    assert np.std(gaps) == pytest.approx(1 / 50, rel=0.1)  # of an exponential distribution: its mean
    assert times == poisson_schedule(4000, rate=50.0, seed=3)


# --- text


def test_texts_of_words_are_the_same_tokens_again_and_special_ones_are_left_out() -> None:
    tokenizer = load_tokenizer(tiny_model_path("qwen3"))
    words = word_ids(tokenizer)
    text = PromptText(tokenizer).decode(words)
    assert tokenizer.encode(text, add_special_tokens=False) == words
    assert not {BOS_ID, EOS_ID, PAD_ID} & {*ordinary_ids(tokenizer)}
    assert len(ordinary_ids(tokenizer)) == tokenizer.vocab_size - 3


# --- the stream

EVENTS = b'data: {"a": 1}\n\n: a comment\ndata: two\r\ndata:lines\r\n\r\nevent: x\nid: 7\ndata:\n\ndata: [DONE]\n\n'
DATA = [b'{"a": 1}', b"two\nlines", b"", b"[DONE]"]


@given(st.lists(st.integers(0, len(EVENTS)), max_size=12))
def test_events_are_read_from_any_pieces(cuts: list[int]) -> None:
    parser = EventParser()
    borders = [0, *sorted(cuts), len(EVENTS)]
    found = [data for start, end in pairwise(borders) for data in parser.feed(EVENTS[start:end])]
    assert found == DATA


def test_an_event_without_its_blank_line_is_not_there_yet() -> None:
    parser = EventParser()
    assert parser.feed(b"data: 1\n") == []
    assert parser.feed(b"\ndata: 2\r") == [b"1"]
    assert parser.feed(b"\r") == []
    assert parser.feed(b"\n") == [b"2"]


def read(*events: dict[str, object]) -> Answer:
    answer = Answer(sent_at=0.0)
    for number, event in enumerate(events):
        take_event(answer, json.dumps(event).encode(), float(number))
    return answer


USAGE = {"prompt_tokens": 9, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 8}}


def test_usage_counts_the_tokens_and_chunks_make_the_times() -> None:
    answer = read(
        {"choices": [{"text": "", "prompt_token_ids": [1, 2]}]},
        {"choices": [{"text": "two tokens", "token_ids": [3, 4]}]},
        {"choices": [{"text": "", "token_ids": [5]}]},
        {"choices": [{"text": "x", "token_ids": [6, 7], "finish_reason": "length"}]},
        {"choices": [], "usage": USAGE},
    )
    assert answer.chunk_times == [1.0, 2.0, 3.0]
    assert answer.token_ids == [3, 4, 5, 6, 7]
    assert (answer.output_tokens, answer.counted_by) == (5, "usage")
    assert (answer.prompt_tokens, answer.cached_tokens, answer.finish_reason) == (9, 8, "length")


def test_a_chat_stream_begins_with_its_first_text_not_with_the_role() -> None:
    answer = read(
        {"choices": [{"delta": {"role": "assistant", "content": ""}}]},
        {"choices": [{"delta": {"content": "Hel"}}]},
        {"choices": [{"delta": {"content": "lo"}}]},
        {"choices": [{"delta": {}, "finish_reason": "stop"}]},
    )
    assert answer.chunk_times == [1.0, 2.0]
    assert "".join(answer.text) == "Hello"
    assert (answer.output_tokens, answer.counted_by, answer.cached_tokens) == (2, "chunks", None)


def test_usage_in_every_chunk_is_not_added_up() -> None:
    answer = read(
        {"choices": [{"text": "a"}], "usage": USAGE | {"completion_tokens": 1}},
        {"choices": [{"text": "b"}], "usage": USAGE | {"completion_tokens": 2}},
        {"choices": [], "usage": USAGE | {"completion_tokens": 2}},
    )
    assert answer.output_tokens == 2


def test_llama_cpps_timings_tell_cached_tokens_where_usage_does_not() -> None:
    answer = read({"choices": [], "usage": {"prompt_tokens": 4, "completion_tokens": 2}, "timings": {"cache_n": 3}})
    assert answer.cached_tokens == 3


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (b'{"error": {"message": "the engine died"}}', "error_event"),
        (b"<html>", "protocol"),
        (b"[1]", "protocol"),
    ],
)
def test_what_is_no_completion_is_an_error_by_kind(data: bytes, kind: ErrorKind) -> None:
    with pytest.raises(Failed) as failed:
        take_event(Answer(sent_at=0.0), data, 0.0)
    assert failed.value.error.kind == kind


@pytest.mark.parametrize(
    ("url", "root"),
    [
        ("http://h:1", "http://h:1"),
        ("http://h:1/v1/", "http://h:1"),
        ("https://h/prefix/v1", "https://h/prefix"),
    ],
)
def test_a_url_with_or_without_v1(url: str, root: str) -> None:
    assert server_root(url) == root


def test_a_counter_is_summed_over_its_labels() -> None:
    text = (
        "# TYPE vllm:prefix_cache_hits counter\n"
        'vllm:prefix_cache_hits_total{engine="0"} 3.0\n'
        'vllm:prefix_cache_hits_total{engine="1"} 4.0\n'
        'vllm:prefix_cache_hits_created{engine="1"} 1.7e9\n'
    )
    assert read_counter(text, "vllm:prefix_cache_hits") == 7
    assert read_counter(text, "vllm:prefix_cache_queries") is None


def test_a_server_that_was_started_anew_has_no_difference() -> None:
    before = CacheCounters(query_tokens=10, hit_tokens=2)
    after = CacheCounters(query_tokens=30, hit_tokens=12)
    assert counted(before, after) == CacheCounters(query_tokens=20, hit_tokens=10)
    assert counted(after, before) is None
    assert counted(None, after) is None


# --- figures


@given(st.lists(st.floats(-1e6, 1e6), min_size=1), st.floats(0, 100))
def test_percentiles_are_numpys(values: list[float], percent: float) -> None:
    assert percentile(sorted(values), percent) == pytest.approx(np.percentile(values, percent), abs=1e-6)


def test_a_distribution_of_nothing_is_none() -> None:
    assert distribution([None, None]) is None
    found = distribution([2.0, None, 4.0], [50, 99.9])
    assert found is not None
    assert (found.count, found.mean, found.max, list(found.percentiles)) == (2, 3.0, 4.0, ["p50", "p99.9"])


def record(index: int, **changes: object) -> RequestRecord:
    fields: dict[str, object] = {
        "index": index,
        "conversation": index,
        "turn": 0,
        "sent_prompt_tokens": 10,
        "scheduled_at": 0.0,
        "sent_at": 1.0,
        "finished_at": 5.0,
        "chunk_times": (2.0, 3.0, 5.0),
        "prompt_tokens": 12,
        "cached_tokens": 6,
        "output_tokens": 5,
        "finish_reason": "length",
    }
    return RequestRecord(**(fields | changes))  # type: ignore[arg-type]


def result(*records: RequestRecord, **changes: object) -> Result:
    fields: dict[str, object] = {
        "label": "",
        "workload": "random",
        "settings": {"rate": None, "ignore_eos": True},
        "server": ServerFacts(base_url="http://h", model="m"),
        "started": "2026-01-01T00:00:00+00:00",
        "duration": 10.0,
        "records": records,
        "client": ClientLoad(loop_lag_p99=0.0, loop_lag_max=0.0, cpu_share=0.1),
    }
    return Result(**(fields | changes))  # type: ignore[arg-type]


def test_the_times_of_a_request() -> None:
    one = record(0)
    assert (one.ttft, one.ttft_from_schedule, one.latency, one.latency_from_schedule) == (1.0, 2.0, 4.0, 5.0)
    assert one.itl == (1.0, 2.0), "between chunks"
    assert one.tpot == 3.0 / 4, "between tokens, by the server's count"
    assert record(0, output_tokens=1).tpot is None


def test_a_summary_counts_successes_and_names_failures() -> None:
    refused = RequestError(kind="http", message="no", status=429)
    failed = {"cached_tokens": None, "prompt_tokens": None, "chunk_times": ()}
    summary = summarize(
        result(
            record(0),
            record(1, cached_tokens=None),
            record(2, error=refused, **failed),
            record(3, error=replace(refused, kind="timeout", status=None), **failed),
            record(4, error=refused, **failed),
            counters=CacheCounters(query_tokens=40, hit_tokens=10),
        )
    )
    assert (summary.requests, summary.completed) == (5, 2)
    assert summary.errors == {"http 429": 2, "timeout": 1}
    assert (summary.prompt_tokens, summary.output_tokens, summary.cached_tokens) == (24, 10, 6)
    assert summary.hit_rate == 0.5, "of the prompt that told"
    assert summary.hit_rate_counters == 0.25
    assert (summary.request_throughput, summary.output_throughput, summary.total_throughput) == (0.2, 1.0, 3.4)
    assert summary.tokens_per_chunk == 10 / 6
    assert summary.itl is not None
    assert (summary.itl.count, summary.itl.mean) == (4, 1.5)
    assert summary.send_delay is not None
    assert summary.send_delay.count == 5


def test_a_server_that_tells_nothing_has_no_hit_rate_rather_than_none_hit() -> None:
    summary = summarize(result(record(0, cached_tokens=None, counted_by="chunks")))
    assert (summary.cached_tokens, summary.hit_rate, summary.hit_rate_counters) == (None, None, None)
    assert "tells no usage" in warnings(result(), summary)[0]


def test_the_hit_rate_over_time_is_of_all_so_far() -> None:
    later = record(0, chunk_times=(9.0,), cached_tokens=12)
    assert hit_rate_over_time([later, record(1, cached_tokens=0)]) == [(2.0, 0.0), (9.0, 0.5)]


def test_ratios_are_above_one_where_the_first_run_was_better() -> None:
    fast = result(record(0), duration=5.0)
    slow = result(record(0, chunk_times=(5.0, 6.0, 8.0), finished_at=8.0), duration=10.0)
    ratios = compare(summarize(fast), summarize(slow))
    assert ratios["ttft mean"] == 4.0
    assert ratios["tpot p50"] == 1.0
    assert ratios["output_throughput"] == 2.0
    assert ratios["duration"] == 2.0


def test_a_late_client_says_so() -> None:
    late = result(record(0), client=ClientLoad(loop_lag_p99=0.2, loop_lag_max=0.5, cpu_share=0.9))
    assert "the client itself was late: its event loop by 200.0 ms" in warnings(late, summarize(late))[0]
    held = result(record(0, sent_at=1.5), settings={"rate": 2.0, "ignore_eos": True})
    assert "sent up to 1.50 s after they were due" in warnings(held, summarize(held))[0]


def test_the_json_of_a_result_is_whole() -> None:
    content = json.loads(json.dumps(result(record(0)).as_json()))
    [request] = content["requests"]
    assert request["ttft"] == 1.0
    assert request["chunk_times"] == [2.0, 3.0, 5.0]
    assert not any(isinstance(value, float) and math.isnan(value) for value in request.values())
