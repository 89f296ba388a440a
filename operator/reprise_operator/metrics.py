"""The operator's own Prometheus metrics, and the two small HTTP servers it has: metrics, and probes.

No global registry: each operator process (or test) makes its own `OperatorMetrics`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager

from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from reprise_operator.kinds import ResourceType
from reprise_operator.service_metrics import ServiceFigures

_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


class OperatorMetrics:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.reconciles = Counter(
            "reprise_operator_reconcile",
            "Reconciles by outcome: success, retry (an expected fault, tried again), error (a bug).",
            ["outcome"],
            registry=self.registry,
        )
        self.reconcile_seconds = Histogram(
            "reprise_operator_reconcile_seconds", "Duration of a reconcile.", buckets=_BUCKETS, registry=self.registry
        )
        self.queue_depth = Gauge(
            "reprise_operator_queue_depth", "InferenceServices due and not yet taken.", registry=self.registry
        )
        self.services = Gauge("reprise_operator_services", "InferenceServices known.", registry=self.registry)
        self.api_requests = Counter(
            "reprise_operator_api_requests",
            "Requests to the API server, kopf's watches not counted.",
            ["verb", "resource", "outcome"],
            registry=self.registry,
        )
        self.writes = Counter(
            "reprise_operator_writes",
            "Changes the operator made, by kind and what it did: created, changed, deleted, status.",
            ["kind", "action"],
            registry=self.registry,
        )
        self.watch_events = Counter(
            "reprise_operator_watch_events", "Events the watches delivered.", ["resource"], registry=self.registry
        )
        self.watch_heartbeat = Gauge(
            "reprise_operator_watch_last_event_timestamp_seconds",
            "When a watch last delivered an event, Unix seconds. Old where nothing happens: see watch_behind.",
            ["resource"],
            registry=self.registry,
        )
        self.watch_behind = Gauge(
            "reprise_operator_watch_behind_seconds",
            "For how long a watch has owed an event that a read has proved to exist; 0 is healthy.",
            ["resource"],
            registry=self.registry,
        )
        self.resynced = Gauge(
            "reprise_operator_resync_timestamp_seconds",
            "When the list of all InferenceServices was last read, Unix seconds; 0 before the first time.",
            registry=self.registry,
        )
        self.leader = Gauge(
            "reprise_operator_leader",
            "1 while this process works, 0 while it waits for the lease.",
            registry=self.registry,
        )
        self.served = ServiceFigures()
        self.registry.register(self.served)
        for outcome in ("success", "retry", "error"):
            self.reconciles.labels(outcome)

    def on_request(self, verb: str, resource: ResourceType, outcome: str) -> None:
        """A `cluster.RequestObserver`."""
        self.api_requests.labels(verb, resource.plural, outcome).inc()

    def on_watch_event(self, resource: str, now: float) -> None:
        self.watch_events.labels(resource).inc()
        self.watch_heartbeat.labels(resource).set(now)

    def expose(self) -> bytes:
        return generate_latest(self.registry)


Check = Callable[[], str | None]
"""None when all is well, else what is wrong."""


@asynccontextmanager
async def serve_metrics(metrics: OperatorMetrics, *, host: str, port: int) -> AsyncIterator[int]:
    """Serves GET /metrics; yields the port (port 0 takes a free one)."""

    async def expose(_: web.Request) -> web.Response:
        return web.Response(body=metrics.expose(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async with _serve({"/metrics": expose}, host=host, port=port) as bound:
        yield bound


@asynccontextmanager
async def serve_probes(checks: Mapping[str, Check], *, host: str, port: int) -> AsyncIterator[int]:
    """Serves each path of `checks`: 200 "ok", or 503 and what is wrong."""

    def handler(check: Check) -> Callable[[web.Request], web.Response]:
        async def answer(_: web.Request) -> web.Response:
            wrong = check()
            return web.Response(status=200 if wrong is None else 503, text=wrong or "ok")

        return answer  # type: ignore[return-value]

    async with _serve({path: handler(check) for path, check in checks.items()}, host=host, port=port) as bound:
        yield bound


@asynccontextmanager
async def _serve(routes: Mapping[str, Callable[[web.Request], object]], *, host: str, port: int) -> AsyncIterator[int]:
    application = web.Application()
    for path, handler in routes.items():
        application.router.add_get(path, handler)  # type: ignore[arg-type]
    runner = web.AppRunner(
        application, access_log=None, handle_signals=False, shutdown_timeout=1.0, keepalive_timeout=1.0
    )
    await runner.setup()
    try:
        site = web.TCPSite(runner, host, port)
        await site.start()
        yield int(runner.addresses[0][1])
    finally:
        await runner.cleanup()
