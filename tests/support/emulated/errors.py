"""Refusals in the shape of a Kubernetes Status; their words are in messages.yaml."""

from pathlib import Path
from typing import Any, NamedTuple

import yaml

Json = dict[str, Any]
MESSAGES: Json = yaml.safe_load((Path(__file__).parent / "messages.yaml").read_text())


class Cause(NamedTuple):
    """One thing that is wrong with a field. `reason` as in the API: FieldValueInvalid, FieldValueRequired …"""

    reason: str
    field: str
    message: str


class ApiError(Exception):
    """An answer that is not a success; `about` is the rest of its Status."""

    def __init__(self, code: int, reason: str | None, message: str, details: Json | None = None) -> None:
        super().__init__(message)
        about = {key: value for key, value in (("reason", reason), ("details", details)) if value is not None}
        base = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "message": message}
        self.code, self.status = code, {**base, **about, "code": code}


def details(name: str, group: str, kind: str, **more: Any) -> Json:
    return {key: value for key, value in {"name": name, "group": group, "kind": kind, **more}.items() if value}


def refusal(which: str, resource: Any = None, name: str = "", kind: str = "", **values: Any) -> ApiError:
    """The error of that name in messages.yaml. `kind` is what it calls the resource, its plural where not given."""
    code, reason, message = MESSAGES["refusals"][which]
    about: Json | None = {} if code in (405, 422) else None
    if resource is not None:
        kind = kind or resource.plural
        about = details(name, resource.group, kind) if code in (404, 409) else None
        values = {"what": f"{kind}.{resource.group}".rstrip("."), "kind": resource.kind, **values}
        values |= {"version": resource.version, "api_version": resource.api_version}
    return ApiError(code, reason, message.format(name=name, **values), about)


def invalid(resource: Any, name: str, causes: list[Cause]) -> ApiError:
    said = list(dict.fromkeys(f"{cause.field}: {cause.message}" for cause in causes))
    text = said[0] if len(said) == 1 else f"[{', '.join(said)}]"
    about = {**details(name, resource.group, resource.kind), "causes": [cause._asdict() for cause in causes]}
    what = f"{resource.kind}.{resource.group}".rstrip(".")
    return ApiError(422, "Invalid", f'{what} "{name}" is invalid: {text}', about)
