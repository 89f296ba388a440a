"""A reverse proxy in front of an API server that writes down every request: what a client really sends."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

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


class RequestRecorder:
    """`requests()` may be called from any thread."""

    def __init__(self, *, kubeconfig: Path) -> None:
        self.kubeconfig = kubeconfig
        """For the client that is to be recorded."""
        self._requests: list[Request] = []
        self._lock = threading.Lock()

    def record(self, request: Request) -> None:
        with self._lock:
            self._requests.append(request)

    def requests(self) -> list[Request]:
        with self._lock:
            return list(self._requests)

    def writes(self, *, since: int = 0) -> list[Request]:
        """All but reads, beginning with the `since`-th request."""
        return [request for request in self.requests()[since:] if request.method not in READING]


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
            recorder.record(Request(method=request.method, path=request.path))
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
                kept = {k: v for k, v in answer.headers.items() if k.lower() not in _HOP_BY_HOP}
                response = web.StreamResponse(status=answer.status, headers=kept)
                with contextlib.suppress(ConnectionResetError):  # the client has had enough of its watch
                    await response.prepare(request)
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
