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
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import aiohttp
import yaml

from benchmarks.machine import machine_facts
from benchmarks.operator_report import write_report
from benchmarks.operator_world import GROUP_PATH, NAMESPACE, READERS_AT_ONCE, Audit, Engines, Hands, Process, until
from tests.support.cluster import CRD, PROJECT
from tests.support.control_plane import ControlPlane, running_control_plane
from tests.support.kube_assets import find_kube_assets
from tests.support.kubectl import Kubectl
from tests.support.node_client import Credentials

DEPLOYMENTS = f"/apis/apps/v1/namespaces/{NAMESPACE}/deployments"
SERVICES = f"/api/v1/namespaces/{NAMESPACE}/services"
WRITES = frozenset({"create", "update", "patch", "delete", "deletecollection"})
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

    async def look(since: str) -> None:
        async for event in hands.watch(DEPLOYMENTS, since=since):
            for argument in event["object"]["spec"]["template"]["spec"]["containers"][0]["args"]:
                if argument in arrived:
                    arrived[argument].set()

    delays = []
    chosen = random.Random(7)
    looking = asyncio.create_task(look(await hands.version(DEPLOYMENTS)))
    try:
        await asyncio.sleep(2)
        for length in range(5000, 5000 + count):
            arrived[str(length)] = asyncio.Event()
            begun = time.monotonic()
            await hands.change(chosen.choice(names), length)
            await asyncio.wait_for(arrived[str(length)].wait(), 60)
            if looking.done():
                raise SystemExit("the watch of the Deployments has ended: the figures would be of what it missed")
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
