"""The way of a changed template to the workload, decided as a table: who is taken when, and what is gone back to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from reprise_operator.checks import Check, CheckState
from reprise_operator.children.check_job import DEADLINE_SECONDS
from reprise_operator.diagnosis import State
from reprise_operator.observed import Observed, ObservedPod
from reprise_operator.plan import Plan
from reprise_operator.rejection import LogSource
from reprise_operator.release import (
    Evidence,
    Questions,
    Release,
    decide_release,
    questions,
)
from reprise_operator.release_manifests import template_hash
from reprise_operator.release_state import LastGood, ReleaseState, read_state, started, state_status
from tests.support.factories import (
    CURRENT,
    NOW,
    OLD,
    deployment_status,
    failure,
    observed,
    planned,
    pod,
    settled_status,
)
from tests.support.statuses import conditions, status_of

NPU: Mapping[str, Any] = {}
CPU: dict[str, Any] = {"accelerator": {"profile": "cpu"}}
CHANGE: Mapping[str, Any] = {"runtime": {"extraArgs": ["--max-num-seqs=3"]}}
NOTHING = Evidence()
PASSED = Evidence(check=Check(state=CheckState.PASSED))
LATE = {
    "type": "Progressing",
    "status": "False",
    "reason": "ProgressDeadlineExceeded",
    "message": "ReplicaSet has timed out progressing.",
}


def spec(*parts: Mapping[str, Any], replicas: int = 1) -> dict[str, Any]:
    return {key: value for part in parts for key, value in part.items()} | {"replicas": replicas}


def serving(old: Plan, replicas: int = 1, *, serving: int | None = None) -> Observed:
    """`old` on the workload, with all of its pods, of which `serving` serve."""
    ready = replicas if serving is None else serving
    pods = [replace(pod(f"qwen-{number}", ready=number < ready), node="n1") for number in range(replicas)]
    status = deployment_status(replicas=replicas, updated=replicas, ready=ready, available=ready)
    return observed(old, *pods, status=status, templates={CURRENT: old.workload["spec"]["template"]})


def given(old: Plan) -> ReleaseState:
    """What is remembered while `old` serves."""
    good = LastGood(template_hash=template_hash(old), pod_template_hash=CURRENT)
    return started(template_hash(old), NOW - 5000, last_good=good)


def rolling(release: Release) -> tuple[Any, Any]:
    assert release.workload is not None
    limits = release.workload["spec"]["strategy"]["rollingUpdate"]
    return limits["maxSurge"], limits["maxUnavailable"]


def args_of(release: Release) -> list[str]:
    assert release.workload is not None
    args: list[str] = release.workload["spec"]["template"]["spec"]["containers"][0]["args"]
    return args


def is_given(release: Release) -> bool:
    return release.held is None and "--max-num-seqs=3" in args_of(release)


def decide(
    plan: Plan, seen: Observed, state: ReleaseState, evidence: Evidence = NOTHING, *, now: float = NOW
) -> Release:
    return decide_release(plan, seen, state, evidence, now=now)


def ask(plan: Plan, seen: Observed, state: ReleaseState, *, now: float = NOW, read_nodes: bool = True) -> Questions:
    return questions(plan, seen, state, now=now, read_nodes=read_nodes)


# A StatefulSet ------------------------------------------------------------------------------------------------------


def test_a_stateful_set_is_given_each_template_at_once() -> None:
    """Its controller takes one pod at a time; nothing is checked before, and nothing remembered to go back to."""
    volumes = {"prefixCaching": {"persistence": {"size": "1Gi"}}}
    old, new = planned(volumes), planned({**volumes, **CHANGE})
    assert old.workload["kind"] == "StatefulSet"
    seen = serving(old)
    assert ask(new, seen, given(old)) == Questions()
    release = decide(new, seen, given(old))
    assert release == Release(workload=new.workload, state=ReleaseState())
    assert state_status(release.state) == {}, "of a Deployment before it, whose ReplicaSets are gone"


# A change -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "replicas", "ready", "evidence", "outcome"),
    [
        # The last serving pod of an NPU service is taken only after a check.
        (NPU, 1, 1, NOTHING, "check"),
        (NPU, 1, 1, PASSED, (0, 1)),
        (NPU, 1, 1, Evidence(free_pods=0), "check"),
        # A free device is as good: the successor comes first.
        (NPU, 1, 1, Evidence(free_pods=1), (1, 0)),
        (NPU, 2, 2, Evidence(free_pods=5), (1, 0)),
        # What does not serve goes first, whatever is free.
        (NPU, 1, 0, Evidence(free_pods=1), (1, 1)),
        (NPU, 3, 2, Evidence(free_pods=1), (1, 1)),
        # Of several pods the Deployment controller keeps all but one.
        (NPU, 2, 2, NOTHING, (0, 1)),
        (NPU, 3, 1, NOTHING, (0, 1)),
        # Where nothing serves there is nothing to be careful of.
        (NPU, 1, 0, NOTHING, (0, 1)),
        (NPU, 0, 0, NOTHING, (0, 1)),
        # A CPU has room for one more.
        (CPU, 1, 1, NOTHING, (1, 0)),
        (CPU | {"rollout": {"maxSurge": 0}}, 1, 1, NOTHING, "check"),
        (CPU | {"rollout": {"maxSurge": 1, "maxUnavailable": 1}}, 1, 1, NOTHING, "check"),
        # What the user says bounds it, and never takes all of several.
        ({"rollout": {"maxSurge": 0}}, 1, 1, Evidence(free_pods=9), "check"),
        ({"rollout": {"maxSurge": 2}}, 3, 3, Evidence(free_pods=9), (2, 0)),
        ({"rollout": {"maxSurge": 2}}, 3, 3, Evidence(free_pods=1), (1, 0)),
        ({"rollout": {"maxSurge": "50%"}}, 4, 4, Evidence(free_pods=9), (2, 0)),
        ({"rollout": {"maxUnavailable": 9}}, 3, 3, NOTHING, (0, 2)),
        ({"rollout": {"maxUnavailable": "100%"}}, 3, 3, NOTHING, (0, "99%")),
        ({"rollout": {"maxUnavailable": 9}}, 1, 1, NOTHING, "check"),
    ],
)
def test_when_a_change_is_given(
    before: Mapping[str, Any], replicas: int, ready: int, evidence: Evidence, outcome: str | tuple[Any, Any]
) -> None:
    old, new = planned(spec(before, replicas=replicas)), planned(spec(before, CHANGE, replicas=replicas))
    release = decide(new, serving(old, replicas, serving=ready), given(old), evidence)
    if outcome == "check":
        assert release.workload is None, "the workload is left as it is"
        assert release.check is not None
        assert release.check["kind"] == "Job"
        assert release.held is not None
        assert (release.held.state, release.held.reason) == (State.PROGRESSING, "Checking")
        assert release.state.check_job == release.check["metadata"]["name"]
        assert release.state.template_hash == template_hash(old)
    else:
        assert is_given(release)
        assert rolling(release) == outcome
        assert release.check is None
        assert release.state.template_hash == template_hash(new)
        assert release.state.last_good == given(old).last_good, "what is gone back to is kept"


def test_a_service_at_rest_asks_nothing_and_remembers_the_same() -> None:
    old = planned(spec())
    seen, state = serving(old), given(old)
    assert ask(old, seen, state) == Questions()
    release = decide(old, seen, state)
    assert release == Release(workload=old.workload, state=state)


def test_only_a_change_that_takes_the_last_pod_looks_for_a_job_and_only_an_npu_for_devices() -> None:
    def asked(before: Mapping[str, Any], replicas: int = 1, *, read_nodes: bool = True) -> tuple[bool, bool]:
        old, new = planned(spec(before, replicas=replicas)), planned(spec(before, CHANGE, replicas=replicas))
        found = ask(new, serving(old, replicas), given(old), read_nodes=read_nodes)
        return found.devices, found.check

    assert asked(NPU) == (True, True)
    assert asked(NPU, read_nodes=False) == (False, True)
    assert asked(NPU, 2) == (True, False)
    assert asked({"rollout": {"maxSurge": 0}}) == (False, True)
    assert asked(CPU) == (False, False)


def test_scaling_is_no_change_of_the_template() -> None:
    old, more = planned(spec()), planned(spec(replicas=3))
    assert template_hash(old) == template_hash(more)
    release = decide(more, serving(old), given(old))
    assert release.held is None
    assert release.workload == more.workload


def test_an_edit_and_its_revert_before_the_check_has_ended_touch_nothing() -> None:
    """Fault 8."""
    old, new = planned(spec()), planned(spec(CHANGE))
    seen = serving(old)
    checking = decide(new, seen, given(old))
    assert checking.workload is None
    reverted = decide(old, seen, checking.state)
    assert reverted.workload == old.workload
    assert reverted.state == given(old), "nothing is left of it"


def test_a_check_that_another_process_began_is_gone_on_with() -> None:
    old, new = planned(spec()), planned(spec(CHANGE))
    first = decide(new, serving(old), given(old))
    running = Evidence(check=Check(state=CheckState.RUNNING, reason="Checking"))
    state = read_state({"rollout": state_status(first.state)})
    second = decide(new, serving(old), state, running)
    assert second.check is None
    assert second.workload is None
    assert second.state == first.state
    third = decide(new, serving(old), second.state, PASSED)
    assert is_given(third)
    assert third.state.check_job is None


def test_an_image_that_cannot_be_pulled_is_said_at_once_and_waited_for() -> None:
    old, new = planned(spec()), planned(spec(CHANGE))
    waits = Check(state=CheckState.RUNNING, reason="ImagePullFailed", message="not found")
    release = decide(new, serving(old), given(old), Evidence(check=waits))
    assert release.workload is None
    assert release.held is not None
    assert (release.held.state, release.held.reason) == (State.STALLED, "ImagePullFailed")
    assert release.state.check_waits == "not found"
    # Its time over, its pod is gone; what it waited for is remembered.
    over = decide(
        new, serving(old), release.state, Evidence(check=Check(state=CheckState.FAILED, reason="CheckFailed"))
    )
    assert over.held is not None
    assert over.held.message.endswith(f"did not end within {DEADLINE_SECONDS} s. It was seen to wait: not found")


def test_a_failed_check_leaves_the_pod_and_is_not_repeated() -> None:
    old, new = planned(spec()), planned(spec(CHANGE))
    failed = Check(state=CheckState.FAILED, reason="CheckFailed", message="ConfigError: --max-num-seqs is 3")
    release = decide(new, serving(old), given(old), Evidence(check=failed))
    assert release.rejects
    assert release.held is not None
    assert (release.held.state, release.held.reason) == (State.STALLED, "CheckFailed")
    assert release.held.message.endswith("Cause: ConfigError: --max-num-seqs is 3")
    assert "--max-num-seqs=3" not in args_of(release)
    assert release.state.check_job is None, "the Job is pruned"
    again = decide(new, serving(old), read_state({"rollout": state_status(release.state)}))
    assert again == replace(release, rejects=False)
    assert ask(new, serving(old), release.state) == Questions()
    # All but the template goes on: the replicas, for instance.
    more = planned(spec(CHANGE, replicas=4))
    scaled = decide(more, serving(old), release.state)
    assert scaled.workload is not None
    assert scaled.workload["spec"]["replicas"] == 4
    assert "--max-num-seqs=3" not in args_of(scaled)
    # Another template gets its chance, the old one its place.
    assert (
        decide(planned(spec({"runtime": {"extraArgs": ["--seed=1"]}})), serving(old), release.state).check is not None
    )
    assert decide(old, serving(old), release.state).state == given(old)


def test_without_the_replica_set_of_a_good_template_the_replicas_are_still_the_specs() -> None:
    """The check's end came before the Deployment's controller had told which one it is, or somebody has deleted it."""
    old, new = planned(spec()), planned(spec(CHANGE))
    unknown = replace(serving(old), template_hash=None, templates={})
    failed = Check(state=CheckState.FAILED, reason="CheckFailed", message="no")
    rejected = decide(new, unknown, given(old), Evidence(check=failed)).state
    assert rejected.rejected is not None
    for part in ({"suspend": True}, {"replicas": 3}):
        release = decide(planned(spec(CHANGE) | part), serving(old), rejected)
        assert release.workload is not None
        assert release.workload["spec"]["replicas"] == part.get("replicas", 0)
        assert "--max-num-seqs=3" not in args_of(release)


# A change that does not become good ---------------------------------------------------------------------------------


def missed(new: Plan, old: Plan, *pods: ObservedPod, replicas: int = 1) -> Observed:
    """`new` on the workload, and its deadline over."""
    status = deployment_status(replicas=replicas, updated=1, ready=replicas - 1, available=replicas - 1)
    return observed(
        new,
        *pods,
        status=status | {"conditions": [LATE]},
        templates={OLD: old.workload["spec"]["template"], CURRENT: new.workload["spec"]["template"]},
    )


def begun(new: Plan, old: Plan, *, at: float = NOW - 4000) -> ReleaseState:
    good = LastGood(template_hash=template_hash(old), pod_template_hash=OLD)
    return started(template_hash(new), at, last_good=good)


BROKEN = pod(
    "qwen-b", ready=False, failures=[failure("CrashLoopBackOff", words="ValueError: no such thing", code=1, restarts=3)]
)


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_change_that_misses_its_deadline_is_taken_back_with_the_cause(replicas: int) -> None:
    old, new = planned(spec(replicas=replicas)), planned(spec(CHANGE, replicas=replicas))
    pods = [BROKEN, pod("qwen-a", template=OLD)][:replicas]
    seen, state = missed(new, old, *pods, replicas=replicas), begun(new, old)
    release = decide(new, seen, state)
    assert release.rejects, "the cause is written before the pods go"
    assert "--max-num-seqs=3" not in args_of(release)
    assert release.workload is not None
    assert release.workload["spec"]["template"]["spec"] == old.workload["spec"]["template"]["spec"]
    assert release.workload["spec"]["replicas"] == replicas
    assert release.held is not None
    assert (release.held.state, release.held.reason) == (State.STALLED, "RolledBack")
    assert "ContainerCrashing" in release.held.message
    assert release.held.message.endswith("ValueError: no such thing")
    status = state_status(release.state)
    assert status["rejected"]["podTemplateHash"] == OLD
    assert status["templateHash"] == template_hash(old)
    # Back on the old template, it stays there, whoever asks.
    back = serving(old, replicas)
    back = replace(back, template_hash=OLD, templates=seen.templates)
    stays = decide(new, back, read_state({"rollout": status}))
    assert stays.held == release.held
    assert stays.workload == release.workload
    assert stays.state == release.state
    # The spec taken back: all is as before.
    healed = decide(old, back, release.state)
    assert healed.held is None
    assert healed.workload == old.workload
    assert healed.state.rejected is None
    # Changed to something else: it is tried, with as much care as ever.
    other = planned(spec({"runtime": {"extraArgs": ["--seed=1"]}}, replicas=replicas))
    assert (decide(other, back, release.state).check is not None) == (replicas == 1)


def test_nothing_is_taken_back_too_early_or_to_nowhere() -> None:
    old, new = planned(spec()), planned(spec(CHANGE))
    seen = missed(new, old, BROKEN)
    assert decide(new, seen, begun(new, old)).rejects
    assert not decide(new, seen, begun(new, old, at=NOW - 60)).rejects, "the condition is the last template's"
    assert decide(new, seen, begun(new, old, at=NOW + 999)).rejects, "a clock that was set back holds nothing up"
    assert not decide(new, seen, replace(begun(new, old), last_good=None)).rejects, "there was never a good one"
    assert not decide(new, replace(seen, templates={}), begun(new, old)).rejects, "its ReplicaSet is gone"
    assert not decide(new, observed(new, BROKEN), begun(new, old)).rejects, "no deadline was missed"
    same = replace(begun(new, old), last_good=LastGood(template_hash=template_hash(new), pod_template_hash=OLD))
    assert not decide(new, seen, same).rejects, "it was good before: a node is broken, not the template"


def test_a_template_that_nobody_wrote_down_has_its_whole_time() -> None:
    """The process ended between the write to the workload and that of the status: what is remembered is the template
    before, which began days ago."""
    old, new = planned(spec()), planned(spec(CHANGE))
    seen, before = missed(new, old, BROKEN), begun(old, old)
    release = decide(new, seen, before)
    assert not release.rejects
    assert release.state == started(template_hash(new), NOW, last_good=before.last_good)
    assert decide(new, seen, release.state, now=NOW + 4000).rejects


def test_a_pod_that_says_nothing_is_asked_for_the_end_of_its_log() -> None:
    old, new = planned(spec()), planned(spec(CHANGE))
    state = begun(new, old)
    silent = pod("qwen-b", ready=False)
    assert ask(new, missed(new, old, silent), state).log == LogSource(pod="qwen-b", container="engine", previous=False)
    crashed = pod("qwen-b", ready=False, failures=[failure("CrashLoopBackOff", code=1, restarts=4)])
    assert ask(new, missed(new, old, crashed), state).log == LogSource(pod="qwen-b", container="engine", previous=True)
    assert ask(new, missed(new, old, BROKEN), state).log is None, "its last words are known"
    assert ask(new, missed(new, old, silent), begun(new, old, at=NOW - 60)).log is None
    log = "loading\n" * 1000 + "at last: the shards do not match\n"
    release = decide(new, missed(new, old, silent), state, Evidence(log=log))
    assert release.held is not None
    assert release.held.message.endswith("at last: the shards do not match"), "fault 13: the end says why"
    assert len(release.held.message) <= 1024


def test_the_status_shows_what_was_taken_back() -> None:
    old, new = planned(spec()), planned(spec(CHANGE))
    seen = missed(new, old, BROKEN)
    release = decide(new, seen, begun(new, old))
    status = status_of(new, seen, release=release)
    assert conditions(status)["Stalled"] == ("True", "RolledBack")
    assert conditions(status)["Ready"] == ("False", "RolledBack")
    assert status["rollout"] == state_status(release.state)
    assert status["updatedReplicas"] == 0, "no pod has the spec's template"


def test_a_template_is_good_once_all_of_its_pods_serve() -> None:
    old, new = planned(spec()), planned(spec(CHANGE))
    state = begun(new, old)
    seen = serving(new)
    assert decide(new, seen, state).state.last_good == LastGood(
        template_hash=template_hash(new), pod_template_hash=CURRENT
    )
    half = observed(new, status=deployment_status(replicas=2, updated=1, ready=1, available=1))
    assert decide(new, half, state).state.last_good == state.last_good
    suspended = planned(spec(CHANGE) | {"suspend": True})
    nothing = observed(suspended, status=settled_status(0))
    assert decide(suspended, nothing, state).state.last_good == state.last_good, "no pods have shown nothing"
    # The Deployment that was not applied yet is the old one, however healthy.
    stale = replace(seen, children=serving(old).children)
    assert decide(new, stale, state).state.last_good == state.last_good


def test_a_service_that_an_operator_without_memory_left_has_a_good_template_too() -> None:
    old, new = planned(spec()), planned(spec(CHANGE))
    adopted = decide(old, serving(old), ReleaseState())
    assert adopted.state.last_good == LastGood(template_hash=template_hash(old), pod_template_hash=CURRENT)
    assert adopted.workload == old.workload
    changed = decide(new, serving(old), ReleaseState())
    assert changed.check is not None
    assert changed.state.last_good == LastGood(template_hash=None, pod_template_hash=CURRENT)


# Free devices -------------------------------------------------------------------------------------------------------


def surging(new: Plan, *, scheduled: bool) -> Observed:
    """One old pod that serves, one new pod beside it."""
    fresh = replace(
        pod("qwen-b", ready=False),
        scheduled=scheduled,
        unschedulable_message=None if scheduled else "Insufficient huawei.com/Ascend910",
    )
    rolled = {
        **new.workload["spec"],
        "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}},
    }
    live = replace(new, workload={**new.workload, "spec": rolled})
    status = deployment_status(replicas=2, updated=1, ready=1, available=1)
    return observed(live, pod("qwen-a", template=OLD), fresh, status=status)


def test_a_surge_goes_on_while_its_pod_has_its_device_and_ends_with_the_change() -> None:
    old, new = planned(spec()), planned(spec(CHANGE))
    seen, state = surging(new, scheduled=True), begun(new, old, at=NOW - 10)
    assert ask(new, seen, state) == Questions()
    assert rolling(decide(new, seen, state)) == (1, 0), "though no device is free any more"
    assert rolling(decide(new, serving(new), state)) == (0, 1)


def test_a_surge_pod_whose_device_was_taken_is_not_waited_for_for_ever() -> None:
    """Fault 7."""
    old, new = planned(spec()), planned(spec(CHANGE))
    seen, state = surging(new, scheduled=False), begun(new, old, at=NOW - 10)
    assert ask(new, seen, state) == Questions(devices=True, check=True)
    assert rolling(decide(new, seen, state, Evidence(free_pods=1))) == (1, 0), "the scheduler is about to place it"
    checking = decide(new, seen, state, Evidence(free_pods=0))
    assert checking.check is not None, "without a device the last pod would go"
    assert rolling(checking) == (1, 0)
    assert "--max-num-seqs=3" in args_of(checking)
    goes_on = decide(new, seen, checking.state, replace(PASSED, free_pods=0))
    assert rolling(goes_on) == (0, 1)
    assert goes_on.held is None
    two, more = planned(spec(replicas=2)), planned(spec(CHANGE, replicas=2))
    assert rolling(decide(more, surging(more, scheduled=False), begun(more, two), Evidence(free_pods=0))) == (0, 1)


def test_who_wants_no_pod_missing_waits_for_a_device_and_is_told() -> None:
    rollout = {"rollout": {"maxUnavailable": 0}}
    old, new = planned(spec(rollout), read_nodes=True), planned(spec(rollout, CHANGE), read_nodes=True)
    waits = decide(new, serving(old), given(old), Evidence(free_pods=0))
    assert waits.held is not None
    assert (waits.held.state, waits.held.reason) == (State.PROGRESSING, "WaitingForDevices")
    assert "--max-num-seqs=3" not in args_of(waits)
    goes_on = decide(new, serving(old), waits.state, Evidence(free_pods=1))
    assert is_given(goes_on)
    assert rolling(goes_on) == (1, 0)


# Manifests ----------------------------------------------------------------------------------------------------------


def test_a_template_from_a_replica_set_is_taken_without_what_is_kubectls() -> None:
    old, new = planned(spec()), planned(spec(CHANGE))
    template = dict(old.workload["spec"]["template"])
    template["metadata"] = template["metadata"] | {
        "annotations": {"kubectl.kubernetes.io/restartedAt": "2026-01-01T00:00:00Z", "team": "a"},
        "creationTimestamp": None,
    }
    seen = replace(missed(new, old, BROKEN), templates={OLD: template})
    release = decide(new, seen, begun(new, old))
    assert release.workload is not None
    metadata = release.workload["spec"]["template"]["metadata"]
    assert metadata["annotations"] == {"team": "a"}
    assert "creationTimestamp" not in metadata
    hashes = [
        each["metadata"]["annotations"]["serving.reprise.io/plan-hash"] for each in (release.workload, new.workload)
    ]
    assert hashes[0] != hashes[1], "a held Deployment is not the plan's"


def test_what_is_remembered_reads_as_it_was_written() -> None:
    old, new = planned(spec()), planned(spec(CHANGE))
    release = decide(new, missed(new, old, BROKEN), begun(new, old))
    state = replace(release.state, check_job="qwen-check-1", check_waits="an image")
    assert read_state({"rollout": state_status(state)}) == state
    assert read_state({}) == ReleaseState()
    assert state_status(ReleaseState()) == {}
