"""Status as kstatus, kubectl and people read it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from reprise_operator.conditions import clip, timestamp
from reprise_operator.diagnosis import UNSCHEDULABLE_SECONDS
from reprise_operator.hitrate import HitRateWindow
from reprise_operator.naming import PLAN_HASH_ANNOTATION
from reprise_operator.observed import ContainerFailure, Observed
from reprise_operator.spec import SpecError, identity_of
from reprise_operator.status import build_status
from tests.operator.factories import (
    CURRENT,
    NOW,
    OLD,
    SETTINGS,
    body,
    child,
    conditions,
    deployment_status,
    merged,
    message,
    metrics,
    observed,
    planned,
    pod,
    status_of,
    window,
)

NOT_READY = deployment_status(ready=0, available=0)
READY, RECONCILING, STALLED = ("True", "False", "False"), ("False", "True", "False"), ("False", "False", "True")


def kstatus(status: Mapping[str, Any]) -> tuple[str, str, str]:
    found = conditions(status)
    return found["Ready"][0], found["Reconciling"][0], found["Stalled"][0]


def reason(status: Mapping[str, Any]) -> str:
    return conditions(status)["Ready"][1]


# The first write, progress, ready ----------------------------------------------------------------------------------


def test_the_first_status_already_says_not_ready() -> None:
    """kstatus takes an object without a Ready condition for Current."""
    status = status_of(planned(generation=4), Observed(at=NOW))
    assert status["observedGeneration"] == 4
    assert kstatus(status) == RECONCILING
    assert reason(status) == "Applying"
    assert conditions(status)["Available"] == ("False", "NoReadyPod")
    assert status["selector"] == "serving.reprise.io/name=qwen"
    assert status["url"] == "http://qwen.llm.svc:8000/v1"
    assert status["model"] == "qwen"
    assert (status["replicas"], status["readyReplicas"]) == (0, 0)
    assert all(item["observedGeneration"] == 4 for item in status["conditions"])


def test_ready() -> None:
    plan = planned({"replicas": 2})
    seen = observed(
        plan,
        pod("qwen-a", metrics=metrics()),
        pod("qwen-b", metrics=metrics()),
        status=deployment_status(replicas=2, updated=2, ready=2, available=2),
    )
    status = status_of(plan, seen)
    assert kstatus(status) == READY
    assert message(status, "Ready") == "2 of 2 pods are ready."
    assert conditions(status)["Available"] == ("True", "Serving")
    assert [status[key] for key in ("replicas", "readyReplicas", "updatedReplicas", "availableReplicas")] == [2] * 4
    assert status["engine"] == {"version": "0.1.0", "blockSize": 16, "kvBlocks": 500, "maxModelLen": 4096}
    assert status["memory"] == {
        "effective": 0.9,
        "reason": "automatic: maxModelLen is unset or at most 32768",
        "deviceOutOfMemory": False,
    }
    assert conditions(status)["MemoryTuned"] == ("False", "Automatic")


@pytest.mark.parametrize(
    "figures",
    [
        deployment_status(replicas=1, updated=0, ready=1, available=1),
        deployment_status(replicas=2, updated=1, ready=2, available=2),
        deployment_status(replicas=2, updated=1, ready=1, available=1),
        deployment_status(seen=2),
        deployment_status(ready=0, available=0),
        {},
    ],
)
def test_pods_of_an_older_template_do_not_make_it_ready(figures: dict[str, Any]) -> None:
    """Fault operator 6: Ready while the counted pods were of the old generation."""
    plan = planned()
    status = status_of(plan, observed(plan, pod(template=OLD), status=figures))
    assert kstatus(status) == RECONCILING


def test_it_is_not_ready_before_the_new_spec_is_applied() -> None:
    """Fault operator 6: the Deployment is fine, but it is still that of the spec before."""
    before, after = planned(), planned({"prefixCaching": {"enabled": False}}, generation=2)
    status = status_of(after, observed(before, pod()))
    assert kstatus(status) == RECONCILING
    assert message(status, "Ready") == "Deployment/qwen is being applied."
    assert status["observedGeneration"] == 2


def test_it_is_not_ready_while_its_init_container_fails() -> None:
    """Fault operator 6: Ready while an init container crash-loops."""
    plan = planned()
    failure = ContainerFailure(container="fetch", reason="CrashLoopBackOff", message="no route", exit_code=1, init=True)
    status = status_of(plan, observed(plan, pod(ready=False, failures=[failure]), status=NOT_READY))
    assert kstatus(status) == STALLED
    assert message(status, "Stalled") == "Pod qwen-a, container fetch fails (exit code 1): no route"


def test_a_service_without_its_network_service_is_not_ready() -> None:
    plan = planned()
    seen = replace(observed(plan, pod()), children=(child(plan.deployment, **deployment_status()),))
    assert kstatus(status_of(plan, seen)) == RECONCILING


@pytest.mark.parametrize(
    ("spec", "expected"), [({"suspend": True, "replicas": 3}, "Suspended"), ({"replicas": 0}, "ScaledToZero")]
)
def test_no_pods_wanted_and_none_there_is_ready_but_not_available(spec: dict[str, Any], expected: str) -> None:
    plan = planned(spec)
    status = status_of(plan, observed(plan, status=deployment_status(replicas=0, updated=0, ready=0, available=0)))
    assert kstatus(status) == READY
    assert reason(status) == expected
    assert conditions(status)["Available"][0] == "False"


def test_suspending_is_in_progress_until_the_pods_are_gone() -> None:
    plan = planned({"suspend": True})
    assert kstatus(status_of(plan, observed(plan, pod()))) == RECONCILING


def test_a_degraded_service_is_available_and_says_how_far_it_is() -> None:
    plan = planned({"replicas": 2})
    seen = observed(
        plan,
        pod("qwen-a"),
        pod("qwen-b", ready=False),
        status=deployment_status(replicas=2, updated=2, ready=1, available=1),
    )
    status = status_of(plan, seen)
    assert kstatus(status) == RECONCILING
    assert message(status, "Ready") == "1 of 2 pods of the present template are ready."
    assert conditions(status)["Available"][0] == "True"


# What needs a person ------------------------------------------------------------------------------------------------

FAILURES: list[tuple[str, ContainerFailure, str, str]] = [
    (
        "image",
        ContainerFailure(container="engine", reason="ErrImagePull", message="not found"),
        "ImagePullFailed",
        "cannot be pulled: not found",
    ),
    (
        "image name",
        ContainerFailure(container="engine", reason="InvalidImageName", message="bad reference"),
        "ImagePullFailed",
        "bad reference",
    ),
    (
        "secret",
        ContainerFailure(container="engine", reason="CreateContainerConfigError", message='secret "k" not found'),
        "SecretNotFound",
        'secret "k" not found',
    ),
    (
        "secret's key",
        ContainerFailure(
            container="engine", reason="CreateContainerConfigError", message="couldn't find key a in Secret llm/k"
        ),
        "SecretNotFound",
        "couldn't find key a",
    ),
    (
        "root",
        ContainerFailure(container="engine", reason="CreateContainerConfigError", message="container has runAsNonRoot"),
        "ContainerConfigInvalid",
        "runAsNonRoot",
    ),
    (
        "mount",
        ContainerFailure(container="", reason="FailedMount", message="hostPath type check failed"),
        "VolumeMountFailed",
        "hostPath type check failed",
    ),
    (
        "host memory",
        ContainerFailure(container="engine", reason="OOMKilled", exit_code=137, restart_count=1),
        "OutOfMemory",
        "resources.limits.memory",
    ),
    (
        "host memory, waiting",
        ContainerFailure(
            container="engine",
            reason="CrashLoopBackOff",
            terminated_reason="OOMKilled",
            exit_code=137,
            message="INFO ok",
        ),
        "OutOfMemory",
        "resources.limits.memory",
    ),
    (
        "device memory",
        ContainerFailure(
            container="engine",
            reason="Error",
            exit_code=1,
            message="RuntimeError: NPU out of memory. Tried to allocate 2 GiB",
        ),
        "DeviceOutOfMemory",
        "memory.utilization",
    ),
    (
        "architecture",
        ContainerFailure(
            container="engine", reason="Error", exit_code=1, message="UnsupportedModel: Qwen2VL is multimodal"
        ),
        "UnsupportedModel",
        "Qwen2VL is multimodal",
    ),
    (
        "no model",
        ContainerFailure(container="engine", reason="Error", exit_code=1, message="ModelNotFound: /model is empty"),
        "ModelNotFound",
        "/model is empty",
    ),
    (
        "KV pool",
        ContainerFailure(container="engine", reason="Error", exit_code=1, message="InsufficientMemory: 3 blocks"),
        "InsufficientMemory",
        "3 blocks",
    ),
    (
        "argument",
        ContainerFailure(container="engine", reason="Error", exit_code=2, message="error: unrecognized arguments: --x"),
        "InvalidArguments",
        "--x",
    ),
    (
        "crash loop",
        ContainerFailure(container="engine", reason="CrashLoopBackOff", exit_code=3, message="KeyError: 'q'"),
        "ContainerCrashing",
        "(exit code 3): KeyError: 'q'",
    ),
    (
        "third crash",
        ContainerFailure(container="engine", reason="Error", exit_code=3, restart_count=2),
        "ContainerCrashing",
        "see its log",
    ),
]


@pytest.mark.parametrize(
    ("failure", "expected", "words"), [item[1:] for item in FAILURES], ids=[i[0] for i in FAILURES]
)
def test_what_stops_a_pod_is_said_with_its_last_words(failure: ContainerFailure, expected: str, words: str) -> None:
    plan = planned()
    status = status_of(plan, observed(plan, pod(ready=False, failures=[failure]), status=NOT_READY))
    assert kstatus(status) == STALLED
    assert conditions(status)["Stalled"] == ("True", expected)
    assert words in message(status, "Stalled")
    assert message(status, "Stalled").startswith("Pod qwen-a")
    assert status["memory"]["deviceOutOfMemory"] is (expected == "DeviceOutOfMemory")


def test_it_recovers_by_itself_once_the_cause_is_gone() -> None:
    plan = planned()
    stalled = status_of(plan, observed(plan, pod(ready=False, failures=[FAILURES[0][1]]), status=NOT_READY))
    assert kstatus(status_of(plan, observed(plan, pod()), stalled, now=NOW + 60)) == READY


def test_the_two_phases_of_a_failing_pull_read_alike() -> None:
    plan = planned()

    def status(kind: str, words: str) -> Mapping[str, Any]:
        failure = ContainerFailure(container="engine", reason=kind, message=words)
        return status_of(plan, observed(plan, pod(ready=False, failures=[failure]), status=NOT_READY))

    assert status("ErrImagePull", "rpc error: not found") == status(
        "ImagePullBackOff", 'Back-off pulling image "x:1": ErrImagePull: rpc error: not found'
    )


def test_the_growing_delay_of_a_crash_loop_is_no_news() -> None:
    plan = planned()

    def status(words: str) -> Mapping[str, Any]:
        failure = ContainerFailure(container="engine", reason="CrashLoopBackOff", message=words, exit_code=1)
        return status_of(plan, observed(plan, pod(ready=False, failures=[failure]), status=NOT_READY))

    assert status("back-off 10s restarting failed container=engine pod=x") == status(
        "back-off 5m0s restarting failed container=engine pod=x"
    )


def test_one_crash_is_a_hiccup() -> None:
    plan = planned()
    failure = ContainerFailure(
        container="engine", reason="Error", exit_code=1, restart_count=1, message="reset by peer"
    )
    status = status_of(plan, observed(plan, pod(ready=False, failures=[failure]), status=NOT_READY))
    assert kstatus(status) == RECONCILING
    assert reason(status) == "ContainerRestarting"


def test_a_failing_pod_of_the_older_template_says_nothing_about_the_cure() -> None:
    plan = planned(generation=2)
    seen = observed(
        plan,
        pod("qwen-old", ready=False, template=OLD, failures=[FAILURES[0][1]]),
        pod("qwen-new", ready=False),
        status=deployment_status(replicas=2, updated=1, ready=0, available=0),
    )
    assert kstatus(status_of(plan, seen)) == RECONCILING
    stray = replace(pod("stray", ready=False, failures=[FAILURES[0][1]]), template_hash=None)
    unknown = replace(seen, template_hash=None, pods=(*seen.pods, stray))
    assert kstatus(status_of(plan, unknown)) == RECONCILING


def test_a_bad_image_beside_a_serving_pod_is_stalled_and_available() -> None:
    plan = planned({"replicas": 2}, generation=2)
    seen = observed(
        plan,
        pod("qwen-old", template=OLD),
        pod("qwen-new", ready=False, failures=[FAILURES[0][1]]),
        status=deployment_status(replicas=2, updated=1, ready=1, available=1),
    )
    status = status_of(plan, seen)
    assert kstatus(status) == STALLED
    assert conditions(status)["Available"] == ("True", "Serving")


def test_a_secret_that_does_not_exist() -> None:
    plan = planned({"auth": {"apiKeySecretRef": {"name": "keys"}}})
    seen = observed(plan, pod(ready=False), status=NOT_READY, missing_secrets=("keys", "somebody-elses"))
    status = status_of(plan, seen)
    assert conditions(status)["Stalled"] == ("True", "SecretNotFound")
    assert message(status, "Stalled") == (
        "Secret keys does not exist in namespace llm. The pods start once it is created."
    )
    assert kstatus(status_of(plan, observed(plan, pod(), missing_secrets=("keys",)))) == READY


def test_a_claim_that_does_not_exist() -> None:
    plan = planned({"model": {"uri": "pvc://weights/qwen"}})
    assert plan.claim_names == ("weights",)
    status = status_of(plan, observed(plan, status=NOT_READY, missing_claims=("weights",)))
    assert conditions(status)["Stalled"] == ("True", "ClaimNotFound")
    assert "weights" in message(status, "Stalled")


def test_a_name_that_is_taken() -> None:
    plan = planned()
    foreign = child(merged(plan.network_service, {"metadata": {"labels": None, "ownerReferences": []}}), owned=False)
    foreign = replace(foreign, body={**foreign.body, "metadata": {"name": "qwen"}})
    status = status_of(plan, replace(observed(plan), children=(foreign,)))
    assert conditions(status)["Stalled"] == ("True", "NameTaken")
    assert message(status, "Stalled").startswith("Service/qwen exists")


def test_what_the_api_server_refuses_is_said_in_its_own_words() -> None:
    """Fault operator 15: a bad quantity from a user panicked the operator."""
    plan = planned({"runtime": {"resources": {"limits": {"memory": "much"}}}})
    seen = Observed(at=NOW, apply_errors={"Deployment/qwen": "quantities must match", "Deployment/gone": "old"})
    status = status_of(plan, seen)
    assert conditions(status)["Stalled"] == ("True", "ApplyRefused")
    assert message(status, "Stalled") == "The API server refused Deployment/qwen: quantities must match"


def test_pods_that_quota_or_pod_security_refuses() -> None:
    plan = planned()
    refused = {"type": "ReplicaFailure", "status": "True", "message": 'violates PodSecurity "restricted"'}
    seen = observed(plan, status={"observedGeneration": 3, "conditions": [refused]})
    status = status_of(plan, seen)
    assert conditions(status)["Stalled"] == ("True", "PodsRefused")
    assert "PodSecurity" in message(status, "Stalled")


def unschedulable(waited: float) -> Observed:
    plan = planned()
    waiting = replace(
        pod(ready=False),
        scheduled=False,
        unschedulable_message="0/1 nodes are available: 1 Insufficient huawei.com/Ascend910.",
        created_at=NOW - waited,
    )
    return observed(plan, waiting, status=NOT_READY)


def test_no_free_device_is_said_at_once_and_stalls_in_time() -> None:
    """Fault operator 7: no free device, and the rollout waited for ever without a word."""
    early = status_of(planned(), unschedulable(10))
    assert kstatus(early) == RECONCILING
    assert reason(early) == "Unschedulable"
    assert "Insufficient huawei.com/Ascend910" in message(early, "Ready")
    late = status_of(planned(), unschedulable(UNSCHEDULABLE_SECONDS))
    assert kstatus(late) == STALLED
    assert reason(late) == "Unschedulable"


def test_a_rollout_without_progress_stalls() -> None:
    plan = planned()
    late = {"type": "Progressing", "status": "False", "reason": "ProgressDeadlineExceeded", "message": "timed out"}
    status = status_of(plan, observed(plan, pod(ready=False), status={**NOT_READY, "conditions": [late]}))
    assert conditions(status)["Stalled"] == ("True", "ProgressDeadlineExceeded")
    stale = {**NOT_READY, "observedGeneration": 2, "conditions": [late]}
    assert kstatus(status_of(plan, observed(plan, pod(ready=False), status=stale))) == RECONCILING


def test_a_field_that_is_not_supported_leaves_the_running_pods_reported() -> None:
    plan = planned()
    running = observed(plan, pod(metrics=metrics()))
    before = status_of(plan, running)
    error = SpecError("NotSupported", "This release does not honour spec.autoscaling.")
    identity = identity_of(body(generation=2))
    status = build_status(identity, error, running, before, window=window(), now=NOW + 1, settings=SETTINGS)
    assert kstatus(status) == STALLED
    assert conditions(status)["Stalled"] == ("True", "NotSupported")
    assert message(status, "Stalled") == "This release does not honour spec.autoscaling."
    assert conditions(status)["Available"] == ("True", "Serving")
    assert status["observedGeneration"] == 2
    for key in ("url", "model", "memory", "replicas", "readyReplicas", "prefixCache", "engine"):
        assert status[key] == before[key], key


# Figures ------------------------------------------------------------------------------------------------------------


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
        "replicas": [{"pod": "qwen-a", "enabled": True, "hitRatePercent": 75}],
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
    plan = planned()
    seen, hits = traffic(2000, 1500)
    before = status_of(plan, seen, hits=hits)
    blind = observed(plan, replace(pod(), metrics_error="timeout"))
    assert status_of(plan, blind, before, hits=hits, now=NOW + 60) == before


def test_pods_that_never_report_say_so() -> None:
    plan = planned()
    status = status_of(plan, observed(plan, replace(pod(), metrics_error="HTTP 404")))
    assert "prefixCache" not in status
    assert conditions(status)["PrefixCacheEffective"] == ("Unknown", "MetricsUnavailable")
    assert "HTTP 404" in message(status, "PrefixCacheEffective")
    assert kstatus(status) == READY, "an informational condition must not hold back Ready"


# Times and lengths --------------------------------------------------------------------------------------------------


def test_transition_times_move_with_the_status_only() -> None:
    plan = planned()
    first = status_of(plan, observed(plan, pod(ready=False), status=NOT_READY))
    second = status_of(plan, observed(plan, pod()), first, now=NOW + 100)
    third = status_of(plan, observed(plan, pod()), second, now=NOW + 200)
    times = [{item["type"]: item["lastTransitionTime"] for item in status["conditions"]} for status in (first, second)]
    assert times[0]["Ready"] == timestamp(NOW)
    assert times[1]["Ready"] == timestamp(NOW + 100)
    assert times[1]["Stalled"] == timestamp(NOW)
    assert third == second


def test_the_schemas_default_condition_is_replaced() -> None:
    pending = {"type": "Ready", "status": "Unknown", "reason": "Pending", "message": "", "lastTransitionTime": "1970"}
    status = status_of(planned(), Observed(at=NOW), {"conditions": [pending]})
    assert [item["type"] for item in status["conditions"]].count("Ready") == 1
    assert status["conditions"][0]["lastTransitionTime"] == timestamp(NOW)


def test_a_long_message_keeps_its_end() -> None:
    """Fault operator 13: the cause of a crash was cut off at the wrong end of the log."""
    trace = "Traceback\n" + "  File x\n" * 500 + "ValueError: the cause"
    clipped = clip(trace)
    assert len(clipped) <= 1024
    assert clipped.startswith("Traceback")
    assert clipped.endswith("ValueError: the cause")
    plan = planned()
    failure = ContainerFailure(container="engine", reason="CrashLoopBackOff", message=trace, exit_code=1)
    status = status_of(plan, observed(plan, pod(ready=False, failures=[failure]), status=NOT_READY))
    assert message(status, "Stalled").endswith("ValueError: the cause")
    assert message(status, "Stalled").startswith("Pod qwen-a, container engine fails (exit code 1)")


def test_informational_conditions_never_decide() -> None:
    """Fault operator 11: Argo CD was Progressing for ever because of an informational condition."""
    plan = planned()
    status = status_of(plan, observed(plan, pod(metrics=metrics())))
    found = conditions(status)
    assert found["PrefixCacheEffective"][0] == "Unknown"
    assert found["MemoryTuned"][0] == "False"
    assert kstatus(status) == READY


def test_exactly_one_of_the_three_is_true() -> None:
    plan = planned()
    cases = [
        observed(plan, pod()),
        observed(plan, pod(ready=False), status=NOT_READY),
        *(observed(plan, pod(ready=False, failures=[failure]), status=NOT_READY) for _, failure, _, _ in FAILURES),
        unschedulable(10),
    ]
    for case in cases:
        assert sorted(kstatus(status_of(plan, case))) == ["False", "False", "True"]


def test_the_plan_hash_is_what_tells_an_applied_spec() -> None:
    plan = planned()
    assert PLAN_HASH_ANNOTATION in plan.deployment["metadata"]["annotations"]
    assert CURRENT != OLD
