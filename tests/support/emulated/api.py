"""Reads and writes of objects: everything between the HTTP request and the store."""

from __future__ import annotations

import copy
import random
import string
import uuid
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from . import errors
from .builtins import Resource, admit, builtin_resources, prepare
from .definitions import definition_causes, establish
from .errors import ApiError, Cause, Json
from .fields import Managers, Path, check_declared, compare, to_set
from .patch import json_patch, merge_patch, strategic_merge
from .rules import check, unreadable
from .schema import metadata_causes, prune, set_defaults, validate
from .store import Store
from .table import json_path

APPLY, STRATEGIC = "application/apply-patch+yaml", "application/strategic-merge-patch+json"
JSON_PATCH, MERGE = "application/json-patch+json", "application/merge-patch+json"
_ENDING = ("deletionTimestamp", "deletionGracePeriodSeconds")
_FIXED = ("uid", "creationTimestamp", "generation", *_ENDING, "name", "namespace", "managedFields", "resourceVersion")
_RETURNED = {"Pod", "Service", "Namespace", "PersistentVolumeClaim", "ServiceAccount"}
"""Kinds whose deletion answers with the object instead of a Status."""


@dataclass(kw_only=True)
class Call:
    """The parameters of a write, and the warnings it causes."""

    manager: str = "unknown"
    subresource: str = ""
    dry_run: bool = False
    strict: bool = False
    ignore: bool = False
    force: bool = False
    warnings: list[str] = field(default_factory=list)


def stamp(moment: datetime | None = None) -> str:
    return (moment or datetime.now(UTC)).strftime("%Y-%m-%dT%H:%M:%SZ")


class Api:
    """The kinds that are served and the objects there are. Methods raise ApiError."""

    def __init__(self) -> None:
        self.store = Store()
        self.resources = {(each.group, each.version, each.plural): each for each in builtin_resources()}
        self.namespaces = self.resources["", "v1", "namespaces"]
        self.definitions = self.resources["apiextensions.k8s.io", "v1", "customresourcedefinitions"]
        self._defaulted: set[str] = set()
        """Custom objects whose status is a default: the real server has not stored that, so their next write counts."""
        for name in ("default", "kube-node-lease", "kube-public", "kube-system"):
            self.create(self.namespaces, "", {"metadata": {"name": name}}, Call())

    def get(self, resource: Resource, namespace: str, name: str) -> Json:
        found = self.store.get(resource, namespace, name)
        if found is None:
            raise errors.not_found(resource, name)
        return found

    def create(self, resource: Resource, namespace: str, body: Json, call: Call, *, applied: bool = False) -> Json:
        new = self._decode(resource, namespace, body, call)
        meta = new["metadata"]
        if "name" not in meta and meta.get("generateName"):
            suffix = "".join(random.choices(string.ascii_lowercase + string.digits, k=5))
            meta["name"] = meta["generateName"] + suffix
        for dropped in ("resourceVersion", "managedFields", *_ENDING):
            meta.pop(dropped, None)
        meta |= {
            "uid": str(uuid.uuid4()),
            "creationTimestamp": stamp(),
            **({"generation": 1} if resource.generation else {}),
        }
        if "status" in resource.subresources:
            new.pop("status", None)
        set_defaults(new, resource.schema)
        prepare(resource, new, None)
        managers = Managers([])
        held = to_set(body, resource.schema) if applied else compare(resource.seed, new, resource.schema)[0]
        key = (call.manager, "Apply" if applied else "Update", resource.api_version, "")
        managers.sets[key] = {path for path in held if _owned(resource, "", path)}
        admit(resource, new, None)
        self._check(resource, new, None)
        if resource.namespaced and self.store.get(self.namespaces, "", namespace) is None:
            raise errors.not_found(self.namespaces, namespace)
        if self.store.get(resource, namespace, meta["name"]) is not None:
            raise errors.already_exists(resource, meta["name"])
        meta["managedFields"] = managers.entries(Managers([]), stamp())
        if call.dry_run:
            return new
        if resource.custom and "status" in new:
            self._defaulted.add(meta["uid"])
        return self._put(resource, new)

    def replace(self, resource: Resource, namespace: str, name: str, body: Json, call: Call) -> Json:
        given = body.get("metadata", {}).get("name", name)
        if given != name:
            raise errors.bad_request(f"the name of the object ({given}) does not match the name on the URL ({name})")
        old = self.get(resource, namespace, name)
        new = self._decode(resource, namespace, body, call)
        if "resourceVersion" not in new["metadata"] and resource.custom:
            message = "Invalid value: 0: must be specified for an update"
            cause = Cause("FieldValueInvalid", "metadata.resourceVersion", message)
            raise errors.invalid(name, [cause], group=resource.group, kind=resource.plural)
        return self.update(resource, old, new, call)

    def patch(
        self, resource: Resource, namespace: str, name: str, kind: str, body: Any, call: Call
    ) -> tuple[int, Json]:
        """Returns the status code (201 where an apply created the object) and the object."""
        accepted = [JSON_PATCH, MERGE, *([] if resource.custom else [STRATEGIC]), APPLY]
        if kind not in accepted:
            types = f"accepted media types include: {', '.join(accepted)}"
            message = f"the body of the request was in an unknown format - {types}"
            raise ApiError(415, "UnsupportedMediaType", message)
        if kind == APPLY:
            return self._apply(resource, namespace, name, body, call)
        old = self.get(resource, namespace, name)
        if kind == JSON_PATCH:
            patched = json_patch(old, body)
        else:
            patched = merge_patch(old, body) if kind == MERGE else strategic_merge(old, body, resource.schema)
        try:
            new = self._decode(resource, namespace, patched, call)
        except ApiError as error:
            cause = Cause("FieldValueInvalid", "patch", f"Invalid value: {error.message}")
            raise errors.invalid("", [cause], group="", kind="") from error
        return 200, self.update(resource, old, new, call)

    def _apply(self, resource: Resource, namespace: str, name: str, body: Json, call: Call) -> tuple[int, Json]:
        old, meta = self.store.get(resource, namespace, name), body.get("metadata") or {}
        body = {**body, "metadata": {"name": name, **({"namespace": namespace} if namespace else {}), **meta}}
        if meta.get("managedFields"):
            raise errors.bad_request("metadata.managedFields must be nil")
        for problem in check_declared(body, resource.schema):
            what = f"/{name}; {resource.api_version}, Kind={resource.kind}"
            raise ApiError(500, None, f"failed to create typed patch object ({what}): {problem}")
        if old is None:
            if "uid" in meta:
                given = f"the provided object specified uid {meta['uid']}"
                raise errors.conflict(resource, name, f"uid mismatch: {given}, and no existing object was found")
            if call.subresource:
                raise errors.not_found(resource, name)
            return 201, self.create(resource, namespace, body, call, applied=True)
        if meta.get("uid", old["metadata"]["uid"]) != old["metadata"]["uid"]:
            cause = Cause("FieldValueInvalid", "metadata.uid", f'Invalid value: "{meta["uid"]}": field is immutable')
            causes = [cause] * (2 if resource.custom else 1)
            raise errors.invalid(name, causes, group=resource.group, kind=resource.kind)
        managers = Managers(old["metadata"]["managedFields"])
        key = (call.manager, "Apply", resource.api_version, call.subresource)
        wanted = {path for path in to_set(body, resource.schema) if _owned(resource, call.subresource, path)}
        new = managers.apply(key, old, body, wanted, resource.schema, force=call.force)
        return 200, self.update(resource, old, self._decode(resource, namespace, new, call), call, managers)

    def update(self, resource: Resource, old: Json, new: Json, call: Call, managers: Managers | None = None) -> Json:
        """Stores `new` in place of `old`, as the subresource allows. `managers` are those after an apply."""
        name, was, meta = old["metadata"]["name"], old["metadata"], new["metadata"]
        if meta.get("resourceVersion", was["resourceVersion"]) != was["resourceVersion"]:
            why = "the object has been modified; please apply your changes to the latest version and try again"
            raise errors.conflict(resource, name, why)
        if meta.get("uid", was["uid"]) != was["uid"]:
            key = "/".join(filter(None, ("/registry", resource.group, resource.plural, was.get("namespace"), name)))
            why = f"StorageError: invalid object, Code: 4, Key: {key}, ResourceVersion: 0, AdditionalErrorMsg: "
            why += f"Precondition failed: UID in precondition: {meta['uid']}, UID in object meta: {was['uid']}"
            raise errors.conflict(resource, name, why)
        new = self._within(resource, old, new, call.subresource)
        new["metadata"] |= {key: was[key] for key in _FIXED if key in was}
        set_defaults(new, resource.schema)
        prepare(resource, new, old)
        if managers is None:
            managers = Managers(was["managedFields"])
            changed, removed = compare(old, new, resource.schema)
            changed = {path for path in changed if _owned(resource, call.subresource, path)}
            managers.update((call.manager, "Update", resource.api_version, call.subresource), changed, removed)
        admit(resource, new, old)
        self._check(resource, new, old)
        new["metadata"]["managedFields"] = managers.entries(Managers(was["managedFields"]), stamp())
        if resource.generation and _content(new) != _content(old):
            new["metadata"]["generation"] = was["generation"] + 1
        if call.dry_run or (new == old and was["uid"] not in self._defaulted):
            return new
        self._defaulted.discard(was["uid"])
        graceful = resource.kind == "Pod" and was.get("deletionGracePeriodSeconds")
        if was.get("deletionTimestamp") and not new["metadata"].get("finalizers") and not graceful:
            self._remove(resource, old)
            return new
        return self._put(resource, new)

    @staticmethod
    def _within(resource: Resource, old: Json, new: Json, subresource: str) -> Json:
        """`new` as far as the subresource reaches: /status is the status alone, anything else leaves it."""
        if "status" not in resource.subresources:
            return {**new, "metadata": dict(new["metadata"])}
        rest, status = (old, new) if subresource == "status" else (new, old)
        kept = {key: value for key, value in rest.items() if key != "status"}
        return {
            **kept,
            "metadata": dict(rest["metadata"]),
            **({"status": status["status"]} if "status" in status else {}),
        }

    def delete(self, resource: Resource, namespace: str, name: str, options: Json, call: Call) -> Json:
        old = self.get(resource, namespace, name)
        meta, wanted = old["metadata"], options.get("preconditions") or {}
        for key, title in (("uid", "UID"), ("resourceVersion", "ResourceVersion")):
            if wanted.get(key, meta[key]) != meta[key]:
                why = f"the {title} in the precondition ({wanted[key]}) does not match the {title} in record "
                why += f"({meta[key]}). The object might have been "
                done = "deleted and then recreated" if key == "uid" else "modified"
                raise errors.conflict(resource, name, why + done, resource.kind)
        seconds = options.get("gracePeriodSeconds")
        if resource.kind == "Pod":
            idle = old["status"].get("phase") in ("Succeeded", "Failed") or not old["spec"].get("nodeName")
            given = old["spec"].get("terminationGracePeriodSeconds", 30) if seconds is None else seconds
            seconds = 0 if idle else given
        extra = {"Foreground": ["foregroundDeletion"], "Orphan": ["orphan"]}.get(
            options.get("propagationPolicy", ""), []
        )
        if not call.dry_run:
            if resource is self.namespaces:
                for kind, item in self._contents(name):
                    self.delete(kind, name, item["metadata"]["name"], {}, Call())
                extra = ["kubernetes"] if self._contents(name) else []
            finalizers = [*meta.get("finalizers", []), *extra]
            stays = bool(finalizers or (seconds and resource.kind == "Pod"))
            if stays or resource.kind == "Pod":
                old = self._mark(resource, old, seconds or 0, finalizers)
            if not stays:
                self._remove(resource, old)
            if stays or resource.kind in _RETURNED:
                return old
        details = {"name": name, "group": resource.group, "kind": resource.plural, "uid": meta["uid"]}
        details = {key: value for key, value in details.items() if value}
        return {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "details": details}

    def _mark(self, resource: Resource, old: Json, seconds: int, finalizers: list[str]) -> Json:
        """The object with its deletion announced; a shorter grace period replaces a longer one."""
        new = copy.deepcopy(old)
        meta, earlier = new["metadata"], old["metadata"].get("deletionGracePeriodSeconds")
        if earlier is None or seconds < earlier:
            ends = stamp(datetime.now(UTC) + timedelta(seconds=seconds))
            meta |= {"deletionTimestamp": ends, "deletionGracePeriodSeconds": seconds}
        if earlier is None and resource.generation:
            meta["generation"] += 1
        if resource is self.namespaces:
            new["status"] = {"phase": "Terminating"}
        elif finalizers:
            meta["finalizers"] = finalizers
        return new if new == old else self._put(resource, new)

    def _put(self, resource: Resource, item: Json) -> Json:
        if resource is self.definitions:
            made = establish(item, resource, since=self.store.version + 1, now=stamp())
            self.resources[made.group, made.version, made.plural] = made
        return self.store.put(resource, item)

    def _contents(self, namespace: str) -> list[tuple[Resource, Json]]:
        kinds = [each for each in self.resources.values() if each.namespaced]
        return [(kind, item) for kind in kinds for item in self.store.list(kind, namespace)]

    def _remove(self, resource: Resource, item: Json) -> None:
        namespace = item["metadata"].get("namespace", "")
        self.store.delete(resource, namespace, item["metadata"]["name"])
        if resource is self.definitions:
            for kind in [each for each in self.resources.values() if each.custom]:
                if item["metadata"]["name"] == f"{kind.plural}.{kind.group}":
                    for each in self.store.list(kind, None):
                        self._remove(kind, each)
                    del self.resources[kind.group, kind.version, kind.plural]
        holder = self.store.get(self.namespaces, "", namespace) if namespace else None
        if holder and holder["metadata"].get("deletionTimestamp") and not self._contents(namespace):
            self.store.delete(self.namespaces, "", namespace)

    def _decode(self, resource: Resource, namespace: str, body: Json, call: Call) -> Json:
        """A pruned copy of what was sent, of the right kind and namespace. Raises 400 or warns for unknown fields."""
        if body.get("kind", resource.kind) != resource.kind:
            cause = Cause("FieldValueInvalid", "kind", f'Invalid value: "{body["kind"]}": must be {resource.kind}')
            raise errors.invalid(body["metadata"].get("name", ""), [cause], group=resource.group, kind=body["kind"])
        unknown: list[str] = []
        new: Json = prune(body, resource.schema, unknown)
        problems = [f'unknown field "{path}"' for path in unknown]
        if problems and call.strict:
            raise errors.bad_request(f"{_unreadable(resource)}: strict decoding error: {', '.join(problems)}")
        call.warnings += [] if call.ignore else problems
        meta = {key: value for key, value in (new.get("metadata") or {}).items() if value not in ({}, [], None)}
        if meta.get("namespace", namespace) != namespace:
            message = "the namespace of the provided object does not match the namespace sent on the request"
            raise errors.bad_request(message)
        meta |= {"namespace": namespace} if namespace else {}
        return {**new, "apiVersion": resource.api_version, "kind": resource.kind, "metadata": meta}

    def _check(self, resource: Resource, new: Json, old: Json | None) -> None:
        causes = validate(new, old, resource.validator, metadata_causes(new["metadata"]))
        typed = [cause for cause in causes if cause.reason == "FieldValueTypeInvalid"]
        if not resource.custom and typed:
            raise errors.bad_request(f"{_unreadable(resource)}: {typed[0]}")
        if not resource.custom and (why := unreadable(resource, new)):
            raise errors.bad_request(f"{_unreadable(resource)}: {why}")
        path = resource.scale_paths.get("specReplicasPath", "")
        asked = json_path(new, path) if path else None
        if resource.custom and isinstance(asked, int) and asked < 0:
            message = f"Invalid value: {asked}: should be a non-negative integer"
            causes.append(Cause("FieldValueInvalid", path, message))
        if not resource.custom:
            causes = [cause for cause in causes if cause.field != "<nil>"] + check(resource, new, old)
        if resource is self.definitions and not causes:
            causes = definition_causes(new)
        if causes:
            raise errors.invalid(new["metadata"].get("name", ""), causes, group=resource.group, kind=resource.kind)


def _unreadable(resource: Resource) -> str:
    return f'{resource.kind} in version "{resource.version}" cannot be handled as a {resource.kind}'


def _content(item: Json) -> Json:
    return {key: value for key, value in item.items() if key not in ("metadata", "status")}


def _owned(resource: Resource, subresource: str, path: Path) -> bool:
    """Whether a write through this subresource can own the field."""
    return (path[0] == "f:status") == (subresource == "status") or "status" not in resource.subresources
