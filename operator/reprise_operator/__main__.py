"""`reprise-operator run`: the command line, and the one process it starts.

What runs in it, in one event loop: kopf's watches (handlers.py) → the work queue's workers (workqueue.py) →
reconcile.py; beside them the slow resync, the lease, and two small HTTP servers.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import os
import random
import signal
import socket
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version

import aiohttp
import kopf
from kubernetes.aio.config.config_exception import ConfigException

from reprise_operator.cluster import Cluster, ClusterError, Fault, Key, load_connection
from reprise_operator.events import Recorder
from reprise_operator.handlers import Waker, kopf_settings, register
from reprise_operator.leader import Leadership, LeadershipLost
from reprise_operator.metrics import OperatorMetrics, serve_metrics, serve_probes
from reprise_operator.observe import Scraper
from reprise_operator.reconcile import Reconciler
from reprise_operator.settings import GROUP, PLURAL, Settings
from reprise_operator.watch import WatchHealth
from reprise_operator.workqueue import WorkQueue

logger = logging.getLogger("reprise_operator")

LEASE_NAME = "reprise-operator"
RETRY_SECONDS = 5.0
ANY_ADDRESS = "0.0.0.0"  # noqa: S104 - the kubelet's probes and Prometheus come to the pod's address


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """One run of the operator: what the pure half is given, and what only the process needs."""

    settings: Settings
    host: str = ANY_ADDRESS
    lease_namespace: str | None = None
    """Where the lease is kept; None runs without leader election."""
    log_format: str = "json"
    log_level: str = "info"


# Command line -------------------------------------------------------------------------------------------------------


def parse_options(arguments: Sequence[str], environment: Mapping[str, str]) -> Options:
    """Every flag has an environment variable, REPRISE_OPERATOR_ and the flag's name; the flag wins.

    Exits with 2 and a message on stderr when they make no sense.
    """
    defaults = Settings()
    parser = argparse.ArgumentParser(prog="reprise-operator", allow_abbrev=False, description=__doc__.splitlines()[0])
    parser.add_argument("--version", action="version", version=f"reprise-operator {version('reprise-operator')}")
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", allow_abbrev=False, help="run the operator until SIGTERM")

    def add(flag: str, default: object, convert: type, text: str, *names: str) -> None:
        name = "REPRISE_OPERATOR_" + flag.removeprefix("--").replace("-", "_").upper()
        # argparse converts a default that is a string, so a bad environment variable is a usage error too.
        given = environment.get(name, default)
        help_text = f"{text} [${name}; {default if default not in (None, '') else 'unset'}]".replace("%", "%%")
        run.add_argument(flag, *names, type=convert, default=given, help=help_text)

    add("--namespace", None, str, "serve this namespace only", "-n")
    run.add_argument(
        "-A", "--all-namespaces", action="store_true", help="serve all namespaces (the default is one of the two)"
    )
    add("--reprise-image", defaults.reprise_image, str, "image of the reprise runtime where the spec names none")
    add("--vllm-ascend-image", defaults.vllm_ascend_image, str, "image of the vllm-ascend runtime, likewise")
    add("--workers", defaults.workers, int, "reconciles at a time")
    add("--resync-seconds", defaults.resync_seconds, float, "every service is looked at this often without any news")
    add("--scrape-seconds", defaults.scrape_seconds, float, "how often the engines' /metrics are read")
    add("--scrape-concurrency", defaults.scrape_concurrency, int, "engines read at a time")
    add("--scrape-timeout-seconds", defaults.scrape_timeout_seconds, float, "patience with one engine")
    add("--hit-rate-window-seconds", defaults.hit_rate_window_seconds, float, "window of the hit rate")
    add(
        "--status-min-interval-seconds",
        defaults.status_min_interval_seconds,
        float,
        "least time between two writes of a service's figures",
    )
    add("--host", ANY_ADDRESS, str, "address the two HTTP servers listen on")
    add("--metrics-port", defaults.metrics_port, int, "GET /metrics; 0 takes a free port")
    add("--health-port", defaults.health_port, int, "GET /healthz and /readyz; 0 takes a free port")
    add("--lease-namespace", None, str, "elect a leader by a Lease in this namespace")
    add("--log-format", "json", str, "json or text")
    add("--log-level", "info", str, "debug, info, warning or error")
    values = parser.parse_args(arguments)

    all_namespaces = values.all_namespaces or environment.get("REPRISE_OPERATOR_ALL_NAMESPACES", "").lower() == "true"
    if bool(values.namespace) == all_namespaces:
        run.error("say which namespaces to serve: either --namespace NAME or --all-namespaces")
    for name in ("workers", "resync_seconds", "scrape_seconds", "scrape_concurrency", "scrape_timeout_seconds"):
        if getattr(values, name) <= 0:
            run.error(f"--{name.replace('_', '-')} is {getattr(values, name)}; it must be above 0")
    for name, choices in (("log_format", ("json", "text")), ("log_level", ("debug", "info", "warning", "error"))):
        if getattr(values, name) not in choices:
            run.error(
                f"--{name.replace('_', '-')} is {getattr(values, name)!r}; it must be one of {', '.join(choices)}"
            )
    return Options(
        settings=Settings(
            namespace=values.namespace or None,
            reprise_image=values.reprise_image,
            vllm_ascend_image=values.vllm_ascend_image,
            workers=values.workers,
            resync_seconds=values.resync_seconds,
            scrape_seconds=values.scrape_seconds,
            scrape_concurrency=values.scrape_concurrency,
            scrape_timeout_seconds=values.scrape_timeout_seconds,
            hit_rate_window_seconds=values.hit_rate_window_seconds,
            status_min_interval_seconds=values.status_min_interval_seconds,
            metrics_port=values.metrics_port,
            health_port=values.health_port,
        ),
        host=values.host,
        lease_namespace=values.lease_namespace or None,
        log_format=values.log_format,
        log_level=values.log_level,
    )


# Logs ---------------------------------------------------------------------------------------------------------------


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, logger, message, and the traceback where there is one."""

    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": datetime.fromtimestamp(record.created, tz=UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False)


def configure_logging(options: Options) -> None:
    handler = logging.StreamHandler(sys.stderr)
    text = logging.Formatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s")
    handler.setFormatter(JsonFormatter() if options.log_format == "json" else text)
    logging.basicConfig(level=options.log_level.upper(), handlers=[handler], force=True)
    if options.log_level != "debug":
        # kopf tells of every object it sees, aiohttp of every probe.
        for name in ("kopf.objects", "aiohttp.access"):
            logging.getLogger(name).setLevel(logging.WARNING)


# The process --------------------------------------------------------------------------------------------------------


class Operator:
    """The parts of one operator process, put together; `run` runs them until it is stopped."""

    def __init__(self, options: Options, cluster: Cluster, session: aiohttp.ClientSession, metrics: OperatorMetrics):
        self.options = options
        self.cluster = cluster
        self.metrics = metrics
        settings = options.settings
        self.health = WatchHealth()
        self.reconciler = Reconciler(
            cluster=cluster,
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
        )
        self.queue: WorkQueue[Key] = WorkQueue(handler=self.reconciler, workers=settings.workers)
        self.waker = Waker(lambda key, after: self.queue.add(key, after=after), health=self.health, metrics=metrics)
        self.ready = False
        metrics.queue_depth.set_function(self.queue.depth)
        metrics.watch_behind.set_function(lambda: self.health.behind(time.time()))

    def unhealthy(self) -> str | None:
        """What a restart would cure."""
        if self.health.is_dead(time.time()):
            return f"the watch has not delivered an event for {self.health.behind(time.time()):.0f} s that a read found"
        idle = self.queue.clock() - self.queue.last_progress
        if self.queue.depth() > 0 and idle > 2 * self.queue.timeout:
            return f"no worker has taken a key for {idle:.0f} s"
        return None

    def unready(self) -> str | None:
        return None if self.ready else "starting: waiting for the CRD or the lease"

    async def run(self, stop: asyncio.Event) -> None:
        """Works until `stop` is set, or a part of it fails, which is raised."""
        await self._wait_for_crd()
        leadership: Leadership | None = None
        if self.options.lease_namespace is not None:
            leadership = Leadership(
                self.cluster.api,
                namespace=self.options.lease_namespace,
                name=LEASE_NAME,
                identity=_identity(),
            )
            await leadership.acquire()
        registry = kopf.OperatorRegistry()
        register(registry, self.waker)
        namespace = self.options.settings.namespace
        # Ours are created before kopf's: kopf, when it ends, cancels every task that is younger than itself.
        parts = [
            asyncio.create_task(self.queue.run(), name="workers"),
            asyncio.create_task(self._resync(), name="resync"),
        ]
        if leadership is not None:
            parts.append(asyncio.create_task(leadership.keep(), name="lease"))
        stopping = asyncio.create_task(stop.wait(), name="stop")
        await asyncio.sleep(0)
        watching = asyncio.create_task(
            kopf.operator(
                registry=registry,
                settings=kopf_settings(namespaced=namespace is not None),
                standalone=True,
                clusterwide=namespace is None,
                namespaces=[namespace] if namespace is not None else [],
                stop_flag=stop,
            ),
            name="watches",
        )
        self.ready = True
        try:
            done, _ = await asyncio.wait({*parts, watching, stopping}, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            self.ready = False
            stop.set()  # ends kopf, by its flag
            for task in (*parts, stopping):
                task.cancel()
            await asyncio.gather(*parts, watching, stopping, return_exceptions=True)
            if leadership is not None:
                await leadership.release()

    async def _wait_for_crd(self) -> None:
        """kopf, when it serves one namespace, does not notice a CRD that appears after it has started."""
        told = False
        while True:
            try:
                await self.cluster.list_services(self.options.settings.namespace)
                return
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
            for service in services:
                metadata = service["metadata"]
                key = Key(metadata["namespace"], metadata["name"])
                self.health.read(key, metadata.get("resourceVersion"), now=time.time())
                self.queue.add(key, after=random.random() * period / 10)  # noqa: S311


def _identity() -> str:
    """Of this process, for the lease and the events: the pod's name, or one that no other process has."""
    return os.environ.get("POD_NAME") or f"{socket.gethostname()}_{uuid.uuid4().hex[:8]}"


async def serve(options: Options) -> None:
    """The whole process, until SIGTERM or SIGINT."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    metrics = OperatorMetrics()
    async with contextlib.AsyncExitStack() as stack:
        cluster = await stack.enter_async_context(Cluster(await load_connection(), on_request=metrics.on_request))
        session = await stack.enter_async_context(aiohttp.ClientSession())
        operator = Operator(options, cluster, session, metrics)
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
        main = asyncio.create_task(operator.run(stop), name="operator")
        # kopf sets handlers of its own for the two signals once it runs; they stop it, and it ends the rest.
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, main.cancel)
        with contextlib.suppress(asyncio.CancelledError):
            await main
    logger.info("stopped")


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0 after a signal, 1 when the operator had to give up (the kubelet starts it again), 2 on bad flags."""
    options = parse_options(sys.argv[1:] if arguments is None else arguments, os.environ)
    configure_logging(options)
    try:
        asyncio.run(serve(options))
    except ConfigException as error:
        logger.error("no cluster to connect to: %s; set KUBECONFIG, or run in a pod with a service account", error)
        return 1
    except LeadershipLost as error:
        logger.error("%s; giving up so that two operators never work at once", error)
        return 1
    except Exception:
        logger.exception("the operator has to give up")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
