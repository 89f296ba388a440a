"""The items of a Responses API input, and the conversation that they stand for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Discriminator, Tag

from reprise_engine.server.protocol import Body, NotSupported, refuse
from reprise_engine.server.protocol_chat import HARMLESS_IN_PARTS, ChatMessageBody
from reprise_engine.server.protocol_tools import CalledFunctionBody, FunctionName, ToolCallBody

_TEXT_PARTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")


def _text(value: Any) -> Any:
    """A text, or the texts of a list of parts joined by line ends, as in chat completions."""
    return "\n".join(_part(part) for part in value) if isinstance(value, list) else value


def _part(part: Any) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind not in _TEXT_PARTS:
        raise refuse("input", f"Content parts of type {kind!r} are not supported; this model reads text only.")
    text = part.get("text")
    if not isinstance(text, str):
        raise refuse("input", f"A content part of type {kind!r} needs a string in its field text.")
    known = ("type", "text", "logprobs", *HARMLESS_IN_PARTS)
    unknown = next((name for name, value in part.items() if value is not None and name not in known), None)
    if unknown is not None:
        raise refuse("input", f"Unknown field {unknown!r} in a content part of type {kind!r}.")
    return text


Text = Annotated[str, BeforeValidator(_text)]


class _Item(Body):
    """What an item of an answer holds beside its content says nothing when it comes back."""

    not_supported: ClassVar[NotSupported] = {"caller": ({"type": "direct"},), "namespace": ()}

    id: str | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None


class InputMessage(_Item):
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Text
    phase: Literal["commentary", "final_answer"] | None = None


class FunctionCall(_Item):
    type: Literal["function_call"]
    call_id: str
    name: FunctionName
    arguments: str


class FunctionCallOutput(_Item):
    type: Literal["function_call_output"]
    call_id: str
    name: str | None = None
    output: Text


class Reasoning(_Item):
    not_supported: ClassVar[NotSupported] = {"encrypted_content": ()}

    type: Literal["reasoning"]
    summary: list[Any] | None = None
    """Of another server; ours writes none."""
    content: Text | None = None


ITEM_TYPES = ("message", "function_call", "function_call_output", "reasoning")


def checked_item(value: Any) -> Any:
    """Raises the complaint about an item of a kind that is not supported."""
    kind = value.get("type", "message") if isinstance(value, dict) else None
    if isinstance(value, dict) and kind not in ITEM_TYPES:
        hint = " This server keeps no responses: send the item itself." if kind == "item_reference" else ""
        raise refuse("input", f"Input items of type {kind!r} are not supported; {', '.join(ITEM_TYPES)} are.{hint}")
    return value


def _tag(value: Any) -> str:
    return "@" + str(value.get("type", "message") if isinstance(value, dict) else "message")


InputItem = Annotated[
    Annotated[InputMessage, Tag("@message")]
    | Annotated[FunctionCall, Tag("@function_call")]
    | Annotated[FunctionCallOutput, Tag("@function_call_output")]
    | Annotated[Reasoning, Tag("@reasoning")],
    Discriminator(_tag),
]


def chat_messages(
    items: str | Sequence[InputMessage | FunctionCall | FunctionCallOutput | Reasoning], *, instructions: str | None
) -> list[ChatMessageBody]:
    """One message a turn: what the model said in one go, reasoning, text and calls, is one message again, so that it
    renders to the tokens that are in the cache."""
    messages: list[ChatMessageBody] = []
    if instructions is not None:
        messages.append(ChatMessageBody(role="system", content=instructions))
    if isinstance(items, str):
        return [*messages, ChatMessageBody(role="user", content=items)]
    for item in items:
        match item:
            case Reasoning():
                if item.content is not None:
                    messages.append(ChatMessageBody(role="assistant", reasoning_content=item.content))
            case InputMessage(role="assistant"):
                turn = _open_turn(messages)
                if turn is None or turn.content is not None or turn.tool_calls:
                    messages.append(ChatMessageBody(role="assistant", content=item.content))
                else:
                    turn.content = item.content
            case InputMessage():
                messages.append(ChatMessageBody(role=item.role, content=item.content))
            case FunctionCall():
                turn = _open_turn(messages)
                if turn is None:
                    turn = ChatMessageBody(role="assistant")
                    messages.append(turn)
                function = CalledFunctionBody(name=item.name, arguments=item.arguments)
                turn.tool_calls = [*(turn.tool_calls or ()), ToolCallBody(id=item.call_id, function=function)]
            case FunctionCallOutput():
                messages.append(ChatMessageBody(role="tool", tool_call_id=item.call_id, content=item.output))
    return messages


def _open_turn(messages: Sequence[ChatMessageBody]) -> ChatMessageBody | None:
    """The assistant's message that the next item may be a part of."""
    return messages[-1] if messages and messages[-1].role == "assistant" else None
