"""GET /v1/models: the one model, under each of its names."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from reprise_engine.server.state import Loaded, Model, ServerState, State

router = APIRouter()


def _card(name: str, state: ServerState, model: Loaded) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": state.created,
        "owned_by": "reprise",
        "root": state.model,
        "parent": None,
        "max_model_len": model.resolved.max_model_len,
    }


@router.get("/v1/models")
async def list_models(state: State, model: Model) -> dict[str, Any]:
    return {"object": "list", "data": [_card(name, state, model) for name in state.served_names]}


@router.get("/v1/models/{name:path}")
async def get_model(name: str, state: State, model: Model) -> dict[str, Any]:
    return _card(state.check_model(name), state, model)
