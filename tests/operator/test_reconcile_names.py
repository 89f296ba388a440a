"""Whose a name is, on an API server: somebody else's, or still that of a service which was deleted a moment ago."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from reprise_operator.workqueue import Retry
from tests.operator.reconcile_bench import NAME, Bench
from tests.support.kubectl import eventually

FOREIGN: dict[str, Any] = {
    "apiVersion": "apps/v1",
    "kind": "Deployment",
    "metadata": {"name": NAME},
    "spec": {
        "replicas": 1,
        "selector": {"matchLabels": {"app": "theirs"}},
        "template": {
            "metadata": {"labels": {"app": "theirs"}},
            "spec": {"containers": [{"name": "theirs", "image": "theirs:1"}]},
        },
    },
}


async def test_a_workload_of_somebody_else_is_not_scaled_by_an_autoscaler_of_ours(bench: Bench) -> None:
    bench.kubectl.apply(FOREIGN)
    bench.apply({"autoscaling": {"minReplicas": 2, "maxReplicas": 4}})
    await bench.settle()
    assert bench.condition("Stalled")[:2] == ("True", "NameTaken")
    assert bench.kubectl.get("hpa", NAME) is None
    assert bench.child("deployment")["spec"]["replicas"] == 1
    bench.kubectl.delete("deployment", NAME)
    await bench.settle()
    target = bench.child("hpa")["spec"]["scaleTargetRef"]
    assert (target["kind"], target["name"]) == ("Deployment", NAME)
    assert bench.condition("Stalled")[0] == "False"
    # The other way round: ours is deleted, and somebody is quicker than we.
    bench.kubectl.delete("deployment", NAME)
    bench.kubectl.apply(FOREIGN)
    await bench.settle()
    assert bench.kubectl.get("hpa", NAME) is None
    assert bench.condition("Stalled")[:2] == ("True", "NameTaken")


async def test_a_service_deleted_and_made_again_at_once_comes_up_without_anybody(bench: Bench) -> None:
    """Its children are there until the garbage collector has been; nobody need delete or rename anything."""
    bench.apply({"prefixCaching": {"warmup": {"prompts": ["a"]}}})
    await bench.make_ready()
    before = {kind: bench.child(kind)["metadata"]["uid"] for kind in ("deployment", "service")}
    # As one that a cloud's load balancer is still held for: the collector does not get it at once.
    bench.kubectl.patch("service", NAME, {"metadata": {"finalizers": ["tests.example/held"]}})
    bench.kubectl.delete("inferenceservice", NAME, "--wait=false")
    bench.apply({"prefixCaching": {"warmup": {"prompts": ["b"]}}})

    def uid(kind: str) -> str | None:
        found = bench.kubectl.get(kind, NAME)
        return None if found is None else str(found["metadata"]["uid"])

    for _ in range(100):
        with contextlib.suppress(Retry):
            await bench.reconcile()
        assert bench.condition("Stalled")[0] == "False", bench.condition("Stalled")
        if uid("deployment") not in (None, before["deployment"]):
            break
        await asyncio.sleep(0.1)
    assert uid("service") == before["service"]
    assert bench.condition("Reconciling")[:2] == ("True", "Applying")
    assert "Service/qwen is left of the InferenceService that had this name before" in bench.condition("Reconciling")[2]
    bench.kubectl.patch("service", NAME, {"metadata": {"finalizers": None}})
    eventually(lambda: uid("service") is None, "the old Service is gone")
    await bench.make_ready()
    assert uid("service") is not None
    warmup = bench.kubectl.get("configmap", f"{NAME}-warmup") or {}
    assert warmup["data"] == {"prompts.jsonl": '{"prompt": "b"}\n'}
    assert bench.status()["observedGeneration"] == 1
