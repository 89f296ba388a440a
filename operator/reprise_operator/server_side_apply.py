"""Server-side apply of one child: who owns which field, whose object it is, and what becomes of it."""

from __future__ import annotations

import enum
import json
import re
from dataclasses import dataclass, replace

from reprise_operator.api import MERGE_PATCH, Api, Body, ClusterError, Fault
from reprise_operator.kinds import ALL_CHILD_TYPES, ResourceType
from reprise_operator.observed import ObservedChild
from reprise_operator.settings import FIELD_MANAGER

RESET_MANAGER = f"{FIELD_MANAGER}-reset"
REPLICAS_MANAGER = f"{FIELD_MANAGER}-replicas"
APPLY_PATCH = "application/apply-patch+yaml; charset=utf-8"
"""With its charset the client library sends a text as it is; without, it would make JSON of it."""
# Any escape of JSON; a pair of surrogates, which is one character, as two groups.
_ESCAPE = re.compile(r"\\(?:u(d[89ab][0-9a-f]{2})\\u(d[c-f][0-9a-f]{2})|.)")


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


async def apply(
    api: Api, manifest: Body, *, present: ObservedChild | None, hand_over: int | None = None
) -> ApplyResult:
    """Applies a child on the server side.

    `present` is the object as just read, and it must be ours; None when there was none. An absent one is created
    without force, so a field that somebody else set in the meantime is a CONFLICT rather than ours. A present one
    is applied with its UID, so an object that was replaced in the meantime is a CONFLICT too, and with force: the
    fields of the manifest are ours, and an edit of one of them by somebody else ends here (see also `_reset`).
    `hand_over` is the number of pods of `present`, where the manifest leaves it out and it is not to be lost.
    """
    try:
        if present is not None and hand_over is not None:
            present = await _hand_over(api, present, manifest["metadata"]["namespace"], hand_over)
        try:
            answer = await _apply(api, manifest, present)
        except ClusterError as error:
            if present is None or error.status != 422 or "spec" not in manifest:
                raise
            await _reset(api, manifest, present, error)
            answer = await _apply(api, manifest, present)
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


async def _apply(api: Api, manifest: Body, present: ObservedChild | None) -> Body:
    metadata = manifest["metadata"]
    if present is not None:
        manifest = {**manifest, "metadata": {**metadata, "uid": present.uid}}
    return await api.request(
        "patch",
        _resource_type(manifest),
        metadata["namespace"],
        metadata["name"],
        body=yaml_of(manifest),
        content_type=APPLY_PATCH,
        field_manager=FIELD_MANAGER,
        force_conflicts="true" if present is not None else "false",
    )


async def _reset(api: Api, manifest: Body, present: ObservedChild, refused: ClusterError) -> None:
    """Clears the way for an apply that came out invalid because of what somebody else put into our lists.

    An apply merges lists by their keys, so it only adds: after an edit of a Service's port it would ask for two
    ports of one name, for ever. A merge patch replaces lists whole. Its own ownership of them is taken out again:
    two owners, and a later apply could not remove an element. Raises `refused` when the manifest itself is invalid.
    """
    metadata = manifest["metadata"]

    async def patch(change: Body, resource_version: str) -> Body:
        identity = {"uid": present.uid, "resourceVersion": resource_version}
        return await api.request(
            "patch",
            _resource_type(manifest),
            metadata["namespace"],
            metadata["name"],
            body={**change, "metadata": {**change.get("metadata", {}), **identity}},
            content_type=MERGE_PATCH,
            field_manager=RESET_MANAGER,
        )

    try:
        answer = await patch({"spec": manifest["spec"]}, present.body["metadata"]["resourceVersion"])
    except ClusterError as error:
        raise refused if error.fault is Fault.INVALID else error from refused
    others = [entry for entry in answer["metadata"]["managedFields"] if entry["manager"] != RESET_MANAGER]
    await patch({"metadata": {"managedFields": others}}, answer["metadata"]["resourceVersion"])


async def _hand_over(api: Api, workload: ObservedChild, namespace: str, replicas: int) -> ObservedChild:
    """Lets another field manager of ours apply the number of pods that `workload` has; the workload after it.

    A CONFLICT when it has changed since it was read: an autoscaler may have written another number.
    """
    metadata = workload.body["metadata"]
    body = {
        "apiVersion": workload.api_version,
        "kind": workload.kind,
        "metadata": {key: metadata[key] for key in ("name", "namespace", "uid", "resourceVersion")},
        "spec": {"replicas": replicas},
    }
    answer = await api.request(
        "patch",
        _resource_type(body),
        namespace,
        workload.name,
        body=yaml_of(body),
        content_type=APPLY_PATCH,
        field_manager=REPLICAS_MANAGER,
        force_conflicts="false",
    )
    return replace(workload, body=answer)


def yaml_of(body: Body) -> str:
    """`body` as JSON that is YAML, too: as that the API server reads an apply. YAML has no pairs of surrogates, so what
    JSON would escape by one (an emoji in a prompt) stands for itself."""

    def escape(found: re.Match[str]) -> str:
        high, low = found.groups()
        return found[0] if high is None else chr(0x10000 + (int(high, 16) - 0xD800 << 10) + int(low, 16) - 0xDC00)

    return _ESCAPE.sub(escape, json.dumps(body))


def _resource_type(manifest: Body) -> ResourceType:
    for resource in ALL_CHILD_TYPES:
        if (resource.api_version, resource.kind) == (manifest["apiVersion"], manifest["kind"]):
            return resource
    raise ValueError(f"no child type is declared for {manifest['apiVersion']} {manifest['kind']}")
