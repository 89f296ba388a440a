"""The FastAPI application. A factory: importing this module starts nothing."""

from __future__ import annotations

from collections.abc import Sequence

from fastapi import FastAPI
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware

from reprise_engine.server import errors
from reprise_engine.server.access import REQUEST_ID_HEADER, Access
from reprise_engine.server.admission import Admission
from reprise_engine.server.auth import ApiKeys
from reprise_engine.server.head_requests import HeadAsGet
from reprise_engine.server.request_body import BoundedBody
from reprise_engine.server.routes import admin, chat, completions, models, operations, page, responses, tokens
from reprise_engine.server.state import ServerState
from reprise_engine.server.tracing import Tracer


def create_app(state: ServerState, *, api_keys: Sequence[str] = (), tracer: Tracer | None = None) -> FastAPI:
    """All routes over one `state`; with `api_keys` every route but the probes' and the page asks for one of them."""
    app = FastAPI(
        title="Reprise",
        version=state.version,
        docs_url=None,  # FastAPI's pages load scripts from elsewhere
        redoc_url=None,
        middleware=_middleware(state, api_keys, tracer),
    )
    app.state.server = state
    app.state.has_api_keys = bool(api_keys)
    errors.install(app)
    for routes in (models, chat, completions, responses, tokens, operations, admin, page):
        app.include_router(routes.router)
    return app


def _middleware(state: ServerState, api_keys: Sequence[str], tracer: Tracer | None) -> list[Middleware]:
    """The outermost first: whoever has no key waits in no queue, and whoever is refused there has sent its body."""
    options = state.http
    found = [Middleware(Access, log=options.access_log, tracer=tracer), Middleware(HeadAsGet)]
    if options.allowed_origins:
        found.append(
            Middleware(
                CORSMiddleware,
                allow_origins=options.allowed_origins,
                allow_methods=options.allowed_methods,
                allow_headers=options.allowed_headers,
                allow_credentials=options.allow_credentials,
                expose_headers=(REQUEST_ID_HEADER, "Retry-After"),
            )
        )
    if api_keys:
        found.append(Middleware(ApiKeys, keys=tuple(api_keys)))
    found.append(Middleware(BoundedBody, max_size=options.max_request_body_size, timeout=options.receive_timeout))
    found.append(
        Middleware(Admission, state=state, max_queued=options.max_queued_requests, timeout=options.request_timeout)
    )
    return found
