"""One operator process and its parts, put together.

In one event loop: kopf's watches (handlers.py) → the work queue's workers (workqueue.py) → reconcile.py; beside them
the slow resync, the lease, and two small HTTP servers.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import signal
import socket
import uuid
from collections.abc import AsyncIterator, Sequence
from functools import partial
from importlib.metadata import version

import aiohttp
import kopf

from reprise_operator.api import Api, Body, ClusterError, Fault, load_connection
from reprise_operator.cluster import Cluster, Key
from reprise_operator.directory import Directory
from reprise_operator.discovery import OptionalKinds
from reprise_operator.events import Recorder
from reprise_operator.handlers import Waker, kopf_settings, register
from reprise_operator.kinds import WATCHED_TYPES
from reprise_operator.leader import Leadership
from reprise_operator.logs import about
from reprise_operator.metrics import OperatorMetrics, serve_metrics, serve_probes
from reprise_operator.options import Options
from reprise_operator.recall import Recall
from reprise_operator.reconcile import Reconciler
from reprise_operator.rotation import ReferenceKey, ReferenceReader
from reprise_operator.scraper import Scraper
from reprise_operator.settings import GROUP, PLURAL
from reprise_operator.watch import WatchHealth
from reprise_operator.workqueue import WorkQueue

logger = logging.getLogger(__name__)

LEASE_NAME = "reprise-operator"
RETRY_SECONDS = 5.0
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class WatchesEnded(Exception):
    """kopf gave up, by its own decision; the cause says why."""


class Operator:
    """The parts of one operator process, put together; `run` runs them until it is stopped."""

    def __init__(self, options: Options, api: Api, session: aiohttp.ClientSession, metrics: OperatorMetrics):
        self.options = options
        self.api = api
        self.cluster = cluster = Cluster(api)
        self.metrics = metrics
        settings = options.settings
        self.kinds = OptionalKinds(cluster, namespace=settings.namespace, period=settings.discovery_seconds)
        self.directory = Directory()
        self.health = WatchHealth(dead_after=settings.watch_patience_seconds)
        # Each resync reads everything anew; the age is for the one that could not list.
        self.recall = Recall(max_age=1.5 * settings.resync_seconds)
        self.reconciler = Reconciler(
            cluster=cluster,
            kinds=self.kinds,
            scraper=Scraper(
                session,
                interval=settings.scrape_seconds,
                concurrency=settings.scrape_concurrency,
                timeout=settings.scrape_timeout_seconds,
            ),
            recorder=Recorder(cluster, instance=_identity()),
            settings=settings,
            metrics=metrics,
            health=self.health,
            wake=self._wake,
            directory=self.directory,
            references=ReferenceReader(ReferenceKey(options.reference_key) if options.reference_key else None),
            recall=self.recall,
        )
        self.queue: WorkQueue[Key] = WorkQueue(handler=self.reconciler, workers=settings.workers, context=about_key)
        self.waker = Waker(self._wake, health=self.health, metrics=metrics, directory=self.directory, newest=api.newest)
        self.ready = False
        self.leadership: Leadership | None = None
        metrics.queue_depth.set_function(self.queue.depth)
        for resource in WATCHED_TYPES:
            metrics.watch_behind.labels(resource.plural).set_function(partial(self.health.behind, resource))

    def _wake(self, key: Key, after: float = 0.0) -> None:
        """There is news of `key`."""
        self.recall.spoil(key)
        self.queue.add(key, after=after)

    def unhealthy(self) -> str | None:
        """What a restart would cure."""
        dead = self.health.dead()
        if dead is not None:
            return f"the watch of {dead} has owed an event for {self.health.behind():.0f} s that a read has found"
        idle = self.queue.clock() - self.queue.last_progress
        if self.queue.depth() > 0 and idle > 2 * self.queue.timeout:
            return f"no worker has taken a key for {idle:.0f} s"
        return None

    def unready(self) -> str | None:
        """One that waits for a leader to end is ready to take over: else a rollout of two would never be done."""
        if self.ready or (self.leadership is not None and self.leadership.standby):
            return None
        return "starting: waiting for the CRD or the lease"

    async def run(self) -> None:
        """Works until SIGTERM or SIGINT, or until a part of it fails, which is raised."""
        stop = asyncio.Event()
        for number in _SIGNALS:
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        stopping = asyncio.create_task(stop.wait(), name="stop")
        work = asyncio.create_task(self._work(stop), name="work")
        try:
            await asyncio.wait({stopping, work}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (stopping, work):
                task.cancel()
            await asyncio.wait({stopping, work})
        if not work.cancelled():
            work.result()

    async def _work(self, stop: asyncio.Event) -> None:
        await self._services()
        async with contextlib.AsyncExitStack() as stack:
            parts = []
            if self.options.lease_namespace is not None:
                self.leadership = leadership = Leadership(
                    self.api.client, namespace=self.options.lease_namespace, name=LEASE_NAME, identity=_identity()
                )
                stack.push_async_callback(leadership.release)
                await leadership.acquire()
                parts.append(leadership.keep())
            self.reconciler.prime(await self._services())
            await self.kinds.first()
            self.metrics.leader.set(1)
            stack.callback(self.metrics.leader.set, 0)
            await stack.enter_async_context(self._watches(stop))
            parts += [self.queue.run(), self._resync(), self._discover()]
            self.ready = True
            try:
                async with asyncio.TaskGroup() as group:  # ends, with all of them, when one fails
                    for part in parts:
                        group.create_task(part)
            finally:
                self.ready = False

    @contextlib.asynccontextmanager
    async def _watches(self, stop: asyncio.Event) -> AsyncIterator[None]:
        """Runs kopf inside the block. When kopf ends by itself the block is cancelled and kopf's error raised."""
        registry = kopf.OperatorRegistry()
        register(registry, self.waker)
        namespace = self.options.settings.namespace
        ended, started = asyncio.Event(), asyncio.Event()
        watching = asyncio.create_task(
            kopf.operator(
                registry=registry,
                settings=kopf_settings(
                    namespaced=namespace is not None,
                    inactivity_seconds=self.options.settings.watch_inactivity_seconds,
                ),
                standalone=True,
                clusterwide=namespace is None,
                namespaces=[namespace] if namespace is not None else [],
                stop_flag=ended,
                ready_flag=started,
            ),
            name="watches",
        )
        inside = asyncio.current_task()
        assert inside is not None
        watching.add_done_callback(lambda _: None if ended.is_set() else inside.cancel())
        try:
            await started.wait()
            # kopf has taken the signals. They are ours again: it would end first, and then wait for our tasks.
            for number in _SIGNALS:
                asyncio.get_running_loop().add_signal_handler(number, stop.set)
            yield
        finally:
            by_itself = watching.done()
            ended.set()
            await asyncio.wait({watching})
            # Without an exception it was a signal that came while the signals were kopf's.
            if by_itself and not watching.cancelled() and watching.exception() is not None:
                raise WatchesEnded("the watches have ended") from watching.exception()

    async def _services(self) -> tuple[Body, ...]:
        """All of them, once the CRD is there: kopf, when it serves one namespace, does not notice one that appears
        after it has started."""
        told = False
        while True:
            try:
                return await self.cluster.list_services(self.options.settings.namespace)
            except ClusterError as error:
                if error.fault is Fault.FORBIDDEN:
                    logger.error("may not list %s.%s: %s; see the chart's RBAC", PLURAL, GROUP, error)
                elif error.fault is Fault.NOT_FOUND and not told:
                    logger.error(
                        "the CRD %s.%s is not installed; waiting for it (kubectl apply -f crds/)", PLURAL, GROUP
                    )
                    told = True
                elif error.fault is not Fault.NOT_FOUND:
                    logger.warning("%s", error)
            await asyncio.sleep(RETRY_SECONDS)

    async def _discover(self) -> None:
        await self.kinds.run(wake=self._wake, concerned=self.reconciler.concerned)

    async def _resync(self) -> None:
        """Puts every service into the queue now and then, spread over a tenth of the time: what no event told of is
        found here, and so is a watch that does not deliver."""
        period = self.options.settings.resync_seconds
        while True:
            await asyncio.sleep(period * (0.9 + 0.1 * random.random()))  # noqa: S311 - spreads load
            try:
                services = await self.cluster.list_services(self.options.settings.namespace)
            except ClusterError as error:
                logger.warning("resync: %s", error)
                continue
            self.metrics.resynced.set_to_current_time()
            for key in self._resync_keys(services):
                self._wake(key, random.random() * period / 10)  # noqa: S311

    def _resync_keys(self, services: Sequence[Body]) -> set[Key]:
        """Those listed, and those that were known and are not listed: of a service that was deleted while the watch was
        away no event may ever come, and its reconcile forgets it."""
        listed = set()
        for service in services:
            metadata = service["metadata"]
            key = Key(metadata["namespace"], metadata["name"])
            self.health.read(key, metadata.get("resourceVersion"))
            listed.add(key)
        return listed | self.directory.absent_from(listed)


def about_key(key: Key) -> contextlib.AbstractContextManager[None]:
    """Log lines of this key's passes name it."""
    return about(key.namespace, key.name)


def _identity() -> str:
    """Of this process, for the lease and the events: the pod's name, or one that no other process has."""
    return os.environ.get("POD_NAME") or f"{socket.gethostname()}_{uuid.uuid4().hex[:8]}"


async def serve(options: Options) -> None:
    """The whole process, until SIGTERM or SIGINT."""
    metrics = OperatorMetrics()
    async with contextlib.AsyncExitStack() as stack:
        api = await stack.enter_async_context(Api(await load_connection(), on_request=metrics.on_request))
        session = await stack.enter_async_context(aiohttp.ClientSession())
        operator = Operator(options, api, session, metrics)
        checks = {"/healthz": operator.unhealthy, "/readyz": operator.unready}
        health_port = await stack.enter_async_context(
            serve_probes(checks, host=options.host, port=options.settings.health_port)
        )
        metrics_port = await stack.enter_async_context(
            serve_metrics(metrics, host=options.host, port=options.settings.metrics_port)
        )
        logger.info(
            "reprise-operator %s serves %s; probes on port %d, metrics on port %d",
            version("reprise-operator"),
            options.settings.namespace or "all namespaces",
            health_port,
            metrics_port,
        )
        await operator.run()
    logger.info("stopped")
