"""A reconciler on an API server, called by the test, so each pass is counted; and hands for what it works on."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from aiohttp import web

from reprise_operator.api import Api, load_connection
from reprise_operator.cluster import Cluster, Key
from reprise_operator.discovery import OptionalKinds
from reprise_operator.events import Recorder
from reprise_operator.kinds import ResourceType
from reprise_operator.log_tails import LogTails
from reprise_operator.metrics import OperatorMetrics
from reprise_operator.mounts import MountReader
from reprise_operator.reconcile import Reconciler
from reprise_operator.rotation import ReferenceKey, ReferenceReader
from reprise_operator.scraper import Scraper
from reprise_operator.settings import Settings
from reprise_operator.watch import WatchHealth
from reprise_operator.workqueue import Retry
from tests.operator.workload_controllers import caught_up
from tests.support.kubectl import Kubectl, KubectlFailed, eventually

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
    misses: dict[str, int] = field(default_factory=dict)
    caching: bool = True
    block_size: int = 16
    status: int = 200
    port: int = 0
    instead: bytes | None = None
    """Answered in the place of the figures."""

    async def metrics(self, _: web.Request) -> web.Response:
        if self.instead is not None:
            return web.Response(body=self.instead, content_type="text/plain")
        labels = f'enable_prefix_caching="{self.caching}",block_size="{self.block_size}"'
        labels += ',gpu_memory_utilization="0.9",num_gpu_blocks="600"'
        misses = (
            f'reprise:prefix_cache_misses_total{{reason="{reason}"}} {count}\n' for reason, count in self.misses.items()
        )
        return web.Response(
            status=self.status,
            text=f"{''.join(misses)}vllm:prefix_cache_queries_total {self.queries}\n"
            f"vllm:prefix_cache_hits_total {self.hits}\n"
            f"vllm:kv_cache_usage_perc 0.5\nvllm:cache_config_info{{{labels}}} 1\n",
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
    woken: list[Key] = field(default_factory=list)
    """Whom a pass has asked to be looked at."""

    @property
    def key(self) -> Key:
        return Key(self.kubectl.namespace, NAME)

    def apply(self, spec: dict[str, Any] | None = None, *, name: str = NAME) -> None:
        self.kubectl.put(
            {
                "apiVersion": "serving.reprise.io/v1alpha1",
                "kind": "InferenceService",
                "metadata": {"name": name},
                "spec": {"model": {"uri": "hostpath:///m"}, "accelerator": {"profile": "cpu"}, **(spec or {})},
            }
        )

    async def reconcile(self) -> float | None:
        return await self.reconciler(self.key)

    def restart(self) -> None:
        """What a restart of the operator forgets."""
        self.reconciler.memories.clear()
        self.reconciler.logs = LogTails()

    async def writes(self) -> list[tuple[str, str]]:
        """What one pass writes, events included."""
        self.requests.clear()
        with contextlib.suppress(Retry):
            await self.reconcile()
        return [request for request in self.requests if request[0] in WRITES]

    async def writes_of_passes(self, passes: int) -> list[tuple[str, str]]:
        """What so many passes write, each half a minute after the one before."""
        written = []
        for _ in range(passes):
            self.clock.now += 30
            written += await self.writes()
        return written

    async def settle(self) -> None:
        """Passes until one writes nothing though the controllers, whose answers cause writes, are done."""
        ends = time.monotonic() + 20
        while time.monotonic() < ends:
            done = caught_up(self.kubectl)
            if not await self.writes() and done:
                return
            await asyncio.sleep(0.05)
        raise AssertionError(f"the controllers are {'' if done else 'not '}done; written: {await self.writes()}")

    async def settle_but_for_refusals(self) -> None:
        """Passes until one writes nothing but the apply that the API server refuses."""
        ends = time.monotonic() + 20
        while time.monotonic() < ends:
            if set(await self.writes()) == {("patch", "deployments")}:
                return
            await asyncio.sleep(0.05)
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

    def notes(self, reason: str) -> list[str]:
        """Messages of the events of that reason, in the order they were written."""
        found = [event for event in self.kubectl.list("events") if event["reason"] == reason]
        found.sort(key=lambda event: int(event["metadata"]["resourceVersion"]))
        return [event["message"] for event in found if event["involvedObject"]["kind"] == "InferenceService"]

    def pods(self) -> list[dict[str, Any]]:
        return [dict(pod) for pod in self.kubectl.list("pods") if "deletionTimestamp" not in pod["metadata"]]

    def kubelet_says(self, **status: Any) -> None:
        """Writes the status of every pod, the oldest first: a rollout ends it as soon as its successor is ready."""
        for pod in sorted(eventually(self._all_pods, "there are pods, as many as asked for"), key=_age):
            self.say(pod["metadata"]["name"], status)

    def say(self, pod: str, status: dict[str, Any]) -> None:
        """The status of a pod that was there a moment ago; of one that its controller has replaced nobody tells."""
        try:
            self.kubectl.patch("pod", pod, {"status": status}, "--subresource=status")
        except KubectlFailed as failed:
            if "(NotFound)" not in failed.stderr:
                raise

    def _all_pods(self) -> list[dict[str, Any]] | None:
        """A ReplicaSet makes its pods one after the other."""
        deployment, found = self.kubectl.get("deployment", NAME), self.pods()
        return found if deployment is None or len(found) >= deployment["spec"]["replicas"] else None

    async def make_ready(self) -> None:
        await self.settle()

        def available() -> bool:
            self.kubelet_says(  # also of a pod that has come meanwhile
                phase="Running",
                podIP="127.0.0.1",
                podIPs=[{"ip": "127.0.0.1"}],
                conditions=[
                    {"type": kind, "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z"}
                    for kind in ("Ready", "PodScheduled")
                ],
            )
            deployment = self.child("deployment")
            return bool(deployment["status"].get("availableReplicas", 0) == deployment["spec"]["replicas"])

        eventually(available, "the Deployment is available")
        await self.settle()
        assert self.condition("Ready")[0] == "True"


def _age(pod: dict[str, Any]) -> tuple[str, int]:
    """The second it was made in is not enough: of two of one second the lower version was written before."""
    return pod["metadata"]["creationTimestamp"], int(pod["metadata"]["resourceVersion"])


@asynccontextmanager
async def open_bench(kubectl: Kubectl) -> AsyncIterator[Bench]:
    engine, clock, requests, woken = Engine(), Clock(), list[tuple[str, str]](), list[Key]()
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
            kinds=OptionalKinds(cluster, namespace=kubectl.namespace, period=60.0),
            scraper=scraper,
            recorder=Recorder(cluster, instance="test", clock=clock),
            settings=settings,
            metrics=metrics,
            health=WatchHealth(),
            wake=woken.append,
            clock=clock,
            mounts=MountReader(clock=clock),
            references=ReferenceReader(ReferenceKey(b"the key of this bench"), clock=clock),
        )
        await reconciler.kinds.poll()
        requests.clear()
        yield Bench(
            kubectl=kubectl,
            reconciler=reconciler,
            engine=engine,
            clock=clock,
            settings=settings,
            requests=requests,
            woken=woken,
        )
    await runner.cleanup()
