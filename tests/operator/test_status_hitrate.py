"""The moving window over counters that restart, vanish and appear."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from reprise_operator.hitrate import HitFigures, HitRateWindow
from reprise_operator.observed import ObservedPod
from tests.support.factories import NOW, metrics, pod, window


def at(seconds: float, queries: float, hits: float, *, name: str = "a", started: float = -1e6) -> ObservedPod:
    """A pod whose counters were read `seconds` after NOW."""
    seen = pod(name, metrics=metrics(at=NOW + seconds, queries=queries, hits=hits))
    return replace(seen, started_at=NOW + started)


def figures(hits: HitRateWindow, seconds: float) -> tuple[int, int]:
    found = hits.figures(NOW + seconds)
    return found.queried_tokens, found.hit_tokens


def test_what_was_served_before_we_looked_does_not_count() -> None:
    hits = window().observe([at(0, 9000, 9000)])
    assert figures(hits, 0) == (0, 0)
    assert figures(hits.observe([at(30, 9100, 9050)]), 30) == (100, 50)


def test_a_pod_that_began_under_our_eyes_counts_from_its_start() -> None:
    hits = window(started_at=NOW - 100).observe([at(0, 200, 150, started=-50)])
    assert figures(hits, 0) == (200, 150)


def test_a_counter_that_starts_again_counts_from_zero() -> None:
    hits = window().observe([at(0, 1000, 500)]).observe([at(30, 80, 20)])
    assert figures(hits, 30) == (80, 20)


def test_pods_are_added_up_and_told_apart() -> None:
    hits = window().observe([at(0, 0, 0), at(0, 0, 0, name="b")])
    hits = hits.observe([at(30, 100, 100), at(30, 300, 0, name="b")])
    assert figures(hits, 30) == (400, 100)
    assert hits.figures(NOW + 30).percent == 25
    assert hits.figures_of_pods(NOW + 30)["uid-a"].percent == 100
    assert hits.figures_of_pods(NOW + 30)["uid-b"].percent == 0
    assert hits.figures_of_pods(NOW + 400) == {}


def test_what_a_vanished_pod_served_counts_until_it_is_old() -> None:
    hits = window().observe([at(0, 0, 0)]).observe([at(30, 100, 60)]).observe([])
    assert figures(hits, 60) == (100, 60)
    assert figures(hits, 331) == (0, 0)
    assert hits.latest == {}


def test_the_window_moves() -> None:
    hits = window().observe([at(0, 0, 0)]).observe([at(30, 100, 0)]).observe([at(200, 200, 100)])
    assert figures(hits, 200) == (200, 100)
    assert figures(hits, 331) == (100, 100)
    assert len(hits.observe([at(400, 200, 100)]).deltas) == 1, "old differences are dropped"


def test_the_same_scrape_twice_counts_once() -> None:
    hits = window().observe([at(0, 0, 0)]).observe([at(30, 100, 50)])
    assert hits.observe([at(30, 100, 50)]) == hits


def test_another_process_counts_from_zero_though_it_has_served_more_than_the_one_before() -> None:
    def began(started: float, seen: ObservedPod) -> ObservedPod:
        assert seen.metrics is not None
        return replace(seen, metrics=replace(seen.metrics, started_at=NOW + started))

    hits = window().observe([began(-900, at(0, 100, 90))])
    same = hits.observe([began(-900, at(30, 150, 95))])
    assert figures(same, 30) == (50, 5)
    other = hits.observe([began(10, at(30, 150, 95))])
    assert figures(other, 30) == (150, 95)


def test_a_process_that_began_under_our_eyes_in_an_old_pod_counts_from_its_start() -> None:
    seen = at(0, 200, 150)
    assert seen.metrics is not None
    restarted = replace(seen, metrics=replace(seen.metrics, started_at=NOW - 50))
    assert figures(window(started_at=NOW - 100).observe([restarted]), 0) == (200, 150)


def test_what_was_served_in_a_long_blind_time_is_not_put_into_the_window() -> None:
    hits = window().observe([at(0, 0, 0)]).observe([at(301, 9000, 9000)])
    assert figures(hits, 301) == (0, 0)
    assert figures(hits.observe([at(331, 9100, 9050)]), 331) == (100, 50)
    late = window(started_at=NOW - 2000).observe([at(0, 9000, 9000, started=-1000)])
    assert figures(late, 0) == (0, 0), "the first figures of a pod that could not be read for long"


def test_a_pod_that_does_not_cache_looks_nothing_up() -> None:
    off = [replace(pod("a"), metrics=metrics(at=NOW + t, enabled=False, queries=100 * t)) for t in (0, 30)]
    hits = window().observe(off[:1]).observe(off[1:])
    assert figures(hits, 30) == (0, 0)


def test_more_hits_than_queries_are_as_many() -> None:
    hits = window().observe([at(0, 0, 0)]).observe([at(30, 100, 900)])
    assert figures(hits, 30) == (100, 100)


def test_a_clock_that_is_set_back_neither_stops_the_count_nor_keeps_old_traffic() -> None:
    hits = window().observe([at(0, 0, 0)]).observe([at(30, 100, 100)])
    back = hits.observe([at(-7200, 200, 100)])
    assert figures(back, -7200) == (100, 0)
    assert figures(back.observe([at(-7170, 300, 100)]), -7170) == (200, 0)
    assert back.is_full(NOW - 7200 + 300)


def test_a_clock_that_jumps_ahead_begins_anew() -> None:
    hits = window().observe([at(0, 0, 0)]).observe([at(30, 100, 100)])
    ahead = hits.observe([at(7200, 200, 100)])
    assert figures(ahead, 7200) == (0, 0)
    assert figures(ahead.observe([at(7230, 300, 100)]), 7230) == (100, 0)


def test_why_prompts_were_not_found() -> None:
    def missed(seconds: float, **misses: float) -> ObservedPod:
        seen = at(seconds, 100 + seconds, 0)
        assert seen.metrics is not None
        return replace(seen, metrics=replace(seen.metrics, misses=misses))

    hits = window().observe([missed(0, evicted=50)])
    assert hits.figures(NOW).misses == {}
    hits = hits.observe([missed(30, evicted=51, not_seen=2)])
    assert hits.figures(NOW + 30).misses == {"evicted": 1, "not_seen": 2}
    assert hits.figures(NOW + 30).main_miss == "not_seen"
    hits = hits.observe([missed(60, evicted=52, not_seen=2)])
    assert hits.figures(NOW + 60).main_miss is None, "half of them is no majority"
    restarted = hits.observe([missed(-50, evicted=1, not_seen=0)])
    assert restarted.figures(NOW + 60).misses == {"evicted": 3, "not_seen": 2}


def test_a_pod_without_figures_changes_nothing() -> None:
    hits = window().observe([at(0, 0, 0)])
    assert hits.observe([replace(at(30, 0, 0), metrics=None)]) == hits


def test_no_traffic_has_no_percentage() -> None:
    assert HitFigures(queried_tokens=0, hit_tokens=0).percent is None
    assert HitFigures(queried_tokens=3, hit_tokens=2).percent == 67


@given(
    st.lists(
        st.tuples(st.integers(0, 1000), st.integers(0, 100), st.booleans()),
        min_size=1,
        max_size=30,
    )
)
def test_the_sum_is_what_was_served_whatever_restarts(steps: Sequence[tuple[int, int, bool]]) -> None:
    """Each step serves some tokens, a share of them from the cache; the container restarts before some of them."""
    hits = HitRateWindow(seconds=1e9, started_at=NOW - 1).observe([at(0, 0, 0)])
    counter_queries = counter_hits = total_queries = total_hits = 0
    for turn, (tokens, share, restart) in enumerate(steps, start=1):
        found = tokens * share // 100
        if restart and (counter_queries > tokens):
            counter_queries = counter_hits = 0
        counter_queries, counter_hits = counter_queries + tokens, counter_hits + found
        total_queries, total_hits = total_queries + tokens, total_hits + found
        hits = hits.observe([at(turn * 30, counter_queries, counter_hits)])
    assert figures(hits, len(steps) * 30) == (total_queries, total_hits)
