"""Changes of the pod template on an API server with its Deployment and Job controllers: who is taken, when, and what is
gone back to. As in test_reconcile.py the tests call the Reconciler and write what a kubelet would say.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest

from reprise_operator.api import Body, ClusterError, Fault
from reprise_operator.cluster import Cluster
from reprise_operator.observed import ObservedChild
from reprise_operator.server_side_apply import ApplyResult
from reprise_operator.workqueue import Retry
from tests.operator.reconcile_bench import NAME, Bench
from tests.support.kubectl import Kubectl, eventually

NPU: Mapping[str, Any] = {"accelerator": {"profile": "ascend910"}, "rollout": {"progressDeadlineSeconds": 10}}
CHANGE: Mapping[str, Any] = {"runtime": {"extraArgs": ["--max-num-seqs=3"]}}
HASH = "pod-template-hash"


def pods(bench: Bench, *, checks: bool = False) -> dict[str, dict[str, Any]]:
    """By name, those of the service or of its checks."""
    label = "serving.reprise.io/check-of" if checks else "serving.reprise.io/name"
    return {pod["metadata"]["name"]: pod for pod in bench.pods() if pod["metadata"]["labels"].get(label) == NAME}


def is_ready(pod: Mapping[str, Any]) -> bool:
    conditions = {each["type"]: each["status"] for each in pod.get("status", {}).get("conditions") or ()}
    return conditions.get("Ready") == "True"


def set_status(bench: Bench, pod: str, **status: Any) -> None:
    bench.kubectl.patch("pod", pod, {"status": status}, "--subresource=status")


def ended(words: str, *, code: int, waiting: str | None = None) -> dict[str, Any]:
    """The status of a container that has ended, or, `waiting`, is about to be started again."""
    over = {"terminated": {"exitCode": code, "reason": "Error", "message": words}}
    state = over if waiting is None else {"waiting": {"reason": waiting}}
    container = {
        "name": "engine",
        "image": "x",
        "imageID": "",
        "ready": False,
        "restartCount": 0 if waiting is None else 4,
    }
    return {**container, "state": state, "lastState": {} if waiting is None else over}


def break_new_pods(bench: Bench, words: str) -> list[str]:
    """Every pod that is not ready crashes; their names."""

    def fresh() -> list[str]:
        return [name for name, pod in pods(bench).items() if not is_ready(pod)]

    names: list[str] = eventually(fresh, "there is a new pod")
    for name in names:
        crashed = ended(words, code=1, waiting="CrashLoopBackOff")
        bench.say(name, {"phase": "Running", "containerStatuses": [crashed]})
    return names


async def miss_the_deadline(bench: Bench) -> None:
    """Until the Deployment controller says so; the operator's clock goes on as well."""

    def late() -> bool:
        conditions = bench.child("deployment")["status"].get("conditions") or ()
        return any(condition.get("reason") == "ProgressDeadlineExceeded" for condition in conditions)

    await asyncio.to_thread(eventually, late, "the deadline is missed", within=40)
    bench.clock.now += 60


async def settle_on(bench: Bench, look: Any, what: str) -> Any:
    """Passes until `look` finds what it looks for."""
    for _ in range(80):
        with contextlib.suppress(Retry):
            await bench.reconcile()
        found = look()
        if found:
            return found
        await asyncio.sleep(0.25)
    raise AssertionError(f"never came: {what}; {bench.status()}")


def the_job(bench: Bench) -> dict[str, Any] | None:
    jobs = [job for job in bench.kubectl.list("jobs") if "deletionTimestamp" not in job["metadata"]]
    assert len(jobs) <= 1
    return dict(jobs[0]) if jobs else None


def the_check(bench: Bench) -> str:
    """Name of the check's pod."""
    found = eventually(lambda: list(pods(bench, checks=True)), "the check has a pod")
    assert len(found) == 1
    return str(found[0])


async def checked(bench: Bench, code: int, words: str = "") -> None:
    """The check's container ends."""
    set_status(
        bench,
        the_check(bench),
        phase="Succeeded" if code == 0 else "Failed",
        containerStatuses=[ended(words, code=code)],
    )

    def over() -> bool:
        # Whether it is to succeed is told before, while its pod is still there.
        conditions = (the_job(bench) or {}).get("status", {}).get("conditions") or ()
        return any(each["type"] in ("Complete", "Failed") and each["status"] == "True" for each in conditions)

    eventually(over, "the Job is over", within=30)


async def test_the_one_serving_pod_is_taken_only_after_a_check(bench: Bench) -> None:
    bench.apply(dict(NPU))
    await bench.make_ready()
    before, template = pods(bench), bench.child("deployment")["spec"]["template"]
    bench.apply({**NPU, **CHANGE})
    await bench.settle()
    job = the_job(bench)
    assert job is not None
    assert "--max-num-seqs=3" in job["spec"]["template"]["spec"]["containers"][0]["args"]
    assert bench.condition("Reconciling")[:2] == ("True", "Checking")
    assert bench.condition("Available")[0] == "True"
    assert bench.child("deployment")["spec"]["template"] == template
    assert bench.status()["replicas"] == 1, "the check's pod is none of the service's"
    await checked(bench, 0)
    await bench.settle()
    assert "--max-num-seqs=3" in bench.child("deployment")["spec"]["template"]["spec"]["containers"][0]["args"]
    eventually(lambda: the_job(bench) is None, "the Job is pruned")
    await bench.make_ready()
    assert not pods(bench).keys() & before.keys()
    assert "rejected" not in bench.status()["rollout"]


async def test_a_change_that_fails_its_check_never_reaches_the_pod(bench: Bench) -> None:
    bench.apply(dict(NPU))
    await bench.make_ready()
    before = pods(bench).keys()
    workload = bench.child("deployment")["spec"]
    bench.apply({**NPU, **CHANGE})
    await bench.settle()
    await checked(bench, 2, "ConfigError: --max-num-seqs is 3, and so on")
    await settle_on(bench, lambda: bench.condition("Stalled")[0] == "True", "the verdict")
    assert bench.condition("Stalled")[1] == "CheckFailed"
    assert bench.condition("Stalled")[2].endswith("Cause: ConfigError: --max-num-seqs is 3, and so on")
    await bench.settle()
    eventually(lambda: the_job(bench) is None, "the Job is pruned")
    assert pods(bench).keys() == before
    assert bench.child("deployment")["spec"] == workload, "the workload was not touched"
    assert bench.events()[-1] == ("Warning", "CheckFailed")
    bench.restart()
    assert ("create", "jobs") not in await bench.writes(), "a new process does not try again"
    await bench.settle()
    bench.clock.now += 3600
    assert await bench.writes() == []
    # Scaling goes on, with the template that is good.
    bench.apply({**NPU, **CHANGE, "replicas": 2})
    await bench.settle()
    assert bench.child("deployment")["spec"]["replicas"] == 2
    eventually(lambda: len(pods(bench)) == 2, "a second pod")
    assert len({pod["metadata"]["labels"][HASH] for pod in pods(bench).values()}) == 1
    bench.apply({**NPU, "runtime": {}, "replicas": 1})
    await bench.settle()
    eventually(lambda: len(pods(bench)) == 1, "one pod is left")
    await bench.settle()
    assert bench.condition("Ready")[0] == "True"
    assert pods(bench).keys() == before


async def test_an_edit_and_its_revert_leave_no_trace(bench: Bench) -> None:
    """Fault 8, with one pod: the edit is taken back while it is checked."""
    bench.apply(dict(NPU))
    await bench.make_ready()
    before, deployment = pods(bench).keys(), bench.child("deployment")["metadata"]["resourceVersion"]
    bench.apply({**NPU, **CHANGE})
    await bench.settle()
    assert the_job(bench) is not None
    bench.apply({**NPU, "runtime": {}})
    await bench.settle()
    eventually(lambda: the_job(bench) is None, "the Job is pruned")
    assert pods(bench).keys() == before
    assert bench.child("deployment")["metadata"]["resourceVersion"] == deployment
    assert bench.condition("Ready")[0] == "True"
    assert "checkJob" not in bench.status()["rollout"]


async def test_an_edit_and_its_revert_under_way_keep_the_pod_that_serves(bench: Bench) -> None:
    """Fault 8, with two pods: the edit has replaced one of them already."""
    bench.apply({**NPU, "replicas": 2})
    await bench.make_ready()
    before = pods(bench)
    bench.apply({**NPU, **CHANGE, "replicas": 2})
    await bench.settle()
    (new,) = break_new_pods(bench, "ValueError: no")
    (kept,) = pods(bench).keys() & before.keys()
    bench.apply({**NPU, "runtime": {}, "replicas": 2})
    await settle_on(bench, lambda: new not in pods(bench), "the broken pod goes")
    assert kept in pods(bench)
    await bench.make_ready()
    assert pods(bench)[kept]["metadata"]["uid"] == before[kept]["metadata"]["uid"]


async def test_a_check_is_gone_on_with_by_a_new_process(bench: Bench) -> None:
    bench.apply(dict(NPU))
    await bench.make_ready()
    bench.apply({**NPU, **CHANGE})
    await bench.settle()
    job = the_job(bench)
    assert job is not None
    bench.restart()
    assert ("create", "jobs") not in await bench.writes()
    assert (the_job(bench) or {})["metadata"]["uid"] == job["metadata"]["uid"]
    await checked(bench, 0)
    bench.restart()
    await bench.settle()
    assert "--max-num-seqs=3" in bench.child("deployment")["spec"]["template"]["spec"]["containers"][0]["args"]


async def test_with_two_pods_a_bad_change_takes_one_and_is_taken_back(bench: Bench) -> None:
    bench.apply({**NPU, "replicas": 2})
    await bench.make_ready()
    before = pods(bench)
    bench.apply({**NPU, **CHANGE, "replicas": 2})
    await bench.settle()
    assert the_job(bench) is None, "one pod goes on serving: nothing to check for"
    break_new_pods(bench, "loading\n" * 500 + "ValueError: the end says why")
    (kept,) = [name for name, pod in pods(bench).items() if is_ready(pod)]
    assert kept in before
    await miss_the_deadline(bench)
    assert kept in pods(bench), "never the last one"
    await settle_on(bench, lambda: bench.condition("Stalled")[1] == "RolledBack", "the rollback")
    message = bench.condition("Stalled")[2]
    assert message.endswith("ValueError: the end says why"), "fault 13"
    assert "ContainerCrashing" in message
    assert bench.events()[-1] == ("Warning", "RolledBack")
    args = bench.child("deployment")["spec"]["template"]["spec"]["containers"][0]["args"]
    assert "--max-num-seqs=3" not in args
    hashes = {before[kept]["metadata"]["labels"][HASH]}

    def back() -> bool:
        return len(pods(bench)) == 2 and {pod["metadata"]["labels"][HASH] for pod in pods(bench).values()} == hashes

    await settle_on(bench, back, "both pods have the last good template")
    bench.kubelet_says(phase="Running", podIP="127.0.0.1", conditions=READY, containerStatuses=[])
    eventually(lambda: bench.child("deployment")["status"].get("availableReplicas") == 2, "both serve")
    await bench.settle()
    assert bench.condition("Stalled")[:2] == ("True", "RolledBack"), "the spec is still not what runs"
    assert bench.condition("Stalled")[2] == message
    assert bench.condition("Ready")[0] == "False"
    assert bench.status()["availableReplicas"] == 2
    # Neither time nor a new process tries it again; the spec taken back, all is well and no pod was touched.
    bench.restart()
    await bench.settle()
    bench.clock.now += 3600
    assert await bench.writes() == []
    names = pods(bench).keys()
    bench.apply({**NPU, "runtime": {}, "replicas": 2})
    await bench.settle()
    assert bench.condition("Ready")[0] == "True"
    assert "rejected" not in bench.status()["rollout"]
    assert pods(bench).keys() == names
    assert kept in names


READY = [
    {"type": "Ready", "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z"},
    {"type": "PodScheduled", "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z"},
]


async def test_with_one_pod_a_change_that_passes_its_check_and_does_not_start_is_taken_back(bench: Bench) -> None:
    bench.apply(dict(NPU))
    await bench.make_ready()
    good = next(iter(pods(bench).values()))["metadata"]["labels"][HASH]
    bench.apply({**NPU, **CHANGE})
    await bench.settle()
    await checked(bench, 0)
    await bench.settle()
    eventually(lambda: [pod for pod in pods(bench).values() if not is_ready(pod)], "the new pod")
    await bench.settle()
    break_new_pods(bench, "RuntimeError: the graph cannot be captured")
    await miss_the_deadline(bench)

    class Cut(Cluster):
        """The process ends between the write of what is remembered and that of the workload."""

        async def apply(
            self, manifest: Body, *, present: ObservedChild | None, hand_over: int | None = None
        ) -> ApplyResult:
            if manifest["kind"] == "Deployment":
                raise ClusterError(Fault.UNAVAILABLE, "the operator was killed")
            return await super().apply(manifest, present=present, hand_over=hand_over)

    sound = bench.reconciler.cluster
    bench.reconciler.cluster = Cut(sound._api)
    with pytest.raises(Retry):
        await bench.reconcile()
    assert bench.status()["rollout"]["rejected"]["reason"] == "RolledBack"
    bench.reconciler.cluster = sound
    bench.restart()
    await settle_on(bench, lambda: bench.condition("Stalled")[1] == "RolledBack", "the rollback")
    assert bench.condition("Stalled")[2].endswith("RuntimeError: the graph cannot be captured")

    def back() -> bool:
        return [pod["metadata"]["labels"][HASH] for pod in pods(bench).values()] == [good]

    await settle_on(bench, back, "the pod has the last good template")
    bench.kubelet_says(phase="Running", podIP="127.0.0.1", conditions=READY)
    await bench.settle()
    assert bench.condition("Available")[0] == "True"
    assert the_job(bench) is None


async def test_a_broken_pod_goes_first(bench: Bench) -> None:
    bench.apply({**NPU, "replicas": 2})
    await bench.make_ready()
    broken, sound = pods(bench)
    set_status(bench, broken, phase="Running", conditions=[{**READY[0], "status": "False"}, READY[1]])
    eventually(lambda: bench.child("deployment")["status"].get("availableReplicas") == 1, "one pod is unavailable")
    bench.apply({**NPU, **CHANGE, "replicas": 2})
    await settle_on(bench, lambda: broken not in pods(bench), "the broken pod goes")
    await bench.settle()
    await asyncio.sleep(1.0)
    assert sound in pods(bench), "and the other one stays while its successor is not ready"
    assert len(pods(bench)) == 2


@pytest.fixture
def node(kubectl: Kubectl) -> Iterator[str]:
    """A node with one NPU, as a kubelet would have registered it."""
    name = f"node-{kubectl.namespace}"
    kubectl.apply({"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}})
    status = {
        "allocatable": {"huawei.com/Ascend910": "50", "cpu": "8", "memory": "16Gi", "pods": "20"},
        "capacity": {"huawei.com/Ascend910": "50", "cpu": "8", "memory": "16Gi", "pods": "20"},
        "conditions": [{"type": "Ready", "status": "True", "reason": "KubeletReady", "message": "ready"}],
    }
    kubectl.patch("node", name, {"status": status}, "--subresource=status")
    # Where the node controller has no news of it for a while, it taints it; at first it does until it has seen it.
    kubectl.patch("node", name, {"spec": {"taints": None}})
    yield name
    kubectl.delete("node", name)


async def test_a_free_device_lets_the_successor_come_first(bench: Bench, node: str) -> None:
    bench.reconciler.settings = replace(bench.settings, read_nodes=True)
    bench.apply({**NPU, "podTemplate": {"tolerations": [{"operator": "Exists"}]}})
    await bench.make_ready()
    (serving,) = pods(bench)
    bench.requests.clear()
    bench.apply({**NPU, **CHANGE, "podTemplate": {"tolerations": [{"operator": "Exists"}]}})
    await bench.settle()
    assert bench.child("deployment")["spec"]["strategy"]["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}
    eventually(lambda: len(pods(bench)) == 2, "the successor is beside it")
    assert the_job(bench) is None
    assert is_ready(pods(bench)[serving])
    (successor,) = pods(bench).keys() - {serving}
    set_status(bench, successor, phase="Running", podIP="127.0.0.1", conditions=READY)
    eventually(lambda: serving not in pods(bench), "then it goes")
    await settle_on(bench, lambda: bench.condition("Ready")[0] == "True", "it is ready")
    assert bench.child("deployment")["spec"]["strategy"]["rollingUpdate"] == {"maxSurge": 0, "maxUnavailable": 1}


async def test_nodes_are_not_read_unless_it_is_allowed(bench: Bench, node: str) -> None:
    bench.apply({**NPU, "podTemplate": {"tolerations": [{"operator": "Exists"}]}})
    await bench.make_ready()
    asked: list[tuple[str, str]] = []
    bench.apply({**NPU, **CHANGE, "podTemplate": {"tolerations": [{"operator": "Exists"}]}})
    for _ in range(3):
        await bench.writes()
        asked += bench.requests
    assert ("list", "nodes") not in asked
    assert the_job(bench) is not None


async def test_a_job_that_the_api_server_refuses_stops_the_change(bench: Bench) -> None:
    bench.apply(dict(NPU))
    await bench.make_ready()
    before = pods(bench).keys()
    bench.apply({**NPU, "podTemplate": {"volumeMounts": [{"name": "absent", "mountPath": "/absent"}]}})
    await bench.reconcile()
    status, reason, message = bench.condition("Stalled")
    assert (status, reason) == ("True", "ApplyRefused")
    assert "Job/qwen-check-" in message
    assert "absent" in message
    assert (await bench.reconcile() or 0) > 20, "tried again, but not at once"
    assert pods(bench).keys() == before
    bench.apply({**NPU, "podTemplate": {}})
    await bench.settle()
    assert bench.condition("Ready")[0] == "True"
