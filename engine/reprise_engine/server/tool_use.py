"""What a request wants of its tools, checked against what the model can do."""

from __future__ import annotations

from dataclasses import dataclass

from reprise_engine.errors import RequestError
from reprise_engine.server.protocol_chat import ChatCompletionBody
from reprise_engine.server.protocol_tools import NamedTool, ToolBody
from reprise_engine.server.state import Loaded


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    parses: bool = False
    """Whether tool calls are looked for in the answer."""
    single: bool = False
    """Whether the answer ends with the first call."""
    forced: tuple[ToolBody, ...] = ()
    """One of these must be called."""
    forbidden: bool = False
    """Whether the model sees tools, and must not call them."""


def tool_use(model: Loaded, body: ChatCompletionBody) -> ToolUse:
    """Raises RequestError for tools that this model, or this server, cannot call."""
    tools = tuple(body.tools or ())
    choice = body.tool_choice or "auto"
    if not tools or choice == "none":
        # The tools are rendered all the same: the prefix stays that of the turns with tools.
        return ToolUse(forbidden=bool(tools) and model.formats.tool_calls is not None)
    if model.formats.tool_calls is None:
        raise RequestError(
            "This model's chat template does not show a format of tool calls that this server reads (it reads hermes: "
            '<tool_call>{"name": …, "arguments": …}</tool_call>). Leave tools out, send tool_choice "none", or start '
            "the server with --tool-call-parser hermes.",
            param="tools",
        )
    if choice == "auto" and not model.auto_tool_choice:
        raise RequestError(
            'tool_choice "auto" is switched off on this server (--no-enable-auto-tool-choice); send "none", "required" '
            "or a function.",
            param="tool_choice",
        )
    named = isinstance(choice, NamedTool)
    forced = tuple(tool for tool in tools if not named or tool.function.name == choice.name)  # type: ignore[union-attr]
    return ToolUse(
        parses=True,
        single=named or body.parallel_tool_calls is False,
        forced=() if choice == "auto" else forced,
    )
