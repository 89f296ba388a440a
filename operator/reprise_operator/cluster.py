"""ALL Kubernetes I/O of the operator, except kopf's watches (handlers.py) and the lease (leader.py).

Reads return plain bodies or the types of observed.py; writes return what became of them. A request that failed raises
`ClusterError` (api.py), and the work queue retries with back-off.
"""

from __future__ import annotations

import asyncio
import base64
import copy
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from reprise_operator.api import MERGE_PATCH, Api, Body, ClusterError, Fault
from reprise_operator.bodies import observed_child
from reprise_operator.kinds import (
    ALL_CHILD_TYPES,
    CHILD_TYPES,
    CLAIMS,
    CONFIG_MAPS,
    EVENTS,
    INFERENCE_SERVICES,
    JOBS,
    NODES,
    OPTIONAL_TYPES,
    PODS,
    REPLICA_SETS,
    SECRETS,
    WATCHED_TYPES,
    ResourceType,
)
from reprise_operator.naming import MANAGED_BY
from reprise_operator.observed import ObservedChild
from reprise_operator.recall import Memo
from reprise_operator.references import ReferenceKind
from reprise_operator.server_side_apply import ApplyOutcome, ApplyResult, apply
from reprise_operator.settings import FIELD_MANAGER

# Of a log. The API server's own limitBytes would keep the beginning, so the end is kept here.
LOG_LINES = 1000
LOG_BYTES = 64 * 1024
METADATA_ONLY = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"
METADATA_LIST = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"


@dataclass(frozen=True, slots=True)
class Key:
    """An InferenceService by namespace and name: what the work queue holds."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


class Cluster:
    """What the operator reads and writes, in its own words."""

    def __init__(self, api: Api) -> None:
        self._api = api

    def remembering(self, memo: Memo) -> Cluster:
        """The same cluster as one pass with that memo sees it (recall.py)."""
        cluster = copy.copy(self)
        cluster._api = self._api.remembering(memo)
        return cluster

    # Reads ----------------------------------------------------------------------------------------------------------

    async def get_service(self, key: Key) -> Body | None:
        """The InferenceService, None when there is none (any more)."""
        return await self._api.get(INFERENCE_SERVICES, key.namespace, key.name)

    async def list_services(self, namespace: str | None) -> tuple[Body, ...]:
        return await self._api.list(INFERENCE_SERVICES, namespace)

    async def list_marked(self, resource: ResourceType, namespace: str | None) -> tuple[Body, ...]:
        """The objects of a kind that carry our label, metadata only. Raises ClusterError with NOT_FOUND when there is
        no such kind."""
        return await self._api.list(resource, namespace, MANAGED_BY, accept=METADATA_LIST)

    async def children(
        self,
        namespace: str,
        *,
        owner_uid: str,
        selector: Mapping[str, str],
        planned: Sequence[tuple[str, str]],
        optional: Collection[ResourceType] = (),
    ) -> tuple[ObservedChild, ...]:
        """The objects under one of the `planned` names, given as (kind, name), or with our selector's labels and our
        owner UID. A planned name that the listing lacks is asked for by itself: it may belong to somebody else, or
        have lost its labels. Of the optional kinds only those in `optional` are looked at."""
        kinds = (*CHILD_TYPES, *(kind for kind in OPTIONAL_TYPES if kind in optional))
        found: dict[tuple[str, str], ObservedChild] = {}
        listings = await _gather(*(self._list_children(kind, namespace, selector) for kind in kinds))
        for resource, bodies in zip(kinds, listings, strict=True):
            for body in bodies:
                child = _child(resource, body, owner_uid)
                if child.owned or (child.kind, child.name) in planned:
                    found[child.kind, child.name] = child
        by_kind = {resource.kind: resource for resource in kinds}
        missing = [(by_kind[kind], name) for kind, name in planned if (kind, name) not in found]
        for (resource, name), present in zip(
            missing, await _gather(*(self._api.get(kind, namespace, name) for kind, name in missing)), strict=True
        ):
            if present is not None:
                found[resource.kind, name] = _child(resource, present, owner_uid)
        return tuple(found[name] for name in sorted(found))

    async def _list_children(
        self, resource: ResourceType, namespace: str, selector: Mapping[str, str]
    ) -> tuple[Body, ...]:
        try:
            return await self._api.list(resource, namespace, selector, cached=resource in WATCHED_TYPES)
        except ClusterError as error:
            if error.fault is Fault.NOT_FOUND and resource in OPTIONAL_TYPES:
                return ()  # its CRD was deleted since the last poll
            raise

    async def pods(self, namespace: str, selector: Mapping[str, str]) -> tuple[Body, ...]:
        return await self._api.list(PODS, namespace, selector, cached=True)

    async def log_tail(
        self, namespace: str, pod: str, container: str, *, previous: bool = True, limit: int = LOG_BYTES
    ) -> str:
        """The last `limit` bytes of the log of a container's previous or present run."""
        query = {"container": container, "previous": str(previous).lower(), "tailLines": str(LOG_LINES)}
        return await self._api.tail(PODS, namespace, pod, subresource="log", query=query, limit=limit)

    async def pod_log(
        self, namespace: str, pod: str, container: str, *, previous: bool, limit: int = LOG_BYTES
    ) -> str | None:
        """The same; None where there is none, or it may not be read, or its node does not answer."""
        try:
            return await self.log_tail(namespace, pod, container, previous=previous, limit=limit)
        except ClusterError:
            return None

    async def job(self, namespace: str, name: str) -> Body | None:
        return await self._api.get(JOBS, namespace, name)

    async def nodes_and_pods(self) -> tuple[tuple[Body, ...], tuple[Body, ...]] | None:
        """All nodes, and the pods of all namespaces; None where they may not be read."""
        try:
            nodes, pods = await _gather(self._api.list(NODES, None), self._api.list(PODS, None))
        except ClusterError as error:
            if error.fault is Fault.FORBIDDEN:
                return None
            raise
        return nodes, pods

    async def events_about(self, namespace: str, uid: str) -> tuple[Body, ...]:
        """The events about one object."""
        return await self._api.list(EVENTS, namespace, fields={"involvedObject.uid": uid})

    async def replica_sets(self, namespace: str, selector: Mapping[str, str]) -> tuple[Body, ...]:
        return await self._api.list(REPLICA_SETS, namespace, selector)

    async def contents(self, kind: ReferenceKind, namespace: str, name: str) -> Mapping[str, bytes] | None:
        """The entries of a Secret or ConfigMap; None when there is no such object."""
        body = await self._api.get(SECRETS if kind == "Secret" else CONFIG_MAPS, namespace, name)
        if body is None:
            return None
        entries = {key: str(value).encode() for key, value in (body.get("data") or {}).items()}
        encoded = entries if kind == "Secret" else (body.get("binaryData") or {})
        return {**entries, **{key: base64.b64decode(value) for key, value in encoded.items()}}

    async def missing_secrets(self, namespace: str, names: Sequence[str]) -> tuple[str, ...]:
        return await self._missing(SECRETS, namespace, names)

    async def missing_claims(self, namespace: str, names: Sequence[str]) -> tuple[str, ...]:
        return await self._missing(CLAIMS, namespace, names)

    async def missing_config_maps(self, namespace: str, names: Sequence[str]) -> tuple[str, ...]:
        return await self._missing(CONFIG_MAPS, namespace, names)

    async def _missing(self, resource: ResourceType, namespace: str, names: Sequence[str]) -> tuple[str, ...]:
        present = await _gather(*(self._exists(resource, namespace, name) for name in names))
        return tuple(name for name, exists in zip(names, present, strict=True) if exists is False)

    async def _exists(self, resource: ResourceType, namespace: str, name: str) -> bool | None:
        """None when we may not know: then the kubelet's own message says what is missing."""
        try:
            return await self._api.get(resource, namespace, name, accept=METADATA_ONLY) is not None
        except ClusterError as error:
            if error.fault is Fault.FORBIDDEN:
                return None
            raise

    # Writes ---------------------------------------------------------------------------------------------------------

    async def apply(
        self, manifest: Body, *, present: ObservedChild | None, hand_over: int | None = None
    ) -> ApplyResult:
        """Applies a child on the server side: see `server_side_apply.apply`."""
        return await apply(self._api, manifest, present=present, hand_over=hand_over)

    async def scale(self, namespace: str, *, kind: str, name: str, uid: str, replicas: int) -> bool:
        """Sets the replicas of a workload if it is still this very object. False when it was gone or another one."""
        change = {"metadata": {"uid": uid}, "spec": {"replicas": replicas}}
        resource = next(resource for resource in ALL_CHILD_TYPES if resource.kind == kind)
        try:
            await self._api.request(
                "patch",
                resource,
                namespace,
                name,
                body=change,
                content_type=MERGE_PATCH,
                field_manager=FIELD_MANAGER,
            )
        except ClusterError as error:
            if error.fault in (Fault.NOT_FOUND, Fault.CONFLICT):
                return False
            raise
        return True

    async def delete(self, namespace: str, *, kind: str, name: str, uid: str) -> bool:
        """Deletes a child or a pod if it is still this very object. False when it was gone or another one already."""
        resource = next(resource for resource in (*ALL_CHILD_TYPES, PODS) if resource.kind == kind)
        options = {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            "preconditions": {"uid": uid},
            "propagationPolicy": "Background",
        }
        try:
            await self._api.request("delete", resource, namespace, name, body=options)
        except ClusterError as error:
            if error.fault in (Fault.NOT_FOUND, Fault.CONFLICT):
                return False
            raise
        return True

    async def create_job(self, manifest: Body) -> ApplyResult:
        """Creates a Job. CONFLICT: there is one of its name already."""
        try:
            answer = await self._api.request(
                "create", JOBS, manifest["metadata"]["namespace"], body=manifest, field_manager=FIELD_MANAGER
            )
        except ClusterError as error:
            if error.fault is Fault.CONFLICT:
                return ApplyResult(outcome=ApplyOutcome.CONFLICT, message=error.message)
            if error.fault in (Fault.INVALID, Fault.FORBIDDEN, Fault.NOT_FOUND):
                return ApplyResult(outcome=ApplyOutcome.REFUSED, message=error.message)
            raise
        return ApplyResult(outcome=ApplyOutcome.CREATED, body=answer)

    async def delete_job(self, namespace: str, name: str) -> None:
        """Deletes a Job with its pods, if there is one."""
        options = {"apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": "Background"}
        try:
            await self._api.request("delete", JOBS, namespace, name, body=options)
        except ClusterError as error:
            if error.fault is not Fault.NOT_FOUND:
                raise

    async def patch_status(self, service: Body, status: Body) -> Body | None:
        """Makes the status of `service` (as just read) equal to `status`.

        None when it already is (no request then), or when the service has been deleted meanwhile.
        Raises ClusterError with CONFLICT when the object has changed since it was read.
        """
        present = service.get("status", {})
        difference = merge_difference(present, status)
        if not difference:
            return None
        metadata = service["metadata"]
        try:
            return await self._api.request(
                "patch",
                INFERENCE_SERVICES,
                metadata["namespace"],
                metadata["name"],
                subresource="status",
                body={"metadata": {"resourceVersion": metadata["resourceVersion"]}, "status": difference},
                content_type=MERGE_PATCH,
                field_manager=FIELD_MANAGER,
            )
        except ClusterError as error:
            if error.fault is Fault.NOT_FOUND:
                return None
            raise

    async def create_event(self, namespace: str, event: Body) -> None:
        await self._api.request("create", EVENTS, namespace, body=event, field_manager=FIELD_MANAGER)

    async def patch_event(self, namespace: str, name: str, change: Body) -> None:
        await self._api.request(
            "patch", EVENTS, namespace, name, body=change, content_type=MERGE_PATCH, field_manager=FIELD_MANAGER
        )


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


def _child(resource: ResourceType, body: Body, owner_uid: str) -> ObservedChild:
    owners = body["metadata"].get("ownerReferences") or ()
    owned = any(owner.get("controller") and owner.get("uid") == owner_uid for owner in owners)
    return observed_child(body, api_version=resource.api_version, kind=resource.kind, owned=owned)


async def _gather(*requests: Any) -> list[Any]:
    """All at once; the first failure is raised after the others have ended, so none is left running."""
    results = await asyncio.gather(*requests, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results
