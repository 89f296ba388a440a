"""/v1/admin/prefix_cache: look into the prefix cache. Behind the API key; without one configured, refused with 403.

Who has no key may ask for completions, but what others have sent is nothing for everybody who reaches the port.
"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Depends, Request

from reprise_engine.server.errors import ApiError
from reprise_engine.server.state import Model


def _needs_api_keys(request: Request) -> None:
    """Raises ApiError 403 where the server has none; ApiKeys has checked the request's."""
    if not request.app.state.has_api_keys:
        raise ApiError(
            403,
            "The admin endpoints need an API key: start the server with REPRISE_API_KEY or --api-key.",
            code="admin_disabled",
        )


router = APIRouter(prefix="/v1/admin/prefix_cache", dependencies=[Depends(_needs_api_keys)])


@router.get("")
async def inspect(model: Model) -> dict[str, Any]:
    """What is in the cache, in blocks; and of the last requests, where the match ended and why."""
    report = await model.engine.inspect_prefix_cache()
    return report.as_json()
