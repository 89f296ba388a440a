"""A change that asks for a Secret, a key of one or a claim that is not there: no pod that serves goes for it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from reprise_operator.checks import Check, CheckState
from reprise_operator.diagnosis import State
from reprise_operator.handover import Scale, hand_over, replace_pods
from reprise_operator.observed import Observed
from reprise_operator.plan import Plan
from reprise_operator.references import ObjectRef, ObservedReference
from reprise_operator.release import Evidence, Questions, decide_release, questions
from reprise_operator.release_manifests import template_hash
from reprise_operator.release_state import LastGood, ReleaseState, started
from tests.operator.reconcile_bench import Bench
from tests.support.factories import CURRENT, NOW, child, deployment_status, observed, planned, pod, settled_status
from tests.support.kubectl import eventually, secret

KEYS = ObjectRef("Secret", "keys")
AUTH: Mapping[str, Any] = {"auth": {"apiKeySecretRef": {"name": "keys"}}}
CLAIM: Mapping[str, Any] = {"model": {"uri": "pvc://absent/qwen"}}
THERE = ObservedReference(present=True, fingerprints={"api-key": "0"})
NO_SECRET: Mapping[str, Any] = {"references": {KEYS: ObservedReference(present=False)}}
NO_KEY: Mapping[str, Any] = {"references": {KEYS: ObservedReference(present=True, fingerprints={"token": "0"})}}
NO_CLAIM: Mapping[str, Any] = {"missing_claims": ("absent",)}
PASSED = Evidence(check=Check(state=CheckState.PASSED), free_pods=1)
FULL = "0/1 nodes are available: 1 Insufficient huawei.com/Ascend910."


def serving(old: Plan, replicas: int, **changes: Any) -> Observed:
    """`old` on the workload, and all of its pods serve."""
    pods = [pod(f"qwen-{number}") for number in range(replicas)]
    templates = {CURRENT: old.workload["spec"]["template"]}
    return observed(old, *pods, status=settled_status(replicas), templates=templates, **changes)


def remembered(old: Plan) -> ReleaseState:
    good = LastGood(template_hash=template_hash(old), pod_template_hash=CURRENT)
    return started(template_hash(old), NOW - 5000, last_good=good)


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize(
    ("change", "seen", "reason", "words"),
    [
        (AUTH, NO_SECRET, "SecretNotFound", "Secret keys does not exist in namespace llm"),
        (AUTH, NO_KEY, "SecretKeyNotFound", "Secret keys in namespace llm has no key api-key"),
        (CLAIM, NO_CLAIM, "ClaimNotFound", "PersistentVolumeClaim absent does not exist in namespace llm"),
    ],
)
def test_the_change_waits_and_the_pods_are_left_as_they_are(
    replicas: int, change: Mapping[str, Any], seen: Mapping[str, Any], reason: str, words: str
) -> None:
    old, new = planned({"replicas": replicas}), planned({**change, "replicas": replicas})
    state, there = remembered(old), serving(old, replicas)
    found = replace(there, **seen)
    assert questions(new, found, state, now=NOW, read_nodes=True) == Questions(), "nothing is looked up for it"
    release = decide_release(new, found, state, PASSED, now=NOW)
    assert release.held is not None
    assert (release.held.state, release.held.reason) == (State.STALLED, reason)
    assert release.held.message.startswith(words)
    assert release.held.message.endswith("Those that serve are left as they are until then.")
    assert release.workload is not None
    assert release.workload["spec"]["template"]["spec"] == old.workload["spec"]["template"]["spec"]
    assert release.check is None
    assert release.state == state
    # All but the template goes on; and the template, too, once what it asks for is there.
    more = planned({**change, "replicas": 5})
    scaled = decide_release(more, found, state, PASSED, now=NOW).workload
    assert scaled is not None
    assert scaled["spec"]["replicas"] == 5
    after = replace(there, references={KEYS: THERE})
    assert decide_release(new, after, state, PASSED, now=NOW).held is None


def test_a_check_that_was_under_way_is_given_up() -> None:
    old, new = planned(), planned(AUTH)
    checking = replace(remembered(old), check_job="qwen-check-1", check_waits="an image")
    release = decide_release(new, serving(old, 1, **NO_SECRET), checking, Evidence(), now=NOW)
    assert release.state == remembered(old), "its Job is pruned"


def test_where_nobody_serves_the_pods_wait_themselves() -> None:
    old, new = planned(), planned(AUTH)
    down = replace(serving(old, 1, **NO_SECRET), pods=(pod(ready=False),))
    assert decide_release(new, down, remembered(old), Evidence(), now=NOW).held is None
    suspended = planned({**AUTH, "suspend": True})
    assert decide_release(suspended, serving(old, 1, **NO_SECRET), remembered(old), Evidence(), now=NOW).held is None


VOLUMES: Mapping[str, Any] = {"prefixCaching": {"persistence": {"size": "1Gi"}}}


@pytest.mark.parametrize("failing", [False, True])
def test_no_pod_of_a_stateful_set_goes_whose_successor_could_not_start(failing: bool) -> None:
    plan = planned({**VOLUMES, **AUTH})
    name = plan.workload["metadata"]["name"]
    old = replace(pod(f"{name}-0", ready=not failing, template=f"{name}-old"), started=not failing)
    seen = observed(plan, old, template_hash=f"{name}-new")
    assert replace_pods(plan, replace(seen, **NO_SECRET)) == ()
    assert [each.name for each in replace_pods(plan, replace(seen, references={KEYS: THERE}))] == [f"{name}-0"]


def test_no_pod_gives_way_to_one_that_could_not_start() -> None:
    plan, before = planned({**VOLUMES, **AUTH, "replicas": 2}), planned({"replicas": 2}).workload
    waiting = replace(pod("new-0", ready=False), scheduled=False, unschedulable_message=FULL)
    seen = observed(plan, waiting, status=deployment_status(replicas=2, updated=2, ready=0, available=0))
    seen = replace(seen, children=(*seen.children, child(before, **settled_status(2))))
    assert hand_over(plan, replace(seen, **NO_SECRET)) == ()
    (action,) = hand_over(plan, replace(seen, references={KEYS: THERE}))
    assert isinstance(action, Scale)


async def test_on_npus_a_pod_is_not_taken_for_a_secret_that_does_not_exist(bench: Bench) -> None:
    """One of two would be, and its successor could not be started: half of the service for a misspelt name."""
    npu: dict[str, Any] = {"accelerator": {"profile": "ascend910"}, "replicas": 2}
    bench.apply(npu)
    await bench.make_ready()
    before = {each["metadata"]["uid"] for each in bench.pods()}
    template = bench.child("deployment")["spec"]["template"]
    bench.apply({**npu, **AUTH})
    await bench.settle()
    assert bench.condition("Stalled")[:2] == ("True", "SecretNotFound")
    assert bench.condition("Available")[0] == "True"
    await asyncio.sleep(0.5)
    assert {each["metadata"]["uid"] for each in bench.pods()} == before
    assert bench.child("deployment")["spec"]["template"] == template
    assert bench.events()[-1] == ("Warning", "SecretNotFound")
    bench.clock.now += 3600
    assert await bench.writes() == [], "it waits in silence"
    bench.kubectl.apply(secret("keys", **{"api-key": "x"}))
    await bench.reconcile()
    assert "REPRISE_API_KEY" in str(bench.child("deployment")["spec"]["template"])
    eventually(lambda: {each["metadata"]["uid"] for each in bench.pods()} != before, "the change is under way")
    await bench.make_ready()
