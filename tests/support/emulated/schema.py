"""Structural schemas: pruning, defaults, validation by `jsonschema`, rules in CEL by `common-expression-language`."""

from __future__ import annotations

import copy
import functools
import json
import re
from collections.abc import Iterator
from typing import Any

import cel
import jsonschema
from cel import stdlib
from jsonschema import validators

from .errors import Cause, Json

PRESERVE = "x-kubernetes-preserve-unknown-fields"
BLOCKING = {
    "FieldValueRequired",
    "FieldValueTooLong",
    "FieldValueTooMany",
    "FieldValueTypeInvalid",
    "FieldValueNotSupported",
}
"""After one of these the rules in CEL are not evaluated, and the answer says so."""
NOT_CHECKED = Cause(
    "FieldValueInvalid",
    "<nil>",
    "Invalid value: null: some validation rules were not checked because the object was invalid; "
    "correct the existing errors to complete validation",
)


_NAME = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*"
_LABEL = r"(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?"
_NAME_RULE = (
    "a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or '.', and must start and "
    f"end with an alphanumeric character (e.g. 'example.com', regex used for validation is '{_NAME}')"
)
_LABEL_RULE = (
    "a valid label must be an empty string or consist of alphanumeric characters, '-', '_' or '.', and must start and "
    "end with an alphanumeric character (e.g. 'MyValue',  or 'my_value',  or '12345', "
    f"regex used for validation is '{_LABEL}')"
)


def metadata_causes(metadata: Json) -> list[Cause]:
    """What is wrong with an object's name and labels."""
    causes, name = [], metadata.get("name", "")
    if not name:
        causes.append(Cause("FieldValueRequired", "metadata.name", "Required value: name or generateName is required"))
    elif len(name) > 253 or not re.fullmatch(_NAME, name.replace(":", "")):  # RBAC names may hold colons
        causes.append(Cause("FieldValueInvalid", "metadata.name", f'Invalid value: "{name}": {_NAME_RULE}'))
    for value in (metadata.get("labels") or {}).values():
        if isinstance(value, str) and not re.fullmatch(_LABEL, value):
            causes.append(Cause("FieldValueInvalid", "metadata.labels", f'Invalid value: "{value}": {_LABEL_RULE}'))
    return causes


def child_schema(schema: Json, key: str) -> Json | None:
    """The schema of a field of an object, or None where the schema does not declare it."""
    if key in schema.get("properties", {}):
        found: Json = schema["properties"][key]
        return found
    extra = schema.get("additionalProperties")
    return extra if isinstance(extra, dict) else {PRESERVE: True} if extra else None


def prune(value: Any, schema: Json, unknown: list[str], path: str = "") -> Any:
    """A copy without the fields that the schema does not declare; their paths are added to `unknown`."""
    if isinstance(value, dict) and schema.get("type", "object") == "object":
        kept: Json = {}
        for key, item in value.items():
            below = f"{path}.{key}" if path else key
            found = child_schema(schema, key)
            if found is not None:
                kept[key] = prune(item, found, unknown, below)
            elif schema.get(PRESERVE):
                kept[key] = copy.deepcopy(item)
            else:
                unknown.append(below)
        return kept
    if isinstance(value, list):
        items = schema.get("items", {PRESERVE: True})
        return [prune(item, items, unknown, f"{path}[{i}]") for i, item in enumerate(value)]
    return value


def set_defaults(value: Any, schema: Json) -> None:
    """Fills in defaults in place; a null where the schema does not allow it is dropped or becomes the default."""
    if isinstance(value, dict):
        for key in [key for key, item in value.items() if item is None]:
            found = child_schema(schema, key)
            if found is not None and not found.get("nullable") and not found.get(PRESERVE) and found.get("type"):
                del value[key]
        for key, found in schema.get("properties", {}).items():
            if key not in value and "default" in found:
                value[key] = copy.deepcopy(found["default"])
        for key, item in value.items():
            set_defaults(item, child_schema(schema, key) or {})
    elif isinstance(value, list):
        for item in value:
            set_defaults(item, schema.get("items", {}))


def validate(value: Json, old: Json | None, validator: Any, before: list[Cause]) -> list[Cause]:
    """What the schema and its rules refuse, in the words of the real server, after what was refused before."""
    causes = before + [_cause(error) for error in validator.iter_errors(value)]
    causes += _duplicates(value, validator.schema, "")
    if any(cause.reason in BLOCKING for cause in causes):
        return [*causes, NOT_CHECKED]
    return causes + list(_rules(value, old, validator.schema, ""))


def validator_of(schema: Json) -> Any:
    """A jsonschema validator that speaks of structural schemas; making one is the slow part."""
    return _Validator(schema)


def _required(validator: Any, names: list[str], value: Any, schema: Json) -> Iterator[jsonschema.ValidationError]:
    if isinstance(value, dict):
        for name in names:
            if name not in value:
                yield jsonschema.ValidationError(name, path=[name])


def _type(validator: Any, name: str, value: Any, schema: Json) -> Iterator[jsonschema.ValidationError]:
    if value is None and schema.get("nullable"):
        return
    if not validator.is_type(value, name):
        yield jsonschema.ValidationError(name)


_Validator: Any = validators.extend(  # type: ignore[no-untyped-call]  # the stubs have no types here
    jsonschema.Draft4Validator, {"required": _required, "type": _type, "format": None}
)
_SAID = {
    "minimum": "should be greater than{strict} {limit}",
    "maximum": "should be less than{strict} {limit}",
    "pattern": "should match '{limit}'",
    "minLength": "should be at least {limit} chars long",
    "minItems": "should have at least {limit} items",
    "minProperties": "should have at least {limit} properties",
}


def _path(parts: Any) -> str:
    text = ""
    for part in parts:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text


def _cause(error: Any) -> Cause:
    path, value, limit, rule = _path(error.absolute_path), error.instance, error.validator_value, str(error.validator)
    if rule == "required":
        return Cause("FieldValueRequired", path, "Required value")
    if rule == "type":
        kind = json.dumps(type_name(value))
        said = f"Invalid value: {kind}: {path} in body must be of type {limit}: {kind}"
        return Cause("FieldValueTypeInvalid", path, said)
    if rule == "enum":
        allowed = ", ".join(json.dumps(each) for each in limit)
        said = f"Unsupported value: {json.dumps(value)}: supported values: {allowed}"
        return Cause("FieldValueNotSupported", path, said)
    if rule == "maxLength":
        return Cause("FieldValueTooLong", path, f"Too long: may not be more than {limit} bytes")
    if rule in ("maxItems", "maxProperties"):
        return Cause("FieldValueTooMany", path, f"Too many: {len(value)}: must have at most {limit} items")
    strict = "" if error.schema.get(f"exclusive{rule.capitalize()}") else " or equal to"
    said = _SAID.get(rule, "does not satisfy {rule}").format(strict=strict, limit=limit, rule=rule)
    shown = len(value) if rule in ("minItems", "minProperties") else json.dumps(value)
    return Cause("FieldValueInvalid", path, f"Invalid value: {shown}: {path} in body {said}")


def type_name(value: Any) -> str:
    names = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
    return names.get(type(value), "null")


def _duplicates(value: Any, schema: Json, path: str) -> Iterator[Cause]:
    for key, item, found in _children(value, schema):
        yield from _duplicates(item, found, _below(path, key, schema))
    kind = schema.get("x-kubernetes-list-type")
    if not isinstance(value, list) or kind not in ("map", "set"):
        return
    seen: list[Any] = []
    for i, item in enumerate(value):
        keys = schema.get("x-kubernetes-list-map-keys", [])
        shown = {key: item.get(key) for key in keys if key in item} if kind == "map" else item
        if shown in seen:
            text = json.dumps(shown, separators=(",", ":"))
            yield Cause("FieldValueDuplicate", f"{path}[{i}]", f"Duplicate value: {text}")
        seen.append(shown)


def _below(path: str, key: str | int, schema: Json) -> str:
    if isinstance(key, int) or key not in schema.get("properties", {}):
        return f"{path}[{key}]"
    return f"{path}.{key}" if path else key


def _children(value: Any, schema: Json) -> Iterator[tuple[str | int, Any, Json]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield key, item, child_schema(schema, key) or {}
    elif isinstance(value, list):
        for i, item in enumerate(value):
            yield i, item, schema.get("items", {})


def _rules(value: Any, old: Any, schema: Json, path: str) -> Iterator[Cause]:
    rules = schema.get("x-kubernetes-validations", [])
    if rules:
        variables = {"self": _typed(value, schema)}
        if old is not None:
            variables["oldSelf"] = _typed(old, schema)
        for rule in rules:
            if "oldSelf" not in rule["rule"] or old is not None:
                yield from _rule(rule, variables, value, path)
    before = {} if not isinstance(old, dict | list) else {key: item for key, item, _ in _children(old, schema)}
    for key, item, found in _children(value, schema):
        # An item of an atomic list has no former self.
        former = before.get(key) if isinstance(value, dict) else None
        yield from _rules(item, former, found, _below(path, key, schema))


def _rule(rule: Json, variables: Json, value: Any, path: str) -> Iterator[Cause]:
    where = path + rule.get("fieldPath", "")
    shown = (
        f'Invalid value: "{type_name(value)}"'
        if isinstance(value, dict | list)
        else f"Invalid value: {json.dumps(value)}"
    )
    try:
        if compile_rule(rule["rule"]).execute(_context(variables)):
            return
        message = rule.get("message") or f"failed rule: {rule['rule']}"
        if "messageExpression" in rule:
            message = str(compile_rule(rule["messageExpression"]).execute(_context(variables)))
    except (RuntimeError, TypeError, ValueError, KeyError) as error:
        yield Cause("FieldValueInvalid", path, f"{shown}: {error} evaluating rule: {rule['rule']}")
        return
    reason = rule.get("reason", "FieldValueInvalid")
    plain = "Invalid value" if isinstance(value, dict | list) else shown
    prefix = {"FieldValueForbidden": "Forbidden", "FieldValueRequired": "Required value"}.get(reason, plain)
    yield Cause(reason, where, f"{prefix}: {message}")


@functools.lru_cache(maxsize=1024)
def compile_rule(text: str) -> cel.Program:
    """Raises ValueError where the rule is not CEL that the library knows."""
    return cel.compile(text)


def _context(variables: Json) -> cel.Context:
    context = cel.Context(variables=variables)
    stdlib.add_stdlib_to_context(context)
    context.add_function("find", lambda text, pattern: m.group(0) if (m := re.search(pattern, text)) else "")
    context.add_function("isSorted", lambda items: items == sorted(items))
    return context


def _typed(value: Any, schema: Json) -> Any:
    """The value as CEL sees it: a `number` is a double even where JSON wrote an integer."""
    if isinstance(value, dict):
        return {key: _typed(item, found) for key, item, found in _children(value, schema)}
    if isinstance(value, list):
        return [_typed(item, found) for _, item, found in _children(value, schema)]
    return float(value) if schema.get("type") == "number" and isinstance(value, int) else value
