"""The moving window over counters that restart, vanish and appear."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from reprise_operator.hitrate import HitFigures, HitRateWindow
from reprise_operator.observed import ObservedPod
from tests.operator.factories import NOW, metrics, pod, window


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
    assert hits.figures(NOW + 30, pod_uid="uid-a").percent == 100


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
