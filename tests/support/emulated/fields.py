"""Who owns which field: server-side apply after kubernetes-sigs/structured-merge-diff, on plain JSON; other merging.

A path is a tuple of elements as FieldsV1 writes them: `f:name` a field, `k:{"name":"a"}` an item of a keyed list,
`v:"x"` an item of a set. Objects are granular unless their schema says atomic, lists only if it says map or set.
"""

import json
from collections.abc import Iterator
from typing import Any

from .errors import ApiError, Json
from .schema import child_schema

Path = tuple[str, ...]
_NEVER = ("name", "namespace", "creationTimestamp", "uid", "generation", "managedFields", "resourceVersion")
NOT_OWNED = {("f:apiVersion",), ("f:kind",), ("f:metadata",), *(("f:metadata", f"f:{name}") for name in _NEVER)}
_IDENTITY = ("manager", "operation", "apiVersion", "subresource")


def _granular(value: Any, schema: Json) -> bool:
    if isinstance(value, dict):
        return schema.get("x-kubernetes-map-type") != "atomic"
    return isinstance(value, list) and schema.get("x-kubernetes-list-type") in ("map", "set")


def _elements(value: Any, schema: Json) -> dict[str, tuple[Any, Json]]:
    """The parts of a granular value, each with its schema; nothing for a scalar or an atomic value."""
    if not _granular(value, schema):
        return {}
    if isinstance(value, dict):
        return {f"f:{key}": (item, child_schema(schema, key) or {}) for key, item in value.items()}
    items, keys = schema.get("items", {}), schema.get("x-kubernetes-list-map-keys")
    if not keys:
        return {f"v:{json.dumps(item)}": (item, {}) for item in value}
    declared = items.get("properties", {})
    named = {key: declared[key]["default"] for key in sorted(keys) if "default" in declared.get(key, {})}
    found = ({**named, **{key: item[key] for key in sorted(keys) if key in item}} for item in value)
    names = [json.dumps(each, separators=(",", ":"), sort_keys=True) for each in found]
    return {f"k:{name}": (item, items) for name, item in zip(names, value, strict=True)}


def _walk(value: Any, schema: Json, path: Path = (), *, unique: bool = False) -> Iterator[tuple[Path, Any, bool]]:
    """Every field: its path, its value (None for a granular one), whether it is only a way to others, as structs are.

    With `unique`, raises ValueError where a keyed list has two items of the same key.
    """
    parts = _elements(value, schema)
    if unique and isinstance(value, list) and 0 < len(parts) < len(value):
        keys = [next(iter(_elements([item], schema))) for item in value]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"{show(path)}: duplicate entries for key {show((twice,))}")
    for element, (item, below) in parts.items():
        granular = _granular(item, below)
        way = granular and item != {} and isinstance(value, dict) and element[2:] in schema.get("properties", {})
        yield (*path, element), None if granular else item, way
        yield from _walk(item, below, (*path, element), unique=unique)


def to_set(value: Any, schema: Json) -> set[Path]:
    """The fields that an applied object holds: leaves, atomic values, items, keys of free maps. Raises ValueError."""
    return {path for path, _, way in _walk(value, schema, unique=True) if not way} - NOT_OWNED


def compare(old: Any, new: Any, schema: Json) -> tuple[set[Path], set[Path]]:
    """(added or modified, removed) fields between two objects; a new object counts with all that is in it."""
    before, after = ({path: value for path, value, _ in _walk(each, schema)} for each in (old, new))
    changed = {path for path, value in after.items() if path not in before or before[path] != value}
    return changed - NOT_OWNED, before.keys() - after.keys() - NOT_OWNED


def merge(live: Any, applied: Any, schema: Json) -> Any:
    """`applied` over `live`. Where it has all items of a keyed list it orders them, else its new ones come last."""
    if not (type(live) is type(applied) and _granular(live, schema) and _granular(applied, schema)):
        return applied
    left, right = _elements(live, schema), _elements(applied, schema)
    merged = {element: item for element, (item, _) in left.items() if not left.keys() <= right.keys()}
    for element, (item, below) in right.items():
        merged[element] = merge(left[element][0], item, below) if element in left else item
    return {element[2:]: item for element, item in merged.items()} if isinstance(live, dict) else list(merged.values())


def merge_patch(target: Any, patch: Any, schema: Json) -> Any:
    """RFC 7386; as a strategic merge patch, with a schema: its keyed lists are merged by their first key, what the
    patch has first; of the directives only `$patch: delete`."""
    if not isinstance(patch, dict):
        return patch
    merged = dict(target) if isinstance(target, dict) else {}
    for key, item in patch.items():
        found = child_schema(schema, key) or {}
        if item is None:
            merged.pop(key, None)
        elif isinstance(item, list) and "x-kubernetes-list-map-keys" in found:
            name = found["x-kubernetes-list-map-keys"][0]
            old = {each.get(name): each for each in merged.get(key) or []}
            new = {each.get(name): merge_patch(old.get(each.get(name)), each, found["items"]) for each in item}
            gone = [each.get(name) for each in item if each.get("$patch") == "delete"]
            merged[key] = [each for each in {**new, **old, **new}.values() if each.get(name) not in gone]
        elif not key.startswith("$"):
            merged[key] = merge_patch(merged.get(key), item, found)
    return merged


def remove(value: Any, schema: Json, paths: set[Path]) -> Any:
    """The value without these fields; what becomes empty by it goes too (None says the value itself does)."""
    kept: dict[str, Any] = {}
    for element, (item, below) in _elements(value, schema).items():
        deeper = {path[1:] for path in paths if path[0] == element}
        item = remove(item, below, deeper) if deeper and () not in deeper else item
        if not deeper or (() not in deeper and item is not None):
            kept[element] = item
    if not kept:
        return None
    return {element[2:]: item for element, item in kept.items()} if isinstance(value, dict) else list(kept.values())


def show(path: Path) -> str:
    """A path as messages write it: `.spec.ports[name="q"].port`."""
    keys = [json.loads(each[2:]) if each[0] == "k" else {"": each[2:]} for each in path]
    texts = [",".join(f"{k}={json.dumps(v) if k else v}" for k, v in each.items()) for each in keys]
    return "".join(f".{e[2:]}" if e[0] == "f" else f"[{text}]" for e, text in zip(path, texts, strict=True))


def encode(paths: set[Path]) -> Json:
    tree: Json = {}
    for path in sorted(paths):
        node = tree
        for n, element in enumerate(path):
            if path[:n] in paths:
                node["."] = {}
            node = node.setdefault(element, {})
    return tree


def decode(tree: Json, path: Path = ()) -> set[Path]:
    found = {path} if "." in tree or not tree else set()
    return found.union(*(decode(item, (*path, element)) for element, item in tree.items() if element != "."))


class Managers:
    """The managedFields of one object. An entry's identity is (manager, operation, apiVersion, subresource)."""

    def __init__(self, entries: list[Json]) -> None:
        self._before = {tuple(entry.get(name, "") for name in _IDENTITY): entry for entry in entries}
        self.sets = {key: decode(entry["fieldsV1"]) for key, entry in self._before.items()}

    def entries(self, now: str) -> list[Json]:
        """As stored; the time of an entry is that of its last change."""
        out = []
        for key in sorted(key for key, paths in self.sets.items() if paths):
            entry = {name: part for name, part in zip(_IDENTITY, key, strict=True) if part}
            entry |= {"fieldsType": "FieldsV1", "fieldsV1": encode(self.sets[key])}
            before = self._before.get(key, {})
            entry["time"] = before.get("time") if before.get("fieldsV1") == entry["fieldsV1"] else now
            out.append({name: part for name, part in entry.items() if name != "time" or key[3] != "scale"})
        return out

    def update(self, key: Path, changed: set[Path], removed: set[Path]) -> None:
        """A plain write: what it changed is now its own alone, what it removed is nobody's."""
        for other in self.sets:
            self.sets[other] = self.sets[other] - removed - (changed if other != key else set())
        self.sets[key] = self.sets.get(key, set()) | changed

    def apply(self, key: Path, live: Any, applied: Any, wanted: set[Path], schema: Json, *, force: bool) -> Any:
        """Server-side apply of the fields `wanted`; returns the new object. Raises the 409 that names all conflicts."""
        merged = merge(live, applied, schema)
        changed, _ = compare(live, merged, schema)
        disputed = {other: paths & changed for other, paths in self.sets.items() if other != key and paths & changed}
        if disputed and not force:
            raise _conflicts(disputed)
        for other, paths in disputed.items():
            self.sets[other] = self.sets[other] - paths
        dropped, self.sets[key] = self.sets.get(key, set()) - wanted, wanted
        held = {path[:n] for paths in self.sets.values() for path in paths for n in range(1, len(path) + 1)}
        return remove(merged, schema, dropped - held) if dropped - held else merged


def _conflicts(disputed: dict[Path, set[Path]]) -> ApiError:
    causes, lines = list[Json](), list[str]()
    for (manager, operation, version, _), paths in sorted(disputed.items()):
        by = f'"{manager}"' + (f" using {version}" if operation == "Update" else "")
        shown = [show(path) for path in sorted(paths, key=lambda path: (len(path), path))]
        about = {"reason": "FieldManagerConflict", "message": f"conflict with {by}"}
        causes += [{**about, "field": each} for each in shown]
        lines.append("\n- ".join([f"conflicts with {by}:", *shown]))
    said = f"{len(causes)} conflicts: " + "\n".join(lines)
    if len(causes) == 1:
        said = f"1 conflict: {causes[0]['message']}: {causes[0]['field']}"
    return ApiError(409, "Conflict", f"Apply failed with {said}", {"causes": causes})
