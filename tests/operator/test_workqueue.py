"""The queue's guarantees, on the pure schedule; then that the workers keep them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reprise_operator.workqueue import Backoff, Retry, Schedule, WorkQueue

BACKOFF = Backoff(base=1.0, factor=2.0, cap=60.0, jitter=0.0)


def schedule() -> Schedule[str]:
    return Schedule(backoff=BACKOFF, random_unit=lambda: 0.0)


def test_wake_ups_coalesce_at_the_earliest_time() -> None:
    queue = schedule()
    for at in (5.0, 3.0, 9.0):
        queue.add("a", at=at)
    assert len(queue) == 1
    assert queue.pop(2.9) is None
    assert queue.next_due() == 3.0
    assert queue.pop(3.0) == "a"
    queue.finish("a", now=3.5, requeue_after=None)
    assert queue.pop(100.0) is None, "the later wishes were part of the pass"


def test_the_earliest_key_comes_first() -> None:
    queue = schedule()
    queue.add("late", at=2.0)
    queue.add("early", at=1.0)
    assert [queue.pop(5.0), queue.pop(5.0), queue.pop(5.0)] == ["early", "late", None]


def test_a_key_is_never_handed_out_twice_at_once() -> None:
    queue = schedule()
    queue.add("a", at=0.0)
    assert queue.pop(0.0) == "a"
    queue.add("a", at=0.0)
    assert queue.pop(1.0) is None
    assert queue.active == {"a"}
    assert queue.due(1.0) == 0
    queue.finish("a", now=1.0, requeue_after=None)
    assert queue.pop(1.0) == "a", "news during the pass is served after it"


def test_requeue_after_does_not_delay_news() -> None:
    queue = schedule()
    queue.add("a", at=0.0)
    assert queue.pop(0.0) == "a"
    queue.finish("a", now=0.0, requeue_after=30.0)
    assert queue.next_due() == 30.0
    queue.add("a", at=4.0)
    assert queue.next_due() == 4.0


def test_failures_back_off_and_a_success_forgets_them() -> None:
    queue = schedule()
    queue.add("a", at=0.0)
    now, pauses = 0.0, []
    for _ in range(8):
        due = queue.next_due()
        assert due is not None
        pauses.append(due - now)
        now = due
        assert queue.pop(now) == "a"
        queue.finish("a", now=now, requeue_after=None, failed=True)
    assert pauses == [0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0]
    assert queue.failures("a") == 8
    assert queue.pop(now + 60.0) == "a"
    queue.finish("a", now=now, requeue_after=None)
    assert queue.failures("a") == 0


def test_a_pause_the_server_asked_for_is_kept() -> None:
    queue = schedule()
    queue.add("a", at=0.0)
    assert queue.pop(0.0) == "a"
    queue.finish("a", now=0.0, requeue_after=17.0, failed=True)
    assert queue.next_due() == 17.0


def test_news_during_a_failed_pass_shortens_the_pause_but_does_not_spin() -> None:
    queue = schedule()
    queue.add("a", at=0.0)
    for _ in range(5):
        due = queue.next_due()
        assert due is not None
        assert queue.pop(due) == "a"
        queue.finish("a", now=0.0, requeue_after=None, failed=True)
    assert queue.next_due() == 16.0
    assert queue.pop(16.0) == "a"
    queue.add("a", at=16.0)
    queue.finish("a", now=16.0, requeue_after=None, failed=True)
    assert queue.next_due() == 17.0


def test_jitter_only_shortens() -> None:
    backoff = Backoff(base=1.0, factor=2.0, cap=60.0, jitter=0.25)
    assert backoff.delay(3, 0.0) == 4.0
    assert backoff.delay(3, 0.999) == pytest.approx(3.0, abs=0.01)
    assert backoff.delay(10_000, 0.0) == 60.0


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["add", "pop", "finish", "fail"]),
            st.sampled_from("abc"),
            st.floats(min_value=0, max_value=10),
        ),
        max_size=80,
    )
)
def test_no_key_is_lost_or_doubled(steps: list[tuple[str, str, float]]) -> None:
    """Whatever comes in whatever order: what was asked for is served in the end, and never twice at once."""
    queue = schedule()
    now, active, owed = 0.0, set[str](), set[str]()
    for step, key, amount in steps:
        now += amount
        if step == "add":
            queue.add(key, at=now)
            owed.add(key)
        elif step == "pop":
            taken = queue.pop(now)
            if taken is not None:
                assert taken not in active
                active.add(taken)
                owed.discard(taken)
        elif key in active:
            queue.finish(key, now=now, requeue_after=None, failed=step == "fail")
            active.discard(key)
            if step == "fail":
                owed.add(key)
    assert queue.active == active
    for key in active:
        queue.finish(key, now=now, requeue_after=None)
    served = set[str]()
    while (due := queue.next_due()) is not None:
        taken = queue.pop(max(due, now))
        assert taken is not None
        served.add(taken)
        queue.finish(taken, now=now, requeue_after=None)
    assert owed <= served
    assert len(queue) == 0


# The workers --------------------------------------------------------------------------------------------------------


async def run_until(queue: WorkQueue[str], done: Callable[[], bool]) -> None:
    task = asyncio.create_task(queue.run())
    try:
        async with asyncio.timeout(5):
            while not done():  # noqa: ASYNC110 - the condition is the test's, no event tells of it
                await asyncio.sleep(0.001)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def quick(handler: Callable[[str], Awaitable[float | None]], **options: float) -> WorkQueue[str]:
    backoff = Backoff(base=0.01, cap=0.02)
    return WorkQueue(
        handler=handler,
        workers=int(options.get("workers", 2)),
        timeout=options.get("timeout", 5.0),
        schedule=Schedule(backoff=backoff),
    )


async def test_workers_are_bounded_and_a_key_is_alone() -> None:
    running, most, same_key, passes = list[str](), 0, False, 0

    async def handler(key: str) -> None:
        nonlocal most, same_key, passes
        same_key |= key in running
        running.append(key)
        most = max(most, len(running))
        await asyncio.sleep(0.005)
        running.remove(key)
        passes += 1

    queue = quick(handler, workers=3)
    for key in "abcdefgh":
        queue.add(key)

    async def disturb() -> None:
        for _ in range(20):
            queue.add("a")
            await asyncio.sleep(0.001)

    disturbing = asyncio.create_task(disturb())
    await run_until(queue, lambda: passes >= 10)
    await disturbing
    assert most == 3
    assert not same_key


async def test_a_failing_key_neither_ends_a_worker_nor_holds_up_others(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[str] = []

    async def handler(key: str) -> None:
        seen.append(key)
        if key == "bad":
            raise ZeroDivisionError("division by zero")

    queue = quick(handler, workers=1)
    queue.add("bad")
    queue.add("good", after=0.02)
    with caplog.at_level(logging.ERROR):
        await run_until(queue, lambda: seen.count("bad") >= 3 and "good" in seen)
    assert "bad: reconcile failed" in caplog.text
    assert "ZeroDivisionError" in caplog.text


async def test_a_handler_that_hangs_is_cut_off_and_tried_again() -> None:
    calls = 0

    async def handler(_: str) -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            await asyncio.sleep(3600)

    queue = quick(handler, timeout=0.02)
    queue.add("a")
    await run_until(queue, lambda: calls == 2)


async def test_a_retry_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    calls = 0

    async def handler(_: str) -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise Retry("the API server does not answer")

    queue = quick(handler)
    queue.add("a")
    with caplog.at_level(logging.WARNING):
        await run_until(queue, lambda: calls == 2)
    assert "the API server does not answer" in caplog.text
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


async def test_a_key_returns_after_the_pause_its_handler_names() -> None:
    times: list[float] = []

    async def handler(_: str) -> float | None:
        times.append(asyncio.get_running_loop().time())
        return 0.03 if len(times) == 1 else None

    queue = quick(handler)
    queue.add("a")
    await run_until(queue, lambda: len(times) == 2)
    assert times[1] - times[0] >= 0.029


async def test_stopping_cancels_what_is_in_work() -> None:
    cancelled = asyncio.Event()
    started = asyncio.Event()

    async def handler(_: str) -> None:
        started.set()
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    queue = quick(handler)
    queue.add("a")
    await run_until(queue, started.is_set)
    assert cancelled.is_set()
    assert queue.schedule.active == frozenset()


def test_a_queue_without_workers_is_refused() -> None:
    async def handler(_: str) -> None:
        return None

    with pytest.raises(ValueError, match="workers is 0"):
        WorkQueue(handler=handler, workers=0)
