"""CustomResourceDefinitions: what is wrong with one, and the kind that is served because of it."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from .builtins import OBJECT_META, Resource
from .errors import Cause, Json
from .fields import Managers, compare
from .schema import compile_rule


def definition_causes(definition: Json) -> list[Cause]:
    """A name that does not fit, or a rule that is not CEL."""
    spec, name = definition["spec"], definition["metadata"]["name"]
    if name != f"{spec['names']['plural']}.{spec['group']}":
        message = f'Invalid value: "{name}": must be spec.names.plural+"."+spec.group'
        return [Cause("FieldValueInvalid", "metadata.name", message)]
    causes: list[Cause] = []
    for rule in _rules_of(spec["versions"]):
        try:
            compile_rule(rule)
        except (ValueError, RuntimeError) as error:
            causes.append(Cause("FieldValueInvalid", "spec.versions", f"Invalid value: {rule}: {error}"))
    return causes


def _rules_of(value: Any) -> Iterator[str]:
    for key, item in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        if key == "rule" and isinstance(item, str):
            yield item
        yield from _rules_of(item)


def establish(definition: Json, kind: Resource, *, since: int, now: str) -> Resource:
    """The kind to serve. A new definition gets its status, owned by the server, in place."""
    spec = definition["spec"]
    version = next(each for each in spec["versions"] if each["storage"])
    names = {"singular": spec["names"]["kind"].lower(), "listKind": spec["names"]["kind"] + "List", **spec["names"]}
    schema, subresources = copy.deepcopy(version["schema"]["openAPIV3Schema"]), version.get("subresources", {})
    root = {"apiVersion": {"type": "string"}, "kind": {"type": "string"}, "metadata": OBJECT_META}
    schema["properties"] = {**schema.get("properties", {}), **root}
    if "status" not in definition:
        about = {"status": "True", "lastTransitionTime": now}
        accepted = {"message": "no conflicts found", "reason": "NoConflicts", "type": "NamesAccepted"}
        message = "the initial names have been accepted"
        established = {"message": message, "reason": "InitialNamesAccepted", "type": "Established"}
        conditions = [{**about, **accepted}, {**about, **established}]
        status = {"conditions": conditions, "acceptedNames": names, "storedVersions": [version["name"]]}
        managers = Managers(definition["metadata"]["managedFields"])
        before = {**kind.seed, "status": {**kind.seed["status"], "storedVersions": status["storedVersions"]}}
        changed, _ = compare(before, {**kind.seed, "status": status}, kind.schema)
        managers.update(("kube-apiserver", "Update", kind.api_version, "status"), changed, set())
        definition["status"] = status
        definition["metadata"]["managedFields"] = managers.entries(Managers([]), now)
    return Resource(
        group=spec["group"],
        version=version["name"],
        kind=names["kind"],
        plural=names["plural"],
        schema=schema,
        namespaced=spec["scope"] == "Namespaced",
        singular=names["singular"],
        short_names=tuple(names.get("shortNames", ())),
        categories=tuple(names.get("categories", ())),
        subresources=frozenset(subresources),
        scale_paths=subresources.get("scale", {}),
        columns=tuple(version.get("additionalPrinterColumns", ())),
        custom=True,
        generation=True,
        seed={"metadata": {}},
        since=int(definition["metadata"].get("resourceVersion", since)),
    )
