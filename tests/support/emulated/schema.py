"""Structural schemas: pruning, defaults, validation by `jsonschema`, rules in CEL by `common-expression-language`."""

import copy
import functools
import json
from collections.abc import Iterator
from typing import Any

import cel
from cel import stdlib
from jsonschema import Draft4Validator

from .errors import MESSAGES, Cause, Json, invalid

PRESERVE = "x-kubernetes-preserve-unknown-fields"
_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
_compiled = functools.lru_cache(maxsize=1024)(cel.compile)


def child_schema(schema: Json, key: str) -> Json | None:
    """The schema of a field of an object, or None where the schema does not declare it."""
    extra = schema.get("additionalProperties")
    other = extra if isinstance(extra, dict) else {PRESERVE: True} if extra else None
    found: Json | None = schema.get("properties", {}).get(key, other)
    return found


def children(value: Any, schema: Json) -> Iterator[tuple[str | int, Any, Json]]:
    if isinstance(value, dict):
        yield from ((key, item, child_schema(schema, key) or {}) for key, item in value.items())
    elif isinstance(value, list):
        yield from ((i, item, schema.get("items", {})) for i, item in enumerate(value))


def prune(value: Any, schema: Json, unknown: list[str], path: str = "") -> Any:
    """A copy without the fields that the schema does not declare; their paths are added to `unknown`."""
    if isinstance(value, list):
        items = schema.get("items", {PRESERVE: True})
        return [prune(item, items, unknown, f"{path}[{i}]") for i, item in enumerate(value)]
    if not isinstance(value, dict) or schema.get("type", "object") != "object":
        return str(value) if schema.get("x-quantity") else value
    kept: Json = {}
    for key, item in value.items():
        below, found = f"{path}.{key}" if path else key, child_schema(schema, key)
        if found is not None:
            kept[key] = prune(item, found, unknown, below)
        elif schema.get(PRESERVE):
            kept[key] = copy.deepcopy(item)
        else:
            unknown.append(below)
    return kept


def set_defaults(value: Any, schema: Json) -> None:
    """Fills in defaults in place; a null where the schema does not allow it is dropped or becomes the default."""
    if isinstance(value, dict):
        for key, item, found in list(children(value, schema)):
            if item is None and found.get("type") and not found.get("nullable") and not found.get(PRESERVE):
                del value[key]
        missing = {key: found for key, found in schema.get("properties", {}).items() if key not in value}
        value |= {key: copy.deepcopy(found["default"]) for key, found in missing.items() if "default" in found}
        rules = {key: found["x-default"] for key, found in missing.items() if "x-default" in found}
        computed = {key: _evaluate(rule, {"self": value}) for key, rule in rules.items()}
        value |= {key: item for key, item in computed.items() if item}
    for _, item, found in children(value, schema):
        set_defaults(item, found)


def check(resource: Any, value: Json, old: Json | None) -> None:
    """Raises what the schema of the kind and its rules refuse, in the words of the real server."""
    found = Draft4Validator(resource.schema).iter_errors(value)
    causes = [_cause(error) for error in found if error.instance is not None or not error.schema.get("nullable")]
    if any(cause.reason in MESSAGES["blocking"] for cause in causes):
        causes.append(Cause("FieldValueInvalid", "<nil>", MESSAGES["not_checked"]))
    else:
        causes += _rules(value, old, resource.schema, "")
    if causes:
        raise invalid(resource, value["metadata"].get("name", ""), causes)


def _cause(error: Any) -> Cause:
    value, limit, rule = error.instance, error.validator_value, error.validator
    kind = _TYPES.get(type(value), "null")
    missing = [error.message.split("'")[1]] if rule == "required" else []
    parts = [f"[{part}]" if isinstance(part, int) else f".{part}" for part in [*error.absolute_path, *missing]]
    reason, message = MESSAGES["causes"][rule]
    said = {"path": "".join(parts)[1:], "limit": limit, "value": json.dumps(value), "kind": f'"{kind}"'}
    said["choices"] = ", ".join(map(json.dumps, limit)) if rule == "enum" else ""
    said["count"] = len(value) if isinstance(value, str | list | dict) else 0
    return Cause(reason, said["path"], message.format(**said))


def _rules(value: Any, old: Any, schema: Json, path: str) -> Iterator[Cause]:
    """Rules in CEL, and that the items of keyed lists and sets are unique."""
    variables = {"self": _typed(value, schema), **({} if old is None else {"oldSelf": _typed(old, schema)})}
    for rule in schema.get("x-kubernetes-validations", []):
        if "oldSelf" not in rule["rule"] or old is not None:
            yield from _rule(rule, variables, value, path)
    keys, seen = schema.get("x-kubernetes-list-map-keys"), list[Any]()
    for i, item in enumerate(value if schema.get("x-kubernetes-list-type") in ("map", "set") else ()):
        shown = {key: item[key] for key in keys if key in item} if keys else item
        if shown in seen:
            said = f"Duplicate value: {json.dumps(shown, separators=(',', ':'))}"
            yield Cause("FieldValueDuplicate", f"{path}[{i}]", said)
        seen.append(shown)
    for key, item, found in children(value, schema):
        declared = key in schema.get("properties", {})
        below = (f"{path}.{key}" if path else str(key)) if declared else f"{path}[{key}]"
        former = old.get(key) if isinstance(old, dict) else None  # an item of an atomic list has no former self
        yield from _rules(item, former, found, below)


def _rule(rule: Json, variables: Json, value: Any, path: str) -> Iterator[Cause]:
    whole, reason = isinstance(value, dict | list), rule.get("reason", "FieldValueInvalid")
    shown = f"Invalid value: {json.dumps(_TYPES[type(value)] if whole else value)}"
    try:
        if _evaluate(rule["rule"], variables):
            return
        message = rule.get("message", f"failed rule: {rule['rule']}")
        if "messageExpression" in rule:
            message = str(_evaluate(rule["messageExpression"], variables))
    except (RuntimeError, TypeError, ValueError, KeyError) as error:
        yield Cause("FieldValueInvalid", path, f"{shown}: {error} evaluating rule: {rule['rule']}")
    else:
        plain = "Invalid value" if whole else shown
        prefix = {"FieldValueForbidden": "Forbidden", "FieldValueRequired": "Required value"}.get(reason, plain)
        where = (path + rule.get("fieldPath", "")).lstrip(".")
        yield Cause(reason, where, f"{prefix}: {message}" if message else prefix)


def _evaluate(text: str, variables: Json) -> Any:
    """Raises ValueError where the rule is not CEL that the library knows."""
    context = cel.Context(variables=variables)
    stdlib.add_stdlib_to_context(context)
    return _compiled(text).execute(context)


def _typed(value: Any, schema: Json) -> Any:
    """The value as CEL sees it: a `number` is a double even where JSON wrote an integer."""
    parts = {key: _typed(item, found) for key, item, found in children(value, schema)}
    if isinstance(value, dict | list):
        return parts if isinstance(value, dict) else list(parts.values())
    return float(value) if schema.get("type") == "number" and isinstance(value, int) else value
