"""HTTP as the sources and downloads use it: typed errors, redirects that lose credentials, no body that never ends."""

from __future__ import annotations

import contextlib
import random
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from yarl import URL

from reprise_engine.errors import ModelFetchDenied, ModelNotFound
from reprise_engine.version import __version__

CONNECT_SECONDS = 30.0
SILENCE_SECONDS = 60.0
"""A connection that sends nothing for so long is given up and taken up again."""
MAX_REDIRECTS = 8
MAX_JSON_BYTES = 64 * 1024 * 1024
_TRANSIENT = frozenset({408, 409, 423, 425, 429})
_REDIRECTS = frozenset({301, 302, 303, 307, 308})


class Transient(Exception):
    """May work the next time. `after`: seconds the server asked to wait."""

    def __init__(self, message: str, *, after: float | None = None) -> None:
        super().__init__(message)
        self.after = after


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A GET. Neither the URL (it may be signed) nor the headers ever go into a message."""

    url: str
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Retries:
    """How often a request is tried without any progress, and the pauses between, in seconds."""

    attempts: int = 10
    base: float = 1.0
    cap: float = 60.0

    def pause(self, failures: int, *, after: float | None = None) -> float:
        """After the n-th failure in a row (n ≥ 1): doubled each time, with jitter, and at least what was asked for."""
        full = min(self.cap, self.base * 2.0 ** min(failures - 1, 32))
        jittered = full * (0.75 + 0.25 * random.random())  # noqa: S311 - spreads load
        return max(jittered, min(after or 0.0, 5 * self.cap))


def open_session(*, connections: int, silence: float = SILENCE_SECONDS) -> aiohttp.ClientSession:
    """Honours HTTPS_PROXY, NO_PROXY and the like. A connection is given up after `silence` seconds without a byte."""
    return aiohttp.ClientSession(
        trust_env=True,
        connector=aiohttp.TCPConnector(limit=connections),
        timeout=aiohttp.ClientTimeout(total=None, connect=CONNECT_SECONDS, sock_read=silence),
        headers={"User-Agent": f"reprise-fetch/{__version__}"},
        cookie_jar=aiohttp.DummyCookieJar(),
    )


@contextlib.asynccontextmanager
async def get(
    session: aiohttp.ClientSession, request: Request, *, what: str, headers: Mapping[str, str] | None = None
) -> AsyncIterator[aiohttp.ClientResponse]:
    """The answer to a GET, of status 200, 206, 412 or 416; `what` names the thing asked for in messages.

    Raises Transient (also inside the block, when the connection breaks off), ModelFetchDenied, ModelNotFound.
    """
    url, sent = URL(request.url, encoded=True), {**request.headers, **(headers or {})}
    origin = url.origin()
    try:
        for _ in range(MAX_REDIRECTS):
            async with session.get(url, headers=sent, allow_redirects=False) as response:
                location = response.headers.get("Location")
                if response.status in _REDIRECTS and location:
                    url = url.join(URL(location, encoded=True))
                    if url.origin() != origin:  # a hub sends to its CDN, whose link needs no credentials
                        sent = {name: value for name, value in sent.items() if name not in request.headers}
                    continue
                if response.status not in (200, 206, 412, 416):
                    raise await _refusal(response, what=what, moved=url.origin() != origin)
                yield response
                return
        raise Transient(f"{what}: more than {MAX_REDIRECTS} redirects")
    except (aiohttp.ClientError, TimeoutError, ConnectionError) as error:
        # The message of some of these holds the URL, so only its host is told.
        raise Transient(f"{what}: {type(error).__name__} at {url.host}") from error


async def get_json(session: aiohttp.ClientSession, request: Request, *, what: str) -> Any:
    """A JSON document. Raises as `get`."""
    async with get(session, request, what=what) as response:
        try:
            if (response.content_length or 0) > MAX_JSON_BYTES:
                raise ValueError("too long")
            return await response.json(content_type=None)
        except ValueError as error:
            raise Transient(
                f"{what}: the answer of {response.url.host} is no JSON; is it the API's address?"
            ) from error


async def _refusal(response: aiohttp.ClientResponse, *, what: str, moved: bool) -> Exception:
    told = response.headers.get("X-Error-Message") or ""
    words = f"{what}: HTTP {response.status} from {response.url.host}" + (f" ({told[:300]})" if told else "")
    # A signed link of a CDN that has expired is refused too; the next attempt gets a new one.
    if response.status in (401, 403) and not moved:
        return ModelFetchDenied(
            f"{words}. Name a Secret with credentials that may read it in spec.model.secretRef; if there is one, check "
            "its keys, and that access was granted (gated models ask for that on their page). Where nothing may be "
            "asked for without credentials, a name that does not exist is refused like this too."
        )
    if response.status in (404, 410) and not moved:
        return ModelNotFound(f"{words}. Check the name and the revision in spec.model.uri.")
    if response.status in _TRANSIENT or response.status >= 500 or moved:
        return Transient(words, after=_seconds(response.headers.get("Retry-After")))
    return ModelNotFound(f"{words}. Check spec.model.uri, and the address of the hub where another one is set.")


def _seconds(text: str | None) -> float | None:
    try:
        return None if text is None else max(0.0, float(text))
    except ValueError:
        return None
