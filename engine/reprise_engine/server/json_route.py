"""Routes whose bodies are strict JSON, and answers that are written quickly: nobody else is served meanwhile."""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
from fastapi import HTTPException, Request, Response
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute

from reprise_engine.server.strict_json import read_json


class JsonRequest(Request):
    async def json(self) -> Any:
        """Raises HTTPException 415 for a compressed body, else json.JSONDecodeError: both are answered by FastAPI."""
        encoding = self.headers.get("content-encoding", "identity")
        if encoding != "identity":
            words = f"Content-Encoding {encoding} is not supported; send the body as it is."
            raise HTTPException(415, words, {"Accept-Encoding": "identity"})
        try:
            return read_json(await self.body())
        except ValueError as error:
            raise json.JSONDecodeError(str(error), "", 0) from None


class JsonRoute(APIRoute):
    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_json(request: Request) -> Response:
            return await handle(JsonRequest(request.scope, request.receive))

        return handle_json


class JsonAnswer(JSONResponse):
    """For what may be large: the log-probabilities of a long prompt are hundreds of thousands of objects."""

    def render(self, content: Any) -> bytes:
        return msgspec.json.encode(content)
