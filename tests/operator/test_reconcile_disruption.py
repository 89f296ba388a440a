"""The disruption budget on an API server: it comes, changes, is repaired and goes; and it holds an eviction up."""

from __future__ import annotations

import json

import pytest

from tests.operator.reconcile_bench import NAME, Bench
from tests.support.kubectl import KubectlFailed, eventually


async def test_the_disruption_budget_comes_changes_is_repaired_and_goes(bench: Bench) -> None:
    bench.apply({"replicas": 2, "disruption": {"minAvailable": 1}})
    await bench.settle()
    assert bench.child("pdb")["spec"]["minAvailable"] == 1
    bench.apply({"replicas": 2, "disruption": {"maxUnavailable": "50%"}})
    await bench.settle()
    spec = bench.child("pdb")["spec"]
    assert (spec.get("minAvailable"), spec["maxUnavailable"]) == (None, "50%")
    await bench.reconciler.kinds.poll()
    bench.kubectl.patch("pdb", NAME, {"spec": {"maxUnavailable": 2}})
    _, woken = await bench.reconciler.kinds.poll()
    assert woken == {bench.key}, "an edit is found by polling"
    await bench.settle()
    assert bench.child("pdb")["spec"]["maxUnavailable"] == "50%"
    bench.kubectl.delete("pdb", NAME)
    await bench.settle()
    assert bench.child("pdb")["spec"]["maxUnavailable"] == "50%"
    bench.apply({"replicas": 2})
    await bench.settle()
    assert bench.kubectl.get("pdb", NAME) is None


async def test_a_service_without_these_asks_for_nothing_more(bench: Bench) -> None:
    bench.apply({"disruption": {"minAvailable": 1}})
    await bench.settle()
    bench.apply()
    await bench.settle()
    await bench.reconciler.kinds.poll()
    await bench.settle()
    bench.requests.clear()
    await bench.reconcile()
    assert {plural for _, plural in bench.requests} == {
        *("inferenceservices", "deployments", "statefulsets", "services", "configmaps", "pods", "replicasets")
    }


async def test_an_eviction_waits_for_the_budget(bench: Bench, controller_manager: None) -> None:
    bench.apply({"disruption": {"minAvailable": 1}})
    await bench.make_ready()
    eventually(
        lambda: bench.child("pdb").get("status", {}).get("currentHealthy") == 1, "the budget has counted", within=30
    )
    (pod,) = bench.pods()
    where = f"/api/v1/namespaces/{bench.kubectl.namespace}/pods/{pod['metadata']['name']}/eviction"
    eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod["metadata"]["name"]}}
    with pytest.raises(KubectlFailed, match="disruption budget"):
        bench.kubectl("create", "--raw", where, "-f", "-", stdin=json.dumps(eviction))
