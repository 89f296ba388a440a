"""What the server is told at its start: frozen, made by entrypoints/arguments.py."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from reprise_engine.config import EngineConfig
from reprise_engine.messages import DEFAULT_BUILDER
from reprise_engine.parser_names import ReasoningParser, ToolCallParser
from reprise_engine.server.http_options import HttpOptions
from reprise_engine.server.isolation import IsolationMode

LogLevel = Literal["debug", "info", "warning", "error", "critical"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """`api_keys` are left out of the repr, so that no log shows them."""

    engine: EngineConfig
    host: str = "0.0.0.0"  # noqa: S104  (as vLLM: in a pod the address is not known beforehand)
    port: int = 8000
    """0 takes a free one; the log says which."""
    served_names: tuple[str, ...] = ()
    """Names that requests may use; none means the model's own."""
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    chat_template: str | None = None
    auto_tool_choice: bool = True
    """Whether a model may call tools when a request leaves it to it."""
    tool_call_parser: ToolCallParser = "auto"
    reasoning_parser: ReasoningParser = "auto"
    generation_config: str = "auto"
    override_generation_config: Mapping[str, Any] = field(default_factory=dict)
    force_include_usage: bool = False
    shutdown_timeout: float = 100.0
    """Seconds that running requests get after SIGTERM; below the pod's grace period of 120 s."""
    warmup_prompts: Path | None = None
    """File of prompts that are computed and pinned before the server is ready."""
    warmup_timeout: float = 300.0
    """Seconds for all of them; what is not done then is left out."""
    prefix_cache_isolation: IsolationMode = "none"
    prefix_cache_isolation_secret: str | None = field(default=None, repr=False)
    """Of "per-key"; None draws one."""
    http: HttpOptions = field(default_factory=HttpOptions)
    log_level: LogLevel = "info"
    builder: str = DEFAULT_BUILDER
    """Function that builds the engine, `module:name`."""
