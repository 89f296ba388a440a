"""A reverse proxy in front of an API server that writes down every request: what a client really sends, and what it is
answered. And it can interfere: answer in the server's place, not at all, or keep a watch's events to itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from types import UnionType

import aiohttp
import yaml
from aiohttp import web

from tests.support.background import background
from tests.support.node_client import Credentials

READING = frozenset({"GET", "HEAD", "OPTIONS"})
_HOP_BY_HOP = frozenset({"connection", "host", "transfer-encoding", "content-length", "authorization", "keep-alive"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request as it came: path without the query."""

    method: str
    path: str
    query: str = ""

    @property
    def is_watch(self) -> bool:
        return "watch=true" in self.query.split("&")


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """A request and the status it was answered with; of a watch when it began."""

    request: Request
    status: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Given in the place of the API server, which does not see the request."""

    status: int
    message: str = "injected by the test"
    headers: dict[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class Hang:
    """Neither answers nor refuses while it is `on`; streams that are open stand still. A wire that is cut."""

    on: bool = False


@dataclass(frozen=True, slots=True)
class Deaf:
    """A watch goes on, with its bookmarks, but its events do not come through."""


@dataclass(frozen=True, slots=True)
class Silent:
    """Nothing of a watch comes through any more, and its connection stays open."""


Interference = Answer | Hang | Deaf | Silent
Rule = Callable[[Request], Interference | None]
"""Asked for each request, and for each line of a watch. None lets it pass."""


class RequestRecorder:
    """Its methods may be called from any thread."""

    def __init__(self, *, kubeconfig: Path) -> None:
        self.kubeconfig = kubeconfig
        """For the client that is to be recorded."""
        self._requests: list[Request] = []
        self._exchanges: list[Exchange] = []
        self._rule: Rule | None = None
        self._lock = threading.Lock()

    def record(self, request: Request) -> None:
        with self._lock:
            self._requests.append(request)

    def answered(self, request: Request, status: int) -> None:
        with self._lock:
            self._exchanges.append(Exchange(request=request, status=status))

    def requests(self) -> list[Request]:
        with self._lock:
            return list(self._requests)

    def exchanges(self) -> list[Exchange]:
        with self._lock:
            return list(self._exchanges)

    def writes(self, *, since: int = 0) -> list[Request]:
        """All but reads, beginning with the `since`-th request."""
        return [request for request in self.requests()[since:] if request.method not in READING]

    def interfere(self, rule: Rule | None) -> None:
        """From now on, until the next call; None lets everything pass."""
        with self._lock:
            self._rule = rule

    def interference(self, request: Request) -> Interference | None:
        with self._lock:
            rule = self._rule
        return None if rule is None else rule(request)

    async def passage(self, request: Request, *, closed_by: UnionType | type = Hang) -> Interference | None:
        """Waits until no interference of that kind is in the way; the one there is then."""
        while True:
            found = self.interference(request)
            if not isinstance(found, closed_by) or (isinstance(found, Hang) and not found.on):
                return found
            await asyncio.sleep(0.05)  # the rule is asked again: it knows when it is over, and tells nobody


def recording(kubeconfig: Path, *, folder: Path) -> AbstractContextManager[RequestRecorder]:
    """A recorder in front of the API server that `kubeconfig` names; writes the client's kubeconfig into `folder`."""
    return background(lambda: _serve(Credentials.from_kubeconfig(kubeconfig), folder), name="request-recorder")


@contextlib.asynccontextmanager
async def _serve(credentials: Credentials, folder: Path) -> AsyncIterator[RequestRecorder]:
    path = folder / "recorded.kubeconfig"
    recorder = RequestRecorder(kubeconfig=path)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, auto_decompress=False) as session:

        async def forward(request: web.Request) -> web.StreamResponse:
            asked = Request(method=request.method, path=request.path, query=request.query_string)
            recorder.record(asked)
            interference = await recorder.passage(asked)
            if isinstance(interference, Answer):
                recorder.answered(asked, interference.status)
                return _refusal(interference)
            headers = {k: v for k, v in request.headers.items() if k.lower() not in _HOP_BY_HOP}
            async with session.request(
                request.method,
                credentials.server + request.path_qs,
                headers={**headers, **credentials.headers},
                data=await request.read() or None,
                ssl=credentials.tls or True,
                timeout=aiohttp.ClientTimeout(total=None),
                allow_redirects=False,
            ) as answer:
                recorder.answered(asked, answer.status)
                kept = {k: v for k, v in answer.headers.items() if k.lower() not in _HOP_BY_HOP}
                response = web.StreamResponse(status=answer.status, headers=kept)
                with contextlib.suppress(ConnectionResetError):  # the client has had enough of its watch
                    await response.prepare(request)
                    if asked.is_watch:
                        await _stream(recorder, asked, answer.content, response)
                    else:
                        async for chunk in answer.content.iter_any():
                            await response.write(chunk)
                    await response.write_eof()
                return response

        app = web.Application(client_max_size=2**24)
        app.router.add_route("*", "/{path:.*}", forward)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.5, handler_cancellation=True)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        _write_kubeconfig(path, f"http://{host}:{port}")
        try:
            yield recorder
        finally:
            await runner.cleanup()
            await asyncio.sleep(0.1)  # handlers that were cancelled let go of their connections
    await asyncio.sleep(0.25)  # TLS takes some turns of the loop to close, and the loop ends with us


def _refusal(answer: Answer) -> web.Response:
    """As the API server puts it."""
    status = {
        "apiVersion": "v1",
        "kind": "Status",
        "status": "Failure",
        "message": answer.message,
        "code": answer.status,
    }
    return web.json_response(status, status=answer.status, headers=answer.headers)


async def _stream(
    recorder: RequestRecorder, asked: Request, content: aiohttp.StreamReader, response: web.StreamResponse
) -> None:
    """A watch, line by line. Lines that do not come through are lost, as on a wire."""
    rest = b""
    async for chunk in content.iter_any():
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            interference = await recorder.passage(asked)
            if isinstance(interference, Silent):
                continue
            if isinstance(interference, Deaf) and json.loads(line)["type"] != "BOOKMARK":
                continue
            await response.write(line + b"\n")
    await recorder.passage(asked, closed_by=Hang | Silent)  # its end does not come through either


def _write_kubeconfig(path: Path, url: str) -> None:
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "recorded", "cluster": {"server": url}}],
        "users": [{"name": "recorded", "user": {}}],
        "contexts": [{"name": "recorded", "context": {"cluster": "recorded", "user": "recorded"}}],
        "current-context": "recorded",
    }
    path.write_text(yaml.safe_dump(config))
