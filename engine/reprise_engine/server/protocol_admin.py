"""The bodies of the admin endpoints, and of a line of a warm-up file."""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import Field, StringConstraints, model_validator

from reprise_engine.server.protocol import Body, NonEmpty, Salt, TokenIdField, refuse
from reprise_engine.server.protocol_chat import MAX_MESSAGES, ChatMessageBody
from reprise_engine.server.protocol_tools import Tools


class PinBody(Body):
    """POST /v1/admin/prefix_cache/pins, and a line of a warm-up file: `prompt`, a text or token ids, or `messages`."""

    name: Annotated[str, StringConstraints(min_length=1, max_length=128, pattern=r"^[.:@-]*\w[\w.:@-]*$")] | None = None
    """None takes a new one."""
    prompt: NonEmpty | Annotated[list[TokenIdField], Field(min_length=1)] | None = None
    messages: Annotated[list[ChatMessageBody], Field(min_length=1, max_length=MAX_MESSAGES)] | None = None
    tools: Tools | None = None
    add_generation_prompt: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    cache_salt: Salt | None = None

    @model_validator(mode="after")
    def _one_prompt(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise refuse("prompt", "Give either prompt or messages.")
        if self.tools and self.messages is None:
            raise refuse("tools", "tools are rendered with messages only; a prompt is taken as it is.")
        return self


class ResetBody(Body):
    """POST /v1/admin/prefix_cache/reset."""

    include_pins: bool = False
