"""Server-sent events, and noticing that a client has gone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from typing import Any, TypeVar

import msgspec
from fastapi import Request
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from reprise_engine.server.errors import SERVER_ERROR, as_api_error, error_body

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"


class ClientGone(Exception):
    """The client closed the connection before there was an answer."""


async def unless_disconnected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`; it is cancelled, and ClientGone raised, when the client goes away first."""
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientGone
    finally:
        working.cancel()
        watching.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def event(data: dict[str, Any], *, name: str | None = None) -> bytes:
    """One event; the blank line ends it."""
    head = b"" if name is None else f"event: {name}\n".encode()
    return head + b"data: " + msgspec.json.encode(data) + b"\n\n"


class EventStream(StreamingResponse):
    """Streams events of a generator that has begun already, and always closes it: that aborts what it runs.

    `closing` follows the last event.
    """

    def __init__(
        self, events: AsyncGenerator[bytes, None], *, source: AsyncGenerator[Any, None], closing: bytes = DONE
    ) -> None:
        super().__init__(
            _with_error_as_event(events, closing),
            media_type="text/event-stream",
            headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
        )
        self._events = events
        self._source = source

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._events.aclose()
            await self._source.aclose()


async def _with_error_as_event(events: AsyncIterator[bytes], closing: bytes) -> AsyncIterator[bytes]:
    """Status and headers are sent, so an error can only be an event; OpenAI's clients raise it."""
    try:
        async for data in events:
            yield data
    except Exception as error:
        answer = as_api_error(error)
        if answer is None:
            yield event(error_body(f"The server failed: {type(error).__name__}.", error_type=SERVER_ERROR))
            yield closing
            raise
        yield event(answer.body)
    yield closing
