"""How often engines are asked for their figures, and what is said where they do not answer."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

import aiohttp
import pytest
from aiohttp import web

from reprise_operator.observed import ObservedPod
from reprise_operator.scraper import Scraper
from tests.support.factories import pod

OURS = "vllm:prefix_cache_queries_total 3000.0\nvllm:prefix_cache_hits_total 1500.0\n"


class Engine:
    """An HTTP server that answers GET /metrics as it is told, and counts."""

    def __init__(self) -> None:
        self.calls = 0
        self.at_once = 0
        self.most_at_once = 0
        self.answer: Callable[[], web.Response] = lambda: web.Response(text=OURS)
        self.delay = 0.0
        self.port = 0

    async def metrics(self, _: web.Request) -> web.Response:
        self.calls += 1
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            await asyncio.sleep(self.delay)
            return self.answer()
        finally:
            self.at_once -= 1


@contextlib.asynccontextmanager
async def engine_and_scraper(
    clock: Callable[[], float], *, patience: float = 2.0, concurrency: int = 4
) -> AsyncIterator[tuple[Engine, Scraper]]:
    engine = Engine()
    app = web.Application()
    app.router.add_get("/metrics", engine.metrics)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    engine.port = runner.addresses[0][1]
    try:
        async with aiohttp.ClientSession() as session:
            yield (
                engine,
                Scraper(
                    session,
                    interval=30.0,
                    concurrency=concurrency,
                    timeout=patience,
                    clock=clock,
                    random_unit=lambda: 1.0,
                    port=engine.port,
                ),
            )
    finally:
        await runner.cleanup()


def ready_pod(uid: str = "u") -> ObservedPod:
    return replace(pod(), uid=uid, ip="127.0.0.1")


async def test_a_pod_is_scraped_once_an_interval_however_often_it_is_observed() -> None:
    now = 100.0
    async with engine_and_scraper(lambda: now) as (engine, scraper):
        for _ in range(5):
            (pod,) = await scraper.observe([ready_pod()])
        assert engine.calls == 1
        assert pod.metrics is not None
        assert (pod.metrics.prefix_cache_hits, pod.metrics.scraped_at) == (1500.0, 100.0)
        now = 126.0
        await scraper.observe([ready_pod()])
        assert engine.calls == 1
        now = 127.0  # 0.9 of the interval: a reconcile that comes a little early still finds it due
        (pod,) = await scraper.observe([ready_pod()])
        assert engine.calls == 2
        assert pod.metrics is not None
        assert pod.metrics.scraped_at == 127.0


async def test_only_pods_that_can_answer_are_asked() -> None:
    async with engine_and_scraper(lambda: 0.0) as (engine, scraper):
        pods = [
            replace(ready_pod("a"), ready=False),
            replace(ready_pod("b"), ip=None),
            replace(ready_pod("c"), terminating=True),
        ]
        assert await scraper.observe(pods) == tuple(pods)
        assert engine.calls == 0


async def test_a_pod_that_is_not_ready_any_more_has_no_old_figures() -> None:
    async with engine_and_scraper(lambda: 0.0) as (_, scraper):
        await scraper.observe([ready_pod()])
        (pod,) = await scraper.observe([replace(ready_pod(), ready=False)])
        assert pod.metrics is None


async def test_a_pod_that_comes_back_is_asked_at_once_since_it_may_be_another_process() -> None:
    async with engine_and_scraper(lambda: 0.0) as (engine, scraper):
        await scraper.observe([ready_pod()])
        await scraper.observe([replace(ready_pod(), ready=False)])
        engine.answer = lambda: web.Response(text="vllm:prefix_cache_queries_total 7\n")
        (pod,) = await scraper.observe([ready_pod()])
        assert engine.calls == 2
        assert pod.metrics is not None
        assert pod.metrics.prefix_cache_queries == 7


async def test_one_engine_in_trouble_does_not_harm_the_others_and_is_asked_again_soon() -> None:
    now = 0.0
    async with engine_and_scraper(lambda: now, patience=1.5) as (engine, scraper):
        engine.answer = lambda: web.Response(status=500)
        sound, lost = ready_pod("a"), replace(ready_pod("b"), ip="127.0.0.2")
        first, second = await scraper.observe([sound, lost])
        assert first.metrics_error == "/metrics answers 500"
        assert second.metrics_error == f"port {engine.port} cannot be reached: Connection refused"
        assert first.metrics is None
        engine.answer = lambda: web.Response(text="vllm:kv_cache_usage_perc nonsense")
        now = 5.0
        (first,) = await scraper.observe([sound])
        assert first.metrics_error == "/metrics is no valid exposition of Prometheus"
        engine.delay = 4.0
        now = 10.0
        (first,) = await scraper.observe([sound])
        assert first.metrics_error
        assert first.metrics_error.startswith("/metrics does not answer within 1.5 s; a NetworkPolicy must")
        assert engine.calls == 3
        engine.delay, engine.answer, now = 0.0, lambda: web.Response(text=OURS), 15.0
        (first,) = await scraper.observe([sound])
        assert first.metrics_error is None
        assert first.metrics is not None


@pytest.mark.parametrize("status", [401, 403])
async def test_an_engine_that_wants_credentials_says_so(status: int) -> None:
    async with engine_and_scraper(lambda: 0.0) as (engine, scraper):
        engine.answer = lambda: web.Response(status=status)
        (pod,) = await scraper.observe([ready_pod()])
        assert pod.metrics is None
        assert pod.metrics_error == f"/metrics answers {status}: it asks for credentials, and scrapers have none"


async def test_what_speaks_no_http_is_told_from_what_does_not_answer() -> None:
    async def talk(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"220 mail\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(talk, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, aiohttp.ClientSession() as session:
        scraper = Scraper(session, interval=30.0, concurrency=1, timeout=2.0, port=port)
        (pod,) = await scraper.observe([ready_pod()])
    assert pod.metrics_error
    assert pod.metrics_error.startswith("/metrics breaks off or is no HTTP (")


async def test_the_last_figures_stand_while_attempts_fail_but_not_for_ever() -> None:
    now = 0.0
    async with engine_and_scraper(lambda: now) as (engine, scraper):
        await scraper.observe([ready_pod()])
        engine.answer = lambda: web.Response(status=500)
        for _ in range(3):
            now += 30.0
            (pod,) = await scraper.observe([ready_pod()])
            assert pod.metrics is not None
            assert pod.metrics.scraped_at == 0.0
            assert pod.metrics_error == "/metrics answers 500"
        now = 95.0
        (pod,) = await scraper.observe([ready_pod()])
        assert pod.metrics is None
        assert engine.calls == 5


async def test_a_clock_that_is_set_back_stops_no_scrape() -> None:
    now = 10_000.0
    async with engine_and_scraper(lambda: now) as (engine, scraper):
        await scraper.observe([ready_pod()])
        now = 5_000.0
        (pod,) = await scraper.observe([ready_pod()])
        assert engine.calls == 2
        assert pod.metrics is not None
        assert pod.metrics.scraped_at == 5_000.0


async def test_an_endless_answer_is_cut_off() -> None:
    async with engine_and_scraper(lambda: 0.0) as (engine, scraper):
        engine.answer = lambda: web.Response(text="x" * (8 * 1024 * 1024 + 1))
        (pod,) = await scraper.observe([ready_pod()])
        assert pod.metrics_error == "/metrics is longer than 8388608 bytes"


async def test_concurrency_is_bounded_over_all_services() -> None:
    async with engine_and_scraper(lambda: 0.0, concurrency=2) as (engine, scraper):
        engine.delay = 0.02
        services = [[ready_pod(f"{service}{pod}") for pod in range(3)] for service in "ab"]
        await asyncio.gather(*(scraper.observe(pods) for pods in services))
        assert engine.calls == 6
        assert engine.most_at_once == 2


async def test_a_pod_that_is_gone_is_forgotten() -> None:
    async with engine_and_scraper(lambda: 0.0) as (engine, scraper):
        await scraper.observe([ready_pod()])
        scraper.forget(["u"])
        await scraper.observe([ready_pod()])
        assert engine.calls == 2
