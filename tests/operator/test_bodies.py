"""Bodies of pods and ReplicaSets → what was observed."""

from __future__ import annotations

from typing import Any

from reprise_operator.bodies import current_template_hash, observed_pod
from reprise_operator.observed import ContainerFailure, Termination


def pod_body(**status: Any) -> dict[str, Any]:
    return {
        "metadata": {"name": "p", "uid": "u", "labels": {"pod-template-hash": "abc"}},
        "spec": {"nodeName": "node1"},
        "status": {"phase": "Running", "podIP": "127.0.0.1", "startTime": "2026-11-29T15:00:00Z", **status},
    }


def failures(*containers: dict[str, Any], init: tuple[dict[str, Any], ...] = ()) -> tuple[ContainerFailure, ...]:
    return observed_pod(pod_body(containerStatuses=containers, initContainerStatuses=init)).failures


def test_a_sound_pod() -> None:
    pod = observed_pod(
        pod_body(
            conditions=[{"type": "Ready", "status": "True"}, {"type": "PodScheduled", "status": "True"}],
            containerStatuses=[{"name": "engine", "ready": True, "restartCount": 0, "state": {"running": {}}}],
        )
    )
    assert (pod.ready, pod.scheduled, pod.terminating, pod.template_hash) == (True, True, False, "abc")
    assert pod.started_at == 1795964400.0
    assert pod.failures == ()


def test_a_pod_without_a_node_says_why() -> None:
    body = pod_body(
        conditions=[
            {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/1 nodes: no NPU"}
        ]
    )
    del body["spec"]["nodeName"]
    pod = observed_pod(body)
    assert not pod.scheduled
    assert pod.unschedulable_message == "0/1 nodes: no NPU"


def test_a_crash_loop_tells_the_containers_last_words_not_the_kubelets() -> None:
    (failure,) = failures(
        {
            "name": "engine",
            "restartCount": 4,
            "state": {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 40s restarting failed container"}},
            "lastState": {"terminated": {"exitCode": 3, "reason": "Error", "message": "ModelNotFound: no /models/x"}},
        }
    )
    assert failure == ContainerFailure(
        container="engine",
        reason="CrashLoopBackOff",
        message="ModelNotFound: no /models/x",
        exit_code=3,
        restart_count=4,
        terminated_reason="Error",
    )


def test_a_crash_loop_stays_one_between_two_crashes() -> None:
    """Faults 6: a container that runs just now, but crashed before and is not ready, is not sound."""
    crashed = {"terminated": {"exitCode": 1, "reason": "Error", "message": "boom"}}
    running = {"name": "engine", "restartCount": 2, "state": {"running": {}}, "lastState": crashed}
    assert [failure.message for failure in failures({**running, "ready": False})] == ["boom"]
    assert failures({**running, "ready": True}) == ()


def test_how_runs_ended_is_kept_apart_from_what_runs_now() -> None:
    before = {
        "exitCode": 1,
        "reason": "Error",
        "message": "OutOfMemory: memory=npu",
        "containerID": "containerd://1",
        "finishedAt": "2026-11-30T00:00:00Z",
    }
    serving = {"name": "engine", "restartCount": 1, "ready": True, "state": {"running": {}}}
    pod = observed_pod(pod_body(containerStatuses=[{**serving, "lastState": {"terminated": before}}]))
    first = Termination(
        container="engine",
        container_id="containerd://1",
        exit_code=1,
        reason="Error",
        message="OutOfMemory: memory=npu",
        finished_at="2026-11-30T00:00:00Z",
        is_previous=True,
    )
    assert (pod.failures, pod.terminations) == ((), (first,))
    again = {"terminated": {"exitCode": 137, "reason": "OOMKilled", "containerID": "containerd://2"}}
    ended = {**serving, "ready": False, "state": again, "lastState": {"terminated": before}}
    second, last = observed_pod(pod_body(containerStatuses=[ended])).terminations
    assert (second.container_id, second.reason, second.is_previous) == ("containerd://2", "OOMKilled", False)
    assert last == first
    assert observed_pod(pod_body(containerStatuses=[serving])).terminations == ()


def test_an_image_that_cannot_be_pulled() -> None:
    waiting = {"waiting": {"reason": "ImagePullBackOff", "message": 'Back-off pulling image "x"'}}
    (failure,) = failures({"name": "engine", "restartCount": 0, "state": waiting})
    assert (failure.reason, failure.message, failure.exit_code) == (
        "ImagePullBackOff",
        'Back-off pulling image "x"',
        None,
    )


def test_what_is_being_set_up_or_has_done_its_work_is_no_failure() -> None:
    assert failures({"name": "engine", "restartCount": 0, "state": {"waiting": {"reason": "ContainerCreating"}}}) == ()
    done = {"name": "setup", "restartCount": 0, "state": {"terminated": {"exitCode": 0, "reason": "Completed"}}}
    assert failures(init=(done,)) == ()


def test_an_init_container_that_fails() -> None:
    ended = {"terminated": {"exitCode": 137, "reason": "OOMKilled"}}
    (failure,) = failures(init=({"name": "setup", "restartCount": 1, "state": ended},))
    assert (failure.init, failure.reason, failure.exit_code) == (True, "OOMKilled", 137)


def test_the_template_hash_is_the_newest_revisions() -> None:
    def replica_set(revision: str, hash_: str, owner: str = "d") -> dict[str, Any]:
        return {
            "metadata": {
                "annotations": {"deployment.kubernetes.io/revision": revision},
                "labels": {"pod-template-hash": hash_},
                "ownerReferences": [{"uid": owner}],
            }
        }

    deployment = {"kind": "Deployment", "metadata": {"uid": "d", "generation": 4}, "status": {"observedGeneration": 4}}
    # A rolled back template gets the highest revision though its ReplicaSet is the oldest; 10 is more than 9.
    sets = [replica_set("10", "old"), replica_set("9", "new"), replica_set("11", "foreign", owner="other")]
    assert current_template_hash(deployment, sets) == "old"
    assert current_template_hash({**deployment, "status": {"observedGeneration": 3}}, sets) is None
    assert current_template_hash(deployment, []) is None
    assert current_template_hash(None, sets) is None
