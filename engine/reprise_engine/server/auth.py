"""API keys. Probes and scrapers have none, so /health, /ping and /metrics stay open; so does the page, which asks its
reader for a key."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from reprise_engine.server.errors import error_body
from reprise_engine.server.open_paths import OPEN_PATHS, PAGE_PATHS


class ApiKeys:
    """ASGI middleware: `Authorization: Bearer KEY` with one of `keys`, compared in constant time, or 401."""

    def __init__(self, app: ASGIApp, *, keys: Sequence[str]) -> None:
        self._app = app
        self._keys = {key: _digest(key.encode()) for key in keys}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS | PAGE_PATHS or scope["method"] == "OPTIONS":
            await self._app(scope, receive, send)
            return
        key = self._key(scope)
        if key is not None:
            scope.setdefault("state", {})["api_key"] = key
            await self._app(scope, receive, send)
            return
        body = error_body(
            "The API key is missing or wrong; send it as Authorization: Bearer KEY.", code="invalid_api_key"
        )
        await JSONResponse(body, status_code=401, headers={"WWW-Authenticate": "Bearer"})(scope, receive, send)

    def _key(self, scope: Scope) -> str | None:
        """Which one the request bears."""
        header = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        kind, _, given = header.partition(b" ")
        # All keys are compared, and their digests, so the time tells neither which one was nearly right nor its length.
        wanted = _digest(given.strip())
        matches = [key for key, digest in self._keys.items() if hmac.compare_digest(wanted, digest)]
        return matches[0] if matches and kind.lower() == b"bearer" else None


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
