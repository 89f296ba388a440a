"""The bodies of /tokenize and /detokenize."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Discriminator, Field, Tag

from reprise_engine.server.protocol import Body, TokenIdField
from reprise_engine.server.protocol_chat import ChatPrompt

MAX_TOKENS = 2**20
"""Of a /detokenize. The tokenizer holds the interpreter's lock meanwhile: a third of a second for so many."""


class TokenizeTextBody(Body):
    model: str | None = None
    prompt: str
    add_special_tokens: bool = True
    return_token_strs: bool | None = False


class TokenizeChatBody(ChatPrompt):
    model: str | None = None
    return_token_strs: bool | None = False


def _tokenize_kind(data: Any) -> str:
    return "@messages" if isinstance(data, dict) and "messages" in data else "@prompt"


TokenizeBody = Annotated[
    Annotated[TokenizeTextBody, Tag("@prompt")] | Annotated[TokenizeChatBody, Tag("@messages")],
    Discriminator(_tokenize_kind),
]
"""A conversation where there are `messages`, else a text: so a complaint is about what was meant."""


class DetokenizeBody(Body):
    model: str | None = None
    tokens: Annotated[list[TokenIdField], Field(max_length=MAX_TOKENS)]
