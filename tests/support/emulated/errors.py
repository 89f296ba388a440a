"""Refusals in the shape of a Kubernetes Status."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .builtins import Resource

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Cause:
    """One thing that is wrong with a field. `reason` as in the API: FieldValueInvalid, FieldValueRequired …"""

    reason: str
    field: str
    message: str

    def __str__(self) -> str:
        return f"{self.field}: {self.message}"


class ApiError(Exception):
    """An answer that is not a success; `details` as in Status."""

    def __init__(self, code: int, reason: str | None, message: str, details: Json | None = None) -> None:
        super().__init__(message)
        self.code, self.reason, self.message, self.details = code, reason, message, details

    def status(self) -> Json:
        status: Json = {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "message": self.message,
        }
        if self.reason is not None:
            status["reason"] = self.reason
        if self.details is not None:
            status["details"] = self.details
        return {**status, "code": self.code}


def _details(name: str, group: str, kind: str) -> Json:
    return {key: value for key, value in (("name", name), ("group", group), ("kind", kind)) if value}


def _qualified(name: str, group: str) -> str:
    """`deployments.apps`, or only `pods` for the core group."""
    return f"{name}.{group}" if group else name


def not_found(resource: Resource, name: str) -> ApiError:
    what = _qualified(resource.plural, resource.group)
    return ApiError(404, "NotFound", f'{what} "{name}" not found', _details(name, resource.group, resource.plural))


def already_exists(resource: Resource, name: str) -> ApiError:
    message = f'{_qualified(resource.plural, resource.group)} "{name}" already exists'
    return ApiError(409, "AlreadyExists", message, _details(name, resource.group, resource.plural))


def conflict(resource: Resource, name: str, why: str, kind: str = "") -> ApiError:
    """`kind` is what the message calls the resource, its plural where not given."""
    kind = kind or resource.plural
    message = f'Operation cannot be fulfilled on {_qualified(kind, resource.group)} "{name}": {why}'
    return ApiError(409, "Conflict", message, _details(name, resource.group, kind))


def invalid(name: str, causes: list[Cause], *, group: str, kind: str) -> ApiError:
    said = list(dict.fromkeys(map(str, causes)))
    text = said[0] if len(said) == 1 else f"[{', '.join(said)}]"
    listed = [{"reason": each.reason, "message": each.message, "field": each.field} for each in causes]
    details = {**_details(name, group, kind), "causes": listed}
    return ApiError(422, "Invalid", f'{_qualified(kind, group)} "{name}" is invalid: {text}', details)


def bad_request(message: str) -> ApiError:
    return ApiError(400, "BadRequest", message)


def not_allowed() -> ApiError:
    return ApiError(405, "MethodNotAllowed", "the server does not allow this method on the requested resource", {})
