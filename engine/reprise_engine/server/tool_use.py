"""What a request wants of its tools, checked against what the model can do."""

from __future__ import annotations

from dataclasses import dataclass

from reprise_engine.errors import RequestError
from reprise_engine.server.protocol_chat import ChatCompletionBody
from reprise_engine.server.protocol_tools import AllowedTools, NamedTool, ToolBody
from reprise_engine.server.state import Loaded


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    parses: bool = False
    """Whether tool calls are looked for in the answer."""
    single: bool = False
    """Whether the answer ends with the first call."""
    allowed: tuple[ToolBody, ...] = ()
    """These may be called."""
    limited: bool = False
    """Whether the model sees others besides, so that nothing but a grammar keeps it from calling them."""
    forced: bool = False
    """Whether one must be called."""
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
    required = choice == "required" or isinstance(choice, NamedTool)
    names = {tool.function.name for tool in tools}
    if isinstance(choice, AllowedTools):
        required, names = choice.required, set(choice.names)
    elif isinstance(choice, NamedTool):
        names = {choice.name}
    if not required and not model.auto_tool_choice:
        raise RequestError(
            'tool_choice "auto" is switched off on this server (--no-enable-auto-tool-choice); send "none", "required" '
            "or a function.",
            param="tool_choice",
        )
    allowed = tuple(tool for tool in tools if tool.function.name in names)
    return ToolUse(
        parses=True,
        single=isinstance(choice, NamedTool) or body.parallel_tool_calls is False,
        allowed=allowed,
        limited=len(allowed) < len(tools),
        forced=required,
    )
