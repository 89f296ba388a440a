"""Tools, tool calls and the choice of a tool, as they stand in bodies."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

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
    """A JSON schema of the arguments, which are an object; none means no arguments."""
    strict: bool | None = None

    @model_validator(mode="after")
    def _arguments_are_an_object(self) -> Self:
        kind = (self.parameters or {}).get("type", "object")
        if kind != "object":
            raise refuse(
                "tools", f"The parameters of {self.name!r} are of type {kind!r}; a function's must be of type 'object'."
            )
        return self


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


@dataclass(frozen=True, slots=True)
class AllowedTools:
    """The functions that may be called; with `required` one of them must be. The prompt shows the others as well, so
    its prefix stays that of the other turns."""

    names: tuple[str, ...]
    required: bool


Choice = str | NamedTool | AllowedTools | None
"""A str is one of "none", "auto" and "required"."""


def read_choice(value: Any, *, name_of: Callable[[Any], str | None], allowed: Any, shapes: str) -> Choice:
    """A tool_choice in the shape of one API: `name_of` is the name in an object of type function, None where it is no
    such object; `allowed` has the fields `mode` and `tools` where the choice is of type allowed_tools, else None.

    Raises the complaint about anything else, showing the `shapes` of both.
    """
    if value is None or value in ("none", "auto", "required"):
        return value  # type: ignore[no-any-return]
    name = name_of(value)
    if name is not None:
        return NamedTool(name)
    if isinstance(allowed, dict) and set(allowed) == {"mode", "tools"} and allowed["mode"] in ("auto", "required"):
        tools = allowed["tools"]
        names = [name_of(tool) for tool in tools] if isinstance(tools, list) else []
        if names and None not in names:
            return AllowedTools(tuple(map(str, names)), required=allowed["mode"] == "required")
    raise refuse(
        "tool_choice", f"tool_choice must be 'none', 'auto', 'required', or {shapes}; nothing else is supported."
    )


def _name_of(value: Any) -> str | None:
    if not isinstance(value, dict) or set(value) != {"type", "function"} or value["type"] != "function":
        return None
    function = value["function"]
    if not isinstance(function, dict) or set(function) != {"name"} or not isinstance(function["name"], str):
        return None
    return function["name"]


def _tool_choice(value: Any) -> Choice:
    limits = isinstance(value, dict) and set(value) == {"type", "allowed_tools"} and value["type"] == "allowed_tools"
    return read_choice(
        value,
        name_of=_name_of,
        allowed=value["allowed_tools"] if limits else None,
        shapes='one function as {"type": "function", "function": {"name": …}}, or some as {"type": "allowed_tools", '
        '"allowed_tools": {"mode": "auto" or "required", "tools": [one such function, …]}}',
    )


ToolChoice = Annotated[Choice, PlainValidator(_tool_choice)]


def check_tool_choice(choice: Choice, tools: Sequence[ToolBody]) -> None:
    """Raises the complaint about a choice that the tools cannot meet, or two tools of one name."""
    names = [tool.function.name for tool in tools]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise refuse("tools", f"tools has two functions of the name {twice[0]!r}; names must differ.")
    if not tools and not is_neutral(choice, ("none", "auto")):
        raise refuse("tool_choice", "tool_choice asks for a tool, but there are no tools; send some.")
    chosen = choice.names if isinstance(choice, AllowedTools) else ()
    if isinstance(choice, NamedTool):
        chosen = (choice.name,)
    missing = next((name for name in chosen if name not in names), None)
    if missing is not None:
        raise refuse("tool_choice", f"tool_choice names {missing!r}; tools has {', '.join(map(repr, names))}.")
