"""What a write changed in a child, in words for an event: `--gpu-memory-utilization 0.9 → 0.5, env A added`. Pure.

Compares two answers of the API server, so defaults and the forms it brings values into are on both sides. Values of the
environment are never told, nor those of arguments that sound like secrets.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from reprise_operator.cause import without_secrets
from reprise_operator.children.pod import CONTAINER
from reprise_operator.naming import PLAN_HASH_ANNOTATION

MAX_TOLD = 6
MAX_VALUE = 60
"""Characters."""

_TEMPLATE = ("spec", "template")
_POD = (*_TEMPLATE, "spec")
_SECRET = re.compile(r"(^|[-_])(keys?|token|secret|password|credentials?)($|[-_])", re.IGNORECASE)
_MERGE_KEYS = ("name", "mountPath", "topologyKey", "containerPort", "port", "key")
_MISSING = object()
_BOOKKEEPING = (
    PLAN_HASH_ANNOTATION,
    "deployment.kubernetes.io/revision",
    "kubectl.kubernetes.io/last-applied-configuration",
)

Path = tuple[str, ...]


def told_changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """`what_changed` as the end of a sentence about the object, and whether new pods take the place of the old."""
    told = what_changed(before, after)
    if not told:
        return ""
    rolls = (before.get("spec") or {}).get("template") != (after.get("spec") or {}).get("template")
    return f", whose pods are replaced: {told}" if rolls else f": {told}"


def what_changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """The differences of two bodies of one object that somebody sets, `MAX_TOLD` at most; "" when there is none."""
    told = [*_metadata(before, after), *_differences((), {"spec": before.get("spec")}, {"spec": after.get("spec")})]
    told = list(dict.fromkeys(told))
    more = len(told) - MAX_TOLD
    return ", ".join(told[:MAX_TOLD]) + (f" and {more} more" if more > 0 else "")


def _metadata(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[str]:
    for field, word in (("labels", "label"), ("annotations", "annotation")):
        old, new = (body["metadata"].get(field) or {} for body in (before, after))
        yield from _keys(word, old, new)
    if before["metadata"].get("ownerReferences") != after["metadata"].get("ownerReferences"):
        yield "ownerReferences"


def _keys(word: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[str]:
    """Entries by their keys alone."""
    for key in sorted(before.keys() | after.keys()):
        if key in _BOOKKEEPING or before.get(key, _MISSING) == after.get(key, _MISSING):
            continue
        if key in before and key in after:
            yield f"{word} {key}"
        else:
            yield f"{word} {key} {'added' if key in after else 'removed'}"


def _differences(path: Path, before: Any, after: Any) -> Iterator[str]:
    if before == after:
        return
    if path and path[-1] == "args":
        yield from _arguments(_where(path[:-1]), before or (), after or ())
    elif path and path[-1] == "env":
        where = _where(path[:-1])
        yield from _keys(f"{where} env" if where else "env", _by_key(before or ()), _by_key(after or ()))
    elif path[-2:] in (("metadata", "labels"), ("metadata", "annotations")):
        yield from _keys(f"pod {path[-1][:-1]}", before or {}, after or {})
    elif isinstance(before, Mapping) and isinstance(after, Mapping):
        for key in sorted(before.keys() | after.keys()):
            yield from _differences((*path, key), before.get(key), after.get(key))
    elif _is_keyed(before) and _is_keyed(after):
        old, new = _by_key(before), _by_key(after)
        for key in sorted(old.keys() | new.keys()):
            if key in old and key in new:
                yield from _differences((*path, key), old[key], new[key])
            else:
                yield f"{_where((*path, key))} {'added' if key in new else 'removed'}"
    elif _is_plain(before) and _is_plain(after):
        yield f"{_where(path)} {_value(before)} → {_value(after)}"
    else:
        yield _where(path)


def _where(path: Path) -> str:
    """A path as people call it: the pod's own fields without the way there, and the engine without its name."""
    for prefix in ((*_POD, "containers", CONTAINER), _POD, _TEMPLATE, ("spec",)):
        if path[: len(prefix)] == prefix:
            path = path[len(prefix) :]
            break
    if path and path[0] in ("containers", "initContainers"):
        path = path[1:]
    return ".".join(path)


def _arguments(where: str, before: Sequence[str], after: Sequence[str]) -> Iterator[str]:
    prefix = f"{where} " if where else ""
    old, new = _flags(before), _flags(after)
    for name in dict.fromkeys((*old, *new)):
        was, now = old.get(name), new.get(name)
        if was == now:
            continue
        if was is None or now is None:
            yield f"{prefix}{_argument(now or was or ())} {'removed' if now is None else 'added'}"
        elif len(was) == len(now) == 2 and was[0] == now[0] and not _SECRET.search(was[0]):
            yield f"{prefix}{was[0]} {_cut(was[1])} → {_cut(now[1])}"
        else:
            old_text, new_text = _argument(was), _argument(now)
            yield f"{prefix}{old_text} → {new_text}" if old_text != new_text else f"{prefix}{old_text} changed"


def _flags(arguments: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Name of a flag, without its `no-` → the flag and its values. What belongs to no flag stands under its place."""
    found: dict[str, tuple[str, ...]] = {}
    name: str | None = None
    for position, argument in enumerate(arguments):
        if argument.startswith("-") and len(argument) > 1 and not argument[1].isdigit():
            flag, has_value, value = argument.partition("=")
            name = re.sub(r"^-+(no[-_])?", "", flag).replace("_", "-")
            found[name] = (*found.get(name, ()), flag, *((value,) if has_value else ()))
        elif name is not None:
            found[name] = (*found[name], argument)
        else:
            found[f" {position}"] = (argument,)
    return found


def _argument(parts: Sequence[str]) -> str:
    if len(parts) > 1 and _SECRET.search(parts[0]):
        return parts[0]
    return _cut(" ".join(parts))


def _is_keyed(value: Any) -> bool:
    """A list whose items can be told apart by one of their fields."""
    if not isinstance(value, Sequence) or isinstance(value, str):
        return False
    keys = [_key(item) for item in value]
    return None not in keys and len(set(keys)) == len(keys)


def _key(item: Any) -> str | None:
    if not isinstance(item, Mapping):
        return None
    return next((str(item[key]) for key in _MERGE_KEYS if key in item), None)


def _by_key(items: Sequence[Any]) -> dict[str, Any]:
    return {str(_key(item)): item for item in items}


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, str | int | float | bool)


def _value(value: Any) -> str:
    if value is None:
        return "unset"
    return _cut(str(value).lower() if isinstance(value, bool) else str(value))


def _cut(text: str) -> str:
    """The end tells images apart, so the middle goes; and so does what looks like a credential."""
    text = without_secrets(text)
    return text if len(text) <= MAX_VALUE else f"{text[: MAX_VALUE // 2 - 1]}…{text[-MAX_VALUE // 2 :]}"
