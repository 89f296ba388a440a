"""Routes whose bodies are strict JSON, and answers that are written quickly: nobody else is served meanwhile."""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
from fastapi import Request, Response
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException

from reprise_engine.server.errors import ApiError
from reprise_engine.server.strict_json import read_json

_SMALL_BODY = 64 * 1024
"""Bytes that are parsed once more to name the field that is no JSON."""


class JsonRequest(Request):
    async def json(self) -> Any:
        """Raises ApiError: 415 for a compressed body, 400 for one that is no JSON."""
        encoding = self.headers.get("content-encoding", "identity")
        if encoding != "identity":
            words = f"Content-Encoding {encoding} is not supported; send the body as it is."
            raise ApiError(415, words, headers={"Accept-Encoding": "identity"})
        body = await self.body()
        try:
            return read_json(body)
        except ValueError as error:
            field = _loose_field(body)
            words = str(error) if field is None else f"{field} holds NaN, Infinity or half of a surrogate pair"
            raise ApiError(400, f"The body is not valid JSON: {words}.", param=field) from None


def _loose_field(body: bytes) -> str | None:
    """The field by which a body is JSON to Python's parser only."""
    if len(body) > _SMALL_BODY:
        return None
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        return None
    if not isinstance(fields, dict):
        return None
    return next((name for name, value in fields.items() if _is_loose(name, value)), None)


def _is_loose(name: str, value: Any) -> bool:
    try:
        read_json(json.dumps({name: value}).encode())
    except (ValueError, RecursionError):
        return True
    return False


class JsonRoute(APIRoute):
    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_json(request: Request) -> Response:
            try:
                return await handle(JsonRequest(request.scope, request.receive))
            except HTTPException as error:
                if isinstance(error.__cause__, ApiError):  # FastAPI's own words for whatever a body's parser raises
                    raise error.__cause__ from None
                raise

        return handle_json


class JsonAnswer(JSONResponse):
    """For what may be large: the log-probabilities of a long prompt are hundreds of thousands of objects."""

    def render(self, content: Any) -> bytes:
        return msgspec.json.encode(content)
