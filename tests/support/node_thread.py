"""A node and a service proxy in an event loop of their own thread, for callers that are not asynchronous."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from tests.support.background import background
from tests.support.kubectl import eventually
from tests.support.node import Node, NodeConfig, Subnet
from tests.support.node_client import Credentials, Informer, KubeClient
from tests.support.service_proxy import ServiceProxy


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningNode:
    """The handle of a node that runs in another thread; its methods only read."""

    node: Node
    proxy: ServiceProxy

    def service_url(self, namespace: str, name: str) -> str:
        """http://address:port of a Service; waits for it, and raises AssertionError when it does not come."""
        address, port = eventually(
            lambda: self.proxy.address(namespace, name), f"Service {namespace}/{name}", within=10, every=0.05
        )
        return f"http://{address}:{port}"

    def service_addresses(self) -> Mapping[str, str]:
        """namespace/name → http://address:port of every Service that answers."""
        return self.proxy.addresses()

    def pod_log(self, pod: str, *, namespace: str = "default", container: str, previous: bool = False) -> str:
        """The output of a container's present or previous run; "" before its first."""
        worker = self.node.worker(namespace, pod)
        path = None if worker is None else worker.log_path(container, previous=previous)
        return path.read_text(errors="replace") if path is not None and path.exists() else ""


def running_node(
    kubeconfig: Path, config: NodeConfig, *, on_services: Callable[[Mapping[str, str]], None] | None = None
) -> AbstractContextManager[RunningNode]:
    """A registered node; on exit every process of every pod is gone. `on_services`: told when Services come and go."""
    return background(lambda: _serve(kubeconfig, config, on_services), name="node")


@contextlib.asynccontextmanager
async def _serve(
    kubeconfig: Path, config: NodeConfig, on_services: Callable[[Mapping[str, str]], None] | None
) -> AsyncIterator[RunningNode]:
    async with contextlib.AsyncExitStack() as stack:
        subnet = stack.enter_context(contextlib.closing(Subnet()))
        client = await stack.enter_async_context(KubeClient(Credentials.from_kubeconfig(kubeconfig)))
        pods, services = Informer(client, "/api/v1/pods"), Informer(client, "/api/v1/services")
        node = await stack.enter_async_context(Node(config, client=client, subnet=subnet, pods=pods))
        proxy = ServiceProxy(services=services, pods=pods, subnet=subnet, on_change=on_services)
        await stack.enter_async_context(proxy)
        informers = [asyncio.create_task(informer.run()) for informer in (pods, services)]
        stack.push_async_callback(_cancel, informers)
        await asyncio.wait_for(asyncio.gather(pods.synced.wait(), services.synced.wait()), 30)
        yield RunningNode(node=node, proxy=proxy)


async def _cancel(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
