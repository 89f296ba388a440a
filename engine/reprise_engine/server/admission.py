"""Which requests may generate: as many as run and may wait, and each for a bounded time."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Mapping

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from reprise_engine.server.errors import RETRY_LATER, SERVER_ERROR, error_body
from reprise_engine.server.state import ServerState
from reprise_engine.server.streaming import DONE, event

GENERATING_PATHS: Mapping[str, bytes] = {"/v1/chat/completions": DONE, "/v1/completions": DONE, "/v1/responses": b""}
"""And what follows the last event of their streams."""

_LAST_WORDS_SECONDS = 1.0
"""For a client to take the news that its stream is cut off."""


class Admission:
    """ASGI middleware of GENERATING_PATHS.

    429 with Retry-After where `max_queued` requests wait already; a queue that only grows ends in answers that nobody
    waits for any more. 504 for an answer that is not complete within `timeout` seconds, as an event where it streams;
    its sequences are aborted. None for either: no limit.
    """

    def __init__(self, app: ASGIApp, *, state: ServerState, max_queued: int | None, timeout: float | None) -> None:
        self._app = app
        self._state = state
        self._max_queued = math.inf if max_queued is None else max_queued
        self._timeout = timeout
        self._admitted = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] not in GENERATING_PATHS or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        if self._is_full():
            self._state.metrics.refused()
            body = error_body(
                f"The queue is full: {self._max_queued} requests wait already (--max-queued-requests). Try again.",
                error_type="rate_limit_error",
                code="queue_full",
            )
            await JSONResponse(body, status_code=429, headers=dict(RETRY_LATER))(scope, receive, send)
            return
        self._admitted += 1
        try:
            await self._within_time(scope, receive, send)
        finally:
            self._admitted -= 1

    def _is_full(self) -> bool:
        loaded = self._state.loaded
        if loaded is None:
            return False  # the route says that the model is loading
        # Those being tokenised are not in the engine yet; a request of several choices is several sequences there.
        open_requests = max(self._admitted, loaded.engine.num_requests)
        # The KV cache may hold fewer than max_num_seqs: then the engine's queue tells, as of its last step.
        return (
            open_requests >= loaded.resolved.max_num_seqs + self._max_queued
            or loaded.engine.stats.num_waiting >= max(self._max_queued, 1)
        )

    async def _within_time(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._timeout is None:
            await self._app(scope, receive, send)
            return
        start: Message | None = None

        async def watched(message: Message) -> None:
            nonlocal start
            if message["type"] == "http.response.start":
                start = message
            await send(message)

        try:
            async with asyncio.timeout(self._timeout) as deadline:
                await self._app(scope, receive, watched)
        except TimeoutError:
            if not deadline.expired():
                raise
            await self._cut_off(start, scope, receive, send)

    async def _cut_off(self, start: Message | None, scope: Scope, receive: Receive, send: Send) -> None:
        body = error_body(
            f"The answer was not complete within {self._timeout:g} s (--request-timeout).",
            error_type=SERVER_ERROR,
            code="request_timeout",
        )
        if start is None:
            await JSONResponse(body, status_code=504)(scope, receive, send)
        elif Headers(raw=start["headers"]).get("content-type", "").startswith("text/event-stream"):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LAST_WORDS_SECONDS):
                    last = event(body) + GENERATING_PATHS[scope["path"]]
                    await send({"type": "http.response.body", "body": last, "more_body": False})
