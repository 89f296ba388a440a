"""A thin asynchronous client of the Kubernetes HTTP API: requests, and an informer (list, then watch) on top.

It knows kubeconfig files with a token, a client certificate or nothing at all, so that it talks to a real kube-
apiserver and to the emulated one alike.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import ssl
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import urlencode

import aiohttp
import yaml

Manifest = dict[str, Any]
"""A Kubernetes object as JSON."""

MERGE_PATCH = "application/merge-patch+json"


class KubeError(Exception):
    """The API server refused a request. `status` is the HTTP code, `reason` the Status object's."""

    def __init__(self, *, status: int, reason: str, message: str) -> None:
        super().__init__(f"{status} {reason}: {message}")
        self.status = status
        self.reason = reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """Where the API server is and how to authenticate there."""

    server: str
    headers: Mapping[str, str]
    tls: ssl.SSLContext | None

    @classmethod
    def from_kubeconfig(cls, path: Path) -> Credentials:
        """Reads the current context. Exec plugins are not supported."""
        config = yaml.safe_load(path.read_text())
        context = _named(config["contexts"], config["current-context"])["context"]
        cluster = _named(config["clusters"], context["cluster"])["cluster"]
        user = _named(config.get("users") or [], context.get("user", ""))
        user = user.get("user") or {}
        headers = {"Authorization": f"Bearer {user['token']}"} if user.get("token") else {}
        server = str(cluster["server"]).rstrip("/")
        if not server.startswith("https:"):
            return cls(server=server, headers=headers, tls=None)
        tls = ssl.create_default_context()
        if cluster.get("insecure-skip-tls-verify"):
            tls.check_hostname = False
            tls.verify_mode = ssl.CERT_NONE
        elif authority := _pem(cluster, "certificate-authority", base=path.parent):
            tls.load_verify_locations(cadata=authority)
        certificate = _pem(user, "client-certificate", base=path.parent)
        key = _pem(user, "client-key", base=path.parent)
        if certificate and key:
            with tempfile.NamedTemporaryFile("w", suffix=".pem") as both:
                both.write(certificate + "\n" + key)
                both.flush()
                tls.load_cert_chain(both.name)
        return cls(server=server, headers=headers, tls=tls)


def _named(entries: list[Manifest], name: str) -> Manifest:
    return next((entry for entry in entries if entry["name"] == name), {})


def _pem(section: Mapping[str, Any], key: str, *, base: Path) -> str | None:
    if inline := section.get(f"{key}-data"):
        return base64.b64decode(str(inline)).decode()
    if name := section.get(key):
        return (base / str(name)).read_text()
    return None


class KubeClient:
    """Requests to one API server. Use as an async context manager, inside the event loop that makes the requests."""

    def __init__(self, credentials: Credentials, *, user_agent: str = "reprise-test-node") -> None:
        self._credentials = credentials
        self._user_agent = user_agent
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> KubeClient:
        self._session = aiohttp.ClientSession(
            headers={"User-Agent": self._user_agent, **self._credentials.headers},
            timeout=aiohttp.ClientTimeout(total=30),
            connector=aiohttp.TCPConnector(limit=0),
        )
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()
            await asyncio.sleep(0)  # what was aborted is closed in the loop's next round, and it may be the last one

    def _url(self, path: str, query: Mapping[str, str] | None) -> str:
        return self._credentials.server + path + ("?" + urlencode(query) if query else "")

    @property
    def session(self) -> aiohttp.ClientSession:
        if self._session is None:
            raise RuntimeError("KubeClient is used outside its `async with`.")
        return self._session

    async def request(
        self,
        method: str,
        path: str,
        *,
        body: Manifest | None = None,
        query: Mapping[str, str] | None = None,
        content_type: str = "application/json",
    ) -> Manifest:
        """One request; the parsed answer. Raises KubeError for an answer of 400 and above."""
        async with self.session.request(
            method,
            self._url(path, query),
            data=None if body is None else json.dumps(body),
            headers={"Content-Type": content_type, "Accept": "application/json"},
            ssl=self._credentials.tls or True,
        ) as answer:
            text = await answer.text()
            try:
                parsed: Manifest = json.loads(text) if text else {}
            except ValueError:
                parsed = {"message": text}
            if answer.status >= 400:
                raise KubeError(
                    status=answer.status, reason=parsed.get("reason", ""), message=parsed.get("message", text)
                )
            return parsed

    async def get(self, path: str) -> Manifest | None:
        """The object, or None where there is none."""
        try:
            return await self.request("GET", path)
        except KubeError as error:
            if error.status == 404:
                return None
            raise

    async def watch(self, path: str, *, resource_version: str) -> AsyncIterator[Manifest]:
        """Watch events as the server sends them, until it ends the stream."""
        query = {
            "watch": "true",
            "resourceVersion": resource_version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": "300",
        }
        async with self.session.get(
            self._url(path, query),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=10),
            ssl=self._credentials.tls or True,
            read_bufsize=2**22,
        ) as answer:
            if answer.status >= 400:
                raise KubeError(status=answer.status, reason="", message=await answer.text())
            buffer = b""
            try:
                async for chunk in answer.content.iter_any():
                    *lines, buffer = (buffer + chunk).split(b"\n")
                    for line in lines:
                        if line.strip():
                            yield json.loads(line)
            finally:
                # Left before its end, over TLS it would wait for the server's farewell, beyond the end of this loop.
                if answer.connection is not None and answer.connection.transport is not None:
                    answer.connection.transport.abort()


class Informer:
    """A cache of one collection, kept fresh by list and watch. `objects` is keyed by UID."""

    def __init__(self, client: KubeClient, path: str) -> None:
        self._client = client
        self._path = path
        self._listeners: list[Callable[[], None]] = []
        self.objects: dict[str, Manifest] = {}
        self.synced = asyncio.Event()

    def on_change(self, listener: Callable[[], None]) -> None:
        """`listener` is called after every change, without arguments: look at `objects` (level-triggered)."""
        self._listeners.append(listener)

    def _changed(self) -> None:
        for listener in self._listeners:
            listener()

    async def run(self) -> None:
        """Runs until cancelled. A broken watch is begun anew with a list."""
        while True:
            with contextlib.suppress(aiohttp.ClientError, KubeError, TimeoutError, OSError):
                listing = await self._client.request("GET", self._path)
                self.objects = {item["metadata"]["uid"]: item for item in listing.get("items") or []}
                self.synced.set()
                self._changed()
                await self._follow(listing["metadata"]["resourceVersion"])
                continue  # the server ended the watch in good order
            await asyncio.sleep(0.5)

    async def _follow(self, resource_version: str) -> None:
        async for event in self._client.watch(self._path, resource_version=resource_version):
            obj = event["object"]
            match event["type"]:
                case "ADDED" | "MODIFIED":
                    self.objects[obj["metadata"]["uid"]] = obj
                    self._changed()
                case "DELETED":
                    self.objects.pop(obj["metadata"]["uid"], None)
                    self._changed()
                case "ERROR":  # 410 Gone, mostly: list again
                    return
