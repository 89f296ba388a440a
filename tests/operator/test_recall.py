"""A pass without news asks the API server nothing; news, a write, an error or age make it ask again."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager

import pytest
from aiohttp import web
from kubernetes.aio.client import Configuration

from reprise_operator.api import MERGE_PATCH, Api, ClusterError
from reprise_operator.kinds import CONFIG_MAPS, DEPLOYMENTS, INFERENCE_SERVICES, PODS, SECRETS
from reprise_operator.naming import MANAGED_BY
from reprise_operator.recall import Recall

KEY = "llm/qwen"


class Time:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Server:
    """Answers every request, and counts."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.status = 200
        self.labels = dict(MANAGED_BY)

    async def answer(self, request: web.Request) -> web.Response:
        self.asked.append(f"{request.method} {request.path}")
        return web.json_response({"metadata": {"labels": self.labels}, "items": []}, status=self.status)


@pytest.fixture
async def server() -> AsyncIterator[tuple[Server, Api]]:
    served = Server()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", served.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    async with Api(Configuration(host=f"http://127.0.0.1:{runner.addresses[0][1]}")) as api:
        yield served, api
    await runner.cleanup()


Served = tuple[Server, Api]


@contextmanager
def passing(recall: Recall, api: Api, key: str = KEY) -> Iterator[Api]:
    with recall.passing(key) as memo:
        yield api.remembering(memo)


async def one_pass(api: Api) -> None:
    await api.get(INFERENCE_SERVICES, "llm", "qwen")
    await api.list(PODS, "llm", {"a": "b"})
    await api.get(DEPLOYMENTS, "llm", "qwen")


async def test_a_user_s_config_map_is_read_anew(server: Served) -> None:
    """The watch brings those that carry our label only; of theirs no event would tell."""
    served, api = server
    recall = Recall(max_age=60.0, clock=Time())
    for _ in range(2):
        with passing(recall, api) as remembering:
            await remembering.list(CONFIG_MAPS, "llm", {"a": "b"})
            await remembering.get(CONFIG_MAPS, "llm", "theirs")
    named = "GET /api/v1/namespaces/llm/configmaps"
    assert sorted(served.asked) == [named, f"{named}/theirs", f"{named}/theirs"]


async def test_what_is_somebody_elses_is_read_anew(server: Served) -> None:
    """It stands in our way, and the watches, which are of what carries our label, do not tell when it goes."""
    (served, api), recall = server, Recall(max_age=60)
    served.labels = {"whose": "mine"}
    for _ in range(2):
        with passing(recall, api) as remembering:
            await remembering.get(DEPLOYMENTS, "llm", "qwen")
    assert served.asked == ["GET /apis/apps/v1/namespaces/llm/deployments/qwen"] * 2


async def test_without_news_nothing_is_asked_again(server: Served) -> None:
    served, api = server
    recall = Recall(max_age=300)
    for _ in range(5):
        with passing(recall, api) as remembering:
            await one_pass(remembering)
    assert len(served.asked) == 3
    with passing(recall, api, "llm/other") as remembering:
        await one_pass(remembering)
    assert len(served.asked) == 6, "what one service has read is no other's"
    await one_pass(api)
    assert len(served.asked) == 9, "outside a pass everything is read"


async def test_news_before_or_during_a_pass_make_the_next_one_ask(server: Served) -> None:
    served, api = server
    recall = Recall(max_age=300)
    with passing(recall, api) as remembering:
        await one_pass(remembering)
    recall.spoil(KEY)
    with passing(recall, api) as remembering:
        await one_pass(remembering)
    assert len(served.asked) == 6
    recall.spoil(KEY)
    with passing(recall, api) as remembering:
        await one_pass(remembering)
        recall.spoil(KEY)  # what was read may be older than this
    with passing(recall, api) as remembering:
        await one_pass(remembering)
    assert len(served.asked) == 12


async def test_a_write_makes_the_next_pass_ask(server: Served) -> None:
    served, api = server
    recall = Recall(max_age=300)
    with passing(recall, api) as remembering:
        await one_pass(remembering)
        await remembering.request("patch", DEPLOYMENTS, "llm", "qwen", body={}, content_type=MERGE_PATCH)
    with passing(recall, api) as remembering:
        await one_pass(remembering)
    assert len(served.asked) == 7


async def test_an_error_makes_the_next_pass_ask(server: Served) -> None:
    served, api = server
    recall = Recall(max_age=300)

    async def broken_off() -> None:
        with passing(recall, api) as remembering:
            await remembering.get(DEPLOYMENTS, "llm", "qwen")
            served.status = 500
            await remembering.list(PODS, "llm", {"a": "b"})

    with pytest.raises(ClusterError):
        await broken_off()
    served.status = 200
    with passing(recall, api) as remembering:
        await remembering.get(DEPLOYMENTS, "llm", "qwen")
    assert len(served.asked) == 3


async def test_absence_is_remembered_too(server: Served) -> None:
    served, api = server
    recall = Recall(max_age=300)
    served.status = 404
    for _ in range(2):
        with passing(recall, api) as remembering:
            assert await remembering.get(DEPLOYMENTS, "llm", "qwen") is None
    assert len(served.asked) == 1


async def test_what_has_no_watch_is_always_asked_for(server: Served) -> None:
    served, api = server
    recall = Recall(max_age=300)
    for _ in range(3):
        with passing(recall, api) as remembering:
            await remembering.get(SECRETS, "llm", "keys")
    assert len(served.asked) == 3


async def test_a_memo_grows_no_older_than_its_age_however_often_it_serves(server: Served) -> None:
    served, api = server
    clock = Time()
    recall = Recall(max_age=300, clock=clock)
    for _ in range(21):
        with passing(recall, api) as remembering:
            await remembering.get(DEPLOYMENTS, "llm", "qwen")
        clock.now += 30
    assert len(served.asked) == 2, "once in the beginning, and once after 300 s"
