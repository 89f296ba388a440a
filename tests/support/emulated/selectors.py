"""Label and field selectors of a list, a watch or a deletion."""

from __future__ import annotations

import re
from collections.abc import Callable

from .builtins import Resource
from .errors import Json, bad_request
from .table import json_path


def selector(resource: Resource, labels: str, fields: str) -> Callable[[Json], bool]:
    """A predicate on objects. Raises 400 where it cannot be read."""
    by_label = [_requirement(part) for part in re.split(r",(?![^(]*\))", labels) if part.strip()]
    by_field = [_field(resource, part) for part in fields.split(",") if part]

    def wanted(item: Json) -> bool:
        of = item["metadata"].get("labels") or {}
        return all(test(of) for test in by_label) and all(
            (str(json_path(item, path) or "") == value) == equal for path, value, equal in by_field
        )

    return wanted


def _requirement(text: str) -> Callable[[Json], bool]:
    name = r"[\w./-]+"
    if found := re.fullmatch(rf"\s*(!?)\s*({name})\s*", text):
        absent, key = found[1] == "!", found[2]
        return lambda labels: (key in labels) != absent
    if found := re.fullmatch(rf"\s*({name})\s*(==?|!=)\s*([\w.-]*)\s*", text):
        key, equal, value = found[1], found[2] != "!=", found[3]
        return lambda labels: (labels.get(key) == value) == equal
    if found := re.fullmatch(rf"\s*({name})\s+(in|notin)\s*\(([^)]*)\)\s*", text):
        key, within, values = found[1], found[2] == "in", {value.strip() for value in found[3].split(",")}
        return lambda labels: (labels.get(key) in values) == within
    raise bad_request(f"unable to parse requirement: {text}")


def _field(resource: Resource, text: str) -> tuple[str, str, bool]:
    found = re.fullmatch(r"([\w.]+)(==?|!=)(.*)", text)
    if not found:
        raise bad_request(f"invalid selector: '{text}'; can't understand '{text}'")
    if found[1] not in ("metadata.name", "metadata.namespace", *resource.selectable):
        raise bad_request(f"field label not supported: {found[1]}")
    return f".{found[1]}", found[3], found[2] != "!="
