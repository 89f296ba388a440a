"""StatefulSets, hand-overs between workloads and the warm-up's ConfigMap, pass by pass on an API server.

Pods are made by the controllers beside the API server; the tests write what a kubelet would say of them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.operator.reconcile_bench import NAME, Bench
from tests.support.kubectl import eventually


@pytest.fixture(autouse=True)
def _present(bench: Bench) -> None:
    """The cluster's own time: how old a pod is counts here."""
    bench.clock.now = time.time()


SELECTOR = f"serving.reprise.io/name={NAME}"


def volumes(size: str = "1Gi", **more: Any) -> dict[str, Any]:
    return {"prefixCaching": {"persistence": {"size": size}}, **more}


def stateful_sets(bench: Bench) -> list[dict[str, Any]]:
    return [dict(found) for found in bench.kubectl.list("statefulsets", SELECTOR)]


def pods_of(bench: Bench, kind: str) -> list[dict[str, Any]]:
    """Those of a Deployment or of StatefulSets."""
    owner = "ReplicaSet" if kind == "Deployment" else kind
    return [pod for pod in bench.pods() if pod["metadata"]["ownerReferences"][0]["kind"] == owner]


def say(bench: Bench, pod: dict[str, Any], *, ready: bool, **more: Any) -> None:
    """What a kubelet would."""
    since = {"lastTransitionTime": "2026-01-01T00:00:00Z"}
    engine = {
        "name": "engine",
        "image": "x",
        "imageID": "x",
        "ready": ready,
        "started": ready,
        "restartCount": 0,
        "state": {"running": {"startedAt": "2026-01-01T00:00:00Z"}},
        **more,
    }
    status = {
        "phase": "Running",
        "podIP": "127.0.0.1",
        "podIPs": [{"ip": "127.0.0.1"}],
        "containerStatuses": [engine],
        "conditions": [
            {"type": "Ready", "status": str(ready), **since},
            {"type": "PodScheduled", "status": "True", **since},
        ],
    }
    bench.say(pod["metadata"]["name"], status)


def crash(bench: Bench, pod: dict[str, Any]) -> None:
    waiting = {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 10s restarting failed container"}}
    say(bench, pod, ready=False, state=waiting, restartCount=3)


def unready(pod: dict[str, Any]) -> bool:
    conditions = (pod.get("status") or {}).get("conditions") or ()
    return not any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)


async def until(bench: Bench, look: Callable[[], Any], what: str) -> Any:
    """Passes until `look` sees it."""
    ends = time.monotonic() + 40
    while time.monotonic() < ends:
        await bench.writes()
        if found := look():
            return found
        await asyncio.sleep(0.05)
    raise AssertionError(f"never: {what}; {bench.status()['conditions']}")


async def serve(bench: Bench, kind: str, count: int) -> None:
    """Passes, in which every pod of `kind` becomes ready, until the service is."""

    def look() -> bool:
        found = pods_of(bench, kind)
        for pod in filter(unready, found):
            say(bench, pod, ready=True)
        return len(found) == count and bench.condition("Ready")[0] == "True"

    await until(bench, look, f"{count} pods of the {kind} serve")


async def test_a_service_with_volumes_from_nothing_to_ready_and_idle(bench: Bench) -> None:
    bench.apply(volumes(replicas=2))
    await serve(bench, "StatefulSet", 2)
    (made,) = stateful_sets(bench)
    claims = {claim["metadata"]["name"] for claim in bench.kubectl.list("persistentvolumeclaims")}
    assert claims == {f"prefix-cache-{made['metadata']['name']}-{number}" for number in range(2)}
    status = bench.status()
    assert (status["replicas"], status["readyReplicas"], status["updatedReplicas"]) == (2, 2, 2)
    assert bench.kubectl.get("deployment", NAME) is None
    await bench.settle()
    bench.clock.now += 400
    await bench.settle()
    assert await bench.writes_of_passes(20) == []


async def test_serving_pods_stay_until_those_with_volumes_serve_and_back(bench: Bench) -> None:
    bench.apply({"replicas": 2})
    await serve(bench, "Deployment", 2)
    before = {pod["metadata"]["uid"] for pod in bench.pods()}

    bench.apply(volumes(replicas=2))
    new = await until(bench, lambda: len(pods_of(bench, "StatefulSet")) == 2, "the new pods are made")
    assert new
    for _ in range(4):
        await bench.writes()
    assert before <= {pod["metadata"]["uid"] for pod in bench.pods()}, "a serving pod was given up for one that is not"
    assert bench.condition("Available")[0] == "True"
    assert bench.condition("Reconciling")[0] == "True"

    say(bench, pods_of(bench, "StatefulSet")[0], ready=True)
    await until(bench, lambda: len(pods_of(bench, "Deployment")) == 1, "one has given way to one")
    await serve(bench, "StatefulSet", 2)
    assert bench.kubectl.get("deployment", NAME) is None
    assert ("Normal", "HandedOver") in bench.events()

    bench.apply({"replicas": 2, "prefixCaching": {"persistence": None}})
    await serve(bench, "Deployment", 2)
    eventually(lambda: not stateful_sets(bench), "the StatefulSet is gone")
    await bench.settle()


async def test_a_pod_without_a_device_makes_one_give_way(bench: Bench) -> None:
    bench.apply({"replicas": 2})
    await serve(bench, "Deployment", 2)
    bench.apply(volumes(replicas=2))
    new = await until(bench, lambda: pods_of(bench, "StatefulSet"), "the new pods are made")
    condition = {
        "type": "PodScheduled",
        "status": "False",
        "reason": "Unschedulable",
        "message": "0/1 nodes are available: 1 Insufficient huawei.com/Ascend910.",
        "lastTransitionTime": "2026-01-01T00:00:00Z",
    }
    name = new[0]["metadata"]["name"]
    bench.kubectl.patch("pod", name, {"status": {"conditions": [condition]}}, "--subresource=status")
    await until(bench, lambda: len(pods_of(bench, "Deployment")) == 1, "one has given way")
    for _ in range(6):
        await bench.writes()
        await asyncio.sleep(0.1)
    assert len(pods_of(bench, "Deployment")) == 1, "the last one that serves waits for one that does"


async def test_another_size_is_another_volume_for_each_pod_in_turn(bench: Bench) -> None:
    bench.apply(volumes("1Gi"))
    await serve(bench, "StatefulSet", 1)
    (before,) = stateful_sets(bench)
    bench.apply(volumes("2Gi"))
    await until(bench, lambda: len(pods_of(bench, "StatefulSet")) == 2, "the new one beside the old one")
    await serve(bench, "StatefulSet", 1)
    (after,) = stateful_sets(bench)
    assert after["metadata"]["name"] != before["metadata"]["name"]
    (claim,) = after["spec"]["volumeClaimTemplates"]
    assert claim["spec"]["resources"]["requests"]["storage"] == "2Gi"


async def test_a_bad_template_that_is_put_right_does_not_wait_for_its_broken_pod(bench: Bench) -> None:
    good = volumes(replicas=2)
    bench.apply(good)
    await serve(bench, "StatefulSet", 2)
    bench.apply({**good, "runtime": {"extraArgs": ["--no-such-flag"]}})

    def broken() -> list[dict[str, Any]]:
        return [
            pod for pod in pods_of(bench, "StatefulSet") if "--no-such-flag" in pod["spec"]["containers"][0]["args"]
        ]

    (bad,) = await until(bench, broken, "the first pod of the bad template")
    crash(bench, bad)
    await until(bench, lambda: bench.condition("Stalled")[1] == "ContainerCrashing", "the crash is told")
    assert bench.condition("Available")[0] == "True", "the other pod serves"

    bench.apply({**good, "runtime": {"extraArgs": ["--seed=7"]}})
    await until(bench, lambda: not broken(), "the broken pod is replaced")
    await serve(bench, "StatefulSet", 2)
    assert all("--seed=7" in pod["spec"]["containers"][0]["args"] for pod in pods_of(bench, "StatefulSet"))


async def test_an_autoscaler_s_number_stays_through_changes_and_hand_overs(bench: Bench) -> None:
    """The autoscaler's writes are `kubectl scale` of the workload."""
    scaling = {"autoscaling": {"minReplicas": 1, "maxReplicas": 4}}
    bench.apply({**volumes(), **scaling})
    await serve(bench, "StatefulSet", 1)
    (made,) = stateful_sets(bench)
    name = made["metadata"]["name"]

    def target() -> dict[str, Any]:
        hpa = bench.kubectl.get("horizontalpodautoscaler", NAME)
        assert hpa is not None
        return dict(hpa["spec"]["scaleTargetRef"])

    assert target() == {"apiVersion": "apps/v1", "kind": "StatefulSet", "name": name}
    bench.kubectl("scale", f"statefulset/{name}", "--replicas=3")
    await serve(bench, "StatefulSet", 3)
    bench.apply({**volumes(runtime={"extraArgs": ["--seed=7"]}), **scaling})
    await serve(bench, "StatefulSet", 3)
    (changed,) = stateful_sets(bench)
    assert changed["spec"]["replicas"] == 3
    assert "--seed=7" in changed["spec"]["template"]["spec"]["containers"][0]["args"]

    bench.apply({**scaling, "prefixCaching": {"persistence": None}})
    await serve(bench, "Deployment", 3)
    eventually(lambda: not stateful_sets(bench), "the StatefulSet is gone")
    assert target() == {"apiVersion": "apps/v1", "kind": "Deployment", "name": NAME}
    await bench.settle()


async def test_a_rejected_change_of_a_deployment_is_forgotten_by_a_stateful_set(bench: Bench) -> None:
    bench.apply({"replicas": 1})
    await serve(bench, "Deployment", 1)
    assert bench.status()["rollout"]["lastGood"]["podTemplateHash"]
    bench.apply(volumes(replicas=1))
    await serve(bench, "StatefulSet", 1)
    assert "rollout" not in bench.status(), "there is no ReplicaSet to go back to"


async def test_prompts_are_kept_right_and_taken_away(bench: Bench) -> None:
    bench.apply({"prefixCaching": {"warmup": {"prompts": ["You are", "He is"]}}})
    await bench.settle()

    def config() -> dict[str, Any] | None:
        return bench.kubectl.get("configmap", f"{NAME}-warmup")

    made = config()
    assert made is not None
    written = made["data"]["prompts.jsonl"]
    assert written.count("\n") == 2
    bench.kubectl.patch("configmap", f"{NAME}-warmup", {"data": {"prompts.jsonl": "mine"}})
    assert ("patch", "configmaps") in await bench.writes()
    repaired = config()
    assert repaired is not None
    assert repaired["data"]["prompts.jsonl"] == written
    await bench.settle()
    template = bench.child("deployment")["spec"]["template"]
    bench.apply({"prefixCaching": {"warmup": {"prompts": ["She is"]}}})
    await bench.settle()
    assert bench.child("deployment")["spec"]["template"] != template, "other prompts, other pods"
    bench.apply({"prefixCaching": {"warmup": None}})
    await bench.settle()
    assert config() is None


async def test_a_config_map_that_is_not_there_is_told(bench: Bench) -> None:
    bench.apply({"prefixCaching": {"warmup": {"configMapKeyRef": {"name": "mine", "key": "k"}}}})
    await serve(bench, "Deployment", 1)
    assert "ConfigMap mine of spec.prefixCaching.warmup does not exist" in bench.condition("Ready")[2]
    bench.kubectl.apply({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "mine"}, "data": {"k": "hi"}})
    await bench.settle()
    assert "ConfigMap" not in bench.condition("Ready")[2]


async def test_a_broken_pod_is_replaced_before_one_that_serves(bench: Bench) -> None:
    bench.apply(volumes(replicas=2))
    await serve(bench, "StatefulSet", 2)
    (first,) = [pod for pod in bench.pods() if pod["metadata"]["name"].endswith("-0")]
    (serving,) = [pod for pod in bench.pods() if pod["metadata"]["name"].endswith("-1")]
    crash(bench, first)
    await until(bench, lambda: bench.condition("Ready")[0] == "False", "the crash is seen")
    bench.apply(volumes(replicas=2, runtime={"extraArgs": ["--seed=7"]}))

    def uids() -> set[str]:
        return {pod["metadata"]["uid"] for pod in bench.pods()}

    await until(bench, lambda: first["metadata"]["uid"] not in uids(), "the broken pod is replaced")
    for _ in range(8):
        await bench.writes()
        await asyncio.sleep(0.2)
    assert serving["metadata"]["uid"] in uids(), "the one that serves went before another one did"
    await serve(bench, "StatefulSet", 2)
