"""What the routes share: one frozen description of the server, and its phase."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Annotated

from fastapi import Depends, Request

from reprise_engine.config import ResolvedConfig
from reprise_engine.engine import EngineClient
from reprise_engine.server.defaults import SamplingDefaults
from reprise_engine.server.errors import RETRY_LATER, SERVER_ERROR, ApiError
from reprise_engine.server.http_options import HttpOptions
from reprise_engine.server.isolation import Isolation
from reprise_engine.server.metrics import Metrics
from reprise_engine.text import Tokenizer
from reprise_engine.text.chat_formats import ChatFormats
from reprise_engine.version import __version__


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """There once the model serves."""

    engine: EngineClient
    resolved: ResolvedConfig
    tokenizer: Tokenizer
    defaults: SamplingDefaults
    formats: ChatFormats = field(default_factory=ChatFormats)
    auto_tool_choice: bool = True


@dataclass(slots=True, kw_only=True)
class ServerState:
    """`loaded` is None while the model loads; `draining` from SIGTERM on."""

    model: str
    served_names: tuple[str, ...]
    metrics: Metrics
    force_include_usage: bool = False
    isolation: Isolation = field(default_factory=Isolation)
    http: HttpOptions = field(default_factory=HttpOptions)
    version: str = __version__
    created: int = field(default_factory=lambda: int(time.time()))
    loaded: Loaded | None = None
    stage: str = "starting"
    draining: bool = False

    @property
    def healthy(self) -> bool:
        return self.loaded is not None and self.loaded.engine.alive and not self.draining

    def not_serving(self) -> str:
        """Why /health is not 200."""
        if self.draining:
            return "The server is shutting down."
        if self.loaded is None:
            return f"The model is loading ({self.stage})."
        return "The engine process has ended; the server exits."

    def check_model(self, name: str | None) -> str:
        """The served name of a request's model; none means the first. Raises ApiError 404."""
        if name is None or name in self.served_names:
            return name or self.served_names[0]
        raise ApiError(
            404,
            f"The model {name!r} does not exist; this server has {', '.join(map(repr, self.served_names))}.",
            param="model",
            code="model_not_found",
        )


def server_state(request: Request) -> ServerState:
    state: ServerState = request.app.state.server
    return state


def loaded_model(request: Request) -> Loaded:
    """Dependency of every route that needs the engine. Raises ApiError 503."""
    state = server_state(request)
    if not state.healthy or state.loaded is None:
        raise ApiError(
            503,
            state.not_serving(),
            error_type=SERVER_ERROR,
            code="engine_unavailable",
            headers=dict(RETRY_LATER),
        )
    return state.loaded


State = Annotated[ServerState, Depends(server_state)]
Model = Annotated[Loaded, Depends(loaded_model)]
