"""The body of a request, read at once and within bounds: bytes, and seconds in which a client must have sent it."""

from __future__ import annotations

import asyncio
import contextlib

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from reprise_engine.server.errors import error_body

_LINGER_SECONDS = 2.0


class _TooLarge(Exception):
    pass


class BoundedBody:
    """ASGI middleware. What is behind it finds the whole body in its first message.

    413 for a body of more than `max_size` bytes, told by its length or found while it comes; 408 for one that is not
    there within `timeout` seconds. Both close the connection: the rest of such a body is not read.
    """

    def __init__(self, app: ASGIApp, *, max_size: int, timeout: float) -> None:
        self._app = app
        self._max_size = max_size
        self._timeout = timeout

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            async with asyncio.timeout(self._timeout):
                body = await self._read(scope, receive)
        except _TooLarge:
            await self._let_go_on(scope, receive)
            message = f"The body exceeds {self._max_size} bytes (--max-request-body-size)."
            await _refuse(413, message, code="request_too_large")(scope, receive, send)
            return
        except TimeoutError:
            message = f"The body did not come within {self._timeout:g} s (--receive-timeout)."
            await _refuse(408, message, code="request_timeout")(scope, receive, send)
            return
        if body is None:
            return  # the client has gone
        first: Message | None = {"type": "http.request", "body": body, "more_body": False}

        async def received() -> Message:
            nonlocal first
            message, first = first, None
            return await receive() if message is None else message

        await self._app(scope, received, send)

    async def _let_go_on(self, scope: Scope, receive: Receive) -> None:
        """Throws away what else comes, for a moment: a client reads no answer while it sends."""
        if any(name == b"expect" for name, _ in scope["headers"]):
            return  # it waits to be told to go on
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LINGER_SECONDS):
                while (await receive()).get("more_body", False):
                    pass

    async def _read(self, scope: Scope, receive: Receive) -> bytes | None:
        """None where the client goes away first. Raises _TooLarge."""
        length = next((value for name, value in scope["headers"] if name == b"content-length"), b"")
        if length.isdigit() and int(length[:20]) > self._max_size:  # the parser has refused what is no number
            raise _TooLarge
        chunks: list[bytes] = []
        size = 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            chunk: bytes = message.get("body", b"")
            size += len(chunk)
            if size > self._max_size:
                raise _TooLarge
            chunks.append(chunk)
            if not message.get("more_body", False):
                return chunks[0] if len(chunks) == 1 else b"".join(chunks)


def _refuse(status: int, message: str, *, code: str) -> JSONResponse:
    return JSONResponse(error_body(message, code=code), status_code=status, headers={"Connection": "close"})
