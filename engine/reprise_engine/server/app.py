"""The FastAPI application. A factory: importing this module starts nothing."""

from __future__ import annotations

from collections.abc import Sequence

from fastapi import FastAPI
from starlette.middleware import Middleware

from reprise_engine.server import errors
from reprise_engine.server.auth import ApiKeys
from reprise_engine.server.routes import admin, chat, completions, models, operations, responses, tokens
from reprise_engine.server.state import ServerState


def create_app(state: ServerState, *, api_keys: Sequence[str] = ()) -> FastAPI:
    """All routes over one `state`; with `api_keys` every route but the probes' asks for one of them."""
    app = FastAPI(
        title="Reprise",
        version=state.version,
        middleware=[Middleware(ApiKeys, keys=tuple(api_keys))] if api_keys else [],
    )
    app.state.server = state
    app.state.has_api_keys = bool(api_keys)
    errors.install(app)
    for routes in (models, chat, completions, responses, tokens, operations, admin):
        app.include_router(routes.router)
    return app
