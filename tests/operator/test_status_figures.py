"""The figures of status: what the pods report, quantised and seldom written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from reprise_operator.conditions import timestamp
from reprise_operator.figures import MAX_REPLICAS_LISTED
from reprise_operator.hitrate import HitRateWindow
from reprise_operator.observed import Observed, ObservedPod
from reprise_operator.plan import Plan
from tests.support.factories import NOW, OLD, metrics, observed, planned, pod, window
from tests.support.statuses import READY, conditions, kstatus, message, status_of


def test_prefix_caching_is_what_the_pods_report_not_what_the_spec_asks() -> None:
    plan = planned({"prefixCaching": {"enabled": True}})
    status = status_of(plan, observed(plan, pod(metrics=metrics(enabled=False))))
    assert status["prefixCache"] == {"enabled": False}
    assert conditions(status)["PrefixCacheEffective"] == ("False", "Disabled")


def test_until_a_new_pod_is_ready_the_old_ones_are_reported() -> None:
    plan = planned({"prefixCaching": {"enabled": False}})
    old, new = pod("qwen-old", template=OLD, metrics=metrics()), pod("qwen-new", ready=False)
    assert status_of(plan, observed(plan, old, new))["prefixCache"]["enabled"] is True
    ready = pod("qwen-new", metrics=metrics(enabled=False))
    assert status_of(plan, observed(plan, old, ready))["prefixCache"] == {"enabled": False}


def test_once_a_new_pod_is_ready_the_old_ones_count_no_more() -> None:
    plan = planned()
    old = pod("qwen-old", template=OLD, metrics=metrics(enabled=False))
    assert status_of(plan, observed(plan, old, pod("qwen-new", metrics=metrics())))["prefixCache"]["enabled"] is True


def test_no_traffic_is_no_figure() -> None:
    plan = planned()
    status = status_of(plan, observed(plan, pod(metrics=metrics())))
    assert "hitRatePercent" not in status["prefixCache"]
    assert conditions(status)["PrefixCacheEffective"] == ("Unknown", "NoTraffic")


def traffic(queries: float, hits: float, *, at: float = NOW) -> tuple[Observed, HitRateWindow]:
    """One pod before and after it served so many tokens."""
    before = pod(metrics=metrics(at=at - 30, queries=1000, hits=0))
    after = pod(metrics=metrics(at=at, queries=1000 + queries, hits=hits))
    return observed(planned(), after), window().observe([before]).observe([after])


def test_the_hit_rate() -> None:
    seen, hits = traffic(2000, 1500)
    status = status_of(planned(), seen, hits=hits)
    assert status["prefixCache"] == {
        "enabled": True,
        "hitRatePercent": 75,
        "hitTokens": 1500,
        "queriedTokens": 2000,
        "windowSeconds": 300,
        "observedAt": timestamp(NOW),
        "usagePercent": 25,
        "replicas": [
            {
                "pod": "qwen-a",
                "enabled": True,
                "reason": "Effective",
                "hitRatePercent": 75,
                "hitTokens": 1500,
                "queriedTokens": 2000,
                "usagePercent": 25,
            }
        ],
    }
    assert conditions(status)["PrefixCacheEffective"] == ("True", "Effective")


def test_traffic_without_a_hit() -> None:
    seen, hits = traffic(2000, 0)
    status = status_of(planned(), seen, hits=hits)
    assert status["prefixCache"]["hitRatePercent"] == 0
    assert conditions(status)["PrefixCacheEffective"] == ("False", "ZeroHits")


def test_a_moving_rate_is_written_once_a_minute() -> None:
    seen, hits = traffic(2000, 1000)
    first = status_of(planned(), seen, hits=hits)
    moved, more = traffic(2000, 1500)
    soon = status_of(planned(), moved, first, hits=more, now=NOW + 30)
    assert soon["prefixCache"] == first["prefixCache"]
    later = status_of(planned(), moved, first, hits=more, now=NOW + 60)
    assert later["prefixCache"]["hitRatePercent"] == 75


def test_less_than_a_point_is_not_written() -> None:
    seen, hits = traffic(2000, 1000)
    first = status_of(planned(), seen, hits=hits)
    moved, more = traffic(2000, 1009)
    assert status_of(planned(), moved, first, hits=more, now=NOW + 120) == first


def test_the_end_of_traffic_is_written_once() -> None:
    seen, hits = traffic(2000, 1000)
    first = status_of(planned(), seen, hits=hits)
    quiet = status_of(planned(), seen, first, hits=hits, now=NOW + 301)
    assert "hitRatePercent" not in quiet["prefixCache"]
    assert conditions(quiet)["PrefixCacheEffective"][1] == "NoTraffic"
    assert status_of(planned(), seen, quiet, hits=hits, now=NOW + 900) == quiet


def test_an_idle_service_gets_the_same_status_for_ever() -> None:
    """Fault operator 17: an idle reconcile rewrote lastUpdated at each pass, waking itself."""
    plan = planned()
    hits = window()
    status: dict[str, Any] = {}
    written = []
    for turn in range(200):
        now = NOW + 30 * turn
        seen = observed(plan, pod(metrics=metrics(at=now, queries=5000, hits=4000)), at=now)
        hits = hits.observe(seen.pods)
        fresh = status_of(plan, seen, status, hits=hits, now=now)
        if fresh != status:
            written.append(turn)
        status = fresh
    assert written == [0]


def test_after_a_restart_the_last_figure_stands_until_the_window_is_full() -> None:
    seen, hits = traffic(2000, 1500)
    before = status_of(planned(), seen, hits=hits)
    restarted = NOW + 10
    fresh = HitRateWindow(seconds=300, started_at=restarted)
    for after in (0.0, 60.0, 299.0):
        status = status_of(planned(), seen, before, hits=fresh.observe(seen.pods), now=restarted + after)
        assert status["prefixCache"] == before["prefixCache"]
        assert conditions(status)["PrefixCacheEffective"] == ("True", "Effective")
    status = status_of(planned(), seen, before, hits=fresh.observe(seen.pods), now=restarted + 300)
    assert "hitRatePercent" not in status["prefixCache"]


def test_a_failing_scrape_keeps_the_last_figures_and_is_no_news() -> None:
    """The scraper keeps what it read last for a while (test_scraper.py); the fault beside it is not told yet."""
    plan = planned()
    seen, hits = traffic(2000, 1500)
    before = status_of(plan, seen, hits=hits)
    blind = replace(seen, pods=tuple(replace(pod, metrics_error="timeout") for pod in seen.pods))
    assert status_of(plan, blind, before, hits=hits, now=NOW + 60) == before


def test_pods_that_never_report_say_so() -> None:
    plan = planned()
    status = status_of(plan, observed(plan, replace(pod(), metrics_error="HTTP 404")))
    assert "enabled" not in status["prefixCache"]
    assert status["prefixCache"]["replicas"] == [
        {"pod": "qwen-a", "reason": "MetricsUnavailable", "message": "HTTP 404"}
    ]
    assert conditions(status)["PrefixCacheEffective"] == ("Unknown", "MetricsUnavailable")
    assert message(status, "PrefixCacheEffective") == "No ready pod reports its prefix cache: qwen-a (HTTP 404)."
    assert kstatus(status) == READY, "an informational condition must not hold back Ready"


def test_an_operator_that_cannot_scrape_yet_keeps_what_the_one_before_it_knew() -> None:
    plan = planned()
    seen, hits = traffic(2000, 1500)
    before = status_of(plan, seen, hits=hits)
    blind = observed(plan, replace(pod(), metrics_error="timeout"))
    fresh = window(started_at=NOW + 10)
    assert status_of(plan, blind, before, hits=fresh, now=NOW + 300)["prefixCache"] == before["prefixCache"]
    later = status_of(plan, blind, before, hits=fresh, now=NOW + 310)
    assert conditions(later)["PrefixCacheEffective"] == ("Unknown", "MetricsUnavailable")


def test_the_inherited_figure_does_not_list_pods_that_are_gone() -> None:
    plan = planned()
    seen, hits = traffic(2000, 1500)
    before = status_of(plan, seen, hits=hits)
    other = observed(plan, pod("qwen-b", metrics=metrics(at=NOW + 20)))
    status = status_of(plan, other, before, hits=window(started_at=NOW + 10).observe(other.pods), now=NOW + 60)
    assert status["prefixCache"]["hitRatePercent"] == 75
    assert [(entry["pod"], entry["reason"]) for entry in status["prefixCache"]["replicas"]] == [("qwen-b", "NoTraffic")]


# What moves a write --------------------------------------------------------------------------------------------------


def turns(plan: Plan, pods: Callable[[int], Sequence[ObservedPod]], *, passes: int) -> list[int]:
    """Numbers of the passes, 30 s apart, that change the status."""
    hits, status, written = window(started_at=NOW - 600), dict[str, Any](), []
    for turn in range(passes):
        now = NOW + 30 * turn
        seen = observed(plan, *pods(turn), at=now)
        hits = hits.observe(seen.pods)
        fresh = status_of(plan, seen, status, hits=hits, now=now)
        if fresh != status:
            written.append(turn)
        status = fresh
    return written


def test_a_rate_that_trembles_about_a_half_point_is_not_written() -> None:
    """74.4 % and 74.6 % are 74 and 75 when rounded, and no news."""

    def pods(turn: int) -> list[ObservedPod]:
        queried = 10_000 * (turn + 1)
        return [pod(metrics=metrics(at=NOW + 30 * turn, queries=queried, hits=queried * 0.745 + 20 * (-1) ** turn))]

    assert turns(planned(), pods, passes=200) == [0, 1]


def test_scrapes_that_fail_now_and_then_cost_no_write() -> None:
    """The scraper keeps what it read last, and says what went wrong since."""

    def pods(turn: int) -> list[ObservedPod]:
        read = pod(metrics=metrics(at=NOW + 30 * (turn - turn % 2)))
        return [replace(read, metrics_error=f"fault {turn}") if turn % 2 else read]

    assert turns(planned(), pods, passes=200) == [0]


def test_a_pod_that_reports_for_one_scrape_in_five_costs_two_writes_each_time() -> None:
    def pods(turn: int) -> list[ObservedPod]:
        return [replace(pod(), metrics_error="timeout") if turn % 5 else pod(metrics=metrics(at=NOW + 30 * turn))]

    assert len(turns(planned(), pods, passes=200)) <= 2 * 200 / 5


def test_changing_words_of_one_fault_are_written_at_most_once_a_minute() -> None:
    written = turns(planned(), lambda turn: [replace(pod(), metrics_error=f"fault {turn}")], passes=100)
    assert len(written) == 50


def test_a_clock_that_is_set_back_does_not_freeze_the_figures() -> None:
    plan = planned()
    seen, hits = traffic(2000, 1500)
    before = status_of(plan, seen, hits=hits)
    back = NOW - 7200
    moved, more = traffic(2000, 400, at=back)
    later = status_of(plan, moved, before, hits=more, now=back)
    assert later["prefixCache"]["hitRatePercent"] == 20


def test_pods_that_differ_in_a_few_blocks_do_not_take_turns_in_the_status() -> None:
    plan = planned()
    a, b = (
        pod(name, metrics=replace(metrics(), num_gpu_blocks=blocks))
        for name, blocks in (("qwen-a", 500), ("qwen-b", 503))
    )
    first = status_of(plan, observed(plan, a, b))
    assert first["engine"]["kvBlocks"] == 500
    second = status_of(plan, observed(plan, b), first)
    assert second["engine"]["kvBlocks"] == 503
    assert status_of(plan, observed(plan, a, b), second)["engine"]["kvBlocks"] == 503


def test_many_pods_are_listed_up_to_a_bound() -> None:
    plan = planned({"replicas": 100})
    pods = [pod(f"qwen-{number:03}", metrics=metrics()) for number in range(100)]
    status = status_of(plan, observed(plan, *pods))
    assert len(status["prefixCache"]["replicas"]) == MAX_REPLICAS_LISTED
