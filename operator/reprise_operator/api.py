"""The connection to the API server: one request, one object, one list; every failure a `ClusterError`.

ClusterError.fault
├── NOT_FOUND    404
├── CONFLICT     409: somebody else wrote first, or the object is not the one that was meant (its UID differs)
├── GONE         410: a list's continuation expired
├── INVALID      400, 413, 415, 422: this request will never be accepted; and the 500 that a server-side apply gets for
│                a field its kind does not have
├── FORBIDDEN    401, 403: RBAC, quota, a namespace that terminates
└── UNAVAILABLE  429, 5xx, time-outs, no connection: the same request may succeed later
"""

from __future__ import annotations

import contextlib
import copy
import enum
import json
import os
from collections.abc import Awaitable, Callable, Hashable, Mapping
from types import TracebackType
from typing import Any, TypeVar

import aiohttp
from kubernetes.aio import client as kubernetes_client
from kubernetes.aio import config as kubernetes_config
from kubernetes.aio.dynamic import DynamicClient
from kubernetes.aio.dynamic.exceptions import DynamicApiError

from reprise_operator.kinds import NODE_PERMISSIONS, PERMISSIONS, ResourceType
from reprise_operator.newest import Newest
from reprise_operator.recall import Memo, is_watched

Body = Mapping[str, Any]
Answer = TypeVar("Answer")

REQUEST_TIMEOUT_SECONDS = 30.0
PAGE_SIZE = 500
MERGE_PATCH = "application/merge-patch+json"
"""Content type of a JSON merge patch (RFC 7386)."""


class Fault(enum.Enum):
    NOT_FOUND = "not found"
    CONFLICT = "conflict"
    GONE = "gone"
    INVALID = "invalid"
    FORBIDDEN = "forbidden"
    UNAVAILABLE = "unavailable"


# How the API server says, with a 500, that an applied object has a field of no schema, or one key of a list twice.
_BAD_APPLY = "failed to create typed patch object"
_CACHE_IS_OLDER = 504
"""The API server's answer, after three seconds, where its cache has not come to the version that was asked for."""
_FAULTS = {404: Fault.NOT_FOUND, 409: Fault.CONFLICT, 410: Fault.GONE, 401: Fault.FORBIDDEN, 403: Fault.FORBIDDEN}


class ClusterError(Exception):
    """A request to the API server that failed. `message` is the API server's own, or the transport's."""

    def __init__(self, fault: Fault, message: str, *, status: int | None = None, retry_after: float | None = None):
        super().__init__(message)
        self.fault = fault
        self.message = message
        self.status = status
        self.retry_after = retry_after
        """Seconds, where the API server asked for a pause."""


RequestObserver = Callable[[str, ResourceType, str], None]
"""Told each request: verb, kind, and "ok" or the fault's name."""


def _retry_after(error: DynamicApiError) -> float | None:
    try:
        return float((error.headers or {})["Retry-After"])
    except (KeyError, ValueError):
        return None


def _cluster_error(error: DynamicApiError) -> ClusterError:
    message = str(error.reason)
    with contextlib.suppress(TypeError, ValueError, KeyError):
        message = str(json.loads(error.body or "")["message"]) or message
    status = int(error.status or 0)
    invalid = (400 <= status < 500 and status != 429) or message.startswith(_BAD_APPLY)
    default = Fault.INVALID if invalid else Fault.UNAVAILABLE
    return ClusterError(_FAULTS.get(status, default), message, status=status or None, retry_after=_retry_after(error))


async def load_connection() -> kubernetes_client.Configuration:
    """The service account of the pod the operator runs in, else $KUBECONFIG or ~/.kube/config."""
    configuration = kubernetes_client.Configuration()
    kubeconfig = os.environ.get("KUBECONFIG")
    if "KUBERNETES_SERVICE_HOST" in os.environ and not kubeconfig:
        kubernetes_config.load_incluster_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
    else:
        await kubernetes_config.load_kube_config(  # type: ignore[no-untyped-call]
            config_file=kubeconfig, client_configuration=configuration
        )
    return configuration


class Api:
    """One connection pool. Close it, or use it as an async context manager."""

    def __init__(
        self, configuration: kubernetes_client.Configuration, *, on_request: RequestObserver | None = None
    ) -> None:
        self.client = kubernetes_client.ApiClient(configuration)
        # Only its request methods are used: kinds are known, so discovery would be requests for nothing.
        self._dynamic = DynamicClient(self.client)  # type: ignore[no-untyped-call]
        self._timeout = aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_SECONDS, sock_connect=10.0)
        self._on_request = on_request
        self._memo: Memo | None = None
        self.newest = Newest()

    def remembering(self, memo: Memo) -> Api:
        """The same connection for one pass: `memo` answers its reads where it can and keeps the others' answers, and
        its writes spoil it."""
        api = copy.copy(self)
        api._memo = memo
        return api

    async def __aenter__(self) -> Api:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.client.close()  # type: ignore[no-untyped-call]

    async def get(
        self, resource: ResourceType, namespace: str, name: str, *, accept: str = "application/json"
    ) -> Body | None:
        memo, asked = self._answers_about(resource, by_name=True), ("get", resource.plural, namespace, name, accept)
        if memo is not None and asked in memo:
            known: Body | None = memo[asked]
            return known
        answer: Body | None = None
        try:
            answer = await self.request("get", resource, namespace, name, header_params={"Accept": accept})
        except ClusterError as error:
            if error.fault is not Fault.NOT_FOUND:
                raise
        if memo is not None and is_watched(resource, answer):
            memo[asked] = answer
        return answer

    async def list(
        self,
        resource: ResourceType,
        namespace: str | None,
        selector: Mapping[str, str] | None = None,
        *,
        accept: str = "application/json",
        fields: Mapping[str, str] | None = None,
        cached: bool = False,
    ) -> tuple[Body, ...]:
        """All there are, consistent; or, of a kind that is watched and with `cached`, as new as anything that was seen
        of that kind, out of the API server's cache."""
        field_selector = ",".join(f"{path}={value}" for path, value in sorted((fields or {}).items())) or None
        label_selector = ",".join(f"{key}={value}" for key, value in sorted((selector or {}).items())) or None
        memo, asked = self._answers_about(resource), ("list", resource.plural, namespace, label_selector, accept)
        if memo is not None and asked in memo:
            known: tuple[Body, ...] = memo[asked]
            return known
        items: list[Body] = []
        continuation: str | None = None
        version = self.newest.of(resource) if cached else None
        while True:
            bound = [("resourceVersion", version), ("resourceVersionMatch", "NotOlderThan")]
            try:
                page = await self.request(
                    "list",
                    resource,
                    namespace,
                    label_selector=label_selector,
                    field_selector=field_selector,
                    limit=PAGE_SIZE if version is None else None,  # a cache gives all at once
                    query_params=[] if version is None else bound,
                    _continue=continuation,
                    header_params={"Accept": accept},
                )
            except ClusterError as error:
                if error.fault is Fault.GONE and continuation is not None:
                    items, continuation = [], None  # the continuation expired: from the start again
                    continue
                if error.status == _CACHE_IS_OLDER and version is not None:
                    self.newest.forget(resource)
                    version = None
                    continue
                raise
            # The items of a list of a built-in kind come without the two.
            identity = {"apiVersion": resource.api_version, "kind": resource.kind}
            items.extend({**identity, **item} for item in page.get("items") or ())
            continuation = page["metadata"].get("continue") or None
            if continuation is None:
                break
        for item in items if cached else ():
            self.newest.seen(resource, item["metadata"].get("resourceVersion"))
        if memo is not None:
            memo[asked] = tuple(items)
        return tuple(items)

    def _answers_about(self, resource: ResourceType, *, by_name: bool = False) -> dict[Hashable, Any] | None:
        return None if self._memo is None else self._memo.answers_about(resource, by_name=by_name)

    async def request(
        self,
        verb: str,
        resource: ResourceType,
        namespace: str | None,
        name: str | None = None,
        *,
        subresource: str | None = None,
        **parameters: Any,
    ) -> Body:
        async def body(response: aiohttp.ClientResponse) -> Body:
            answer: Body = await response.json()
            return answer

        answer = await self._send(verb, resource, namespace, name, subresource, body, parameters)
        if verb != "list" and answer.get("kind") == resource.kind:  # not a Status, nor a Scale, which has its version
            self.newest.seen(resource, answer["metadata"].get("resourceVersion"))
        return answer

    async def tail(
        self,
        resource: ResourceType,
        namespace: str,
        name: str,
        *,
        subresource: str,
        query: Mapping[str, str],
        limit: int,
    ) -> str:
        """The last `limit` bytes of an answer that is text; no more than that is held at a time."""

        async def end(response: aiohttp.ClientResponse) -> str:
            kept = b""
            async for chunk in response.content.iter_chunked(64 * 1024):
                kept = (kept + chunk)[-limit:]
            return kept.decode("utf-8", errors="replace")

        parameters = {"query_params": list(query.items()), "header_params": {"Accept": "text/plain, */*"}}
        return await self._send("get", resource, namespace, name, subresource, end, parameters)

    async def _send(
        self,
        verb: str,
        resource: ResourceType,
        namespace: str | None,
        name: str | None,
        subresource: str | None,
        read: Callable[[aiohttp.ClientResponse], Awaitable[Answer]],
        parameters: Mapping[str, Any],
    ) -> Answer:
        asked = resource.plural if subresource is None else f"{resource.plural}/{subresource}"
        allowed = {**NODE_PERMISSIONS, **PERMISSIONS}[resource.group, asked]
        assert verb in allowed, f"kinds.PERMISSIONS lacks {verb} on {asked}"
        method = {"list": "get", "create": "post"}.get(verb, verb)
        outcome = "ok"
        if self._memo is not None and verb not in ("get", "list"):
            self._memo.spoil()
        try:
            response = await self._dynamic.request(
                method,
                resource.path(namespace, name, subresource),
                serialize=False,
                _request_timeout=self._timeout,
                **parameters,
            )
            return await read(response)
        except DynamicApiError as error:
            fault = _cluster_error(error)
            outcome = fault.fault.name.lower()
            raise fault from None
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            outcome = Fault.UNAVAILABLE.name.lower()
            detail = str(error) or type(error).__name__
            raise ClusterError(Fault.UNAVAILABLE, f"no answer from the API server: {detail}") from error
        finally:
            if self._on_request is not None:
                self._on_request(verb, resource, outcome)
