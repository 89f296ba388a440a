"""The bodies of chat completions, and of what else takes a conversation."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from reprise_engine.server.protocol import (
    Body,
    GenerationBody,
    NonEmpty,
    is_neutral,
    refuse,
)
from reprise_engine.server.protocol_logits import MAX_TOP_LOGPROBS
from reprise_engine.server.protocol_tools import ToolCallBody, ToolChoice, Tools, check_tool_choice

MAX_MESSAGES = 4096
"""OpenAI's is 2,048. Each takes some microseconds of the event loop."""
HARMLESS_IN_PARTS = ("cache_control", "annotations", "prompt_cache_breakpoint")
"""Marks what is to be cached, which everything is here; and what a part of an answer holds beside its text."""


class ChatMessageBody(Body):
    """One message. `content` is text, or a list of text parts, which are joined by line ends."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | None = None
    name: str | None = None
    tool_calls: list[ToolCallBody] | None = None
    tool_call_id: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _plain(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        data = dict(data)
        role = data.get("role")
        if role == "function":
            raise refuse("messages", "Messages of role 'function' are not supported by this server; use role 'tool'.")
        # What the OpenAI client's own model_dump() of a reply holds, at values that say nothing.
        for name, neutral in (("refusal", ()), ("audio", ()), ("function_call", ()), ("annotations", ([],))):
            if name in data and not is_neutral(data.pop(name), neutral):
                raise refuse("messages", f"{name} in a message is not supported by this server.")
        data.pop("parsed", None)  # what parse() of the client made of the content
        if role != "assistant" and not is_neutral(data.pop("tool_calls", None), ([],)):
            raise refuse("messages", f"tool_calls in a message of role {role!r}; only an assistant calls tools.")
        if role != "tool" and data.pop("tool_call_id", None) is not None:
            raise refuse("messages", f"tool_call_id in a message of role {role!r}; it is for role 'tool'.")
        content = data.get("content")
        if isinstance(content, list):
            data["content"] = "\n".join(_text_of(part) for part in content)
        elif content is None and role != "assistant":
            raise refuse("messages", f"content is required in a message of role {role!r}.")
        return data

    def for_template(self) -> dict[str, Any]:
        """The message as chat templates know it."""
        message = self.model_dump(exclude_none=True, exclude={"tool_calls"})
        if self.role == "assistant":
            message.setdefault("content", "")  # templates look into it
        if self.tool_calls:
            message["tool_calls"] = [call.for_template() for call in self.tool_calls]
        return message


def _text_of(part: Any) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else None
    if kind != "text":
        raise refuse(
            "messages", f"Content parts of type {kind!r} are not supported; this model reads parts of type 'text' only."
        )
    text = part.get("text")
    if not isinstance(text, str):
        raise refuse("messages", "A content part of type 'text' needs a string in its field text.")
    known = ("type", "text", *HARMLESS_IN_PARTS)
    unknown = next((name for name, value in part.items() if value is not None and name not in known), None)
    if unknown is not None:
        raise refuse("messages", f"Unknown field {unknown!r} in a content part of type 'text'.")
    return text


class ChatPrompt(Body):
    """The fields that make the prompt, shared with /tokenize."""

    messages: Annotated[list[ChatMessageBody], Field(min_length=1, max_length=MAX_MESSAGES)]
    tools: Tools | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool = False

    @model_validator(mode="after")
    def _one_way_to_go_on(self) -> Self:
        if self.continue_final_message and self.add_generation_prompt:
            raise refuse(
                "continue_final_message", "continue_final_message needs add_generation_prompt to be false: one of them."
            )
        return self


class ChatCompletionBody(ChatPrompt, GenerationBody):
    """POST /v1/chat/completions."""

    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    tool_choice: ToolChoice = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: NonEmpty | None = None
    logprobs: bool | None = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    echo: Literal[False] = False

    @model_validator(mode="after")
    def _top_logprobs_need_logprobs(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise refuse("top_logprobs", "top_logprobs is only allowed when logprobs is true.")
        return self

    @model_validator(mode="after")
    def _choice_among_tools(self) -> Self:
        check_tool_choice(self.tool_choice, self.tools or ())
        return self
