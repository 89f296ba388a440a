"""Errors as OpenAI's clients know them: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from reprise_engine.errors import EngineDead, EngineStopped, NotFinite, RequestError, SlowReader

INVALID_REQUEST = "invalid_request_error"
SERVER_ERROR = "server_error"

RETRY_LATER: Mapping[str, str] = {"Retry-After": "5"}
"""Seconds: a header of every refusal that is about the moment and not about the request."""

_SHOWN_INPUT = 80
"""Characters of a wrong value that a message repeats."""
_repr = reprlib.Repr()
"""Writes no more of a value than is shown: it may have millions of entries."""
_repr.maxstring = _repr.maxother = _repr.maxlong = 2 * _SHOWN_INPUT
_repr.maxlist = _repr.maxdict = _SHOWN_INPUT


class ApiError(Exception):
    """An answer other than 200. `headers` are added to the response."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        error_type: str = INVALID_REQUEST,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.headers = headers
        self.body = error_body(message, error_type=error_type, param=param, code=code)


def error_body(
    message: str, *, error_type: str = INVALID_REQUEST, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    return {
        "error": {
            "message": _encodable(message),
            "type": error_type,
            "param": None if param is None else _encodable(param),
            "code": code,
        }
    }


def _encodable(text: str) -> str:
    """JSON can spell half of a surrogate pair, UTF-8 cannot; a template's complaint, for one, may repeat it."""
    return text.encode("utf-8", "backslashreplace").decode()


def as_api_error(error: Exception) -> ApiError | None:
    """The answer to an error of the engine; None for one that is no answer but a bug."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestError):
        return ApiError(400, error.message, param=error.param, code=error.code)
    if isinstance(error, SlowReader):
        return ApiError(408, str(error), code="slow_reader")
    if isinstance(error, NotFinite):
        return ApiError(500, str(error), error_type=SERVER_ERROR, code="not_finite")
    if isinstance(error, EngineStopped):
        return ApiError(503, str(error), error_type=SERVER_ERROR, code="engine_unavailable", headers=dict(RETRY_LATER))
    if isinstance(error, EngineDead):
        return ApiError(500, str(error), error_type=SERVER_ERROR, code="engine_dead")
    return None


def install(app: FastAPI) -> None:
    """Every way a route can fail ends in this shape."""

    @app.exception_handler(ApiError)
    @app.exception_handler(RequestError)
    @app.exception_handler(EngineDead)
    @app.exception_handler(SlowReader)
    @app.exception_handler(NotFinite)
    async def api_error(_: Request, error: Exception) -> JSONResponse:
        answer = as_api_error(error)
        assert answer is not None
        return JSONResponse(answer.body, status_code=answer.status, headers=answer.headers)

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        message, param = describe(error.errors())
        return JSONResponse(error_body(message, param=param), status_code=400)

    @app.exception_handler(RecursionError)
    async def nested(_: Request, __: RecursionError) -> JSONResponse:
        # Only a body is followed as deep as it goes. One that could just be read may be too deep to be written again.
        return JSONResponse(error_body("The body is nested too deeply."), status_code=400)

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> JSONResponse:
        message = str(error.detail)
        if error.status_code in (404, 405):
            message = f"{error.detail}: {request.method} {request.url.path}"
        return JSONResponse(error_body(message), status_code=error.status_code, headers=error.headers)

    @app.exception_handler(Exception)
    async def bug(request: Request, error: Exception) -> JSONResponse:
        # Answered outside of all middleware, so the id is put in here.
        exchange = getattr(request.state, "exchange", None)
        return JSONResponse(
            error_body(f"The server failed: {type(error).__name__}.", error_type=SERVER_ERROR),
            status_code=500,
            headers=None if exchange is None else {"X-Request-Id": exchange.request_id},
        )


def describe(errors: Sequence[Any]) -> tuple[str, str | None]:
    """(message, param) of pydantic's first complaint; the others are usually its echoes."""
    first = errors[0]
    context = first.get("ctx") or {}
    if first["type"] == "refused_field":
        return first["msg"], context["param"]
    param = _path(first["loc"]) or None
    if first["type"] == "extra_forbidden":
        return f"Unknown field {param!r}.", param
    if first["type"] == "missing":
        return f"{param or 'A JSON body'} is required.", param
    if param is None:
        return f"The body must be a JSON object, sent with Content-Type: application/json. {first['msg']}.", None
    shown = _repr.repr(first.get("input"))
    if len(shown) > _SHOWN_INPUT:
        shown = shown[: _SHOWN_INPUT - 1] + "…"
    return f"{param}: {first['msg']}; got {shown}.", param


def _path(location: Sequence[str | int]) -> str:
    """("body", "messages", 0, "role") → "messages[0].role". Tags of unions ("@…") are no part of it."""
    path = ""
    for part in location[1:] if location and location[0] == "body" else location:
        if isinstance(part, str) and part.startswith("@"):
            continue
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return path
