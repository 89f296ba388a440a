"""Around each request: its id, its line in the access log, its span.

A line is `key=value` pairs (logfmt): who asked for what, how it ended, how long it took, what of the prompt was cached.
Prompts are in the log only where `--enable-log-requests` asks for them.
"""

from __future__ import annotations

import json
import logging
import re
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from reprise_engine.server.errors import error_body
from reprise_engine.server.generation import Generations
from reprise_engine.server.open_paths import OPEN_PATHS
from reprise_engine.server.tracing import Tracer

logger = logging.getLogger(__name__)

REQUEST_ID_HEADER = "X-Request-Id"
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:@/+=-]{1,128}")
_PLAIN = re.compile(r"[\w.:/@%+,~*\[\]-]+", re.ASCII)


@dataclass(slots=True)
class Exchange:
    """What is known of a request while it is served: `request.state.exchange`."""

    request_id: str
    generations: Generations | None = None
    """Set by the route, where it generates."""


class Access:
    """ASGI middleware, the outermost one.

    X-Request-Id is the client's (at most 128 letters, digits and signs of `._:@/+=-`; 400 for another one) or a new
    one; it is in the answer and in the log.
    """

    def __init__(self, app: ASGIApp, *, log: bool = True, tracer: Tracer | None = None) -> None:
        self._app = app
        self._log = log
        self._tracer = tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = time.monotonic()
        headers = Headers(scope=scope)
        given = headers.get(REQUEST_ID_HEADER)
        valid = given is not None and _REQUEST_ID.fullmatch(given) is not None
        exchange = Exchange(given if given is not None and valid else uuid.uuid4().hex)
        scope.setdefault("state", {})["exchange"] = exchange
        status = 500  # where the application raises, the server answers outside of this middleware
        complete = False

        async def answer(message: Message) -> None:
            nonlocal status, complete
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)[REQUEST_ID_HEADER] = exchange.request_id
            elif not message.get("more_body", False):
                complete = True
            await send(message)

        try:
            if given is None or valid:
                await self._app(scope, receive, answer)
            else:
                words = f"{REQUEST_ID_HEADER} must be 1 to 128 letters, digits and signs of ._:@/+=-"
                await JSONResponse(error_body(f"{words}.", param=REQUEST_ID_HEADER), 400)(scope, receive, answer)
        finally:
            seconds = time.monotonic() - began
            if self._log and scope["path"] not in OPEN_PATHS:
                logger.info("%s", _line(scope, exchange, status=status, seconds=seconds, complete=complete))
            if self._tracer is not None and exchange.generations is not None:
                self._tracer.record(
                    exchange.generations,
                    headers=headers,
                    request_id=exchange.request_id,
                    path=scope["path"],
                    status=status,
                )


def _line(scope: Scope, exchange: Exchange, *, status: int, seconds: float, complete: bool) -> str:
    client = scope.get("client")
    fields: dict[str, object] = {
        "request_id": exchange.request_id,
        "client": f"{client[0]}:{client[1]}" if client else "unknown",
        "method": scope["method"],
        "path": scope["path"],
        "status": status,
        "seconds": f"{seconds:.3f}",
    }
    if not complete:
        fields["cut"] = "true"  # the client went away, or was cut off, before the end of the answer
    if exchange.generations is not None:
        usage = exchange.generations.usage()
        fields["id"] = exchange.generations.batch
        fields["prompt_tokens"] = usage.prompt_tokens
        fields["cached_tokens"] = usage.cached_tokens
        fields["completion_tokens"] = usage.completion_tokens
    return logfmt(fields)


def logfmt(fields: Mapping[str, object]) -> str:
    """One line whatever the values hold: what is not plain is quoted as in JSON, line ends included."""
    return " ".join(f"{name}={_value(str(value))}" for name, value in fields.items())


def _value(text: str) -> str:
    return text if _PLAIN.fullmatch(text) else json.dumps(text)
