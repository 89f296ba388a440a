"""Who owns which field: server-side apply after kubernetes-sigs/structured-merge-diff, on plain JSON.

A path is a tuple of elements as FieldsV1 writes them: `f:name` a field, `k:{"name":"a"}` an item of a keyed list,
`v:"x"` an item of a set. Objects are granular unless their schema says atomic, lists are atomic unless it says
map or set; what the schema does not know is treated the same way.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from .errors import ApiError, Json
from .schema import PRESERVE, child_schema

Path = tuple[str, ...]
NOT_OWNED = {
    ("f:apiVersion",),
    ("f:kind",),
    ("f:metadata",),
    *(
        ("f:metadata", f"f:{name}")
        for name in ("name", "namespace", "creationTimestamp", "uid", "generation", "managedFields", "resourceVersion")
    ),
}


def _is_map(value: Any, schema: Json) -> bool:
    return isinstance(value, dict) and schema.get("x-kubernetes-map-type") != "atomic"


def _is_list(value: Any, schema: Json) -> bool:
    return isinstance(value, list) and schema.get("x-kubernetes-list-type") in ("map", "set")


def elements(value: Any, schema: Json) -> dict[str, tuple[Any, Json]]:
    """The parts of a granular value, each with its schema; nothing for a scalar or an atomic value."""
    if _is_map(value, schema):
        return {f"f:{key}": (item, child_schema(schema, key) or {}) for key, item in value.items()}
    if not _is_list(value, schema):
        return {}
    items = schema.get("items", {})
    if schema["x-kubernetes-list-type"] == "set":
        return {f"v:{json.dumps(item)}": (item, {}) for item in value}
    return {_key(item, schema): (item, items) for item in value}


def _key(item: Any, schema: Json) -> str:
    declared = schema.get("items", {}).get("properties", {})
    keys = {key: item.get(key, declared.get(key, {}).get("default")) for key in schema["x-kubernetes-list-map-keys"]}
    chosen = {key: value for key, value in sorted(keys.items()) if value is not None}
    return "k:" + json.dumps(chosen, separators=(",", ":"))


def check_declared(value: Any, schema: Json, path: Path = ()) -> Iterator[str]:
    """What makes an applied object untypable: fields that are not declared, keys that are there twice."""
    if isinstance(value, dict):
        for key, item in value.items():
            found = child_schema(schema, key)
            if found is None and not schema.get(PRESERVE) and schema.get("type", "object") == "object":
                yield f"{show((*path, f'f:{key}'))}: field not declared in schema"
            else:
                yield from check_declared(item, found or {PRESERVE: True}, (*path, f"f:{key}"))
    elif _is_list(value, schema):
        seen: set[str] = set()
        for item in value:
            element = next(iter(elements([item], schema)))
            if element in seen:
                yield f"{show(path)}: duplicate entries for key {show((element,))}"
            seen.add(element)
            yield from check_declared(item, schema.get("items", {}), (*path, element))


def to_set(value: Any, schema: Json) -> set[Path]:
    """The fields that an applied object holds: leaves, atomic values, items, keys of free maps."""
    found: set[Path] = set()

    def visit(value: Any, schema: Json, path: Path) -> None:
        if not _is_map(value, schema) and not _is_list(value, schema):
            found.add(path)
        for element, (item, below) in elements(value, schema).items():
            free = isinstance(value, list) or element[2:] not in schema.get("properties", {})
            if free or item is None or item == {}:
                found.add((*path, element))
            visit(item, below, (*path, element))

    visit(value, schema, ())
    return {path for path in found if path not in NOT_OWNED}


def compare(old: Any, new: Any, schema: Json) -> tuple[set[Path], set[Path]]:
    """(added or modified, removed) fields between two objects; a new object counts with all that is in it."""
    changed: set[Path] = set()
    removed: set[Path] = set()

    def whole(value: Any, schema: Json, path: Path, into: set[Path]) -> None:
        into.add(path)
        for element, (item, below) in elements(value, schema).items():
            whole(item, below, (*path, element), into)

    def visit(old: Any, new: Any, schema: Json, path: Path) -> None:
        granular = (_is_map(old, schema) and _is_map(new, schema)) or (_is_list(old, schema) and _is_list(new, schema))
        if not granular:
            if old is None and (_is_map(new, schema) or _is_list(new, schema)):
                for element, (item, below) in elements(new, schema).items():
                    whole(item, below, (*path, element), changed)
            elif old != new:
                changed.add(path)
            return
        before, after = elements(old, schema), elements(new, schema)
        for element, (item, below) in after.items():
            if element in before:
                visit(before[element][0], item, below, (*path, element))
            else:
                whole(item, below, (*path, element), changed)
        for element in before.keys() - after.keys():
            whole(*before[element], (*path, element), removed)

    visit(old, new, schema, ())
    return changed - NOT_OWNED, removed - NOT_OWNED


def merge(live: Any, applied: Any, schema: Json) -> Any:
    """`applied` over `live`. The order of lists is the real server's: applied items in their order among the others."""
    if _is_map(live, schema) and _is_map(applied, schema):
        merged = dict(live)
        for key, item in applied.items():
            merged[key] = merge(live[key], item, child_schema(schema, key) or {}) if key in live else item
        return merged
    if not (_is_list(live, schema) and _is_list(applied, schema)):
        return applied
    left, right = elements(live, schema), elements(applied, schema)
    shared = [element for element in right if element in left]
    lefts, rights, out, done = list(left), list(right), [], set()
    i = j = 0
    while i < len(lefts) or j < len(rights):
        if i < len(lefts) and j < len(rights) and lefts[i] != rights[j]:
            wanted = next((element for element in shared if element not in done), None)
            if lefts[i] in right and wanted is not None and lefts[i] != wanted:
                i += 1
                continue
        if i < len(lefts) and lefts[i] not in right:
            out.append(left[lefts[i]][0])
            i += 1
            continue
        if i < len(lefts) and (lefts[i] in done or (j < len(rights) and lefts[i] == rights[j])):
            i += 1
        if j < len(rights):
            item, below = right[rights[j]]
            out.append(merge(left[rights[j]][0], item, below) if rights[j] in left else item)
            done.add(rights[j])
            j += 1
    return out


def remove(value: Any, schema: Json, paths: set[Path]) -> Any:
    """The value without these fields; what becomes empty by it goes too (None says the value itself does)."""
    gone = {path[0] for path in paths if len(path) == 1}
    kept: list[tuple[str, Any]] = []
    for element, (item, below) in elements(value, schema).items():
        if element in gone:
            continue
        deeper = {path[1:] for path in paths if len(path) > 1 and path[0] == element}
        item = remove(item, below, deeper) if deeper else item
        if item is not None or not deeper:
            kept.append((element, item))
    if not kept:
        return None
    return {element[2:]: item for element, item in kept} if isinstance(value, dict) else [item for _, item in kept]


def show(path: Path) -> str:
    """A path as messages write it: `.spec.ports[name="q"].port`."""
    text = ""
    for element in path:
        if element.startswith("f:"):
            text += f".{element[2:]}"
        elif element.startswith("k:"):
            text += "[" + ",".join(f"{key}={json.dumps(value)}" for key, value in json.loads(element[2:]).items()) + "]"
        else:
            text += f"[={element[2:]}]"
    return text


def encode(paths: set[Path]) -> Json:
    tree: Json = {}
    for path in sorted(paths):
        node = tree
        for element in path:
            node = node.setdefault(element, {})
        node["."] = {}
    return _compact(tree)


def _compact(tree: Json) -> Json:
    return {key: {} if key == "." or item.keys() == {"."} else _compact(item) for key, item in sorted(tree.items())}


def decode(tree: Json, path: Path = ()) -> set[Path]:
    found: set[Path] = set()
    for element, item in tree.items():
        if element == ".":
            found.add(path)
        elif item:
            found |= decode(item, (*path, element))
        else:
            found.add((*path, element))
    return found


class Managers:
    """The managedFields of one object. An entry's identity is (manager, operation, apiVersion, subresource)."""

    def __init__(self, entries: list[Json]) -> None:
        self.times: dict[tuple[str, ...], str] = {}
        self.sets: dict[tuple[str, ...], set[Path]] = {}
        for entry in entries:
            key = (entry["manager"], entry["operation"], entry["apiVersion"], entry.get("subresource", ""))
            self.sets[key] = decode(entry["fieldsV1"])
            self.times[key] = entry.get("time", "")

    def entries(self, before: Managers, now: str) -> list[Json]:
        """As stored; the time of an entry is that of its last change."""
        out = []
        for key in sorted(self.sets, key=lambda key: (key[1], self.times.get(key, now), key[0])):
            if self.sets[key]:
                same = before.sets.get(key) == self.sets[key]
                time = {"time": self.times[key] if same else now} if key[3] != "scale" else {}
                entry = {"manager": key[0], "operation": key[1], "apiVersion": key[2], **time, "fieldsType": "FieldsV1"}
                out.append({**entry, "fieldsV1": encode(self.sets[key]), **({"subresource": key[3]} if key[3] else {})})
        return out

    def update(self, key: tuple[str, ...], changed: set[Path], removed: set[Path]) -> None:
        """A plain write: what it changed is now its own alone, what it removed is nobody's."""
        for other in self.sets:
            self.sets[other] = self.sets[other] - removed - (changed if other != key else set())
        if changed:
            self.sets[key] = self.sets.get(key, set()) | changed

    def apply(
        self, key: tuple[str, ...], live: Any, applied: Any, wanted: set[Path], schema: Json, *, force: bool
    ) -> Any:
        """Server-side apply of the fields `wanted`; returns the new object. Raises the 409 that names all conflicts."""
        merged = merge(live, applied, schema)
        changed, _ = compare(live, merged, schema)
        disputed = {other: paths & changed for other, paths in self.sets.items() if other != key}
        disputed = {other: paths for other, paths in disputed.items() if paths}
        if disputed and not force:
            raise _conflicts(disputed)
        for other, paths in disputed.items():
            self.sets[other] = self.sets[other] - paths
        dropped = self.sets.get(key, set()) - wanted
        others = [path for other, paths in self.sets.items() if other != key for path in paths] + list(wanted)
        held = {path[:n] for path in others for n in range(1, len(path) + 1)}
        merged = remove(merged, schema, dropped - held) if dropped - held else merged
        self.sets[key] = wanted
        return merged


def _conflicts(disputed: dict[tuple[str, ...], set[Path]]) -> ApiError:
    causes = []
    lines = []
    for (manager, operation, version, _), paths in sorted(disputed.items()):
        by = f'"{manager}"' + (f" using {version}" if operation == "Update" else "")
        ordered = [show(path) for path in sorted(paths, key=lambda path: (len(path), path))]
        causes += [
            {"reason": "FieldManagerConflict", "message": f"conflict with {by}", "field": each} for each in ordered
        ]
        lines.append(f"conflicts with {by}:" + "".join(f"\n- {each}" for each in ordered))
    if len(causes) == 1:
        message = f"Apply failed with 1 conflict: {causes[0]['message']}: {causes[0]['field']}"
    else:
        message = f"Apply failed with {len(causes)} conflicts: " + "\n".join(lines)
    return ApiError(409, "Conflict", message, {"causes": causes})
