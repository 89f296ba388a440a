"""The status on an API server: what the cache did, what GitOps tools make of the conditions, what an event names."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from reprise_operator.workqueue import Retry
from tests.operator.reconcile_bench import NAME, Bench
from tests.support.gitops import ArgoCD, kstatus
from tests.support.kubectl import eventually

STAMP = "2026-01-01T00:00:00Z"


def body(bench: Bench) -> dict[str, Any]:
    found = bench.kubectl.get("inferenceservice", NAME)
    assert found is not None
    return dict(found)


async def later(bench: Bench, seconds: float = 61.0) -> None:
    bench.clock.now += seconds
    await bench.settle()


def effect(bench: Bench) -> tuple[str, str]:
    return bench.condition("PrefixCacheEffective")[:2]


async def test_the_cache_from_no_traffic_to_hits_and_back(bench: Bench) -> None:
    bench.apply()
    await bench.make_ready()
    assert effect(bench) == ("Unknown", "NoTraffic")

    bench.engine.queries, bench.engine.misses = 200, {"shorter_than_block": 20, "not_seen": 1}
    await later(bench)
    assert effect(bench) == ("False", "PromptsShorterThanBlock")
    assert "a block of 16 tokens" in bench.condition("PrefixCacheEffective")[2]
    assert bench.status()["prefixCache"]["missReason"] == "ShorterThanBlock"

    bench.engine.queries, bench.engine.misses = 5000, {"shorter_than_block": 20, "not_seen": 90}
    await later(bench)
    assert effect(bench) == ("False", "ZeroHits")

    bench.engine.queries, bench.engine.hits = 15_000, 9000
    await later(bench)
    assert effect(bench) == ("True", "Effective")
    (entry,) = bench.status()["prefixCache"]["replicas"]
    assert (entry["reason"], entry["queriedTokens"], entry["hitTokens"]) == ("Effective", 15_000, 9000)

    bench.engine.status = 401
    await later(bench)
    assert effect(bench) == ("True", "Effective"), "what was read last stands for a while"
    await later(bench)
    assert "401" in bench.condition("PrefixCacheEffective")[2]
    await later(bench, 400)
    assert effect(bench) == ("Unknown", "MetricsUnavailable")
    assert "enabled" not in bench.status()["prefixCache"]
    assert bench.condition("Ready")[0] == "True", "nothing of it holds anything up"

    bench.engine.status = 200
    await later(bench)
    assert effect(bench) == ("Unknown", "NoTraffic")

    # The container restarts: its counters begin anew.
    bench.engine.queries, bench.engine.hits, bench.engine.misses = 1000, 900, {}
    await later(bench)
    assert bench.status()["prefixCache"]["hitRatePercent"] == 90
    assert bench.status()["prefixCache"]["queriedTokens"] == 1000


async def test_an_engine_that_runs_otherwise_than_asked_is_surfaced(bench: Bench) -> None:
    bench.engine.block_size, bench.engine.caching = 128, False
    bench.apply({"prefixCaching": {"blockSize": 64}})
    await bench.make_ready()
    assert effect(bench) == ("False", "Disabled")
    assert bench.status()["prefixCache"] == {"enabled": False}
    status, reason, message = bench.condition("AsSpecified")
    assert (status, reason) == ("False", "EngineDiffers")
    assert "spec.prefixCaching.enabled asks for true, and " in message
    assert "spec.prefixCaching.blockSize asks for 64, and " in message
    assert bench.status()["engine"] == {"blockSize": 128, "kvBlocks": 600, "memoryUtilization": 0.9}


async def test_a_rollouts_event_names_what_changed(bench: Bench) -> None:
    bench.apply()
    await bench.make_ready()
    bench.apply({"memory": {"utilization": 0.5}, "runtime": {"env": [{"name": "A", "value": "secret"}]}})
    await bench.settle()
    assert bench.notes("Updated") == [
        f"Updated Deployment/{NAME}, whose pods are replaced: --gpu-memory-utilization 0.9 → 0.5, env A added"
    ]
    bench.kubectl.patch("deployment", NAME, {"spec": {"replicas": 4}})
    await bench.settle()
    (drift,) = bench.notes("DriftRepaired")
    assert drift.endswith("it was set back: replicas 4 → 1")


async def test_gitops_tools_read_it_right_from_creation_to_deletion(bench: Bench) -> None:
    """kstatus and Argo CD at every point where somebody could look: after each edit and after each pass."""
    argocd = ArgoCD()

    def judged() -> tuple[str, str]:
        found = body(bench)
        return kstatus(found), argocd.health(found)[0]

    progressing, current = ("InProgress", "Progressing"), ("Current", "Healthy")

    async def passes_until(expected: tuple[str, str]) -> None:
        """Every look on the way there finds progress, or what was so at its beginning."""
        begun = judged()
        for _ in range(60):
            with contextlib.suppress(Retry):
                await bench.reconcile()
            seen = judged()
            if seen == expected:
                return
            assert seen in (progressing, begun)
            await asyncio.sleep(0.25)
        raise AssertionError(f"it stays {judged()}: {bench.status()['conditions']}")

    bench.apply()
    assert judged() == progressing, "before any operator has looked"
    await passes_until(progressing)
    await bench.make_ready()
    assert judged() == current

    bench.apply({"prefixCaching": {"enabled": False}})
    assert judged() == progressing, "the status is still that of the old spec"
    await bench.settle()
    assert judged() == progressing, "the old pod is ready, the new one is not"
    assert bench.condition("Available")[0] == "True"

    broken = {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off"}}
    last = {"terminated": {"exitCode": 1, "reason": "Error", "message": "no route to the model"}}
    for pod in _not_ready(bench):
        init = [{"name": "fetch", "image": "x", "imageID": "", "ready": False, "restartCount": 3}]
        init[0] |= {"state": broken, "lastState": last}
        _patch(bench, pod, phase="Pending", initContainerStatuses=init)
    await bench.settle()
    assert judged() == ("Failed", "Degraded")
    assert "no route to the model" in argocd.health(body(bench))[1]

    bench.engine.caching = False
    for pod in _not_ready(bench):
        conditions = [
            {"type": kind, "status": "True", "lastTransitionTime": STAMP} for kind in ("Ready", "PodScheduled")
        ]
        _patch(bench, pod, phase="Running", podIP="127.0.0.1", initContainerStatuses=None, conditions=conditions)
    eventually(lambda: len(bench.pods()) == 1, "the old pod is gone")
    await passes_until(current)

    bench.apply({"suspend": True})
    assert judged() == progressing
    await bench.settle()
    for listed in bench.kubectl.list("pods"):
        bench.kubectl.delete("pod", listed["metadata"]["name"], "--force", "--grace-period=0")
    eventually(lambda: not bench.kubectl.list("pods"), "no pod is left")
    await passes_until(("Current", "Suspended"))

    bench.kubectl.patch("inferenceservice", NAME, {"metadata": {"finalizers": ["example.com/held"]}})
    bench.kubectl.delete("inferenceservice", NAME, "--wait=false")
    assert judged() == ("Terminating", "Progressing")
    bench.kubectl.patch("inferenceservice", NAME, {"metadata": {"finalizers": None}})


def _not_ready(bench: Bench) -> list[dict[str, Any]]:
    def looks_ready(pod: dict[str, Any]) -> bool:
        conditions = (pod.get("status") or {}).get("conditions") or ()
        return any((found["type"], found["status"]) == ("Ready", "True") for found in conditions)

    return eventually(lambda: [pod for pod in bench.pods() if not looks_ready(pod)], "there is a new pod")


def _patch(bench: Bench, pod: dict[str, Any], **status: Any) -> None:
    bench.kubectl.patch("pod", pod["metadata"]["name"], {"status": status}, "--subresource=status")


async def test_it_is_not_ready_while_the_deployment_lags_behind_a_pod_that_fails(bench: Bench) -> None:
    """Fault operator 6. A node restarts: the pod's init container runs again, and fails, before anybody counts."""
    bench.apply()
    await bench.make_ready()
    (pod,) = bench.pods()
    failing = {"name": "fetch", "image": "x", "imageID": "", "ready": False, "restartCount": 3}
    failing |= {"state": {"waiting": {"reason": "CrashLoopBackOff"}}}
    # The pod's Ready condition is still there, and so are the Deployment's figures.
    _patch(bench, pod, initContainerStatuses=[failing])
    await bench.settle()
    assert bench.condition("Ready")[0] == "False"
    assert kstatus(body(bench)) == "Failed"
