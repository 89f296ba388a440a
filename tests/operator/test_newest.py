"""A cached listing is not older than what was seen of its kind, and consistent where nothing was."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web
from kubernetes.aio.client import Configuration

from reprise_operator.api import MERGE_PATCH, Api, ClusterError
from reprise_operator.kinds import CONFIG_MAPS, DEPLOYMENTS, INFERENCE_SERVICES, PODS, SERVICES, ResourceType
from reprise_operator.newest import Newest

CONSISTENT = {"limit": "500"}
Query = dict[str, str]


def not_older(version: int) -> Query:
    return {"resourceVersion": str(version), "resourceVersionMatch": "NotOlderThan"}


class Server:
    """Lists objects of `versions`; answers 504 where more than `cache` is asked for, as an API server does."""

    def __init__(self) -> None:
        self.versions: list[str] = []
        self.cache = 10**9
        self.written: dict[str, Any] = {}
        self.asked: list[Query] = []

    async def answer(self, request: web.Request) -> web.Response:
        if request.method != "GET":
            return web.json_response(self.written)
        self.asked.append(dict(request.query))
        if int(request.query.get("resourceVersion", 0)) > self.cache:
            told = {"kind": "Status", "reason": "Timeout", "message": "Too large resource version: 9, current: 3"}
            return web.json_response(told, status=504)
        items = [{"metadata": {"name": version, "resourceVersion": version}} for version in self.versions]
        return web.json_response({"metadata": {"resourceVersion": "99999"}, "items": items})


@pytest.fixture
async def served() -> AsyncIterator[tuple[Server, Api]]:
    server = Server()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", server.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    async with Api(Configuration(host=f"http://127.0.0.1:{runner.addresses[0][1]}")) as api:
        yield server, api
    await runner.cleanup()


Served = tuple[Server, Api]


async def asked_for(served: Served, resource: ResourceType) -> Query:
    """Of a cached listing, without its selector."""
    server, api = served
    server.asked.clear()
    await api.list(resource, "llm", {"a": "b"}, cached=True)
    [query] = server.asked
    assert query.pop("labelSelector") == "a=b"
    return query


async def test_the_first_is_consistent_and_the_next_as_new_as_what_it_found(served: Served) -> None:
    server, _ = served
    server.versions = ["7", "31", "8"]
    assert await asked_for(served, PODS) == CONSISTENT
    assert await asked_for(served, PODS) == not_older(31)
    server.versions = []
    assert await asked_for(served, PODS) == not_older(31)
    assert await asked_for(served, SERVICES) == CONSISTENT, "each kind for itself; a list's own version is all kinds'"
    assert await asked_for(served, SERVICES) == CONSISTENT


async def test_one_that_must_be_consistent_is(served: Served) -> None:
    server, api = served
    api.newest.seen(PODS, "7")
    await api.list(PODS, None)
    assert server.asked == [CONSISTENT]


async def test_an_event_raises_what_is_asked_for(served: Served) -> None:
    _, api = served
    for version in ("9", "120", "40", None, "", "opaque"):
        api.newest.seen(PODS, version)
    assert await asked_for(served, PODS) == not_older(120)


async def test_what_was_written_is_seen_by_the_next_listing(served: Served) -> None:
    server, api = served
    server.written = {"kind": "Deployment", "metadata": {"resourceVersion": "55"}}
    await api.request("patch", DEPLOYMENTS, "llm", "qwen", body={}, content_type=MERGE_PATCH)
    assert await asked_for(served, DEPLOYMENTS) == not_older(55)
    server.written = {"kind": "Status", "metadata": {"resourceVersion": "99"}}
    await api.request("delete", SERVICES, "llm", "qwen")
    assert await asked_for(served, SERVICES) == CONSISTENT, "a Status is no object of the kind"


async def test_where_no_cache_comes_to_it_the_listing_is_consistent(served: Served) -> None:
    """etcd restored from a backup: versions begin again."""
    server, api = served
    api.newest.seen(PODS, "9")
    server.cache, server.versions = 3, ["3"]
    assert [item["metadata"]["name"] for item in await api.list(PODS, "llm", {}, cached=True)] == ["3"]
    assert server.asked == [not_older(9), CONSISTENT]
    assert await asked_for(served, PODS) == not_older(3)


async def test_another_failure_is_told(served: Served) -> None:
    server, api = served
    server.cache = -1
    with pytest.raises(ClusterError, match="Too large resource version"):
        await api.list(CONFIG_MAPS, "llm", {}, cached=True)
    assert len(server.asked) == 1


def test_kinds_of_one_plural_are_apart() -> None:
    newest = Newest()
    newest.seen(SERVICES, "5")
    assert newest.of(ResourceType("serving.knative.dev/v1", "Service", "services")) is None
    assert newest.of(INFERENCE_SERVICES) is None
