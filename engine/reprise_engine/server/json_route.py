"""Bodies as JSON in the strict sense of RFC 8259, by a parser that holds the event loop up less than Python's own.

That one takes NaN, Infinity and halves of surrogate pairs as well. No answer can repeat any of them, and no tokenizer
reads the last: they are refused where they come in, and not wherever they happen to be used.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
from fastapi import HTTPException, Request, Response
from fastapi.routing import APIRoute

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class JsonRequest(Request):
    async def json(self) -> Any:
        """Raises HTTPException 415 for a compressed body, else json.JSONDecodeError: both are answered by FastAPI."""
        encoding = self.headers.get("content-encoding", "identity")
        if encoding != "identity":
            raise HTTPException(
                415,
                f"Content-Encoding {encoding} is not supported; send the body as it is.",
                {"Accept-Encoding": "identity"},
            )
        body = await self.body()
        try:
            return msgspec.json.decode(body.removeprefix(_BYTE_ORDER_MARK))
        except (msgspec.MsgspecError, RecursionError) as error:
            raise json.JSONDecodeError(_words(error), "", 0) from None


def _words(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    return str(error).removeprefix("JSON is malformed: ")


class JsonRoute(APIRoute):
    """A route that reads its body as JsonRequest does."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_json(request: Request) -> Response:
            return await handle(JsonRequest(request.scope, request.receive))

        return handle_json
