"""ALL Kubernetes I/O of the operator, except kopf's watches (handlers.py) and the lease (leader.py).

Reads return plain bodies or the types of observed.py; writes return what became of them. A request that failed raises
`ClusterError`, whose `fault` says what kind of failure it was; the work queue retries with back-off.

    ClusterError.fault
    ├── NOT_FOUND    404
    ├── CONFLICT     409: somebody else wrote first, or the object is not the one that was meant (its UID differs)
    ├── GONE         410: a list's continuation expired
    ├── INVALID      400, 413, 415, 422: this request will never be accepted
    ├── FORBIDDEN    401, 403: RBAC, quota, a namespace that terminates
    └── UNAVAILABLE  429, 5xx, time-outs, no connection: the same request may succeed later
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NewType

import aiohttp
from kubernetes.aio import client as kubernetes_client
from kubernetes.aio import config as kubernetes_config
from kubernetes.aio.dynamic import DynamicClient
from kubernetes.aio.dynamic.exceptions import DynamicApiError

from reprise_operator.kinds import (
    CHILD_TYPES,
    CLAIMS,
    EVENTS,
    INFERENCE_SERVICES,
    PERMISSIONS,
    PODS,
    REPLICA_SETS,
    SECRETS,
    ResourceType,
)
from reprise_operator.observed import ObservedChild
from reprise_operator.settings import FIELD_MANAGER

logger = logging.getLogger(__name__)

Body = Mapping[str, Any]
Uid = NewType("Uid", str)

REQUEST_TIMEOUT_SECONDS = 30.0
PAGE_SIZE = 500

APPLY_PATCH = "application/apply-patch+yaml"
MERGE_PATCH = "application/merge-patch+json"
METADATA_ONLY = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"


@dataclass(frozen=True, slots=True)
class Key:
    """An InferenceService by namespace and name: what the work queue holds."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


class Fault(enum.Enum):
    NOT_FOUND = "not found"
    CONFLICT = "conflict"
    GONE = "gone"
    INVALID = "invalid"
    FORBIDDEN = "forbidden"
    UNAVAILABLE = "unavailable"


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


class ApplyOutcome(enum.Enum):
    CREATED = "created"
    CHANGED = "changed"
    UNCHANGED = "unchanged"
    """The API server found nothing to change."""
    CONFLICT = "conflict"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True, kw_only=True)
class ApplyResult:
    outcome: ApplyOutcome
    message: str = ""
    """The API server's reason, for CONFLICT and REFUSED."""
    body: Body | None = None
    """The object as answered, for the other outcomes."""


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
    default = Fault.INVALID if 400 <= status < 500 and status != 429 else Fault.UNAVAILABLE
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


class Cluster:
    """One connection pool to the API server. Close it, or use it as an async context manager."""

    def __init__(
        self, configuration: kubernetes_client.Configuration, *, on_request: RequestObserver | None = None
    ) -> None:
        self.api = kubernetes_client.ApiClient(configuration)
        # Only its request methods are used: kinds are known, so discovery would be requests for nothing.
        self._client = DynamicClient(self.api)  # type: ignore[no-untyped-call]
        self._timeout = aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_SECONDS, sock_connect=10.0)
        self._on_request = on_request

    async def __aenter__(self) -> Cluster:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        await self.api.close()  # type: ignore[no-untyped-call]

    # Reads ----------------------------------------------------------------------------------------------------------

    async def get_service(self, key: Key) -> Body | None:
        """The InferenceService, None when there is none (any more)."""
        return await self._get(INFERENCE_SERVICES, key.namespace, key.name)

    async def list_services(self, namespace: str | None) -> tuple[Body, ...]:
        return await self._list(INFERENCE_SERVICES, namespace)

    async def children(
        self, namespace: str, *, owner_uid: str, selector: Mapping[str, str], planned: Sequence[tuple[str, str]]
    ) -> tuple[ObservedChild, ...]:
        """The objects under one of the `planned` names, given as (kind, name), or with our selector's labels and our
        owner UID. A planned name that the listing lacks is asked for by itself: it may belong to somebody else, or
        have lost its labels."""
        found: dict[tuple[str, str], ObservedChild] = {}
        listings = await _gather(*(self._list(kind, namespace, selector) for kind in CHILD_TYPES))
        for resource, bodies in zip(CHILD_TYPES, listings, strict=True):
            for body in bodies:
                child = _observed_child(resource, body, owner_uid)
                if child.owned or (child.kind, child.name) in planned:
                    found[child.kind, child.name] = child
        by_kind = {resource.kind: resource for resource in CHILD_TYPES}
        missing = [(by_kind[kind], name) for kind, name in planned if (kind, name) not in found]
        for (resource, name), present in zip(
            missing, await _gather(*(self._get(kind, namespace, name) for kind, name in missing)), strict=True
        ):
            if present is not None:
                found[resource.kind, name] = _observed_child(resource, present, owner_uid)
        return tuple(found[name] for name in sorted(found))

    async def pods(self, namespace: str, selector: Mapping[str, str]) -> tuple[Body, ...]:
        return await self._list(PODS, namespace, selector)

    async def replica_sets(self, namespace: str, selector: Mapping[str, str]) -> tuple[Body, ...]:
        return await self._list(REPLICA_SETS, namespace, selector)

    async def missing_secrets(self, namespace: str, names: Sequence[str]) -> tuple[str, ...]:
        return await self._missing(SECRETS, namespace, names)

    async def missing_claims(self, namespace: str, names: Sequence[str]) -> tuple[str, ...]:
        return await self._missing(CLAIMS, namespace, names)

    async def _missing(self, resource: ResourceType, namespace: str, names: Sequence[str]) -> tuple[str, ...]:
        present = await _gather(*(self._exists(resource, namespace, name) for name in names))
        return tuple(name for name, exists in zip(names, present, strict=True) if exists is False)

    async def _exists(self, resource: ResourceType, namespace: str, name: str) -> bool | None:
        """None when we may not know: then the kubelet's own message says what is missing."""
        try:
            return await self._get(resource, namespace, name, accept=METADATA_ONLY) is not None
        except ClusterError as error:
            if error.fault is Fault.FORBIDDEN:
                return None
            raise

    # Writes ---------------------------------------------------------------------------------------------------------

    async def apply(self, manifest: Body, *, present: ObservedChild | None) -> ApplyResult:
        """Applies a child on the server side.

        `present` is the object as just read, and it must be ours; None when there was none. An absent one is created
        without force, so a field that somebody else set in the meantime is a CONFLICT rather than ours. A present one
        is applied with its UID, so an object that was replaced in the meantime is a CONFLICT too, and with force: the
        fields of the manifest are ours, and an edit of one of them by somebody else ends here.
        """
        resource = _resource_type(manifest)
        metadata = manifest["metadata"]
        body: Body = manifest
        if present is not None:
            body = {**manifest, "metadata": {**metadata, "uid": present.uid}}
        try:
            answer = await self._request(
                "patch",
                resource,
                metadata["namespace"],
                metadata["name"],
                body=body,
                content_type=APPLY_PATCH,
                field_manager=FIELD_MANAGER,
                force_conflicts="true" if present is not None else "false",
            )
        except ClusterError as error:
            if error.fault is Fault.CONFLICT:
                return ApplyResult(outcome=ApplyOutcome.CONFLICT, message=error.message)
            if error.fault in (Fault.INVALID, Fault.FORBIDDEN):
                return ApplyResult(outcome=ApplyOutcome.REFUSED, message=error.message)
            raise
        if present is None:
            return ApplyResult(outcome=ApplyOutcome.CREATED, body=answer)
        before, after = present.body["metadata"].get("resourceVersion"), answer["metadata"].get("resourceVersion")
        outcome = ApplyOutcome.UNCHANGED if before == after else ApplyOutcome.CHANGED
        return ApplyResult(outcome=outcome, body=answer)

    async def delete(self, namespace: str, *, kind: str, name: str, uid: str) -> bool:
        """Deletes a child if it is still this very object. False when it was gone or another one already."""
        resource = next(resource for resource in CHILD_TYPES if resource.kind == kind)
        options = {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            "preconditions": {"uid": uid},
            "propagationPolicy": "Background",
        }
        try:
            await self._request("delete", resource, namespace, name, body=options)
        except ClusterError as error:
            if error.fault in (Fault.NOT_FOUND, Fault.CONFLICT):
                return False
            raise
        return True

    async def patch_status(self, service: Body, status: Body) -> Body | None:
        """Makes the status of `service` (as just read) equal to `status`. None, and no request, when it already is.

        Raises ClusterError with CONFLICT when the object has changed since it was read.
        """
        present = service.get("status", {})
        difference = merge_difference(present, status)
        if not difference:
            return None
        metadata = service["metadata"]
        return await self._request(
            "patch",
            INFERENCE_SERVICES,
            metadata["namespace"],
            metadata["name"],
            subresource="status",
            body={"metadata": {"resourceVersion": metadata["resourceVersion"]}, "status": difference},
            content_type=MERGE_PATCH,
            field_manager=FIELD_MANAGER,
        )

    async def create_event(self, namespace: str, event: Body) -> None:
        await self._request("create", EVENTS, namespace, body=event, field_manager=FIELD_MANAGER)

    async def patch_event(self, namespace: str, name: str, change: Body) -> None:
        await self._request(
            "patch", EVENTS, namespace, name, body=change, content_type=MERGE_PATCH, field_manager=FIELD_MANAGER
        )

    # Transport ------------------------------------------------------------------------------------------------------

    async def _get(
        self, resource: ResourceType, namespace: str, name: str, *, accept: str = "application/json"
    ) -> Body | None:
        try:
            return await self._request("get", resource, namespace, name, header_params={"Accept": accept})
        except ClusterError as error:
            if error.fault is Fault.NOT_FOUND:
                return None
            raise

    async def _list(
        self, resource: ResourceType, namespace: str | None, selector: Mapping[str, str] | None = None
    ) -> tuple[Body, ...]:
        label_selector = ",".join(f"{key}={value}" for key, value in sorted((selector or {}).items())) or None
        items: list[Body] = []
        continuation: str | None = None
        while True:
            try:
                page = await self._request(
                    "list",
                    resource,
                    namespace,
                    label_selector=label_selector,
                    limit=PAGE_SIZE,
                    _continue=continuation,
                )
            except ClusterError as error:
                if error.fault is Fault.GONE and continuation is not None:
                    items, continuation = [], None  # the continuation expired: from the start again
                    continue
                raise
            # The items of a list of a built-in kind come without the two.
            identity = {"apiVersion": resource.api_version, "kind": resource.kind}
            items.extend({**identity, **item} for item in page.get("items") or ())
            continuation = page["metadata"].get("continue") or None
            if continuation is None:
                return tuple(items)

    async def _request(
        self,
        verb: str,
        resource: ResourceType,
        namespace: str | None,
        name: str | None = None,
        *,
        subresource: str | None = None,
        **parameters: Any,
    ) -> Body:
        asked = resource.plural if subresource is None else f"{resource.plural}/{subresource}"
        assert verb in PERMISSIONS[resource.group, asked], f"kinds.PERMISSIONS lacks {verb} on {asked}"
        method = {"list": "get", "create": "post"}.get(verb, verb)
        outcome = "ok"
        try:
            response = await self._client.request(
                method,
                resource.path(namespace, name, subresource),
                serialize=False,
                _request_timeout=self._timeout,
                **parameters,
            )
            body: Body = await response.json()
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
        return body


def merge_difference(present: Body, wanted: Body) -> dict[str, Any]:
    """The JSON merge patch (RFC 7386) that turns `present` into `wanted`; empty when they are equal.

    A None in `wanted` means the field's absence, as it does in a merge patch.
    """
    difference: dict[str, Any] = {}
    for key, value in wanted.items():
        before = present.get(key)
        if isinstance(value, Mapping) and isinstance(before, Mapping):
            nested = merge_difference(before, value)
            if nested:
                difference[key] = nested
        elif value != before:
            difference[key] = value
    difference.update({key: None for key in present.keys() - wanted.keys() if present[key] is not None})
    return difference


def _resource_type(manifest: Body) -> ResourceType:
    for resource in CHILD_TYPES:
        if (resource.api_version, resource.kind) == (manifest["apiVersion"], manifest["kind"]):
            return resource
    raise ValueError(f"no child type is declared for {manifest['apiVersion']} {manifest['kind']}")


def _observed_child(resource: ResourceType, body: Body, owner_uid: str) -> ObservedChild:
    metadata = body["metadata"]
    owners = metadata.get("ownerReferences") or ()
    return ObservedChild(
        api_version=resource.api_version,
        kind=resource.kind,
        name=metadata["name"],
        uid=metadata["uid"],
        owned=any(owner.get("controller") and owner.get("uid") == owner_uid for owner in owners),
        generation=metadata.get("generation", 0),
        terminating="deletionTimestamp" in metadata,
        body=body,
    )


async def _gather(*requests: Any) -> list[Any]:
    """All at once; the first failure is raised after the others have ended, so none is left running."""
    results = await asyncio.gather(*requests, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results
