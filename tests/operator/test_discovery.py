"""Optional kinds: what a poll makes of each answer, and whom it wakes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Collection, Mapping
from typing import Any

import pytest

from reprise_operator.api import ClusterError, Fault
from reprise_operator.cluster import Key
from reprise_operator.discovery import OptionalKinds, Poll, Presence, Trace, touched, traces
from reprise_operator.kinds import HTTP_ROUTES, INFERENCE_POOLS, OPTIONAL_TYPES, PERMISSIONS, ResourceType

QWEN = Key("llm", "qwen")


def route(name: str = "qwen", *, generation: int = 1, **metadata: Any) -> dict[str, Any]:
    owner = {"apiVersion": "serving.reprise.io/v1alpha1", "kind": "InferenceService", "name": name, "uid": f"u-{name}"}
    return {
        "metadata": {
            "namespace": "llm",
            "name": name,
            "uid": f"r-{name}",
            "generation": generation,
            "resourceVersion": "1",
            "labels": {"app.kubernetes.io/managed-by": "reprise-operator"},
            "ownerReferences": [owner],
            **metadata,
        }
    }


class Answers:
    """In place of a Cluster: what each kind's listing answers."""

    def __init__(self, answers: Mapping[ResourceType, ClusterError | list[dict[str, Any]]]) -> None:
        self.answers = dict(answers)
        self.namespaces: list[str | None] = []

    async def list_marked(self, resource: ResourceType, namespace: str | None) -> tuple[dict[str, Any], ...]:
        self.namespaces.append(namespace)
        answer = self.answers[resource]
        if isinstance(answer, ClusterError):
            raise answer
        return tuple(answer)


ABSENT = ClusterError(Fault.NOT_FOUND, "404 page not found", status=404)
FORBIDDEN = ClusterError(Fault.FORBIDDEN, "httproutes is forbidden", status=403)
EXPIRED = ClusterError(Fault.FORBIDDEN, "Unauthorized", status=401)
DOWN = ClusterError(Fault.UNAVAILABLE, "etcd", status=500)


def kinds(answers: Answers, *, namespace: str | None = None, period: float = 60.0) -> OptionalKinds:
    return OptionalKinds(answers, namespace=namespace, period=period, kinds=tuple(answers.answers))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("before", "answer", "after"),
    [
        ([], ABSENT, Presence.ABSENT),
        (ABSENT, [], Presence.SERVED),
        ([], FORBIDDEN, Presence.FORBIDDEN),
        ([], DOWN, Presence.SERVED),
        ([], EXPIRED, Presence.SERVED),
        (ABSENT, DOWN, Presence.ABSENT),
        (DOWN, DOWN, Presence.UNKNOWN),
        (DOWN, [], Presence.SERVED),
    ],
    ids=["goes", "appears", "forbidden", "down", "token-expired", "down-while-absent", "never-answered", "recovers"],
)
async def test_what_an_answer_means(before: Any, answer: Any, after: Presence) -> None:
    answers = Answers({HTTP_ROUTES: before})
    known = kinds(answers)
    await known.poll()
    first = known.presence(HTTP_ROUTES)
    answers.answers[HTTP_ROUTES] = answer
    changed, _ = await known.poll()
    assert known.presence(HTTP_ROUTES) is after
    assert changed == (frozenset({HTTP_ROUTES}) if first is not after else frozenset())
    assert known.available == (frozenset({HTTP_ROUTES}) if after is Presence.SERVED else frozenset())


async def test_one_kind_that_does_not_answer_keeps_no_other_from_being_known() -> None:
    known = kinds(Answers({HTTP_ROUTES: DOWN, INFERENCE_POOLS: []}), namespace="llm")
    await known.poll()
    assert known.available == {INFERENCE_POOLS}


async def test_it_asks_where_it_serves_and_needs_one_request_a_kind() -> None:
    answers = Answers({HTTP_ROUTES: [], INFERENCE_POOLS: ABSENT})
    await kinds(answers, namespace="llm").poll()
    assert answers.namespaces == ["llm", "llm"]
    for kind in OPTIONAL_TYPES:
        assert "watch" not in PERMISSIONS[kind.group, kind.plural]


async def test_it_knows_who_holds_objects_of_a_kind() -> None:
    known = kinds(Answers({HTTP_ROUTES: [route()], INFERENCE_POOLS: []}))
    await known.poll()
    assert known.held_by("u-qwen") == {HTTP_ROUTES}
    assert known.held_by("u-other") == frozenset()


def poll(*bodies: dict[str, Any], presence: Presence = Presence.SERVED) -> Poll:
    return Poll(presence=presence, traces=traces(bodies))


@pytest.mark.parametrize(
    ("before", "after", "woken"),
    [
        (poll(route()), poll(route()), set()),
        (poll(route()), poll(route(resourceVersion="9")), set()),
        (poll(route()), poll(route(generation=2)), {QWEN}),
        (poll(route()), poll(), {QWEN}),
        (poll(), poll(route()), {QWEN}),
        (poll(route()), poll(route(uid="another")), {QWEN}),
        (poll(route()), poll(route(labels={"app.kubernetes.io/managed-by": "reprise-operator", "x": "y"})), {QWEN}),
        (poll(route()), poll(route(ownerReferences=[])), {QWEN}),
        (poll(route()), poll(route(annotations={"serving.reprise.io/plan-hash": "x"})), {QWEN}),
        (poll(route(), route("two")), poll(route(), route("two", generation=3)), {Key("llm", "two")}),
        (poll(route()), poll(presence=Presence.ABSENT), set()),
        (poll(presence=Presence.UNKNOWN), poll(route()), set()),
    ],
    ids=[
        *("same", "status-only", "edited", "deleted", "new", "replaced", "label", "owner", "plan", "of-two"),
        *("kind-gone", "first"),
    ],
)
def test_whose_objects_were_touched(before: Poll, after: Poll, woken: set[Key]) -> None:
    assert touched(before, after) == woken


def test_what_nobody_of_ours_controls_leaves_no_trace() -> None:
    foreign = route(ownerReferences=[{"apiVersion": "apps/v1", "kind": "Deployment", "name": "x", "uid": "y"}])
    assert traces([foreign, route()]) == traces([route()])
    (trace,) = traces([route()]).values()
    assert isinstance(trace, Trace)
    assert (trace.owner, trace.owner_uid) == (QWEN, "u-qwen")


@contextlib.asynccontextmanager
async def loop(
    known: OptionalKinds,
) -> AsyncIterator[tuple[asyncio.Queue[Key], asyncio.Queue[frozenset[ResourceType]]]]:
    """Runs the loop; yields the keys it wakes, and the kinds it asks about."""
    woken, asked = asyncio.Queue[Key](), asyncio.Queue[frozenset[ResourceType]]()

    def concerned(changed: Collection[ResourceType]) -> tuple[Key, ...]:
        asked.put_nowait(frozenset(changed))
        return (QWEN,)

    running = asyncio.create_task(known.run(wake=lambda key, _: woken.put_nowait(key), concerned=concerned))
    try:
        async with asyncio.timeout(10):
            yield woken, asked
    finally:
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running


async def test_the_loop_wakes_whom_it_concerns() -> None:
    answers = Answers({HTTP_ROUTES: ABSENT})
    known = kinds(answers, period=0.01)
    await known.first()
    async with loop(known) as (woken, asked):
        await asyncio.sleep(0.1)
        assert (woken.qsize(), asked.qsize()) == (0, 0)
        answers.answers[HTTP_ROUTES] = []
        assert await asked.get() == {HTTP_ROUTES}
        assert await woken.get() == QWEN
        answers.answers[HTTP_ROUTES] = [route("two")]
        assert await woken.get() == Key("llm", "two")
        assert asked.empty(), "the kind has not changed"


async def test_in_doubt_it_polls_at_once() -> None:
    answers = Answers({HTTP_ROUTES: []})
    known = kinds(answers, period=3600.0)
    await known.first()
    async with loop(known) as (_, asked):
        answers.answers[HTTP_ROUTES] = ABSENT
        await asyncio.sleep(0.05)
        assert known.available == {HTTP_ROUTES}
        known.look_again()
        assert await asked.get() == {HTTP_ROUTES}
        assert known.available == frozenset()


async def test_what_was_applied_and_is_gone_at_the_next_poll_is_news() -> None:
    answers = Answers({HTTP_ROUTES: []})
    polled = kinds(answers)
    await polled.poll()
    polled.applied(HTTP_ROUTES, route())
    assert (await polled.poll())[1] == {QWEN}
    polled.applied(HTTP_ROUTES, route())
    answers.answers[HTTP_ROUTES] = [route()]
    assert (await polled.poll())[1] == frozenset(), "as it was applied"
