"""One pass after another against an API server: what is written, when nothing is, and what is said about it.

No operator process: the Reconciler is called by the tests, so each pass is counted. Pods are made by the controllers
beside the API server; there is no node, so the tests write what a kubelet would say.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any

import pytest

from reprise_operator.kinds import DEPLOYMENTS, INFERENCE_SERVICES
from reprise_operator.naming import NAME_LABEL
from reprise_operator.watch import WatchHealth
from reprise_operator.workqueue import Retry
from tests.operator.reconcile_bench import NAME, Bench
from tests.support.kubectl import Kubectl, eventually


async def test_a_service_from_nothing_to_ready(bench: Bench) -> None:
    bench.apply()
    assert await bench.writes() == [
        ("patch", "services"),
        ("create", "events"),
        ("patch", "deployments"),
        ("create", "events"),
        ("patch", "inferenceservices"),
    ]
    assert bench.condition("Ready")[:2] == ("False", "Progressing")
    assert bench.condition("Reconciling")[0] == "True"
    owner = bench.child("deployment")["metadata"]["ownerReferences"]
    assert [(reference["kind"], reference["name"], reference["controller"]) for reference in owner] == [
        ("InferenceService", NAME, True)
    ]
    await bench.make_ready()
    status = bench.status()
    assert (status["replicas"], status["readyReplicas"]) == (1, 1)
    assert status["prefixCache"]["enabled"] is True
    assert status["engine"]["blockSize"] == 16
    assert status["memory"]["effective"] == 0.9
    assert "hitRatePercent" not in status["prefixCache"], "no traffic is no figure, not 0 %"
    assert bench.events() == [("Normal", "Created"), ("Normal", "Created"), ("Normal", "Ready")]
    body = bench.kubectl.get("inferenceservice", NAME)
    assert body is not None
    assert "finalizers" not in body["metadata"], "deletion must not need the operator (fault 12)"
    assert not [key for key in body["metadata"].get("annotations", {}) if "kopf" in key]


async def test_a_deployment_that_somebody_paused_goes_on(bench: Bench) -> None:
    """Else every later change of the spec would stop there, and nothing say why."""
    bench.apply()
    await bench.make_ready()
    bench.kubectl("rollout", "pause", f"deployment/{NAME}")
    await bench.settle()
    assert not bench.child("deployment")["spec"].get("paused", False)
    assert ("Warning", "DriftRepaired") in bench.events()
    assert bench.condition("Ready")[0] == "True"
    assert await bench.writes() == [], "and that is all"


async def test_what_is_taken_out_of_the_spec_leaves_nothing_behind(bench: Bench) -> None:
    """What the API server fills in belongs to nobody, so an apply does not take it away with what it came from."""
    bench.apply()
    await bench.settle()
    before = bench.child("deployment")["spec"]["template"]
    bench.apply({"podTemplate": {"serviceAccountName": "reader"}, "runtime": {"image": "r.example/engine:latest"}})
    await bench.settle()
    spec = bench.child("deployment")["spec"]["template"]["spec"]
    assert spec["serviceAccountName"] == "reader"
    assert spec["containers"][0]["imagePullPolicy"] == "Always"
    bench.apply({"podTemplate": {}, "runtime": {}})
    await bench.settle()
    assert bench.child("deployment")["spec"]["template"] == before


async def test_emoji_reach_the_pods(bench: Bench) -> None:
    """In prompts they are common, and an apply is YAML, which has no pairs of surrogates."""
    env = [{"name": "MOOD", "value": "a 😀 b"}]
    bench.apply({"prefixCaching": {"warmup": {"prompts": ["Hello 😀, ünïcode and \\ud83d"]}}, "runtime": {"env": env}})
    await bench.settle()
    (container,) = bench.child("deployment")["spec"]["template"]["spec"]["containers"]
    assert env[0] in container["env"]
    data = (bench.kubectl.get("configmap", f"{NAME}-warmup") or {})["data"]
    assert json.loads(data["prompts.jsonl"]) == {"prompt": "Hello 😀, ünïcode and \\ud83d"}


async def test_an_idle_service_is_never_written(bench: Bench) -> None:
    """Fault 17: an hour of passes, with figures read every 30 s, and not one write."""
    bench.apply()
    bench.engine.queries, bench.engine.hits = 100, 50
    await bench.make_ready()
    bench.clock.now += 300  # the window of the hit rate passes
    await bench.settle()
    assert await bench.writes_of_passes(120) == []


async def test_the_watch_owes_nothing_of_a_service_that_idles_since_the_operator_started(bench: Bench) -> None:
    bench.apply()
    await bench.make_ready()
    bench.restart()
    health = bench.reconciler.health = WatchHealth(clock=bench.clock)
    body = bench.kubectl.get("inferenceservice", NAME)
    assert body is not None
    health.delivered(bench.key, body["metadata"]["resourceVersion"])  # the watch's first listing, and no event after it
    for _ in range(3):
        await bench.reconcile()
        bench.clock.now += 200
    assert health.behind(INFERENCE_SERVICES) == 0
    assert health.behind(DEPLOYMENTS) > 120, "of which nobody has told here"
    assert health.dead() in ("deployments", "services", "pods")


async def test_the_pass_asks_little(bench: Bench) -> None:
    bench.apply()
    await bench.make_ready()
    bench.requests.clear()
    await bench.reconcile()
    assert sorted(bench.requests) == [
        ("get", "inferenceservices"),
        ("list", "configmaps"),
        ("list", "deployments"),
        ("list", "pods"),
        ("list", "replicasets"),
        ("list", "services"),
        ("list", "statefulsets"),
    ]


async def test_traffic_shows_as_a_hit_rate(bench: Bench) -> None:
    bench.apply()
    await bench.make_ready()
    bench.engine.queries, bench.engine.hits = 3000, 1500
    bench.clock.now += 61
    await bench.settle()
    cache = bench.status()["prefixCache"]
    assert cache["hitRatePercent"] == 50
    assert bench.condition("PrefixCacheEffective")[:2] == ("True", "Effective")


@pytest.mark.parametrize(
    ("kind", "edit", "look", "wanted"),
    [
        ("deployment", {"spec": {"replicas": 4}}, lambda body: body["spec"]["replicas"], 1),
        ("service", {"spec": {"selector": {"x": "y"}}}, lambda body: list(body["spec"]["selector"]), [NAME_LABEL]),
        (
            "service",
            {"spec": {"ports": [{"name": "http", "port": 81, "targetPort": "http"}]}},
            lambda body: [port["port"] for port in body["spec"]["ports"]],
            [8000],
        ),
        (
            "deployment",
            {"metadata": {"labels": {"app.kubernetes.io/managed-by": "me"}}},
            lambda body: body["metadata"]["labels"]["app.kubernetes.io/managed-by"],
            "reprise-operator",
        ),
        (
            "deployment",
            {"metadata": {"ownerReferences": []}},
            lambda body: [owner["name"] for owner in body["metadata"]["ownerReferences"]],
            [NAME],
        ),
    ],
    ids=["replicas", "selector", "port", "label", "owner"],
)
async def test_an_edit_of_our_fields_is_repaired_in_one_pass(
    bench: Bench, kind: str, edit: dict[str, Any], look: Any, wanted: Any
) -> None:
    bench.apply()
    await bench.settle()
    bench.kubectl.patch(kind, NAME, edit)
    await bench.reconcile()
    assert look(bench.child(kind)) == wanted
    await bench.settle()
    assert ("Warning", "DriftRepaired") in bench.events()


async def test_what_others_add_beside_our_fields_is_theirs(bench: Bench) -> None:
    bench.apply()
    await bench.settle()
    bench.kubectl.patch("service", NAME, {"metadata": {"annotations": {"team": "a"}}, "spec": {"externalIPs": []}})
    await bench.settle()
    assert bench.child("service")["metadata"]["annotations"]["team"] == "a"
    assert ("Warning", "DriftRepaired") not in bench.events()


@pytest.mark.parametrize("kind", ["deployment", "service"])
async def test_a_deleted_child_is_back_in_one_pass(bench: Bench, kind: str) -> None:
    bench.apply()
    await bench.settle()
    bench.kubectl.delete(kind, NAME)
    await bench.settle()
    assert bench.child(kind)["spec"]


async def test_a_spec_change_reaches_the_pod_template(bench: Bench) -> None:
    """Fault 1: the caching flag, the memory share, extra args and the environment."""
    bench.apply()
    await bench.make_ready()
    bench.apply(
        {
            "prefixCaching": {"enabled": False},
            "memory": {"utilization": 0.5},
            "runtime": {"extraArgs": ["--max-num-seqs=3"], "env": [{"name": "A", "value": "b"}]},
        }
    )
    await bench.reconcile()
    (container,) = bench.child("deployment")["spec"]["template"]["spec"]["containers"]
    assert "--no-enable-prefix-caching" in container["args"]
    assert "--max-num-seqs=3" in container["args"]
    assert {"name": "A", "value": "b"} in container["env"]
    assert bench.condition("Ready")[:2] == ("False", "Progressing"), "the old pods do not make the new spec ready"
    assert bench.condition("Available")[0] == "True"
    assert ("Normal", "Updated") in bench.events()


async def test_a_suspended_service_has_no_pods_and_is_not_polled(bench: Bench) -> None:
    bench.apply()
    await bench.make_ready()
    bench.apply({"suspend": True})
    await bench.settle()
    for pod in bench.kubectl.list("pods"):
        bench.kubectl.delete("pod", pod["metadata"]["name"], "--force", "--grace-period=0")
    eventually(lambda: not bench.kubectl.list("pods"), "no pod is left")
    await bench.settle()
    assert bench.child("deployment")["spec"]["replicas"] == 0
    assert await bench.reconcile() is None


async def test_deletion_needs_no_operator(bench: Bench) -> None:
    bench.apply()
    await bench.settle()
    bench.kubectl.delete("risvc", NAME)
    eventually(lambda: not bench.kubectl.list("deployments") and not bench.kubectl.list("services"), "all is gone")
    # What the resync does with a service that a listing lacks: the read finds it gone, and it is forgotten.
    assert bench.reconciler.directory.absent_from([]) == {bench.key}
    assert await bench.writes() == []
    assert len(bench.reconciler.directory) == 0
    assert bench.reconciler.metrics.registry.get_sample_value("reprise_operator_services") == 0


async def test_a_new_process_comes_to_the_same_end_with_no_change(bench: Bench, kubectl: Kubectl) -> None:
    bench.apply()
    await bench.make_ready()
    before = [bench.child(kind)["metadata"]["resourceVersion"] for kind in ("deployment", "service")]
    bench.restart()
    writes = await bench.writes()
    assert sorted(writes) == [("patch", "deployments"), ("patch", "services")], "applied once, to learn the answer"
    assert [bench.child(kind)["metadata"]["resourceVersion"] for kind in ("deployment", "service")] == before
    assert await bench.writes() == []
    assert len(bench.events()) == 3, "and nothing to tell"


async def test_a_service_that_was_made_anew_under_its_old_name_starts_afresh(bench: Bench) -> None:
    bench.apply()
    await bench.settle()
    bench.kubectl.delete("risvc", NAME)
    bench.apply({"suspend": True})
    for _ in range(20):
        with contextlib.suppress(Retry):
            await bench.reconcile()
        found = bench.kubectl.get("deployment", NAME)
        if found is not None and found["spec"]["replicas"] == 0:
            break
        await asyncio.sleep(0.25)
    else:
        raise AssertionError("the new service's Deployment does not come")
    owner = bench.kubectl.get("risvc", NAME)
    assert owner is not None
    assert bench.child("deployment")["metadata"]["ownerReferences"][0]["uid"] == owner["metadata"]["uid"]
