"""Memory that runs out, on an API server: one step down for each revision that met it, whatever happens in between.

As in test_reconcile.py the tests call the Reconciler, and write what a kubelet would say.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from reprise_operator.api import Api, Body
from reprise_operator.cluster import LOG_BYTES, Cluster
from reprise_operator.events import Recorder
from reprise_operator.observed import ObservedChild
from reprise_operator.server_side_apply import ApplyResult
from tests.operator.reconcile_bench import NAME, Bench
from tests.operator.test_reconcile_release import checked
from tests.support.kubectl import KubectlFailed, eventually

NPU: dict[str, Any] = {"accelerator": {"profile": "ascend910b"}}
OURS = "OutOfMemory: memory=npu phase=running: NPU out of memory. Tried to allocate 2.00 GiB. Lower it."
CORE_FAILED = "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}"


def current_pods(bench: Bench) -> list[dict[str, Any]]:
    """Of the newest ReplicaSet."""
    sets = bench.kubectl.list("replicasets")
    newest = max(sets, key=lambda each: int(each["metadata"]["annotations"]["deployment.kubernetes.io/revision"]))
    wanted = newest["metadata"]["labels"]["pod-template-hash"]
    return [pod for pod in bench.pods() if pod["metadata"]["labels"].get("pod-template-hash") == wanted]


def end_pods(
    bench: Bench, words: str = OURS, *, reason: str = "Error", code: int = 1, ready: bool = False, pods: int = 1
) -> list[str]:
    """Each container of the present template has ended so, and is started again, or was. The pods' names."""

    def present() -> list[dict[str, Any]] | None:
        deployment = bench.child("deployment")
        if deployment["status"].get("observedGeneration") != deployment["metadata"]["generation"]:
            return None  # the newest ReplicaSet may be the one that is about to be replaced
        found = [pod for pod in current_pods(bench) if "deletionTimestamp" not in pod["metadata"]]
        return found if len(found) == pods else None

    names = [pod["metadata"]["name"] for pod in eventually(present, "the present template's pods are there")]
    for name in names:
        ended = {"exitCode": code, "reason": reason, "message": words, "containerID": f"containerd://{name}-0"}
        end_pod(bench, name, ended, ready=ready)
    return names


def end_pod(bench: Bench, name: str, ended: dict[str, Any], *, ready: bool = False) -> None:
    times = {"startedAt": "2026-11-30T00:00:00Z", "finishedAt": "2026-11-30T00:01:00Z"}
    started = {"running": {"startedAt": "2026-11-30T00:02:00Z"}}
    container = {
        "name": "engine",
        "image": "x",
        "imageID": "",
        "ready": ready,
        "restartCount": 1,
        "state": started if ready else {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 10s"}},
        "lastState": {"terminated": {**ended, **times}},
    }
    told: dict[str, Any] = {"phase": "Running", "containerStatuses": [container]}
    if ready:
        turned = "2026-11-30T00:02:00Z"
        told |= {
            "podIP": "127.0.0.1",
            "podIPs": [{"ip": "127.0.0.1"}],
            "conditions": [
                {"type": kind, "status": "True", "lastTransitionTime": turned} for kind in ("PodScheduled", "Ready")
            ],
        }
    bench.kubectl.patch("pod", name, {"status": told}, "--subresource=status")


def told_share(bench: Bench) -> str:
    """What the Deployment's pods are started with."""
    (container,) = bench.child("deployment")["spec"]["template"]["spec"]["containers"]
    args = list(container["args"])
    return str(args[args.index("--gpu-memory-utilization") + 1])


def memory(bench: Bench) -> dict[str, Any]:
    return dict(bench.status()["memory"])


async def test_a_step_is_written_before_the_deployment_and_told_once(bench: Bench) -> None:
    bench.apply(NPU)
    await bench.settle()
    assert (told_share(bench), memory(bench)["steps"]) == ("0.9", 0)
    end_pods(bench)
    (pod,) = current_pods(bench)
    assert await bench.writes() == [
        ("patch", "inferenceservices"),
        ("patch", "deployments"),
        ("create", "events"),
        ("patch", "inferenceservices"),
        ("create", "events"),
    ]
    assert told_share(bench) == "0.85"
    found = memory(bench)
    assert found.pop("inputsHash")
    assert found == {
        "effective": 0.85,
        "reason": "lowered from 0.9 in 1 step, since pods ran out of memory; "
        "automatic: maxModelLen is unset or at most 32768",
        "steps": 1,
        "deviceOutOfMemory": False,
        "lastOutOfMemory": {
            "podUID": pod["metadata"]["uid"],
            "containerID": f"containerd://{pod['metadata']['name']}-0",
            "at": "2026-11-30T00:01:00Z",
        },
    }
    assert bench.condition("MemoryTuned")[:2] == ("True", "LoweredAfterOutOfMemory")
    assert bench.condition("Reconciling")[0] == "True", "it is being cured"
    await bench.settle()
    assert await bench.writes() == []
    assert bench.events()[2:] == [("Normal", "Updated"), ("Normal", "LoweredAfterOutOfMemory")]


async def test_one_step_for_all_replicas_and_the_next_only_for_the_next_revision(bench: Bench) -> None:
    bench.apply({**NPU, "replicas": 3})
    await bench.settle()
    end_pods(bench, pods=3)
    for _ in range(3):
        await bench.settle()
        await asyncio.sleep(0.2)
    assert (told_share(bench), memory(bench)["steps"]) == ("0.85", 1)
    # Without a surge the first pod of the new template takes the place of a dead one; the others still lie there.
    end_pods(bench, pods=len(eventually(lambda: current_pods(bench), "the new template has pods")))
    await bench.settle()
    assert (told_share(bench), memory(bench)["steps"]) == ("0.8", 2)


async def test_a_container_that_serves_again_has_run_out_of_memory_all_the_same(bench: Bench) -> None:
    bench.apply(NPU)
    await bench.make_ready()
    end_pods(bench, ready=True)
    await bench.settle()
    assert memory(bench)["effective"] == 0.85
    assert told_share(bench) == "0.9", "the only pod that serves is taken after a check"
    await checked(bench, 0)
    await bench.settle()
    assert told_share(bench) == "0.85"


async def test_scaling_resets_nothing_and_a_change_of_an_input_does(bench: Bench) -> None:
    bench.apply({**NPU, "memory": {"utilization": 0.8}})
    await bench.settle()
    end_pods(bench)
    await bench.settle()
    bench.apply({**NPU, "memory": {"utilization": 0.8}, "replicas": 2})
    await bench.settle()
    bench.kubectl("scale", "risvc", NAME, "--replicas=1")
    await bench.settle()
    found = memory(bench)
    assert (told_share(bench), found["steps"], found["requested"], found["effective"]) == ("0.75", 1, 0.8, 0.75)
    bench.apply({**NPU, "memory": {"utilization": 0.8}, "model": {"uri": "hostpath:///m", "maxModelLen": 4096}})
    await bench.settle()
    found = memory(bench)
    assert (told_share(bench), found["steps"], "lastOutOfMemory" in found) == ("0.8", 0, False)
    assert bench.condition("MemoryTuned")[:2] == ("False", "Requested")


async def test_the_floor_ends_it_and_a_person_is_asked(bench: Bench) -> None:
    bench.apply({**NPU, "memory": {"floor": 0.82}})
    await bench.settle()
    for share in ("0.85", "0.82", "0.82"):
        end_pods(bench)
        await bench.settle()
        assert told_share(bench) == share
    assert bench.condition("MemoryTuned")[:2] == ("True", "FloorReached")
    status, reason, message = bench.condition("Stalled")
    assert (status, reason) == ("True", "DeviceOutOfMemory")
    assert "spec.memory.utilization is at its floor, 0.82" in message
    assert memory(bench)["deviceOutOfMemory"] is True
    assert ("Warning", "FloorReached") in bench.events()


@pytest.mark.parametrize(
    ("spec", "words", "reason", "code", "expected"),
    [
        ({"memory": {"autoTune": False}}, OURS, "Error", 1, "DeviceOutOfMemory"),
        ({}, "", "OOMKilled", 137, "OutOfMemory"),
        ({}, "OutOfMemory: memory=npu phase=weights: NPU out of memory.", "Error", 1, "DeviceOutOfMemory"),
    ],
    ids=["switched off", "the host's memory", "the weights"],
)
async def test_what_a_smaller_share_does_not_cure(
    bench: Bench, spec: dict[str, Any], words: str, reason: str, code: int, expected: str
) -> None:
    bench.apply({**NPU, **spec})
    await bench.settle()
    end_pods(bench, words, reason=reason, code=code)
    await bench.settle()
    assert (told_share(bench), memory(bench)["steps"]) == ("0.9", 0)
    assert bench.condition("Stalled")[:2] == ("True", expected)


async def test_on_a_cpu_the_limit_is_the_device(bench: Bench) -> None:
    """bench's profile is cpu."""
    bench.apply({"runtime": {"resources": {"limits": {"memory": "2Gi"}}}})
    await bench.settle()
    end_pods(bench, "", reason="OOMKilled", code=137)
    await bench.settle()
    assert (told_share(bench), memory(bench)["steps"]) == ("0.85", 1)


async def test_vllm_s_cause_is_read_from_its_log(bench: Bench) -> None:
    class Node(Cluster):
        """There is no kubelet here: what it would answer."""

        asked = 0

        async def log_tail(
            self, namespace: str, pod: str, container: str, *, previous: bool = True, limit: int = LOG_BYTES
        ) -> str:
            self.asked += 1
            return f"RuntimeError: NPU out of memory. Tried to allocate 2.00 GiB\n{CORE_FAILED}\n"

    node = Node(bench.reconciler.cluster._api)
    bench.reconciler.cluster = node
    runtime = {"runtime": {"name": "vllm-ascend"}, "model": {"uri": "hostpath:///m", "maxModelLen": 4096}}
    bench.apply({**NPU, **runtime})
    await bench.settle()
    assert node.asked == 0
    end_pods(bench, CORE_FAILED)
    await bench.settle()
    assert (told_share(bench), memory(bench)["steps"]) == ("0.85", 1)
    assert node.asked == 1, "read once"


class Killed(BaseException):
    """The process is gone: nothing behind this line runs."""


class Mortal(Cluster):
    """Ends the process at its n-th write: before it is sent, or when it has been answered."""

    def __init__(self, api: Api, *, at: int, answered: bool) -> None:
        super().__init__(api)
        self._left = at
        self._answered = answered

    def _die(self, *, answered: bool) -> None:
        if answered is self._answered and self._left == 0:
            raise Killed

    async def patch_status(self, service: Body, status: Body) -> Body | None:
        self._die(answered=False)
        answer = await super().patch_status(service, status)
        self._die(answered=True)
        self._left -= 1
        return answer

    async def apply(
        self, manifest: Body, *, present: ObservedChild | None, hand_over: int | None = None
    ) -> ApplyResult:
        self._die(answered=False)
        answer = await super().apply(manifest, present=present, hand_over=hand_over)
        self._die(answered=True)
        self._left -= 1
        return answer

    async def create_event(self, namespace: str, event: Body) -> None:
        self._die(answered=False)
        await super().create_event(namespace, event)
        self._die(answered=True)
        self._left -= 1


async def test_an_operator_that_is_killed_anywhere_in_a_step_takes_exactly_one(bench: Bench) -> None:
    """Status, Deployment, event, status, event: five writes, and it ends before or after each of them."""
    bench.apply({**NPU, "memory": {"floor": 0.05}})
    await bench.settle()
    sound = bench.reconciler.cluster
    share, died = 0.90, 0
    points = [(at, answered) for at in range(5) for answered in (False, True)]
    for number, (at, answered) in enumerate(points, start=1):
        names = end_pods(bench)
        mortal = Mortal(sound._api, at=at, answered=answered)
        bench.reconciler.cluster, bench.reconciler.recorder = mortal, Recorder(mortal, instance="a", clock=bench.clock)
        with pytest.raises(Killed):
            await bench.reconcile()
        died += 1
        # While no operator runs, another run ends in the same way with the old share; then comes a new process.
        for name in names:
            again = {"exitCode": 1, "reason": "Error", "message": OURS, "containerID": f"containerd://{name}-1"}
            try:
                end_pod(bench, name, again)
            except KubectlFailed as failed:  # the Deployment was written already, and its controller was faster
                if "NotFound" not in str(failed):
                    raise
        bench.reconciler.cluster, bench.reconciler.recorder = sound, Recorder(sound, instance="b", clock=bench.clock)
        bench.restart()
        await bench.settle()
        share = round(share - 0.05, 4)
        where = f"killed {'after' if answered else 'before'} write {at + 1}"
        assert memory(bench)["steps"] == number, where
        assert told_share(bench) == f"{share:g}", where
        assert bench.condition("MemoryTuned")[:2] == ("True", "LoweredAfterOutOfMemory"), where
    assert died == len(points) == 10
