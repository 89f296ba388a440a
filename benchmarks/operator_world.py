"""Around the operator that is measured: its process and what it takes, what it asked for, and who else is at work.

A person and a kubelet are played at the API server (`Hands`), engines on loopback addresses (`Engines`).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from tests.support.cluster import PROJECT
from tests.support.node_client import Credentials

NAMESPACE = "scale"
GROUP_PATH = f"/apis/serving.reprise.io/v1alpha1/namespaces/{NAMESPACE}/inferenceservices"
PODS = f"/api/v1/namespaces/{NAMESPACE}/pods"
READERS_AT_ONCE = 8


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

    async def watch(self, path: str, *, since: str = "") -> AsyncIterator[dict[str, Any]]:
        """Events after the resource version `since`, or first of all that is there. Ends with the stream; an ERROR
        event, say that a thousand objects were more than the API server holds for a slow reader, ends it too."""
        url = f"{self._credentials.server}{path}?watch=true&resourceVersion={since}"
        timeout = aiohttp.ClientTimeout(total=None)
        async with self._session.get(
            url, headers=self._credentials.headers, ssl=self._credentials.tls or True, timeout=timeout
        ) as response:
            async for line in response.content:
                event = json.loads(line)
                if event["type"] == "ERROR":
                    return
                yield event

    async def version(self, path: str) -> str:
        """The resource version of the collection now."""
        return str((await self.request("GET", f"{path}?limit=1"))["metadata"]["resourceVersion"])

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
