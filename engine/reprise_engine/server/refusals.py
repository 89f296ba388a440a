"""The complaint about a field of a body."""

from __future__ import annotations

from pydantic_core import PydanticCustomError


def refuse(param: str, message: str) -> PydanticCustomError:
    """A complaint that names its field, wherever in the model it is raised."""
    # The message goes through as an argument: PydanticCustomError treats its template's braces as fields.
    return PydanticCustomError("refused_field", "{message}", {"param": param, "message": message})
