"""Reads and writes of objects: everything between the HTTP request and the store."""

from __future__ import annotations

import copy
import random
import re
import string
import uuid
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any

from . import errors, fields
from .builtins import OBJECT_META, Resource, admit, builtin_resources, check, prepare
from .errors import ApiError, Cause, Json
from .patch import json_patch, merge_patch, strategic_merge
from .schema import BLOCKING, compile_rule, prune, set_defaults, validate
from .store import Store
from .table import json_path

CRDS = "customresourcedefinitions"
APPLY, STRATEGIC = "application/apply-patch+yaml", "application/strategic-merge-patch+json"
JSON_PATCH, MERGE = "application/json-patch+json", "application/merge-patch+json"
_FIXED = ("uid", "creationTimestamp", "generation", "deletionTimestamp", "deletionGracePeriodSeconds", "name", "namespace", "managedFields")  # fmt: skip
_RETURNED = {"Pod", "Service", "Namespace", "PersistentVolumeClaim", "ServiceAccount"}
"""Kinds whose deletion answers with the object instead of a Status."""


@dataclass(kw_only=True)
class Call:
    """The parameters of a write, and the warnings it causes."""

    manager: str = "unknown"
    dry_run: bool = False
    strict: bool = False
    ignore: bool = False
    force: bool = False
    warnings: list[str] = field(default_factory=list)


def now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


class Api:
    """The kinds that are served and the objects there are. Methods raise ApiError."""

    def __init__(self) -> None:
        self.store = Store()
        self._defaulted: set[str] = set()
        """Custom objects whose status is a default: a real server does not store that, so their next write is never idle."""
        self.resources = {(each.group, each.version, each.plural): each for each in builtin_resources()}
        self.namespaces, self.definitions = (
            self.resources["", "v1", "namespaces"],
            self.resources["apiextensions.k8s.io", "v1", CRDS],
        )
        for name in ("default", "kube-node-lease", "kube-public", "kube-system"):
            self.create(
                self.namespaces, "", {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}, Call()
            )

    def get(self, resource: Resource, namespace: str, name: str) -> Json:
        found = self.store.get(resource, namespace, name)
        if found is None:
            raise errors.not_found(name, group=resource.group, plural=resource.plural)
        return found

    def create(self, resource: Resource, namespace: str, body: Json, call: Call, *, applied: bool = False) -> Json:
        new = self._decode(resource, namespace, body, call)
        metadata = new["metadata"]
        if "name" not in metadata and metadata.get("generateName"):
            metadata["name"] = metadata["generateName"] + "".join(
                random.choices(string.ascii_lowercase + string.digits, k=5)
            )
        metadata |= {"uid": str(uuid.uuid4()), "creationTimestamp": now()}
        if resource.generation:
            metadata["generation"] = 1
        for key in ("resourceVersion", "deletionTimestamp", "deletionGracePeriodSeconds", "managedFields"):
            metadata.pop(key, None)
        if "status" in resource.subresources:
            new.pop("status", None)
        set_defaults(new, resource.schema)
        prepare(resource, new, None)
        managers = fields.Managers([])
        key = (call.manager, "Apply" if applied else "Update", resource.api_version, "")
        if applied:
            managers.sets[key] = {path for path in fields.to_set(body, resource.schema) if _owned(resource, "", path)}
        else:
            changed, _ = fields.compare(resource.seed, new, resource.schema)
            managers.update(key, {path for path in changed if _owned(resource, "", path)}, set())
        admit(resource, new, None)
        self._check(resource, new, None)
        if resource.namespaced and self.store.get(self.namespaces, "", namespace) is None:
            raise errors.not_found(namespace, group="", plural="namespaces")
        if self.store.get(resource, namespace, metadata["name"]) is not None:
            raise errors.already_exists(metadata["name"], group=resource.group, plural=resource.plural)
        metadata["managedFields"] = managers.entries(fields.Managers([]), now())
        if call.dry_run:
            return new
        if resource is self.definitions:
            self._establish(new)
        if resource.custom and "status" in new:
            self._defaulted.add(metadata["uid"])
        return self.store.put(resource, new)

    def replace(
        self, resource: Resource, namespace: str, name: str, body: Json, call: Call, subresource: str = ""
    ) -> Json:
        if body.get("metadata", {}).get("name", name) != name:
            given = body["metadata"]["name"]
            raise errors.bad_request(f"the name of the object ({given}) does not match the name on the URL ({name})")
        old = self.get(resource, namespace, name)
        new = self._decode(resource, namespace, body, call)
        if "resourceVersion" not in new["metadata"] and resource.custom:
            cause = Cause(
                "FieldValueInvalid", "metadata.resourceVersion", "Invalid value: 0: must be specified for an update"
            )
            raise errors.invalid(name, [cause], group=resource.group, kind=resource.plural)
        return self.update(resource, old, new, call, subresource)

    def patch(self, resource: Resource, namespace: str, name: str, kind: str, body: Any, call: Call, subresource: str = "") -> tuple[int, Json]:  # fmt: skip
        """Returns the status code (201 where an apply created the object) and the object."""
        accepted = [JSON_PATCH, MERGE, *([] if resource.custom else [STRATEGIC]), APPLY]
        if kind not in accepted:
            message = f"the body of the request was in an unknown format - accepted media types include: {', '.join(accepted)}"
            raise ApiError(415, "UnsupportedMediaType", message)
        if kind == APPLY:
            return self._apply(resource, namespace, name, body, call, subresource)
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
        return 200, self.update(resource, old, new, call, subresource)

    def _apply(
        self, resource: Resource, namespace: str, name: str, body: Json, call: Call, subresource: str
    ) -> tuple[int, Json]:
        old = self.store.get(resource, namespace, name)
        body = {
            **body,
            "metadata": {"name": name, **({"namespace": namespace} if namespace else {}), **body.get("metadata", {})},
        }
        if body["metadata"].get("managedFields"):
            raise errors.bad_request("metadata.managedFields must be nil")
        for problem in fields.check_declared(body, resource.schema):
            what = f"/{name}; {resource.api_version}, Kind={resource.kind}"
            raise ApiError(500, None, f"failed to create typed patch object ({what}): {problem}")
        if old is None:
            if "uid" in body["metadata"]:
                why = f"uid mismatch: the provided object specified uid {body['metadata']['uid']}, and no existing object was found"
                raise errors.conflict(name, why, group=resource.group, plural=resource.plural)
            if subresource:
                raise errors.not_found(name, group=resource.group, plural=resource.plural)
            return 201, self.create(resource, namespace, body, call, applied=True)
        if body["metadata"].get("uid", old["metadata"]["uid"]) != old["metadata"]["uid"]:
            message = f'Invalid value: "{body["metadata"]["uid"]}": field is immutable'
            causes = [Cause("FieldValueInvalid", "metadata.uid", message)] * (2 if resource.custom else 1)
            raise errors.invalid(name, causes, group=resource.group, kind=resource.kind)
        managers = fields.Managers(old["metadata"].get("managedFields", []))
        key = (call.manager, "Apply", resource.api_version, subresource)
        new = managers.apply(
            key, old, body, resource.schema, force=call.force, owned=lambda path: _owned(resource, subresource, path)
        )
        return 200, self.update(
            resource, old, self._decode(resource, namespace, new, call), call, subresource, managers
        )

    def update(self, resource: Resource, old: Json, new: Json, call: Call, subresource: str = "", managers: fields.Managers | None = None) -> Json:  # fmt: skip
        """Stores `new` in place of `old`, as the subresource allows. `managers` are those after an apply."""
        name, meta = old["metadata"]["name"], new["metadata"]
        where: Any = {"group": resource.group, "plural": resource.plural}
        if meta.get("resourceVersion", old["metadata"]["resourceVersion"]) != old["metadata"]["resourceVersion"]:
            raise errors.modified(name, **where)
        if meta.get("uid", old["metadata"]["uid"]) != old["metadata"]["uid"]:
            key = f"/registry/{resource.group or resource.plural}/{resource.plural}/{old['metadata'].get('namespace', '')}/{name}"
            why = f"StorageError: invalid object, Code: 4, Key: {key}, ResourceVersion: 0, AdditionalErrorMsg: Precondition failed: "
            raise errors.conflict(
                name, why + f"UID in precondition: {meta['uid']}, UID in object meta: {old['metadata']['uid']}", **where
            )
        new["metadata"] = {**meta, **{key: old["metadata"][key] for key in _FIXED if key in old["metadata"]}}
        new["metadata"]["resourceVersion"] = old["metadata"]["resourceVersion"]
        if subresource == "status":
            status = {"status": new["status"]} if "status" in new else {}
            new = {**{key: value for key, value in old.items() if key != "status"}, **status}
            new["metadata"] = dict(new["metadata"])
        elif "status" in resource.subresources:
            new = (
                {**new, "status": old["status"]} if "status" in old else {k: v for k, v in new.items() if k != "status"}
            )
        set_defaults(new, resource.schema)
        prepare(resource, new, old)
        before = fields.Managers(old["metadata"].get("managedFields", []))
        if managers is None:
            managers = fields.Managers(old["metadata"].get("managedFields", []))
            changed, removed = fields.compare(old, new, resource.schema)
            changed = {path for path in changed if _owned(resource, subresource, path)}
            managers.update((call.manager, "Update", resource.api_version, subresource), changed, removed)
        admit(resource, new, old)
        self._check(resource, new, old)
        new["metadata"]["managedFields"] = managers.entries(before, now())
        if resource.generation and _content(new) != _content(old):
            new["metadata"]["generation"] = old["metadata"]["generation"] + 1
        if call.dry_run or (new == old and new["metadata"]["uid"] not in self._defaulted):
            return new
        self._defaulted.discard(new["metadata"]["uid"])
        if old["metadata"].get("deletionTimestamp") and not new["metadata"].get("finalizers") and not _graceful(new):
            self._remove(resource, old)
            return new
        if resource is self.definitions:
            self._establish(new)
        return self.store.put(resource, new)

    def delete(self, resource: Resource, namespace: str, name: str, options: Json, call: Call) -> Json:
        old = self.get(resource, namespace, name)
        meta, wanted = old["metadata"], options.get("preconditions") or {}
        for key, title in (("uid", "UID"), ("resourceVersion", "ResourceVersion")):
            if wanted.get(key, meta[key]) != meta[key]:
                more = "deleted and then recreated" if key == "uid" else "modified"
                why = f"the {title} in the precondition ({wanted[key]}) does not match the {title} in record ({meta[key]}). The object might have been {more}"  # fmt: skip
                raise errors.conflict(name, why, group=resource.group, plural=resource.kind)
        seconds = options.get("gracePeriodSeconds")
        if resource.kind == "Pod":
            ended = old.get("status", {}).get("phase") in ("Succeeded", "Failed")
            given = old["spec"].get("terminationGracePeriodSeconds", 30) if seconds is None else seconds
            seconds = 0 if ended or not old["spec"].get("nodeName") else given
        extra = {"Foreground": ["foregroundDeletion"], "Orphan": ["orphan"]}.get(
            options.get("propagationPolicy", ""), []
        )
        finalizers = [*meta.get("finalizers", []), *extra]
        stays = bool(finalizers or seconds) if resource is not self.namespaces else bool(self._contents(name))
        if not call.dry_run and (stays or resource.kind == "Pod"):
            new = copy.deepcopy(old)
            ends = datetime.now(UTC) + timedelta(seconds=seconds or 0)
            earlier = new["metadata"].get("deletionGracePeriodSeconds")
            if earlier is None or (seconds is not None and seconds < earlier):
                new["metadata"] |= {"deletionTimestamp": ends.strftime("%Y-%m-%dT%H:%M:%SZ"), "deletionGracePeriodSeconds": seconds or 0}  # fmt: skip
                if resource.generation:
                    new["metadata"]["generation"] += 1 if earlier is None else 0
            if finalizers and resource is not self.namespaces:
                new["metadata"]["finalizers"] = finalizers
            if resource is self.namespaces:
                new["status"] = {"phase": "Terminating"}
            old = self.store.put(resource, new) if new != old else new
        if resource is self.namespaces and not call.dry_run:
            for kind, item in self._contents(name):
                self.delete(kind, name, item["metadata"]["name"], {}, Call())
            stays = bool(self._contents(name))
        if not stays and not call.dry_run and self.store.get(resource, namespace, name) is not None:
            self._remove(resource, old)
        if stays or resource.kind in _RETURNED:
            return old
        details = {"name": name, "group": resource.group, "kind": resource.plural, "uid": meta["uid"]}
        shown = {key: value for key, value in details.items() if value}
        return {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "details": shown}

    def _contents(self, namespace: str) -> list[tuple[Resource, Json]]:
        return [
            (kind, item)
            for kind in self.resources.values()
            if kind.namespaced
            for item in self.store.list(kind, namespace)
        ]

    def _remove(self, resource: Resource, item: Json) -> None:
        namespace = item["metadata"].get("namespace", "")
        self.store.delete(resource, namespace, item["metadata"]["name"])
        if resource is self.definitions:
            for kind in [each for each in self.resources.values() if each.custom and _named_by(item, each)]:
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
            raise errors.invalid(
                body.get("metadata", {}).get("name", ""), [cause], group=resource.group, kind=body["kind"]
            )
        unknown: list[str] = []
        new: Json = prune(body, resource.schema, unknown)
        problems = [f'unknown field "{path}"' for path in unknown]
        if problems and call.strict:
            about = f'{resource.kind} in version "{resource.version}" cannot be handled as a {resource.kind}'
            raise errors.bad_request(f"{about}: strict decoding error: {', '.join(problems)}")
        if not call.ignore:
            call.warnings += problems
        new |= {"apiVersion": resource.api_version, "kind": resource.kind}
        metadata = new["metadata"] = new.get("metadata") or {}
        if metadata.get("namespace", namespace) != namespace:
            raise errors.bad_request(
                "the namespace of the provided object does not match the namespace sent on the request"
            )
        for key in ("labels", "annotations", "finalizers", "ownerReferences"):
            if key in metadata and not metadata[key]:
                del metadata[key]
        return {**new, "metadata": {**metadata, "namespace": namespace}} if namespace else new

    def _check(self, resource: Resource, new: Json, old: Json | None) -> None:
        causes = validate(new, old, resource.schema, _metadata_causes(new["metadata"]))
        typed = [cause for cause in causes if cause.reason == "FieldValueTypeInvalid"]
        if not resource.custom and typed:
            about = f'{resource.kind} in version "{resource.version}" cannot be handled as a {resource.kind}'
            raise errors.bad_request(f"{about}: {typed[0]}")
        if resource.custom and "scale" in resource.subresources:
            path = resource.scale_paths["specReplicasPath"]
            asked = json_path(new, path)
            if isinstance(asked, int) and asked < 0:
                causes.append(
                    Cause("FieldValueInvalid", path, f"Invalid value: {asked}: should be a non-negative integer")
                )
        if not resource.custom:
            causes = [cause for cause in causes if cause.field != "<nil>"] + check(resource, new, old)
        if resource is self.definitions and not causes:
            causes = _definition_causes(new)
        if causes:
            raise errors.invalid(new["metadata"].get("name", ""), causes, group=resource.group, kind=resource.kind)

    def _establish(self, definition: Json) -> None:
        """Serves the kind that a CustomResourceDefinition describes, and says so in its status."""
        spec = definition["spec"]
        version = next(each for each in spec["versions"] if each["storage"])
        names = {"singular": spec["names"]["kind"].lower(), "listKind": spec["names"]["kind"] + "List", **spec["names"]}
        schema = copy.deepcopy(version["schema"]["openAPIV3Schema"])
        root = {"apiVersion": {"type": "string"}, "kind": {"type": "string"}, "metadata": OBJECT_META}
        schema["properties"] = {**schema.get("properties", {}), **root}
        known = self.resources.get((spec["group"], version["name"], names["plural"]))
        made = Resource(
            group=spec["group"], version=version["name"], kind=names["kind"], plural=names["plural"], schema=schema,
            namespaced=spec["scope"] == "Namespaced", singular=names["singular"], short_names=tuple(names.get("shortNames", ())),
            categories=tuple(names.get("categories", ())), subresources=frozenset(version.get("subresources", {})),
            scale_paths=version.get("subresources", {}).get("scale", {}), columns=tuple(version.get("additionalPrinterColumns", ())),
            custom=True, generation=True, seed={"metadata": {}}, since=self.store.version + 1,
        )  # fmt: skip
        self.resources[made.group, made.version, made.plural] = replace(made, since=known.since) if known else made
        if known:
            return
        about = {"status": "True", "lastTransitionTime": now()}
        conditions = [
            {**about, "message": "no conflicts found", "reason": "NoConflicts", "type": "NamesAccepted"},
            {
                **about,
                "message": "the initial names have been accepted",
                "reason": "InitialNamesAccepted",
                "type": "Established",
            },
        ]
        definition["status"] = {"conditions": conditions, "acceptedNames": names, "storedVersions": [version["name"]]}
        managers = fields.Managers(definition["metadata"]["managedFields"])
        changed, _ = fields.compare(
            {"acceptedNames": {}, "conditions": []},
            definition["status"],
            self.definitions.schema["properties"]["status"],
        )
        owned = {("f:status", *path) for path in changed if path[0] != "f:storedVersions"}
        managers.update(("kube-apiserver", "Update", self.definitions.api_version, "status"), owned, set())
        definition["metadata"]["managedFields"] = managers.entries(fields.Managers([]), now())


def _named_by(definition: Json, resource: Resource) -> bool:
    return bool(definition["metadata"]["name"] == f"{resource.plural}.{resource.group}")


def _content(item: Json) -> Json:
    return {key: value for key, value in item.items() if key not in ("metadata", "status")}


def _graceful(item: Json) -> bool:
    return bool(item["kind"] == "Pod" and item["metadata"].get("deletionGracePeriodSeconds"))


def _owned(resource: Resource, subresource: str, path: fields.Path) -> bool:
    """Whether a write through this subresource can own the field."""
    if subresource == "status":
        return path[0] == "f:status"
    return not (path[0] == "f:status" and "status" in resource.subresources)


_NAME = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*"
_LABEL = r"(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?"


def _metadata_causes(metadata: Json) -> list[Cause]:
    causes, name = [], metadata.get("name")
    if not name:
        causes.append(Cause("FieldValueRequired", "metadata.name", "Required value: name or generateName is required"))
    elif (not re.fullmatch(_NAME, name) and ":" not in name) or len(name) > 253:
        rule = "a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or '.', and must start and end with an alphanumeric character (e.g. 'example.com', regex used for validation is "  # fmt: skip
        causes.append(Cause("FieldValueInvalid", "metadata.name", f"Invalid value: \"{name}\": {rule}'{_NAME}')"))
    for value in (metadata.get("labels") or {}).values():
        if isinstance(value, str) and not re.fullmatch(_LABEL, value):
            rule = "a valid label must be an empty string or consist of alphanumeric characters, '-', '_' or '.', and must start and end with an alphanumeric character (e.g. 'MyValue',  or 'my_value',  or '12345', regex used for validation is "  # fmt: skip
            causes.append(
                Cause("FieldValueInvalid", "metadata.labels", f"Invalid value: \"{value}\": {rule}'{_LABEL}')")
            )
    return causes


def _definition_causes(definition: Json) -> list[Cause]:
    spec, name = definition["spec"], definition["metadata"]["name"]
    if name != f"{spec['names']['plural']}.{spec['group']}":
        message = f'Invalid value: "{name}": must be spec.names.plural+"."+spec.group'
        return [Cause("FieldValueInvalid", "metadata.name", message)]
    causes: list[Cause] = []

    def visit(schema: Any) -> None:
        if isinstance(schema, dict):
            for rule in (
                schema.get("x-kubernetes-validations", [])
                if isinstance(schema.get("x-kubernetes-validations"), list)
                else []
            ):
                try:
                    compile_rule(rule["rule"])
                except (ValueError, RuntimeError) as error:
                    causes.append(
                        Cause("FieldValueInvalid", "spec.versions.schema", f"Invalid value: {rule['rule']}: {error}")
                    )
        for each in schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ():
            visit(each)

    for version in spec["versions"]:
        visit(version.get("schema"))
    return causes
