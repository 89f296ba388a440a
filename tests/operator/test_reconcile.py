"""One pass after another against an API server: what is written, when nothing is, and what is said about it.

No operator process: the Reconciler is called by the tests, so each pass is counted. Pods are made by the controllers
beside the API server; there is no node, so the tests write what a kubelet would say.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from reprise_operator.api import Api, Body, ClusterError, Fault, load_connection
from reprise_operator.cluster import ApplyResult, Cluster, Key
from reprise_operator.events import Recorder
from reprise_operator.kinds import ResourceType
from reprise_operator.metrics import OperatorMetrics
from reprise_operator.naming import NAME_LABEL
from reprise_operator.observe import Scraper
from reprise_operator.observed import ObservedChild
from reprise_operator.reconcile import Reconciler
from reprise_operator.settings import Settings
from reprise_operator.watch import WatchHealth
from reprise_operator.workqueue import Retry
from tests.support.kubectl import Kubectl, eventually

WRITES = frozenset({"create", "patch", "delete", "update"})
NAME = "qwen"


class Clock:
    """The operator's time, moved by the test."""

    def __init__(self) -> None:
        self.now = 1_900_000_000.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Engine:
    """What every engine pod answers on /metrics."""

    queries: int = 0
    hits: int = 0
    port: int = 0

    async def metrics(self, _: web.Request) -> web.Response:
        labels = 'enable_prefix_caching="True",gpu_memory_utilization="0.9",block_size="16",num_gpu_blocks="600"'
        return web.Response(
            text=f"vllm:prefix_cache_queries_total {self.queries}\n"
            f"vllm:prefix_cache_hits_total {self.hits}\n"
            f"vllm:kv_cache_usage_perc 0.5\nvllm:cache_config_info{{{labels}}} 1\n"
        )


@dataclass(kw_only=True)
class Bench:
    """A reconciler, and hands for what it works on."""

    kubectl: Kubectl
    reconciler: Reconciler
    engine: Engine
    clock: Clock
    settings: Settings
    requests: list[tuple[str, str]] = field(default_factory=list)

    @property
    def key(self) -> Key:
        return Key(self.kubectl.namespace, NAME)

    def apply(self, spec: dict[str, Any] | None = None) -> None:
        self.kubectl.apply(
            {
                "apiVersion": "serving.reprise.io/v1alpha1",
                "kind": "InferenceService",
                "metadata": {"name": NAME},
                "spec": {"model": {"uri": "hostpath:///m"}, "accelerator": {"profile": "cpu"}, **(spec or {})},
            }
        )

    async def reconcile(self) -> float | None:
        return await self.reconciler(self.key)

    async def writes(self) -> list[tuple[str, str]]:
        """What one pass writes, events included."""
        self.requests.clear()
        with contextlib.suppress(Retry):
            await self.reconcile()
        return [request for request in self.requests if request[0] in WRITES]

    async def settle(self) -> None:
        """Passes until one writes nothing."""
        for _ in range(40):
            if not await self.writes():
                return
            await asyncio.sleep(0.25)
        raise AssertionError(f"still writing: {await self.writes()}")

    async def settle_but_for_refusals(self) -> None:
        """Passes until one writes nothing but the apply that the API server refuses."""
        for _ in range(40):
            if set(await self.writes()) == {("patch", "deployments")}:
                return
            await asyncio.sleep(0.25)
        raise AssertionError(f"still writing: {await self.writes()}")

    def status(self) -> dict[str, Any]:
        body = self.kubectl.get("inferenceservice", NAME)
        assert body is not None
        return dict(body["status"])

    def condition(self, kind: str) -> tuple[str, str, str]:
        (found,) = [condition for condition in self.status()["conditions"] if condition["type"] == kind]
        return found["status"], found["reason"], found["message"]

    def child(self, kind: str) -> dict[str, Any]:
        found = self.kubectl.get(kind, NAME)
        assert found is not None
        return dict(found)

    def events(self) -> list[tuple[str, str]]:
        listed = self.kubectl.list("events")
        ours = [event for event in listed if event["involvedObject"]["kind"] == "InferenceService"]
        ours.sort(key=lambda event: int(event["metadata"]["resourceVersion"]))
        return [(event["type"], event["reason"]) for event in ours]

    def pods(self) -> list[dict[str, Any]]:
        return [dict(pod) for pod in self.kubectl.list("pods") if "deletionTimestamp" not in pod["metadata"]]

    def kubelet_says(self, **status: Any) -> None:
        """Writes the status of every pod."""
        for pod in eventually(self.pods, "there are pods"):
            self.kubectl.patch("pod", pod["metadata"]["name"], {"status": status}, "--subresource=status")

    async def make_ready(self) -> None:
        await self.settle()
        self.kubelet_says(
            phase="Running",
            podIP="127.0.0.1",
            podIPs=[{"ip": "127.0.0.1"}],
            conditions=[
                {"type": "Ready", "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z"},
                {"type": "PodScheduled", "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z"},
            ],
        )
        eventually(lambda: self.child("deployment")["status"].get("availableReplicas"), "the Deployment is available")
        await self.settle()
        assert self.condition("Ready")[0] == "True"


@pytest.fixture
async def bench(kubectl: Kubectl) -> AsyncIterator[Bench]:
    engine, clock, requests = Engine(), Clock(), list[tuple[str, str]]()
    metrics = OperatorMetrics()

    def on_request(verb: str, resource: ResourceType, outcome: str) -> None:
        requests.append((verb, resource.plural))
        metrics.on_request(verb, resource, outcome)

    settings = Settings(namespace=kubectl.namespace)
    app = web.Application()
    app.router.add_get("/metrics", engine.metrics)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    engine.port = runner.addresses[0][1]
    async with Api(await load_connection(), on_request=on_request) as api, aiohttp.ClientSession() as session:
        scraper = Scraper(session, interval=30.0, concurrency=4, timeout=2.0, clock=clock, port=engine.port)
        cluster = Cluster(api)
        reconciler = Reconciler(
            cluster=cluster,
            scraper=scraper,
            recorder=Recorder(cluster, instance="test", clock=clock),
            settings=settings,
            metrics=metrics,
            health=WatchHealth(),
            clock=clock,
        )
        yield Bench(
            kubectl=kubectl, reconciler=reconciler, engine=engine, clock=clock, settings=settings, requests=requests
        )
    await runner.cleanup()


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


async def test_an_idle_service_is_never_written(bench: Bench) -> None:
    """Fault 17: an hour of passes, with figures read every 30 s, and not one write."""
    bench.apply()
    bench.engine.queries, bench.engine.hits = 100, 50
    await bench.make_ready()
    bench.clock.now += 300  # the window of the hit rate passes
    await bench.settle()
    written = []
    for _ in range(120):
        bench.clock.now += 30
        written += await bench.writes()
    assert written == []


async def test_the_watch_owes_nothing_of_a_service_that_idles_since_the_operator_started(bench: Bench) -> None:
    bench.apply()
    await bench.make_ready()
    bench.reconciler._memories.clear()  # what a restart forgets
    health = bench.reconciler.health = WatchHealth()
    body = bench.kubectl.get("inferenceservice", NAME)
    assert body is not None
    health.delivered(bench.key, body["metadata"]["resourceVersion"])  # the watch's first listing, and no event after it
    for _ in range(3):
        await bench.reconcile()
        bench.clock.now += 200
    assert health.behind(bench.clock.now) == 0
    assert not health.is_dead(bench.clock.now)


async def test_the_pass_asks_little(bench: Bench) -> None:
    bench.apply()
    await bench.make_ready()
    bench.requests.clear()
    await bench.reconcile()
    assert sorted(bench.requests) == [
        ("get", "inferenceservices"),
        ("list", "deployments"),
        ("list", "pods"),
        ("list", "replicasets"),
        ("list", "services"),
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


async def test_a_spec_that_cannot_be_honoured_leaves_the_pods_alone(bench: Bench) -> None:
    bench.apply()
    await bench.make_ready()
    before = bench.child("deployment")["spec"]
    bench.apply({"autoscaling": {"minReplicas": 1, "maxReplicas": 3}})
    assert await bench.writes() == [("patch", "inferenceservices"), ("create", "events")]
    status, reason, message = bench.condition("Stalled")
    assert (status, reason) == ("True", "NotSupported")
    assert "spec.autoscaling" in message
    assert bench.child("deployment")["spec"] == before
    assert bench.status()["readyReplicas"] == 1
    assert bench.events()[-1] == ("Warning", "NotSupported")
    assert await bench.writes() == []
    bench.kubectl("patch", "risvc", NAME, "--type=json", "-p", '[{"op": "remove", "path": "/spec/autoscaling"}]')
    await bench.settle()
    assert bench.condition("Ready")[0] == "True"


async def test_a_name_that_is_taken_is_left_alone(bench: Bench) -> None:
    foreign = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": NAME},
        "spec": {"selector": {"app": "theirs"}, "ports": [{"port": 99}]},
    }
    bench.kubectl.apply(foreign)
    bench.apply()
    await bench.settle()
    assert bench.condition("Stalled")[:2] == ("True", "NameTaken")
    assert bench.child("service")["spec"]["selector"] == {"app": "theirs"}
    bench.kubectl.delete("service", NAME)
    await bench.settle()
    assert bench.condition("Stalled")[0] == "False"
    assert bench.child("service")["metadata"]["ownerReferences"]


async def test_a_secret_that_does_not_exist_is_named_and_its_creation_is_the_cure(bench: Bench) -> None:
    bench.apply({"auth": {"apiKeySecretRef": {"name": "keys"}}})
    await bench.settle()
    status, reason, message = bench.condition("Stalled")
    assert (status, reason) == ("True", "SecretNotFound")
    assert "keys" in message
    assert (await bench.reconcile()) is not None, "it looks again by itself: no event tells of the Secret"
    bench.kubectl.apply({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "keys"}})
    await bench.settle()
    assert bench.condition("Stalled")[0] == "False"


async def test_a_crash_is_told_in_the_containers_own_words(bench: Bench) -> None:
    bench.apply()
    await bench.settle()
    eventually(bench.pods, "there are pods")
    await bench.settle()
    bench.kubelet_says(
        phase="Running",
        containerStatuses=[
            {
                "name": "engine",
                "image": "x",
                "imageID": "",
                "ready": False,
                "restartCount": 3,
                "state": {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 40s restarting"}},
                "lastState": {
                    "terminated": {
                        "exitCode": 3,
                        "reason": "Error",
                        "message": "UnsupportedModel: LlavaForConditionalGeneration is multimodal",
                    }
                },
            }
        ],
    )
    await bench.settle()
    status, reason, message = bench.condition("Stalled")
    assert (status, reason) == ("True", "UnsupportedModel")
    assert "LlavaForConditionalGeneration" in message
    assert bench.events()[-1] == ("Warning", "UnsupportedModel")


async def test_a_refused_apply_is_stalled_with_the_servers_words(bench: Bench) -> None:
    bench.apply({"podTemplate": {"volumeMounts": [{"name": "absent", "mountPath": "/absent"}]}})
    await bench.settle_but_for_refusals()
    status, reason, message = bench.condition("Stalled")
    assert (status, reason) == ("True", "ApplyRefused")
    assert "volumeMounts" in message
    assert "absent" in message
    bench.apply({"podTemplate": {}})
    await bench.settle()
    assert bench.condition("Stalled")[0] == "False"


async def test_a_refused_change_that_is_taken_back_leaves_no_trace(bench: Bench) -> None:
    bench.apply()
    await bench.make_ready()
    bench.apply({"podTemplate": {"volumeMounts": [{"name": "absent", "mountPath": "/absent"}]}})
    await bench.settle_but_for_refusals()
    assert bench.condition("Stalled")[:2] == ("True", "ApplyRefused")
    bench.apply({"podTemplate": {}})
    await bench.settle()
    assert bench.condition("Stalled")[0] == "False"
    assert bench.condition("Ready")[0] == "True"


async def test_what_a_failing_webhook_says_is_in_the_status_while_the_apply_is_tried_again(bench: Bench) -> None:
    class Webhook(Cluster):
        async def apply(self, manifest: Body, *, present: ObservedChild | None) -> ApplyResult:
            if manifest["kind"] == "Deployment":
                raise ClusterError(Fault.UNAVAILABLE, 'failed calling webhook "policy.example"', status=500)
            return await super().apply(manifest, present=present)

    sound = bench.reconciler.cluster
    bench.reconciler.cluster = Webhook(sound._api)
    bench.apply()
    with pytest.raises(Retry, match="failed calling webhook"):
        await bench.reconcile()
    status, reason, message = bench.condition("Reconciling")
    assert (status, reason) == ("True", "Applying")
    assert 'Deployment/qwen is not applied yet, and tried again: failed calling webhook "policy.example"' in message
    bench.reconciler.cluster = sound
    await bench.make_ready()


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
    assert await bench.writes() == []
    assert bench.reconciler.metrics.registry.get_sample_value("reprise_operator_services") == 0


async def test_a_new_process_comes_to_the_same_end_with_no_change(bench: Bench, kubectl: Kubectl) -> None:
    bench.apply()
    await bench.make_ready()
    before = [bench.child(kind)["metadata"]["resourceVersion"] for kind in ("deployment", "service")]
    bench.reconciler._memories.clear()  # what a restart forgets
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
    eventually(lambda: not bench.kubectl.list("deployments") or True, "")
    for _ in range(20):
        with contextlib.suppress(Retry):
            await bench.reconcile()
        found = bench.kubectl.get("deployment", NAME)
        if found is not None and found["spec"]["replicas"] == 0:
            break
        await asyncio.sleep(0.25)
    owner = bench.kubectl.get("risvc", NAME)
    assert owner is not None
    assert bench.child("deployment")["metadata"]["ownerReferences"][0]["uid"] == owner["metadata"]["uid"]


async def test_a_server_that_fails_is_a_retry_and_counted(kubectl: Kubectl, bench: Bench) -> None:
    class Down:
        async def get_service(self, _: Key) -> None:
            raise ClusterError(Fault.UNAVAILABLE, "no answer", retry_after=7.0)

    bench.reconciler.cluster = Down()  # type: ignore[assignment]
    with pytest.raises(Retry, match="no answer") as retry:
        await bench.reconcile()
    assert retry.value.after == 7.0
    value = bench.reconciler.metrics.registry.get_sample_value
    assert value("reprise_operator_reconcile_total", {"outcome": "retry"}) == 1.0
