"""What keeps a service from running is said once, in words that help, and goes away by itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from reprise_operator.conditions import clip
from reprise_operator.observed import ContainerFailure, Observed
from reprise_operator.readiness import UNSCHEDULABLE_SECONDS
from reprise_operator.spec import SpecError, identity_of
from reprise_operator.status import build_status
from tests.support.factories import (
    NOT_READY,
    NOW,
    OLD,
    SETTINGS,
    body,
    child,
    deployment_status,
    failing,
    failure,
    merged,
    metrics,
    observed,
    planned,
    pod,
    window,
)
from tests.support.statuses import READY, RECONCILING, STALLED, conditions, kstatus, message, reason, status_of

FAILURES: list[tuple[str, ContainerFailure, str, str]] = [
    ("image", failure("ErrImagePull", words="not found"), "ImagePullFailed", "cannot be pulled: not found"),
    ("image name", failure("InvalidImageName", words="bad reference"), "ImagePullFailed", "bad reference"),
    (
        "secret",
        failure("CreateContainerConfigError", words='secret "k" not found'),
        "SecretNotFound",
        'secret "k" not found',
    ),
    (
        "secret's key",
        failure("CreateContainerConfigError", words="couldn't find key a in Secret llm/k"),
        "SecretNotFound",
        "couldn't find key a",
    ),
    (
        "root",
        failure("CreateContainerConfigError", words="container has runAsNonRoot"),
        "ContainerConfigInvalid",
        "runAsNonRoot",
    ),
    (
        "mount",
        failure("FailedMount", words="hostPath type check failed", container=""),
        "VolumeMountFailed",
        "hostPath type check failed",
    ),
    ("host memory", failure("OOMKilled", code=137, restarts=1), "OutOfMemory", "resources.limits.memory"),
    (
        "host memory, waiting",
        failure("CrashLoopBackOff", words="INFO ok", code=137, terminated="OOMKilled"),
        "OutOfMemory",
        "resources.limits.memory",
    ),
    (
        "device memory",
        failure("Error", words="RuntimeError: NPU out of memory. Tried to allocate 2 GiB", code=1),
        "DeviceOutOfMemory",
        "memory.utilization",
    ),
    (
        "architecture",
        failure("Error", words="UnsupportedModel: Qwen2VL is multimodal", code=1),
        "UnsupportedModel",
        "Qwen2VL is multimodal",
    ),
    ("no model", failure("Error", words="ModelNotFound: /model is empty", code=1), "ModelNotFound", "/model is empty"),
    (
        "cut off",
        failure("Error", words="DamagedModel: config.json is empty", code=1),
        "DamagedModel",
        "config.json is empty",
    ),
    ("KV pool", failure("Error", words="InsufficientMemory: 3 blocks", code=1), "InsufficientMemory", "3 blocks"),
    ("argument", failure("Error", words="error: unrecognized arguments: --x", code=2), "InvalidArguments", "--x"),
    (
        "crash loop",
        failure("CrashLoopBackOff", words="KeyError: 'q'", code=3),
        "ContainerCrashing",
        "(exit code 3): KeyError: 'q'",
    ),
    ("third crash", failure("Error", code=3, restarts=2), "ContainerCrashing", "see its log"),
]


@pytest.mark.parametrize(
    ("failure", "expected", "words"), [item[1:] for item in FAILURES], ids=[i[0] for i in FAILURES]
)
def test_what_stops_a_pod_is_said_with_its_last_words(failure: ContainerFailure, expected: str, words: str) -> None:
    plan = planned({"memory": {"autoTune": False}})
    status = status_of(plan, failing(plan, failure))
    assert kstatus(status) == STALLED
    assert conditions(status)["Stalled"] == ("True", expected)
    assert words in message(status, "Stalled")
    assert message(status, "Stalled").startswith("Pod qwen-a")
    assert status["memory"]["deviceOutOfMemory"] is (expected == "DeviceOutOfMemory")


def test_it_recovers_by_itself_once_the_cause_is_gone() -> None:
    plan = planned()
    stalled = status_of(plan, failing(plan, FAILURES[0][1]))
    assert kstatus(status_of(plan, observed(plan, pod()), stalled, now=NOW + 60)) == READY


def test_the_two_phases_of_a_failing_pull_read_alike() -> None:
    plan = planned()

    def status(kind: str, words: str) -> Mapping[str, Any]:
        cause = failure(kind, words=words)
        return status_of(plan, failing(plan, cause))

    assert status("ErrImagePull", "rpc error: not found") == status(
        "ImagePullBackOff", 'Back-off pulling image "x:1": ErrImagePull: rpc error: not found'
    )


def test_the_growing_delay_of_a_crash_loop_is_no_news() -> None:
    plan = planned()

    def status(words: str) -> Mapping[str, Any]:
        cause = failure("CrashLoopBackOff", words=words, code=1)
        return status_of(plan, failing(plan, cause))

    assert status("back-off 10s restarting failed container=engine pod=x") == status(
        "back-off 5m0s restarting failed container=engine pod=x"
    )


def test_one_crash_is_a_hiccup() -> None:
    plan = planned()
    cause = failure("Error", words="reset by peer", code=1, restarts=1)
    status = status_of(plan, failing(plan, cause))
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
    assert conditions(status)["MemoryTuned"] == conditions(before)["MemoryTuned"]
    for key in ("url", "model", "memory", "replicas", "readyReplicas", "prefixCache", "engine"):
        assert status[key] == before[key], key


def test_a_long_message_keeps_its_end() -> None:
    """Fault operator 13: the cause of a crash was cut off at the wrong end of the log."""
    trace = "Traceback\n" + "  File x\n" * 500 + "ValueError: the cause"
    clipped = clip(trace)
    assert len(clipped) <= 1024
    assert clipped.startswith("Traceback")
    assert clipped.endswith("ValueError: the cause")
    plan = planned()
    cause = failure("CrashLoopBackOff", words=trace, code=1)
    status = status_of(plan, failing(plan, cause))
    assert message(status, "Stalled").endswith("ValueError: the cause")
    assert message(status, "Stalled").startswith("Pod qwen-a, container engine fails (exit code 1)")


def test_exactly_one_of_the_three_is_true() -> None:
    plan = planned()
    cases = [
        observed(plan, pod()),
        observed(plan, pod(ready=False), status=NOT_READY),
        *(failing(plan, failure) for _, failure, _, _ in FAILURES),
        unschedulable(10),
    ]
    for case in cases:
        assert sorted(kstatus(status_of(plan, case))) == ["False", "False", "True"]
