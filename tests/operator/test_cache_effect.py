"""PrefixCacheEffective: every reason, from what the engines' metrics say; each pod and their sum; and what is told when
the pods do otherwise than the spec asks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from reprise_operator.cache_effect import MISS_REASONS, Effect
from reprise_operator.observed import ObservedPod
from reprise_operator.spec import SpecError, identity_of
from reprise_operator.status import build_status
from tests.support.factories import (
    NOW,
    SETTINGS,
    body,
    metrics,
    observed,
    planned,
    pod,
    settled_status,
    window,
)
from tests.support.statuses import READY, conditions, kstatus, message, status_of


def served(
    name: str = "qwen-a", *, queries: float = 0, hits: float = 0, misses: Mapping[str, float] | None = None
) -> tuple[ObservedPod, ObservedPod]:
    """A pod 30 s ago and now, having looked up and found so many tokens between."""
    before = pod(name, metrics=metrics(at=NOW - 30, queries=1000, hits=500))
    after = metrics(queries=1000 + queries, hits=500 + hits)
    return before, pod(name, metrics=replace(after, misses=misses or {}))


def status(
    *pairs: tuple[ObservedPod, ObservedPod], spec: dict[str, Any] | None = None, previous: dict[str, Any] | None = None
) -> dict[str, Any]:
    replicas = len(pairs)
    plan = planned({"replicas": replicas, **(spec or {})})
    hits = window().observe([before for before, _ in pairs]).observe([after for _, after in pairs])
    figures = settled_status(replicas)
    return status_of(plan, observed(plan, *(after for _, after in pairs), status=figures), previous, hits=hits)


def effect(of: Mapping[str, Any]) -> tuple[str, str]:
    return conditions(of)["PrefixCacheEffective"]


def silent(name: str = "qwen-a", error: str = "/metrics answers 401") -> tuple[ObservedPod, ObservedPod]:
    return pod(name), replace(pod(name), metrics_error=error)


def off(name: str = "qwen-a") -> tuple[ObservedPod, ObservedPod]:
    return pod(name), pod(name, metrics=metrics(enabled=False))


TABLE: list[tuple[str, tuple[ObservedPod, ObservedPod], tuple[str, str], str]] = [
    ("hits", served(queries=2000, hits=1500), ("True", "Effective"), "are served from the prefix cache"),
    ("nothing asked", served(), ("Unknown", "NoTraffic"), "No prompt was served within the window."),
    ("wants credentials", silent(), ("Unknown", "MetricsUnavailable"), "qwen-a (/metrics answers 401)"),
    (
        "metrics without counters",
        (pod(), pod(metrics=replace(metrics(), prefix_cache_queries=None, prefix_cache_hits=None))),
        ("Unknown", "MetricsUnavailable"),
        "no counters of a prefix cache; vLLM's --disable-log-stats",
    ),
    ("off", off(), ("False", "Disabled"), "The spec asks for it; see the pods' logs"),
    (
        "no hit",
        served(queries=2000),
        ("False", "ZeroHits"),
        "share no beginning that is long enough, or it was evicted",
    ),
    (
        "hardly a hit",
        served(queries=100_000, hits=400),
        ("False", "ZeroHits"),
        "Hardly any prompt token was found in the cache",
    ),
    (
        "evicted",
        served(queries=2000, misses={"evicted": 9, "not_seen": 1}),
        ("False", "ZeroHits"),
        "evicted before; raise spec.memory.utilization or spec.replicas",
    ),
    ("tenants", served(queries=2000, misses={"other_salt": 3}), ("False", "ZeroHits"), "under another salt"),
    ("skipped", served(queries=2000, misses={"caching_off": 3}), ("False", "ZeroHits"), "ask not to be served from it"),
    ("a label of tomorrow", served(queries=2000, misses={"moon": 3}), ("False", "ZeroHits"), "or it was evicted"),
    (
        "short prompts",
        served(queries=200, misses={"shorter_than_block": 20, "not_seen": 5}),
        ("False", "PromptsShorterThanBlock"),
        "Most prompts are shorter than a block of 16 tokens",
    ),
    (
        "some short prompts",
        served(queries=2000, misses={"shorter_than_block": 5, "not_seen": 20}),
        ("False", "ZeroHits"),
        "begin like none before them",
    ),
    (
        "short prompts that are found all the same",
        served(queries=200, hits=50, misses={"shorter_than_block": 20}),
        ("True", "Effective"),
        "are served from the prefix cache",
    ),
    (
        "short prompts of vLLM, which gives no reasons",
        served(queries=200, misses={"shorter_than_block": 20, "unexplained": 3}),
        ("False", "PromptsShorterThanBlock"),
        "too short for anything of them to be found",
    ),
]


@pytest.mark.parametrize(("seen", "expected", "words"), [row[1:] for row in TABLE], ids=[row[0] for row in TABLE])
def test_every_reason(seen: tuple[ObservedPod, ObservedPod], expected: tuple[str, str], words: str) -> None:
    found = status(seen)
    assert effect(found) == expected
    assert words in message(found, "PrefixCacheEffective")
    assert kstatus(found) == READY, "it informs, and holds nothing up"


def test_the_table_has_every_reason() -> None:
    assert {row[2][1] for row in TABLE} == {effect.value for effect in Effect}


def test_every_reason_of_our_engine_has_a_word() -> None:
    assert len(set(MISS_REASONS.values())) == len(MISS_REASONS)
    for label, word in MISS_REASONS.items():
        found = status(served(queries=2000, misses={label: 1}))
        assert found["prefixCache"]["missReason"] == word
    assert "missReason" not in status(served(queries=2000, misses={"moon": 1}))["prefixCache"]


def test_each_pod_has_its_own_reason_and_figures_and_the_sum_is_that_of_all() -> None:
    found = status(
        served("a", queries=1000, hits=900),
        served("b", queries=3000),
        served("c"),
        silent("d"),
        served("e", queries=10, misses={"shorter_than_block": 2}),
    )
    cache = found["prefixCache"]
    assert [(entry["pod"], entry["reason"], entry.get("hitRatePercent")) for entry in cache["replicas"]] == [
        ("a", "Effective", 90),
        ("b", "ZeroHits", 0),
        ("c", "NoTraffic", None),
        ("d", "MetricsUnavailable", None),
        ("e", "PromptsShorterThanBlock", 0),
    ]
    assert (cache["hitTokens"], cache["queriedTokens"], cache["hitRatePercent"]) == (900, 4010, 22)
    assert sum(entry.get("queriedTokens", 0) for entry in cache["replicas"]) == 4010
    assert effect(found) == ("True", "Effective")
    assert message(found, "PrefixCacheEffective").endswith("1 of 5 pods report nothing: d (/metrics answers 401).")


def test_three_silent_pods_are_named_and_the_others_counted() -> None:
    found = status(*(silent(f"qwen-{letter}") for letter in "abcde"))
    assert message(found, "PrefixCacheEffective").endswith("qwen-c (/metrics answers 401) and 2 more.")


def test_prompts_may_go_to_the_wrong_pod() -> None:
    assert "sessionAffinity" not in message(status(served(queries=100)), "PrefixCacheEffective")
    two = status(served("a", queries=100), served("b", queries=100))
    assert "spec.service.sessionAffinity" in message(two, "PrefixCacheEffective")


# What runs against what is asked --------------------------------------------------------------------------------------


def test_pods_that_cache_though_the_spec_says_off() -> None:
    """The figures are those of what runs, and the message says that it is not what was asked."""
    found = status(served(queries=2000, hits=1500), spec={"prefixCaching": {"enabled": False}})
    assert found["prefixCache"]["enabled"] is True
    assert effect(found) == ("True", "Effective")
    assert "spec.prefixCaching.enabled is false, and yet the pods report" in message(found, "PrefixCacheEffective")
    assert conditions(found)["AsSpecified"] == ("False", "EngineDiffers")


def test_off_as_asked() -> None:
    found = status(off(), spec={"prefixCaching": {"enabled": False}})
    assert found["prefixCache"] == {"enabled": False}
    assert effect(found) == ("False", "Disabled")
    assert message(found, "PrefixCacheEffective") == "Prefix caching is off. spec.prefixCaching.enabled is false."
    assert conditions(found)["AsSpecified"] == ("True", "AsSpecified")


def test_pods_that_disagree_are_named() -> None:
    found = status(served("a", queries=1000, hits=900), off("b"))
    assert found["prefixCache"]["enabled"] is False, "one that is off is off"
    assert [(entry["pod"], entry["reason"]) for entry in found["prefixCache"]["replicas"]] == [
        ("a", "Effective"),
        ("b", "Disabled"),
    ]
    assert effect(found) == ("False", "Disabled")
    assert message(found, "PrefixCacheEffective").startswith("Prefix caching is off in 1 of 2 pods: b. The spec asks")


def test_without_a_pod_nothing_is_claimed() -> None:
    for spec, expected in (({}, ("Unknown", "MetricsUnavailable")), ({"enabled": False}, ("False", "Disabled"))):
        plan = planned({"prefixCaching": spec})
        found = status_of(plan, observed(plan, pod(ready=False)))
        assert effect(found) == expected
        assert "prefixCache" not in found
        assert "no pod is ready" in message(found, "PrefixCacheEffective").lower()


def test_a_spec_that_cannot_be_read_still_tells_what_runs() -> None:
    before, after = served(queries=2000, hits=1500)
    given = body()
    found = build_status(
        identity_of(given),
        SpecError("InvalidSpec", "no"),
        observed(planned(), after),
        {},
        window=window().observe([before]).observe([after]),
        now=NOW,
        settings=SETTINGS,
    )
    assert effect(found) == ("True", "Effective")
    assert "AsSpecified" not in conditions(found), "nobody knows what is specified"
    assert kstatus(found) == ("False", "False", "True")


@pytest.mark.parametrize(
    ("spec", "runs", "words"),
    [
        (
            {"prefixCaching": {"blockSize": 64}},
            {"block_size": 128},
            "spec.prefixCaching.blockSize asks for 64, and qwen-a runs with 128.",
        ),
        (
            {"memory": {"utilization": 0.8}},
            {"gpu_memory_utilization": 0.92},
            "spec.memory.utilization asks for 0.8, and qwen-a runs with 0.92.",
        ),
        (
            {},
            {"gpu_memory_utilization": 0.92},
            "status.memory.effective asks for 0.9, and qwen-a runs with 0.92.",
        ),
        (
            {"model": {"maxModelLen": 8192}},
            {"max_model_len": 4096},
            "spec.model.maxModelLen asks for 8192, and qwen-a runs with 4096.",
        ),
        (
            {},
            {"enable_prefix_caching": False},
            "spec.prefixCaching.enabled asks for true, and qwen-a runs with false.",
        ),
    ],
)
def test_an_engine_that_runs_with_something_else(spec: dict[str, Any], runs: dict[str, Any], words: str) -> None:
    plan = planned(spec)
    sound = replace(metrics(), max_model_len=8192, block_size=64, gpu_memory_utilization=plan.memory.effective)
    found = status_of(plan, observed(plan, pod(metrics=sound)))
    assert conditions(found)["AsSpecified"] == ("True", "AsSpecified")
    found = status_of(plan, observed(plan, pod(metrics=replace(sound, **runs))))
    assert conditions(found)["AsSpecified"] == ("False", "EngineDiffers")
    assert message(found, "AsSpecified") == words
    assert kstatus(found) == READY


def test_what_all_pods_do_otherwise_is_said_once() -> None:
    plan = planned({"replicas": 2, "prefixCaching": {"blockSize": 64}})
    pods = [pod(name, metrics=metrics()) for name in ("a", "b")]
    found = status_of(plan, observed(plan, *pods))
    expected = "spec.prefixCaching.blockSize asks for 64, and all 2 pods that report run with 16."
    assert message(found, "AsSpecified") == expected


def test_pods_of_an_older_template_are_not_measured_by_the_new_spec() -> None:
    plan = planned({"prefixCaching": {"enabled": False}})
    found = status_of(plan, observed(plan, pod("old", template="hash-old", metrics=metrics())))
    assert conditions(found)["AsSpecified"] == ("Unknown", "NotReported")


def test_what_an_engine_does_not_report_is_no_difference() -> None:
    plan = planned({"prefixCaching": {"blockSize": 64}, "model": {"maxModelLen": 99}})
    mute = replace(metrics(), block_size=None, max_model_len=None, gpu_memory_utilization=None)
    found = status_of(plan, observed(plan, pod(metrics=mute)))
    assert conditions(found)["AsSpecified"] == ("True", "AsSpecified")
    found = status_of(plan, observed(plan, pod(metrics=replace(mute, enable_prefix_caching=None))))
    assert conditions(found)["AsSpecified"] == ("Unknown", "NotReported")
