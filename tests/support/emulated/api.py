"""Reads and writes of objects: everything between the HTTP request and the store."""

import copy
import uuid
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import jsonpatch
import jsonpointer

from .builtins import Resource, admit, builtin_resources, custom_resource, prepare
from .errors import Json, details, refusal
from .fields import Managers, Path, compare, merge_patch, to_set
from .schema import check, prune, set_defaults
from .store import Store

JSON_PATCH, MERGE = "application/json-patch+json", "application/merge-patch+json"
APPLY, STRATEGIC = "application/apply-patch+yaml", "application/strategic-merge-patch+json"
_ENDING = ("deletionTimestamp", "deletionGracePeriodSeconds")
_FIXED = ("uid", "creationTimestamp", "generation", *_ENDING, "name", "namespace", "managedFields", "resourceVersion")
_RETURNED = {"Pod", "Service", "Namespace", "PersistentVolumeClaim", "ServiceAccount"}  # by DELETE, not a Status
_FINALIZERS = {"Foreground": ["foregroundDeletion"], "Orphan": ["orphan"]}


@dataclass
class Call:
    """A request about objects of one kind, and the warnings it causes."""

    resource: Resource
    namespace: str = ""
    name: str = ""
    subresource: str = ""
    manager: str = "unknown"
    dry_run: bool = False
    strict: bool = False
    force: bool = False
    warnings: list[str] = field(default_factory=list)

    def owner(self, operation: str) -> tuple[str, str, str, str]:
        return (self.manager, operation, self.resource.api_version, self.subresource)

    def owned(self, paths: set[Path]) -> set[Path]:
        """Those that a write through this subresource can own."""
        whole, status = "status" not in self.resource.subresources, self.subresource == "status"
        return {path for path in paths if whole or (path[0] == "f:status") == status}


def stamp(seconds: int = 0) -> str:
    """The time, or that in some seconds."""
    return (datetime.now(UTC) + timedelta(seconds=seconds)).strftime("%Y-%m-%dT%H:%M:%SZ")


class Api:
    """The kinds that are served and the objects there are. Methods raise ApiError."""

    def __init__(self) -> None:
        self.store = Store()
        self.resources = {(each.group, each.version, each.plural): each for each in builtin_resources()}
        self.namespaces = self.resources["", "v1", "namespaces"]
        for name in ("default", "kube-node-lease", "kube-public", "kube-system"):
            self.create(Call(self.namespaces), {"metadata": {"name": name}})

    def get(self, call: Call) -> Json:
        found = self.store.get(call.resource, call.namespace, call.name)
        if found is None:
            raise refusal("NotFound", call.resource, call.name)
        return found

    def create(self, call: Call, body: Json, *, applied: bool = False) -> Json:
        resource, new, managers = call.resource, self._decode(call, body), Managers([])
        meta = new["metadata"]
        if not meta.get("name") and meta.get("generateName"):
            meta["name"] = meta["generateName"] + uuid.uuid4().hex[:5]
        for dropped in ("resourceVersion", "managedFields", *_ENDING):
            meta.pop(dropped, None)
        meta |= {"uid": str(uuid.uuid4()), "creationTimestamp": stamp()}
        meta |= {"generation": 1} if resource.generation else {}
        if "status" in resource.subresources:
            new.pop("status", None)
        set_defaults(new, resource.schema)
        prepare(resource, new, None)
        held = to_set(body, resource.schema) if applied else compare(resource.seed, new, resource.schema)[0]
        managers.sets[call.owner("Apply" if applied else "Update")] = call.owned(held)
        new = merge_patch(resource.admitted, new, {})
        admit(resource, new)
        check(resource, new, None)
        if resource.namespaced:
            self.get(Call(self.namespaces, name=call.namespace))
        if self.store.get(resource, call.namespace, meta["name"]) is not None:
            raise refusal("Exists", resource, meta["name"])
        new["metadata"]["managedFields"] = managers.entries(stamp())
        return new if call.dry_run else self._put(resource, new)

    def replace(self, call: Call, body: Json) -> Json:
        given = body.get("metadata", {}).get("name", call.name)
        if given != call.name:
            raise refusal("Name", call.resource, call.name, given=given)
        old, new = self.get(call), self._decode(call, body)
        if "resourceVersion" not in new["metadata"] and call.resource.custom:
            raise refusal("NoVersion", call.resource, call.name)
        return self.update(call, old, new)

    def patch(self, call: Call, kind: str, body: Any) -> tuple[int, Json]:
        """Returns the status code (201 where an apply created the object) and the object."""
        accepted = [JSON_PATCH, MERGE, *([] if call.resource.custom else [STRATEGIC]), APPLY]
        if kind not in accepted:
            raise refusal("MediaType", accepted=", ".join(accepted))
        if kind == APPLY:
            return self._apply(call, body)
        old, schema = self.get(call), call.resource.schema if kind == STRATEGIC else {}
        try:
            new = jsonpatch.apply_patch(old, body) if kind == JSON_PATCH else merge_patch(old, body, schema)
        except (jsonpatch.JsonPatchException, jsonpointer.JsonPointerException, TypeError) as error:
            raise refusal("JsonPatch") from error
        return 200, self.update(call, old, self._decode(call, new))

    def _apply(self, call: Call, body: Json) -> tuple[int, Json]:
        resource, name, meta = call.resource, call.name, body.get("metadata") or {}
        if meta.get("managedFields"):
            raise refusal("ManagedFields")
        place: Json = {"name": name, "namespace": call.namespace} if call.namespace else {"name": name}
        body, unknown = {**body, "metadata": {**place, **meta}}, list[str]()
        prune(body, resource.schema, unknown)
        try:
            wanted = call.owned(to_set(body, resource.schema))
            if unknown:
                raise ValueError(f".{unknown[0]}: field not declared in schema")
        except ValueError as error:
            raise refusal("Untypable", resource, name, problem=error) from error
        old = self.store.get(resource, call.namespace, name)
        if old is None and "uid" in meta:
            raise refusal("UidMismatch", resource, name, uid=meta["uid"])
        if old is None and call.subresource:
            raise refusal("NotFound", resource, name)
        if old is None:
            return 201, self.create(call, body, applied=True)
        managers = Managers(old["metadata"]["managedFields"])
        new = managers.apply(call.owner("Apply"), old, body, wanted, resource.schema, force=call.force)
        return 200, self.update(call, old, self._decode(call, new), managers)

    def update(self, call: Call, old: Json, new: Json, managers: Managers | None = None) -> Json:
        """Stores `new` in place of `old`, as the subresource allows. `managers` are those after an apply."""
        resource, was = call.resource, old["metadata"]
        if any(new["metadata"].get(key, was[key]) != was[key] for key in ("resourceVersion", "uid")):
            raise refusal("Modified", resource, call.name)
        if "status" in resource.subresources:
            rest, status = (old, new) if call.subresource == "status" else (new, old)
            new = {k: v for k, v in {**rest, "status": status.get("status")}.items() if v is not None}
        new["metadata"] = {**new["metadata"], **{key: was[key] for key in _FIXED if key in was}}
        set_defaults(new, resource.schema)
        prepare(resource, new, old)
        if managers is None:
            managers = Managers(was["managedFields"])
            changed, removed = compare(old, new, resource.schema)
            managers.update(call.owner("Update"), call.owned(changed), removed)
        check(resource, new, old)
        new["metadata"]["managedFields"] = managers.entries(stamp())
        if resource.generation and any(new.get(key) != old.get(key) for key in {*new, *old} - {"metadata", "status"}):
            new["metadata"]["generation"] += 1
        if call.dry_run or new == old:
            return new
        graceful = resource.kind == "Pod" and was.get("deletionGracePeriodSeconds")
        if was.get("deletionTimestamp") and not new["metadata"].get("finalizers") and not graceful:
            self._remove(resource, old)
            return new
        return self._put(resource, new)

    def delete(self, call: Call, options: Json) -> Json:
        resource, old = call.resource, self.get(call)
        meta, pod = old["metadata"], resource.kind == "Pod"
        for key, value in (options.get("preconditions") or {}).items():
            if value != meta[key]:
                raise refusal(key, resource, call.name, kind=resource.kind, wanted=value, found=meta[key])
        running = pod and old["spec"].get("nodeName") and old["status"].get("phase") not in ("Succeeded", "Failed")
        seconds = int(options.get("gracePeriodSeconds", old["spec"]["terminationGracePeriodSeconds"])) if running else 0
        finalizers = [*meta.get("finalizers", []), *_FINALIZERS.get(options.get("propagationPolicy", ""), [])]
        if not call.dry_run:
            if resource is self.namespaces:
                for kind, item in self._contents(call.name):
                    self.delete(Call(kind, call.name, item["metadata"]["name"]), {})
                finalizers = ["kubernetes"] if self._contents(call.name) else []
            if finalizers or pod:
                old = self._mark(resource, old, seconds, finalizers)
            if finalizers or seconds:
                return old
            self._remove(resource, old)
        if resource.kind in _RETURNED:
            return old
        about = details(call.name, resource.group, resource.plural, uid=meta["uid"])
        return {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "details": about}

    def _mark(self, resource: Resource, old: Json, seconds: int, finalizers: list[str]) -> Json:
        """The object with its deletion announced; a shorter grace period replaces a longer one."""
        new, earlier = copy.deepcopy(old), old["metadata"].get("deletionGracePeriodSeconds")
        if earlier is None or seconds < earlier:
            new["metadata"] |= {"deletionTimestamp": stamp(seconds), "deletionGracePeriodSeconds": seconds}
        if earlier is None and resource.generation:
            new["metadata"]["generation"] += 1
        if resource is self.namespaces:
            new["status"] = {"phase": "Terminating"}
        elif finalizers:
            new["metadata"]["finalizers"] = finalizers
        return new if new == old else self._put(resource, new)

    def _put(self, resource: Resource, item: Json) -> Json:
        if resource.kind == "CustomResourceDefinition":
            made = custom_resource(item, since=self.store.version + 1)
            self.resources[made.group, made.version, made.plural] = made
        return self.store.put(resource, item)

    def _contents(self, namespace: str) -> list[tuple[Resource, Json]]:
        kinds = self.resources.values()
        return [(kind, item) for kind in kinds if kind.namespaced for item in self.store.list(kind, namespace)]

    def _remove(self, resource: Resource, item: Json) -> None:
        name, namespace = item["metadata"]["name"], item["metadata"].get("namespace", "")
        self.store.delete(resource, namespace, name)
        custom = [each for each in self.resources.values() if each.custom and f"{each.plural}.{each.group}" == name]
        for kind in custom if resource.kind == "CustomResourceDefinition" else ():
            for each in self.store.list(kind, ""):
                self._remove(kind, each)
            del self.resources[kind.group, kind.version, kind.plural]
        holder = self.store.get(self.namespaces, "", namespace)
        if holder and holder["metadata"].get("deletionTimestamp") and not self._contents(namespace):
            self.store.delete(self.namespaces, "", namespace)

    def _decode(self, call: Call, body: Json) -> Json:
        """A pruned copy of what was sent, of the right kind and namespace. Raises 400 or warns for unknown fields."""
        resource, unknown = call.resource, list[str]()
        if body.get("kind", resource.kind) != resource.kind:
            raise refusal("Kind", resource, given=body["kind"])
        new: Json = prune(body, resource.schema, unknown)
        problems = [f'unknown field "{path}"' for path in unknown]
        if problems and call.strict:
            raise refusal("Strict", resource, problems=", ".join(problems))
        call.warnings += problems
        meta = {key: value for key, value in (new.get("metadata") or {}).items() if value not in ({}, [], None)}
        if meta.get("namespace", call.namespace) != call.namespace:
            raise refusal("Namespace")
        meta |= {"namespace": call.namespace} if call.namespace else {}
        return {**new, "apiVersion": resource.api_version, "kind": resource.kind, "metadata": meta}
