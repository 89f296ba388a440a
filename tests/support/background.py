"""An asynchronous context manager held open in the event loop of another thread, for callers that are synchronous."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager
from typing import TypeVar

T = TypeVar("T")

PATIENCE_SECONDS = 60.0


@contextlib.contextmanager
def background(make: Callable[[], AbstractAsyncContextManager[T]], *, name: str) -> Iterator[T]:
    """Enters `make()` in the thread, yields its value here, and leaves it there. Its errors are raised here."""
    entered: Future[tuple[T, asyncio.Event]] = Future()
    left: Future[None] = Future()
    loop = asyncio.new_event_loop()

    async def hold() -> None:
        stop = asyncio.Event()
        async with make() as value:
            entered.set_result((value, stop))
            await stop.wait()

    def main() -> None:
        try:
            loop.run_until_complete(hold())
        except BaseException as error:  # noqa: BLE001 - raised in the thread of the caller
            (left if entered.done() else entered).set_exception(error)
        else:
            left.set_result(None)

    thread = threading.Thread(target=main, name=name)
    thread.start()
    try:
        value, stop = entered.result(timeout=PATIENCE_SECONDS)
        try:
            yield value
        finally:
            loop.call_soon_threadsafe(stop.set)
            left.result(timeout=PATIENCE_SECONDS)
    finally:
        thread.join(timeout=PATIENCE_SECONDS)
        loop.close()
