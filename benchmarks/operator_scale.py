"""A thousand InferenceServices on a real API server: how long, how many requests, how much processor and memory.

    python -m benchmarks.operator_scale                 # 1,000 services; writes OPERATOR.md and results/operator.json
    python -m benchmarks.operator_scale --services 20   # does it go? Writes to .cache/bench only

One system after the other, each on an API server of its own with kube-controller-manager: the operator, and bare kopf
handlers (bare_kopf.py). A kubelet's part is played by this process: pods are said to be ready at 127.0.0.1, where it
answers /metrics for all of them. Requests are counted by the API server's audit log, by user, so nothing is left out.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import aiohttp
import yaml
from aiohttp import web

from benchmarks.machine import machine_facts
from benchmarks.operator_report import write_report
from tests.support.cluster import CRD, PROJECT
from tests.support.control_plane import ControlPlane, running_control_plane
from tests.support.kube_assets import find_kube_assets
from tests.support.kubectl import Kubectl
from tests.support.node_client import Credentials

NAMESPACE = "scale"
GROUP_PATH = f"/apis/serving.reprise.io/v1alpha1/namespaces/{NAMESPACE}/inferenceservices"
DEPLOYMENTS = f"/apis/apps/v1/namespaces/{NAMESPACE}/deployments"
SERVICES = f"/api/v1/namespaces/{NAMESPACE}/services"
PODS = f"/api/v1/namespaces/{NAMESPACE}/pods"
WRITES = frozenset({"create", "update", "patch", "delete", "deletecollection"})
READERS_AT_ONCE = 8
USER = "operator"
OPERATOR = "reprise-operator"
AUDIT_POLICY = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "omitStages": ["RequestReceived", "ResponseStarted", "Panic"],
    "rules": [{"level": "Metadata", "users": [USER]}, {"level": "None"}],
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Of one system. Seconds, requests, MiB."""

    system: str
    services: int
    apply_seconds: float
    """First apply to last."""
    children_seconds: float
    """Last apply to the last child."""
    requests_per_service: float
    """Until all children are there."""
    settled_requests_per_service: float
    """Until pods are ready, and nothing more happens."""
    cpu_seconds: float
    """Of the system's process, until all children are there."""
    rss_mib: float
    peak_rss_mib: float
    change_p50: float
    """A change of one spec to the event of its patched Deployment."""
    change_p99: float
    changes: int
    idle_seconds: float
    idle_requests_per_minute: float
    idle_writes_per_minute: float
    idle_cpu_percent: float
    """Of one core."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Of the operator alone, while some of the services have pods with traffic and the others idle."""

    services: int
    busy_services: int
    endpoints: int
    """Pods whose metrics are read."""
    told_seconds: float
    """From the last pod's readiness to the last busy service's right hit rate in its status."""
    requests_per_minute: float
    writes_per_minute: float
    scrapes_per_minute: float
    cpu_percent: float
    rss_mib: float


class Process:
    """The system under measurement, by its process id."""

    def __init__(self, argv: Sequence[str], *, kubeconfig: Path, log: Path) -> None:
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                argv, cwd=PROJECT, env={**os.environ, "KUBECONFIG": str(kubeconfig)}, stdout=output, stderr=output
            )
        self.log = log

    def cpu_seconds(self) -> float:
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(") ")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def memory_mib(self, field: str) -> float:
        """VmRSS (now) or VmHWM (the most there was)."""
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(f"{field}:"))

    def check(self) -> None:
        if self.process.poll() is not None:
            raise SystemExit(f"the system has ended:\n{self.log.read_text()[-3000:]}")

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class Audit:
    """Counts what one user asked, from the API server's audit log."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self.counts: Counter[tuple[str, str]] = Counter()

    def read(self) -> Counter[tuple[str, str]]:
        """All so far, by (verb, resource); watches are counted when they end, and leases not at all."""
        if self._path.exists():
            with self._path.open("rb") as file:
                file.seek(self._offset)
                for line in file:
                    if not line.endswith(b"\n"):
                        break
                    self._offset += len(line)
                    self._count(json.loads(line))
        return Counter(self.counts)

    def _count(self, event: dict[str, Any]) -> None:
        resource = (event.get("objectRef") or {}).get("resource", "discovery")
        if resource != "leases":
            self.counts[event["verb"], resource] += 1

    def total(self, verbs: frozenset[str] | None = None) -> int:
        return sum(count for (verb, _), count in self.read().items() if verbs is None or verb in verbs)


class Hands:
    """What a person, a kubelet and a stopwatch do at the API server."""

    def __init__(self, session: aiohttp.ClientSession, credentials: Credentials) -> None:
        self._session = session
        self._credentials = credentials

    async def request(self, method: str, path: str, body: Any = None, content_type: str = "application/json") -> Any:
        headers = {**self._credentials.headers, "Content-Type": content_type}
        data = None if body is None else json.dumps(body)
        url = self._credentials.server + path
        tls = self._credentials.tls or True
        async with self._session.request(method, url, data=data, headers=headers, ssl=tls) as answer:
            text = await answer.text()
            if answer.status >= 400:
                raise RuntimeError(f"{method} {path}: {answer.status} {text[:300]}")
            return json.loads(text)

    async def watch(self, path: str) -> AsyncIterator[dict[str, Any]]:
        url = f"{self._credentials.server}{path}?watch=true"
        timeout = aiohttp.ClientTimeout(total=None)
        async with self._session.get(
            url, headers=self._credentials.headers, ssl=self._credentials.tls or True, timeout=timeout
        ) as response:
            async for line in response.content:
                yield json.loads(line)

    async def count(self, path: str) -> int:
        """Objects of a collection, by a listing of one."""
        page = await self.request("GET", f"{path}?limit=1")
        return len(page["items"]) + int(page["metadata"].get("remainingItemCount") or 0)

    async def apply(self, name: str) -> None:
        body = {
            "apiVersion": "serving.reprise.io/v1alpha1",
            "kind": "InferenceService",
            "metadata": {"name": name, "namespace": NAMESPACE},
            "spec": {"model": {"uri": "hostpath:///models/m", "maxModelLen": 4096}, "accelerator": {"profile": "cpu"}},
        }
        path = f"{GROUP_PATH}/{name}?fieldManager=person"
        await self.request("PATCH", path, body, "application/apply-patch+yaml")

    async def merge(self, path: str, body: Any) -> None:
        await self.request("PATCH", path, body, "application/merge-patch+json")

    async def change(self, name: str, length: int) -> None:
        await self.merge(f"{GROUP_PATH}/{name}", {"spec": {"model": {"maxModelLen": length}}})

    async def play_kubelet(self) -> None:
        """Says of every new pod that it is ready, for as long as it runs."""
        limit = asyncio.Semaphore(READERS_AT_ONCE)
        since = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        conditions = [{"type": t, "status": "True", "lastTransitionTime": since} for t in ("Ready", "PodScheduled")]
        addresses = (f"127.{a}.{b}.{c}" for a in range(1, 250) for b in range(250) for c in range(1, 250))

        def status() -> dict[str, Any]:
            address = next(addresses)
            return {
                "phase": "Running",
                "startTime": since,
                "podIP": address,
                "podIPs": [{"ip": address}],
                "conditions": conditions,
            }

        async def look_after(pod: dict[str, Any]) -> None:
            async with limit:
                with contextlib.suppress(RuntimeError):  # it is gone already
                    path = f"{PODS}/{pod['metadata']['name']}"
                    if "deletionTimestamp" in pod["metadata"]:
                        await self.request("DELETE", path, {"gracePeriodSeconds": 0})
                    else:
                        await self.merge(f"{path}/status", {"status": status()})

        async with asyncio.TaskGroup() as group:
            while True:
                with contextlib.suppress(aiohttp.ClientError):
                    async for event in self.watch(PODS):
                        pod = event["object"]
                        new = event["type"] == "ADDED" and not (pod.get("status") or {}).get("podIP")
                        ends = event["type"] == "MODIFIED" and "deletionTimestamp" in pod["metadata"]
                        if new or ends:
                            group.create_task(look_after(pod))


class Engines:
    """Answers /metrics on port 8000 of every loopback address: engines that idle until `busy`, and then find three of
    five prompt tokens in their caches."""

    def __init__(self) -> None:
        self.scrapes = 0
        self.busy = False
        self._tokens = 0

    async def _metrics(self, _: web.Request) -> web.Response:
        self.scrapes += 1
        if self.busy:
            self._tokens += 500
        labels = 'model_name="m",engine="0"'
        return web.Response(
            text=f"vllm:prefix_cache_queries_total{{{labels}}} {self._tokens}\n"
            f"vllm:prefix_cache_hits_total{{{labels}}} {self._tokens * 3 // 5}\n"
            f"vllm:kv_cache_usage_perc{{{labels}}} 0.1\n"
            'vllm:cache_config_info{block_size="16",enable_prefix_caching="True",gpu_memory_utilization="0.9",'
            'num_gpu_blocks="600"} 1\n'
        )

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        app = web.Application()
        app.router.add_get("/metrics", self._metrics)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "0.0.0.0", 8000).start()
        try:
            yield
        finally:
            await runner.cleanup()


async def until(look: Any, what: str, process: Process, *, within: float, every: float) -> None:
    deadline = time.monotonic() + within
    while not await look():
        process.check()
        if time.monotonic() > deadline:
            raise SystemExit(f"not within {within:g} s: {what}\n{process.log.read_text()[-3000:]}")
        await asyncio.sleep(every)


async def measure(
    system: str, process: Process, hands: Hands, audit: Audit, *, services: int, changes: int, idle: float
) -> Figures:
    names = [f"svc-{number:05d}" for number in range(services)]
    limit = asyncio.Semaphore(READERS_AT_ONCE)

    async def apply(name: str) -> None:
        async with limit:
            await hands.apply(name)

    before, cpu = audit.total(), process.cpu_seconds()
    begun = time.monotonic()
    await asyncio.gather(*(apply(name) for name in names))
    applied = time.monotonic()

    async def all_there() -> bool:
        return await hands.count(DEPLOYMENTS) >= services and await hands.count(SERVICES) >= services

    await until(all_there, "all children", process, within=1800, every=0.1)
    there = time.monotonic()
    requests, cpu = audit.total() - before, process.cpu_seconds() - cpu
    print(f"{system}: children of {services} services {there - applied:.1f} s after the last apply", flush=True)

    async def at_rest() -> bool:
        """No write for ten seconds, with a ready pod for each service."""
        deployments = (await hands.request("GET", DEPLOYMENTS))["items"]
        if any((item.get("status") or {}).get("availableReplicas", 0) < 1 for item in deployments):
            return False
        writes = audit.total(WRITES)
        await asyncio.sleep(10)
        return audit.total(WRITES) == writes

    await until(at_rest, "pods are ready and nothing is written", process, within=1800, every=5)
    settled = audit.total() - before
    print(f"{system}: at rest after {time.monotonic() - there:.0f} s", flush=True)

    delays = await changed(hands, names, changes)
    await until(at_rest, "at rest after the changes", process, within=600, every=5)
    # A thousand figures of the hit rate, and what else goes on for a window, shall not count as idling.
    await asyncio.sleep(10)
    read, written, idle_cpu = audit.total(), audit.total(WRITES), process.cpu_seconds()
    started = time.monotonic()
    await asyncio.sleep(idle)
    lasted = time.monotonic() - started
    return Figures(
        system=system,
        services=services,
        apply_seconds=applied - begun,
        children_seconds=there - applied,
        requests_per_service=requests / services,
        settled_requests_per_service=settled / services,
        cpu_seconds=cpu,
        rss_mib=process.memory_mib("VmRSS"),
        peak_rss_mib=process.memory_mib("VmHWM"),
        change_p50=statistics.median(delays),
        change_p99=sorted(delays)[max(0, -(-99 * len(delays) // 100) - 1)],
        changes=len(delays),
        idle_seconds=lasted,
        idle_requests_per_minute=(audit.total() - read) * 60 / lasted,
        idle_writes_per_minute=(audit.total(WRITES) - written) * 60 / lasted,
        idle_cpu_percent=100 * (process.cpu_seconds() - idle_cpu) / lasted,
    )


async def changed(hands: Hands, names: Sequence[str], count: int) -> list[float]:
    """One change after the other: seconds from sending it to the event of the Deployment that has it."""
    arrived: dict[str, asyncio.Event] = {}

    async def look() -> None:
        async for event in hands.watch(DEPLOYMENTS):
            for argument in event["object"]["spec"]["template"]["spec"]["containers"][0]["args"]:
                if argument in arrived:
                    arrived[argument].set()

    delays = []
    chosen = random.Random(7)
    looking = asyncio.create_task(look())
    try:
        await asyncio.sleep(2)
        for length in range(5000, 5000 + count):
            arrived[str(length)] = asyncio.Event()
            begun = time.monotonic()
            await hands.change(chosen.choice(names), length)
            await asyncio.wait_for(arrived[str(length)].wait(), 60)
            delays.append(time.monotonic() - begun)
            await asyncio.sleep(0.25)
    finally:
        looking.cancel()
        await asyncio.gather(looking, return_exceptions=True)
    return delays


async def under_traffic(
    process: Process, hands: Hands, audit: Audit, engines: Engines, *, services: int, busy: int, endpoints: int
) -> Traffic:
    """Gives `busy` of the services so many pods that there are `endpoints`, and all of them traffic."""
    chosen = [f"svc-{number:05d}" for number in range(busy)]
    replicas = endpoints // busy
    for name in chosen:
        await hands.merge(f"{GROUP_PATH}/{name}", {"spec": {"replicas": replicas}})

    async def all_ready() -> bool:
        found = await asyncio.gather(*(hands.request("GET", f"{DEPLOYMENTS}/{name}") for name in chosen))
        return all((item.get("status") or {}).get("readyReplicas", 0) == replicas for item in found)

    await until(all_ready, f"{endpoints} pods are ready", process, within=1800, every=3)
    engines.busy = True
    begun = time.monotonic()

    async def all_told() -> bool:
        found = await asyncio.gather(*(hands.request("GET", f"{GROUP_PATH}/{name}") for name in chosen))
        return all(abs(item["status"].get("prefixCache", {}).get("hitRatePercent", 0) - 60) <= 1 for item in found)

    await until(all_told, "every busy service tells its hit rate", process, within=900, every=2)
    told = time.monotonic() - begun
    await asyncio.sleep(60)
    read, written, cpu, scrapes = audit.total(), audit.total(WRITES), process.cpu_seconds(), engines.scrapes
    started = time.monotonic()
    await asyncio.sleep(120)
    minutes = (time.monotonic() - started) / 60
    return Traffic(
        services=services,
        busy_services=busy,
        endpoints=busy * replicas + services - busy,
        told_seconds=told,
        requests_per_minute=(audit.total() - read) / minutes,
        writes_per_minute=(audit.total(WRITES) - written) / minutes,
        scrapes_per_minute=(engines.scrapes - scrapes) / minutes,
        cpu_percent=100 * (process.cpu_seconds() - cpu) / (60 * minutes),
        rss_mib=process.memory_mib("VmRSS"),
    )


def systems() -> dict[str, list[str]]:
    """Name → how it is started."""
    ports = ("--host=127.0.0.1", "--metrics-port=0", "--health-port=0")
    return {
        OPERATOR: [
            *(sys.executable, "-m", "reprise_operator", "run", "--all-namespaces", *ports),
            *("--lease-namespace", NAMESPACE, "--log-level", "warning"),
        ],
        "bare kopf": [
            *(sys.executable, "-m", "kopf", "run", "--all-namespaces", "--standalone", "--quiet"),
            str(PROJECT / "benchmarks" / "bare_kopf.py"),
        ],
    }


def as_user(plane: ControlPlane, folder: Path, token: str) -> Path:
    """The administrator's kubeconfig, with another token: the audit log tells the two apart."""
    config = yaml.safe_load(plane.kubeconfig_path.read_text())
    config["users"][0]["user"] = {"token": token}
    path = folder / "operator.kubeconfig"
    path.write_text(yaml.safe_dump(config))
    return path


async def run_system(system: str, folder: Path, options: argparse.Namespace) -> tuple[Figures, Traffic | None]:
    assets = find_kube_assets()
    if assets is None or assets.controller_manager is None:
        raise SystemExit("a real API server with kube-controller-manager is needed: see make kube-assets")
    policy, log, token = folder / "audit.yaml", folder / "audit.log", "measured"
    policy.write_text(json.dumps(AUDIT_POLICY))
    with running_control_plane(
        assets,
        folder,
        apiserver_flags=[
            *(f"--audit-policy-file={policy}", f"--audit-log-path={log}"),
            "--service-cluster-ip-range=10.96.0.0/16",  # an address for each of a thousand Services
        ],
        # By default it writes 20 times a second, and a thousand Deployments would take it minutes.
        controller_manager_flags=["--kube-api-qps=300", "--kube-api-burst=600", "--concurrent-deployment-syncs=10"],
        users={token: USER},
    ) as plane:
        kubectl = Kubectl(kubeconfig=plane.kubeconfig_path)
        kubectl("create", "namespace", NAMESPACE)
        kubectl("apply", "--server-side", "-f", str(CRD))
        process = Process(systems()[system], kubeconfig=as_user(plane, folder, token), log=folder / "system.log")
        try:
            connector = aiohttp.TCPConnector(limit=0)
            engines = Engines()
            async with aiohttp.ClientSession(connector=connector) as session, engines.serving():
                hands = Hands(session, Credentials.from_kubeconfig(plane.kubeconfig_path))
                await asyncio.sleep(5)
                kubelet = asyncio.create_task(hands.play_kubelet())
                audit, services = Audit(log), options.services
                try:
                    figures = await measure(
                        *(system, process, hands, audit),
                        services=services,
                        changes=options.changes,
                        idle=options.idle,
                    )
                    if system != OPERATOR or not options.endpoints:
                        return figures, None
                    busy = max(1, services // 10)
                    return figures, await under_traffic(
                        *(process, hands, audit, engines), services=services, busy=busy, endpoints=options.endpoints
                    )
                finally:
                    kubelet.cancel()
                    await asyncio.gather(kubelet, return_exceptions=True)
        finally:
            process.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--services", type=int, default=1000)
    parser.add_argument("--changes", type=int, default=200, help="changes of one spec, for p50 and p99")
    parser.add_argument("--idle", type=float, default=180.0, help="seconds of idling that are counted")
    parser.add_argument("--endpoints", type=int, default=3000, help="pods with traffic; 0: none")
    parser.add_argument("--only", default="", choices=["", *systems()], help="one system")
    options = parser.parse_args()
    found, traffic = [], None
    for system in systems():
        if options.only not in ("", system):
            continue
        with tempfile.TemporaryDirectory(prefix="reprise-scale-") as folder:
            figures, seen = asyncio.run(run_system(system, Path(folder), options))
        found.append(asdict(figures))
        traffic = traffic or (asdict(seen) if seen is not None else None)
        print(json.dumps([found[-1], traffic], indent=1), flush=True)
    whole = options.services >= 1000 and not options.only
    write_report(found, traffic, machine=machine_facts(), for_good=whole)


if __name__ == "__main__":
    main()
