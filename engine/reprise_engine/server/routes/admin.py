"""/v1/admin/prefix_cache: look into the prefix cache, empty it, pin and unpin prefixes.

Behind the API key; without one configured, refused with 403. Who has no key may ask for completions, but what others
have sent, and what is kept for them, is nothing for everybody who reaches the port.

    GET    /v1/admin/prefix_cache                what is in it; of the last requests, where the match ended and why
    POST   /v1/admin/prefix_cache/reset          {"include_pins": false} → {"success", "freed_blocks", …}
    POST   /v1/admin/prefix_cache/pins           PinBody → what is pinned
    DELETE /v1/admin/prefix_cache/pins/{name}    what it held stays cached, and may be evicted again
"""

from __future__ import annotations

import uuid
from typing import Any

from fastapi import APIRouter, Depends, Request

from reprise_engine.server import pinning
from reprise_engine.server.errors import ApiError
from reprise_engine.server.isolation import request_api_key
from reprise_engine.server.json_route import JsonRoute
from reprise_engine.server.protocol_admin import PinBody, ResetBody
from reprise_engine.server.state import Model, State


def _needs_api_keys(request: Request) -> None:
    """Raises ApiError 403 where the server has none; ApiKeys has checked the request's."""
    if not request.app.state.has_api_keys:
        raise ApiError(
            403,
            "The admin endpoints need an API key: start the server with REPRISE_API_KEY or --api-key-file.",
            code="admin_disabled",
        )


router = APIRouter(prefix="/v1/admin/prefix_cache", dependencies=[Depends(_needs_api_keys)], route_class=JsonRoute)


@router.get("")
async def inspect(model: Model) -> dict[str, Any]:
    """In blocks where not said otherwise. `request` is the response's id without its first word, and the choice."""
    report = await model.engine.inspect_prefix_cache()
    return report.as_json()


@router.post("/reset")
async def reset(model: Model, body: ResetBody | None = None) -> dict[str, Any]:
    """`success` is false where requests still use blocks: those stay, and so do pinned ones unless included."""
    include_pins = body is not None and body.include_pins
    result = await model.engine.reset_prefix_cache(include_pins=include_pins)
    return result.as_json()


@router.post("/pins")
async def pin(request: Request, state: State, model: Model, body: PinBody) -> dict[str, Any]:
    """Computes the prompt and keeps it until it is unpinned, as far as the budget goes; isolated, for this key."""
    cache_salt = state.isolation.salt(request_api_key(request), body.cache_salt)
    name = body.name or uuid.uuid4().hex
    pinned = await pinning.pin(model, body, name=name, cache_salt=cache_salt, isolated=state.isolation.per_key)
    return pinned.as_json()


@router.delete("/pins/{name}")
async def unpin(model: Model, name: str) -> dict[str, Any]:
    if not await model.engine.unpin(name):
        raise ApiError(404, f"There is no pin {name!r}.", param="name", code="pin_not_found")
    return {"name": name, "unpinned": True}
