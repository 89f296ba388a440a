"""How objects are selected and shown: label and field selectors, Tables and the JSONPath of their columns."""

import re
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from .builtins import Resource
from .errors import Json, refusal

_REQUIREMENT = re.compile(r"\s*(!?)\s*([\w./-]+)\s*(?:(==?|!=)\s*([\w.-]*)|\s(in|notin)\s*\(([^)]*)\))?\s*")
_FIELD = re.compile(r"([\w.]+)(==?|!=)(.*)")


def json_path(value: Any, path: str) -> Any:
    """The first value at `.a.b[0].c` or `.a[?(@.type=="x")].b`, or None."""
    for key, index, field, wanted in re.findall(r"\.([\w-]+)|\[(\d+)]|\[\?\(@\.([\w.]+)==[\"']([^\"']*)[\"']\)]", path):
        if key:
            value = value.get(key) if isinstance(value, dict) else None
        elif index:
            value = value[int(index)] if isinstance(value, list) and len(value) > int(index) else None
        else:
            value = next((item for item in value or [] if str(json_path(item, f".{field}")) == wanted), None)
    return value


def table(resource: Resource, items: list[Json], include: str | None, *, headers: bool = True) -> Json:
    """A Table of these objects. `include` as the includeObject parameter: Metadata (None), Object or None ("None")."""
    name = {"name": "Name", "type": "string", "format": "name", "jsonPath": ".metadata.name"}
    columns = [{"format": "", "description": "", "priority": 0, **each} for each in (name, *resource.columns)]
    shown = [{key: value for key, value in each.items() if key != "jsonPath"} for each in columns]
    objects = [None if include == "None" else item if include == "Object" else partial(item) for item in items]
    cells = [[_cell(item, column) for column in columns] for item in items]
    rows = [{"cells": cells[i], "object": about} for i, about in enumerate(objects)]
    metadata = {"resourceVersion": items[0]["metadata"]["resourceVersion"]} if items else {}
    about = {"kind": "Table", "apiVersion": "meta.k8s.io/v1", "metadata": metadata, "rows": rows}
    return {**about, "columnDefinitions": shown if headers else None}


def _cell(item: Json, column: Json) -> Any:
    value = json_path(item, column["jsonPath"])
    if column["type"] == "date":
        return _age(value) if value else None
    if column["type"] in ("integer", "number", "boolean"):
        return value if isinstance(value, bool) == (column["type"] == "boolean") else None
    return value if value is None or isinstance(value, str) else str(value)


def _age(since: str) -> str:
    seconds = int((datetime.now(UTC) - datetime.fromisoformat(since)).total_seconds())
    units = (("d", 86400), ("h", 3600), ("m", 60))
    return next((f"{seconds // size}{unit}" for unit, size in units if seconds >= 2 * size), f"{seconds}s")


def partial(item: Json) -> Json:
    return {"kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1", "metadata": item["metadata"]}


def selector(resource: Resource, labels: str, fields: str) -> Callable[[Json], bool]:
    """A predicate on objects. Raises 400 where it cannot be read."""
    by_label = [_requirement(part) for part in re.split(r",(?![^(]*\))", labels) if part.strip()]
    by_field = [_field(resource, part) for part in fields.split(",") if part]
    return lambda item: (
        all(test(item["metadata"].get("labels", {})) for test in by_label)
        and all((str(json_path(item, path) or "") == value) == equal for path, value, equal in by_field)
    )


def _requirement(text: str) -> Callable[[Json], bool]:
    found = _REQUIREMENT.fullmatch(text)
    if not found:
        raise refusal("Selector", text=text)
    absent, key, operator, value, within, several = found.groups()
    if not operator and not within:
        return lambda labels: (key in labels) != bool(absent)
    values = {each.strip() for each in (value if operator else several).split(",")}
    return lambda labels: (labels.get(key) in values) == ((operator or within) in ("=", "==", "in"))


def _field(resource: Resource, text: str) -> tuple[str, str, bool]:
    found = _FIELD.fullmatch(text)
    if not found or found[1] not in ("metadata.name", "metadata.namespace", *resource.selectable):
        raise refusal("FieldSelector", text=found[1] if found else text)
    return f".{found[1]}", found[3], found[2] != "!="
