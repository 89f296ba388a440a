"""Tools, tool calls and the choice of a tool, as they stand in bodies."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, PlainValidator, StringConstraints, model_validator

from reprise_engine.server.protocol import Body, is_neutral, refuse
from reprise_engine.text.chat_template import JsonText

MAX_TOOLS = 512
FunctionName = Annotated[str, StringConstraints(min_length=1, max_length=128, pattern=r'^[^"\\\x00-\x1f]+$')]
"""OpenAI's names and those of MCP servers; no quotes, since templates write it between some."""


class FunctionBody(Body):
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """A JSON schema of the arguments; none means no arguments."""
    strict: bool | None = None


class ToolBody(Body):
    type: Literal["function"]
    function: FunctionBody

    def for_template(self) -> dict[str, Any]:
        """What the chat template renders: what says something to the model, always in the same order.

        Null fields are left out, and so is `strict`, which speaks to the server.
        """
        function = {
            "name": self.function.name,
            "description": self.function.description,
            "parameters": self.function.parameters,
        }
        return {"type": "function", "function": {key: value for key, value in function.items() if value is not None}}


Tools = Annotated[list[ToolBody], Field(max_length=MAX_TOOLS)]


class CalledFunctionBody(Body):
    name: FunctionName
    arguments: str
    """JSON, as the model wrote it."""

    def for_template(self) -> dict[str, Any]:
        """Arguments as an object that renders as the text that is in the cache; what is no object stays text."""
        try:
            value = json.loads(self.arguments or "{}")
        except (ValueError, RecursionError):
            value = None
        arguments = JsonText(value, text=self.arguments or "{}") if isinstance(value, dict) else self.arguments
        return {"name": self.name, "arguments": arguments}


class ToolCallBody(Body):
    """A call in an assistant's message. `index` is what a client may have kept of a stream."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunctionBody
    index: int | None = None

    @model_validator(mode="before")
    @classmethod
    def _plain(cls, data: Any) -> Any:
        # The OpenAI client's own model_dump() of a parsed call holds the parsed arguments too.
        if isinstance(data, dict) and isinstance(data.get("function"), dict) and "parsed_arguments" in data["function"]:
            function = {key: value for key, value in data["function"].items() if key != "parsed_arguments"}
            return data | {"function": function}
        return data

    def for_template(self) -> dict[str, Any]:
        call = {"type": "function", "function": self.function.for_template()}
        return call if self.id is None else {"id": self.id} | call


@dataclass(frozen=True, slots=True)
class NamedTool:
    """The one function that must be called."""

    name: str


def _tool_choice(value: Any) -> str | NamedTool | None:
    if value is None or value in ("none", "auto", "required"):
        return value  # type: ignore[no-any-return]
    if isinstance(value, dict) and value.get("type") == "function":
        function = value.get("function")
        if isinstance(function, dict) and set(value) == {"type", "function"} and set(function) == {"name"}:
            name = function["name"]
            if isinstance(name, str):
                return NamedTool(name)
    raise refuse(
        "tool_choice",
        "tool_choice must be 'none', 'auto', 'required', or one function as "
        """{"type": "function", "function": {"name": …}}; nothing else is supported.""",
    )


ToolChoice = Annotated[str | NamedTool | None, PlainValidator(_tool_choice)]


def check_tool_choice(choice: str | NamedTool | None, tools: Sequence[ToolBody]) -> None:
    """Raises the complaint about a choice that the tools cannot meet, or two tools of one name."""
    names = [tool.function.name for tool in tools]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise refuse("tools", f"tools has two functions of the name {twice[0]!r}; names must differ.")
    if not tools and not is_neutral(choice, ("none", "auto")):
        raise refuse("tool_choice", "tool_choice asks for a tool, but there are no tools; send some.")
    if isinstance(choice, NamedTool) and choice.name not in names:
        raise refuse("tool_choice", f"tool_choice names {choice.name!r}; tools has {', '.join(map(repr, names))}.")
