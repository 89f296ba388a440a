"""For probes, scrapers and operators of the server.

/health is 200 only while the model is loaded, the engine process is alive and the server is not shutting down. The port
answers from the start on (503 while the model loads), so a probe tells "loading" from "not there": give the startup
probe as long as a load may take, and use the same path for readiness and liveness.
"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4

from reprise_engine.server.state import Model, State

router = APIRouter()


@router.get("/health")
@router.get("/ping")
@router.post("/ping")
async def health(state: State) -> JSONResponse:
    if state.healthy:
        return JSONResponse({"status": "ok"})
    return JSONResponse({"status": "unavailable", "reason": state.not_serving()}, status_code=503)


@router.get("/version")
async def version(state: State) -> dict[str, str]:
    return {"version": state.version}


@router.get("/load")
async def load(state: State) -> dict[str, int]:
    """Sequences that are being generated or wait for it."""
    return {"server_load": 0 if state.loaded is None else state.loaded.engine.num_requests}


@router.post("/reset_prefix_cache")
async def reset_prefix_cache(model: Model) -> dict[str, Any]:
    """Forget what is cached. `success` is false where requests still use blocks: those stay."""
    result = await model.engine.reset_prefix_cache()
    return result.as_json()


@router.get("/metrics")
async def metrics(state: State) -> Response:
    return Response(state.metrics.render(), media_type=CONTENT_TYPE_PLAIN_0_0_4)
