"""A small node: registers itself, schedules pods onto itself and runs their containers as local processes.

It speaks the plain Kubernetes API, so it serves a real kube-apiserver and the emulated one alike. Every pod has a
loopback address of its own out of one 127.x.y.0/24 (Linux answers on all of 127.0.0.0/8), so every pod may listen on
the same port. What stands for images is given by the caller; see node_spec.py for the limits of running without a
mount namespace. Output is kept in FOLDER/pods/NAMESPACE_POD_UID/CONTAINER/RUN.log.

Not there: taints, preferences of the scheduler, sidecars (init containers that stay), and `kubectl logs`, `exec` and
`port-forward`, which need a kubelet's own server.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import NoReturn

import aiohttp

from tests.support.node_client import MERGE_PATCH, Informer, KubeClient, KubeError, Manifest
from tests.support.node_pod import NodeContext, PodWorker
from tests.support.node_process import timestamp
from tests.support.node_spec import Image, requests_of, unschedulable

HEARTBEAT_SECONDS = 10.0
KUBELET_PORT = 10250
POD_ADDRESSES = range(2, 200)
SERVICE_ADDRESSES = range(200, 255)


class Subnet:
    """One 127.x.y.0/24, held against other nodes of this machine by a socket bound to its first address."""

    def __init__(self) -> None:
        self._guard = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        for _ in range(100):
            self.prefix = f"127.{random.randint(64, 250)}.{random.randint(1, 250)}"
            try:
                self._guard.bind((f"{self.prefix}.1", KUBELET_PORT))
                return
            except OSError as error:
                reason = error
        raise RuntimeError(f"No free loopback /24 for the pods ({reason}). Linux has them; other systems need aliases.")

    @property
    def node_address(self) -> str:
        return f"{self.prefix}.1"

    def addresses(self, last: range) -> Iterator[str]:
        """The addresses of a range, round and round, so that one is not used again at once."""
        for number in itertools.cycle(last):
            yield f"{self.prefix}.{number}"

    def close(self) -> None:
        self._guard.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeConfig:
    """`images`: image name or prefix of one → what runs. `host_paths`: hostPath prefix → the folder it stands for.

    `fastest_probe_seconds` cuts long probe periods (patience is kept, see node_probe.Timing); None keeps the
    manifest's. cpu and memory are nominal: processes share the machine, nothing is enforced.
    """

    folder: Path
    images: Mapping[str, Image]
    name: str = "node1"
    host_paths: Mapping[str, Path] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    extended_resources: Mapping[str, str] = field(default_factory=dict)
    cpu: str = "64"
    memory: str = "256Gi"
    back_off_seconds: float = 10.0
    back_off_limit_seconds: float = 300.0
    fastest_probe_seconds: float | None = None


class Node:
    """Use as `async with Node(...)`: on exit every process of every pod is gone."""

    def __init__(self, config: NodeConfig, *, client: KubeClient, subnet: Subnet, pods: Informer) -> None:
        self._config = config
        self._client = client
        self._subnet = subnet
        self._pods = pods
        self._addresses = subnet.addresses(POD_ADDRESSES)
        self._workers: dict[str, PodWorker] = {}
        self._bound: set[str] = set()
        self._refused: dict[str, str] = {}
        self._wake = asyncio.Event()
        self._tasks: list[asyncio.Task[NoReturn]] = []
        self._capacity = {
            "cpu": config.cpu,
            "memory": config.memory,
            "pods": str(len(POD_ADDRESSES)),
            **config.extended_resources,
        }
        self._labels = {"kubernetes.io/hostname": config.name, "kubernetes.io/os": "linux", **config.labels}
        self._probes: aiohttp.ClientSession | None = None
        self._event_numbers = itertools.count(1)

    async def __aenter__(self) -> Node:
        self._config.folder.mkdir(parents=True, exist_ok=True)
        self._probes = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, force_close=True))
        await self._register()
        self._pods.on_change(self._wake.set)
        self._tasks = [asyncio.create_task(self._heartbeats()), asyncio.create_task(self._sync())]
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        await asyncio.gather(*(worker.kill_now() for worker in self._workers.values()))
        if self._probes is not None:
            await self._probes.close()

    def worker(self, namespace: str, pod: str) -> PodWorker | None:
        """The worker of a pod by name; None where this node runs no such pod."""
        for worker in self._workers.values():
            meta = worker.pod["metadata"]
            if (meta["namespace"], meta["name"]) == (namespace, pod):
                return worker
        return None

    # ---- the Node object --------------------------------------------------------------------------------------------

    def _status(self) -> Manifest:
        now = timestamp()
        kinds = {
            "MemoryPressure": ("False", "KubeletHasSufficientMemory"),
            "DiskPressure": ("False", "KubeletHasNoDiskPressure"),
            "PIDPressure": ("False", "KubeletHasSufficientPID"),
            "Ready": ("True", "KubeletReady"),
        }
        return {
            "capacity": self._capacity,
            "allocatable": self._capacity,
            "addresses": [
                {"type": "InternalIP", "address": self._subnet.node_address},
                {"type": "Hostname", "address": self._config.name},
            ],
            "conditions": [
                {
                    "type": kind,
                    "status": status,
                    "reason": reason,
                    "message": f"{reason} (pods run as local processes)",
                    "lastHeartbeatTime": now,
                    "lastTransitionTime": self._since,
                }
                for kind, (status, reason) in kinds.items()
            ],
            "nodeInfo": {
                "kubeletVersion": "v0.0.0-process-node",
                "containerRuntimeVersion": "process://1",
                "operatingSystem": "linux",
                "architecture": "amd64",
                "machineID": "",
                "systemUUID": "",
                "bootID": "",
                "kernelVersion": "",
                "osImage": "",
                "kubeProxyVersion": "",
            },
        }

    async def _register(self) -> None:
        self._since = timestamp()
        body = {
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {"name": self._config.name, "labels": self._labels},
            "spec": {},
        }
        try:
            await self._client.request("POST", "/api/v1/nodes", body=body)
        except KubeError as error:
            if error.status != 409:
                raise
            patch = {"metadata": {"labels": self._labels}}
            await self._client.request(
                "PATCH", f"/api/v1/nodes/{self._config.name}", body=patch, content_type=MERGE_PATCH
            )
        await self._report()

    async def _report(self) -> None:
        await self._client.request(
            "PATCH",
            f"/api/v1/nodes/{self._config.name}/status",
            body={"status": self._status()},
            content_type=MERGE_PATCH,
        )

    async def _heartbeats(self) -> NoReturn:
        while True:
            await asyncio.sleep(HEARTBEAT_SECONDS)
            with contextlib.suppress(KubeError, aiohttp.ClientError, TimeoutError, OSError):
                await self._report()

    # ---- pods -------------------------------------------------------------------------------------------------------

    async def _sync(self) -> NoReturn:
        while True:
            await self._wake.wait()
            self._wake.clear()
            try:
                await self._schedule()
                self._reconcile()
            except (KubeError, aiohttp.ClientError, TimeoutError, OSError):
                await asyncio.sleep(0.2)
                self._wake.set()

    async def _schedule(self) -> None:
        """Binds pods that nobody has bound, oldest first; says on the pod why one does not fit."""
        waiting = [
            pod
            for pod in self._pods.objects.values()
            if not pod["spec"].get("nodeName")
            and pod["metadata"]["uid"] not in self._bound
            and not pod["metadata"].get("deletionTimestamp")
            and (pod["spec"].get("schedulerName") or "default-scheduler") == "default-scheduler"
        ]
        waiting.sort(key=lambda pod: (pod["metadata"].get("creationTimestamp", ""), pod["metadata"]["name"]))
        for pod in waiting:
            why = await self._missing_claim(pod) or unschedulable(
                pod, labels=self._labels, allocatable=self._capacity, taken=self._taken()
            )
            if why is None:
                await self._bind(pod)
            elif self._refused.get(pod["metadata"]["uid"]) != why:
                await self._refuse(pod, why)

    async def _missing_claim(self, pod: Manifest) -> str | None:
        for volume in pod["spec"].get("volumes") or ():
            if claim := (volume.get("persistentVolumeClaim") or {}).get("claimName"):
                path = f"/api/v1/namespaces/{pod['metadata']['namespace']}/persistentvolumeclaims/{claim}"
                if await self._client.get(path) is None:
                    asyncio.get_running_loop().call_later(1.0, self._wake.set)  # claims are not watched
                    return f'0/1 nodes are available: persistentvolumeclaim "{claim}" not found.'
        return None

    def _taken(self) -> dict[str, Decimal]:
        total: dict[str, Decimal] = {}
        for uid, pod in self._pods.objects.items():
            ours = pod["spec"].get("nodeName") == self._config.name or uid in self._bound
            if ours and (pod.get("status") or {}).get("phase") not in ("Succeeded", "Failed"):
                for name, quantity in requests_of(pod).items():
                    total[name] = total.get(name, Decimal(0)) + quantity
        return total

    async def _bind(self, pod: Manifest) -> None:
        meta = pod["metadata"]
        body = {
            "apiVersion": "v1",
            "kind": "Binding",
            "metadata": {"name": meta["name"], "namespace": meta["namespace"], "uid": meta["uid"]},
            "target": {"apiVersion": "v1", "kind": "Node", "name": self._config.name},
        }
        path = f"/api/v1/namespaces/{meta['namespace']}/pods/{meta['name']}/binding"
        try:
            await self._client.request("POST", path, body=body)
        except KubeError as error:
            if error.status not in (404, 409):
                raise
            return
        self._bound.add(meta["uid"])
        await self._record(
            pod,
            "Normal",
            "Scheduled",
            f"Successfully assigned {meta['namespace']}/{meta['name']} to {self._config.name}",
        )

    async def _refuse(self, pod: Manifest, why: str) -> None:
        meta = pod["metadata"]
        condition = {
            "type": "PodScheduled",
            "status": "False",
            "reason": "Unschedulable",
            "message": why,
            "lastProbeTime": None,
            "lastTransitionTime": timestamp(),
        }
        others = [c for c in (pod.get("status") or {}).get("conditions") or () if c["type"] != "PodScheduled"]
        body = {"metadata": {"uid": meta["uid"]}, "status": {"conditions": [*others, condition]}}
        path = f"/api/v1/namespaces/{meta['namespace']}/pods/{meta['name']}/status"
        try:
            await self._client.request("PATCH", path, body=body, content_type=MERGE_PATCH)
        except KubeError as error:
            if error.status not in (404, 409):
                raise
            return
        self._refused[meta["uid"]] = why
        await self._record(pod, "Warning", "FailedScheduling", why)

    def _reconcile(self) -> None:
        known = self._pods.objects
        for uid, pod in known.items():
            if pod["spec"].get("nodeName") != self._config.name:
                continue
            worker = self._workers.get(uid)
            deleting = pod["metadata"].get("deletionTimestamp")
            if worker is None and (pod.get("status") or {}).get("phase") not in ("Succeeded", "Failed"):
                worker = self._workers[uid] = PodWorker(pod=pod, ip=self._free_address(), node=self._context())
            if worker is not None and deleting:
                grace = pod["metadata"].get("deletionGracePeriodSeconds")
                self._finish(uid, worker, None if grace is None else float(grace))
        for uid, worker in self._workers.items():
            if uid not in known:  # removed by force
                self._finish(uid, worker, 0.0)
        self._bound &= known.keys()

    def _finish(self, uid: str, worker: PodWorker, grace: float | None) -> None:
        def gone(_: asyncio.Task[None]) -> None:
            self._workers.pop(uid, None)
            self._wake.set()

        if not worker.ending:
            worker.terminate(grace).add_done_callback(gone)

    def _free_address(self) -> str:
        used = {worker.ip for worker in self._workers.values()}
        return next(address for address in self._addresses if address not in used)

    def _context(self) -> NodeContext:
        if self._probes is None:
            raise RuntimeError("Node is used outside its `async with`.")
        return NodeContext(
            client=self._client,
            name=self._config.name,
            address=self._subnet.node_address,
            folder=self._config.folder,
            images=self._config.images,
            host_paths=self._config.host_paths,
            probe_session=self._probes,
            back_off_seconds=self._config.back_off_seconds,
            back_off_limit_seconds=self._config.back_off_limit_seconds,
            fastest_probe_seconds=self._config.fastest_probe_seconds,
            record=self._record,
        )

    async def _record(self, pod: Manifest, kind: str, reason: str, message: str) -> None:
        meta, now = pod["metadata"], timestamp()
        event = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {
                "name": f"{meta['name'][:200]}.{meta['uid'][:8]}.{next(self._event_numbers):x}",
                "namespace": meta["namespace"],
            },
            "involvedObject": {
                "apiVersion": "v1",
                "kind": "Pod",
                "name": meta["name"],
                "namespace": meta["namespace"],
                "uid": meta["uid"],
            },
            "type": kind,
            "reason": reason,
            "message": message[:1024],
            "source": {"component": "process-node", "host": self._config.name},
            "firstTimestamp": now,
            "lastTimestamp": now,
            "count": 1,
        }
        with contextlib.suppress(KubeError, aiohttp.ClientError, TimeoutError, OSError):
            await self._client.request("POST", f"/api/v1/namespaces/{meta['namespace']}/events", body=event)
