"""What kube-proxy does, in user space: every ClusterIP Service answers on a loopback address and spreads its
connections over the ready pods behind its selector, round robin (or one pod a client, with sessionAffinity
ClientIP).
"""

from __future__ import annotations

import asyncio
import contextlib
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NoReturn

from tests.support.node import SERVICE_ADDRESSES, Subnet
from tests.support.node_client import Informer, Manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class Listener:
    """One port of one Service. `spec` is what it was made from: another spec means another listener."""

    server: asyncio.Server
    address: str
    port: int
    spec: tuple[str, str, int]
    """(service UID, port name, service port)."""


def ready_endpoints(service: Manifest, port: Manifest, pods: Mapping[str, Manifest]) -> list[tuple[str, int]]:
    """(pod IP, port) of the pods that may get traffic, in a stable order."""
    selector: dict[str, str] = service["spec"].get("selector") or {}
    endpoints = []
    for pod in pods.values():
        meta, status = pod["metadata"], pod.get("status") or {}
        labels = meta.get("labels") or {}
        ready = any(c["type"] == "Ready" and c["status"] == "True" for c in status.get("conditions") or ())
        if (
            not selector
            or meta["namespace"] != service["metadata"]["namespace"]
            or meta.get("deletionTimestamp")
            or not ready
            or not status.get("podIP")
            or any(labels.get(key) != value for key, value in selector.items())
        ):
            continue
        if (number := _target(pod, port)) is not None:
            endpoints.append((status["podIP"], number))
    return sorted(endpoints)


def _target(pod: Manifest, port: Manifest) -> int | None:
    target = port.get("targetPort") or port["port"]
    if isinstance(target, int):
        return target
    for container in pod["spec"]["containers"]:
        for declared in container.get("ports") or ():
            if declared.get("name") == target:
                return int(declared["containerPort"])
    return None


class ServiceProxy:
    """Use as `async with`: listeners follow the Services of the cluster."""

    def __init__(
        self,
        *,
        services: Informer,
        pods: Informer,
        subnet: Subnet,
        on_change: Callable[[Mapping[str, str]], None] | None = None,
    ) -> None:
        self._services = services
        self._pods = pods
        self._on_change = on_change
        self._addresses = subnet.addresses(SERVICE_ADDRESSES)
        self._listeners: dict[tuple[str, str, int], Listener] = {}
        self._turn = 0
        self._wake = asyncio.Event()
        self._task: asyncio.Task[NoReturn] | None = None
        self._connections: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> ServiceProxy:
        self._services.on_change(self._wake.set)
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        for listener in self._listeners.values():
            listener.server.close()
        for connection in list(self._connections):
            connection.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    def address(self, namespace: str, name: str, port: int | None = None) -> tuple[str, int] | None:
        """Where a Service answers: its first port, or the one with that number. None while it is not there."""
        for service in list(self._services.objects.values()):
            meta = service["metadata"]
            if (meta["namespace"], meta["name"]) != (namespace, name):
                continue
            for listener in list(self._listeners.values()):
                if listener.spec[0] == meta["uid"] and port in (None, listener.spec[2]):
                    return listener.address, listener.port
        return None

    def addresses(self) -> dict[str, str]:
        """namespace/name → http://address:port of every Service that answers (its first port)."""
        found = {}
        for service in list(self._services.objects.values()):
            meta = service["metadata"]
            if (where := self.address(meta["namespace"], meta["name"])) is not None:
                found[f"{meta['namespace']}/{meta['name']}"] = f"http://{where[0]}:{where[1]}"
        return found

    async def _run(self) -> NoReturn:
        while True:
            await self._wake.wait()
            self._wake.clear()
            wanted = {
                (service["metadata"]["uid"], port.get("name") or "", int(port["port"]))
                for service in self._services.objects.values()
                if service["spec"].get("selector") and service["spec"].get("clusterIP") != "None"
                for port in service["spec"].get("ports") or ()
            }
            for spec in self._listeners.keys() - wanted:
                self._listeners.pop(spec).server.close()
            for spec in sorted(wanted - self._listeners.keys()):
                self._listeners[spec] = await self._listen(spec)
            if self._on_change is not None:
                self._on_change(self.addresses())

    async def _listen(self, spec: tuple[str, str, int]) -> Listener:
        taken = {listener.address: listener.spec[0] for listener in self._listeners.values()}
        own = [address for address, uid in taken.items() if uid == spec[0]]
        address = own[0] if own else next(each for each in self._addresses if each not in taken)

        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            if task is not None:
                self._connections.add(task)
                task.add_done_callback(self._connections.discard)
            with contextlib.suppress(OSError, asyncio.CancelledError):
                await self._serve(spec, reader, writer)
            writer.close()

        try:
            server = await asyncio.start_server(accept, address, spec[2])
        except OSError:  # a port below 1024 and no right to it: any other
            server = await asyncio.start_server(accept, address, 0)
        return Listener(server=server, address=address, port=server.sockets[0].getsockname()[1], spec=spec)

    async def _serve(
        self, spec: tuple[str, str, int], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        service = self._services.objects.get(spec[0])
        if service is None:
            return
        port = next(
            (p for p in service["spec"]["ports"] if (p.get("name") or "", int(p["port"])) == spec[1:]),
            {"port": spec[2]},
        )
        endpoints = ready_endpoints(service, port, self._pods.objects)
        if service["spec"].get("sessionAffinity") == "ClientIP":
            start = zlib.crc32(str(writer.get_extra_info("peername")[0]).encode())
        else:
            start = self._turn
            self._turn += 1
        for attempt in range(len(endpoints)):
            host, number = endpoints[(start + attempt) % len(endpoints)]
            try:
                up_reader, up_writer = await asyncio.open_connection(host, number)
            except OSError:
                continue
            try:
                await asyncio.gather(_pipe(reader, up_writer), _pipe(up_reader, writer))
            finally:
                up_writer.close()
            return


async def _pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
    finally:  # also when the peer broke off: the other side must learn of it
        with contextlib.suppress(OSError):
            writer.write_eof()
