"""Three kinds of PATCH: JSON merge patch (RFC 7386), JSON patch (RFC 6902), strategic merge patch."""

from __future__ import annotations

import copy
from typing import Any

import jsonpatch
import jsonpointer

from .errors import ApiError, Json
from .schema import child_schema


def merge_patch(target: Any, patch: Any) -> Any:
    if not isinstance(patch, dict):
        return copy.deepcopy(patch)
    merged = dict(target) if isinstance(target, dict) else {}
    for key, item in patch.items():
        if item is None:
            merged.pop(key, None)
        else:
            merged[key] = merge_patch(merged.get(key), item)
    return merged


def json_patch(target: Any, operations: list[Json]) -> Any:
    """Raises the 422 of the real server, which does not say what was wrong."""
    try:
        return jsonpatch.apply_patch(target, operations)
    except (jsonpatch.JsonPatchException, jsonpointer.JsonPointerException, TypeError) as error:
        message = "the server rejected our request due to an error in our request"
        raise ApiError(422, "Invalid", message, {}) from error


def strategic_merge(target: Any, patch: Any, schema: Json) -> Any:
    """Lists with a merge key are merged by it, after the patch's own order; `$patch`, `$setElementOrder` and
    `$deleteFromPrimitiveList` directives as in Kubernetes, `$retainKeys` as far as kubectl writes it."""
    if not isinstance(patch, dict):
        return copy.deepcopy(patch)
    directive = patch.get("$patch")
    if directive == "delete":
        return {}
    merged = dict(target) if isinstance(target, dict) and directive != "replace" else {}
    if "$retainKeys" in patch:
        merged = {key: item for key, item in merged.items() if key in patch["$retainKeys"]}
    for key, item in patch.items():
        if key.startswith("$deleteFromPrimitiveList/"):
            name = key.split("/", 1)[1]
            merged[name] = [each for each in merged.get(name, []) if each not in item]
        elif key.startswith("$"):
            continue
        elif item is None:
            merged.pop(key, None)
        else:
            found = child_schema(schema, key) or {}
            if isinstance(item, list) and found.get("x-merge-key"):
                merged[key] = _merge_list(merged.get(key) or [], item, found, patch.get(f"$setElementOrder/{key}"))
            elif isinstance(item, list) and found.get("x-kubernetes-list-type") == "set":
                merged[key] = [
                    *(merged.get(key) or []),
                    *(each for each in item if each not in (merged.get(key) or [])),
                ]
            elif isinstance(item, dict):
                merged[key] = strategic_merge(merged.get(key), item, found)
            else:
                merged[key] = copy.deepcopy(item)
    return merged


def _merge_list(target: list[Json], patch: list[Json], schema: Json, order: list[Json] | None) -> list[Json]:
    name, items = schema["x-merge-key"], schema.get("items", {})
    if any(item.get("$patch") == "replace" for item in patch):
        return [copy.deepcopy(item) for item in patch if item.get("$patch") != "replace"]
    merged = {item.get(name): item for item in target}
    patched: list[Any] = []
    for item in patch:
        if item.get("$patch") == "delete":
            merged.pop(item.get(name), None)
        else:
            merged[item.get(name)] = strategic_merge(merged.get(item.get(name)), item, items)
            patched.append(item.get(name))
    first = [item.get(name) for item in order] if order is not None else patched
    # Patched items come in the patch's order, the others keep their place relative to the ones before them.
    result: list[Any] = [key for key in first if key in merged]
    old = [item.get(name) for item in target if item.get(name) in merged]
    for key in old:
        if key not in result:
            before = [each for each in old[: old.index(key)] if each in result]
            result.insert(result.index(before[-1]) + 1 if before and order is not None else len(result), key)
    return [merged[key] for key in result]
