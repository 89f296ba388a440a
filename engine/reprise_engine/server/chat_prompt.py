"""From a conversation to token ids, through the model's chat template."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from reprise_engine.errors import RequestError
from reprise_engine.request import TokenId
from reprise_engine.server.prepare import encode
from reprise_engine.server.protocol_chat import ChatPrompt
from reprise_engine.server.state import Loaded
from reprise_engine.text import ChatTemplateError
from reprise_engine.text.reasoning import ReasoningStart, reasoning_start

_THINKING = "enable_thinking"
_EFFORT = "reasoning_effort"
_OWN_FIELDS = frozenset({"messages", "tools", "add_generation_prompt", "continue_final_message"})


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderedChat:
    """A prompt, and what the chat template made it of."""

    token_ids: tuple[TokenId, ...]
    text: str
    start: ReasoningStart
    """Whether what is generated behind it begins inside a block of reasoning."""
    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]]
    variables: Mapping[str, Any]


async def chat_prompt(model: Loaded, body: ChatPrompt, *, fits: bool = True) -> tuple[TokenId, ...]:
    """The token ids of a conversation. Raises RequestError, in the template's words where it is the template's.

    With `fits` one that is far too long is refused before all of it is encoded.
    """
    return (await render_chat(model, body, fits=fits)).token_ids


async def render_chat(model: Loaded, body: ChatPrompt, *, effort: str | None = None, fits: bool = True) -> RenderedChat:
    """`effort` is reasoning_effort. Raises RequestError like `chat_prompt`, and for tools or an effort that the
    template does not know."""
    _check_variables(model, body.chat_template_kwargs or {})
    variables = dict(body.chat_template_kwargs or {}) | _thinking(model, body, effort)
    return await asyncio.to_thread(_render, model, body, variables, fits=fits)


def _check_variables(model: Loaded, variables: Mapping[str, Any]) -> None:
    """Raises RequestError for variables that another field has, and for those that would change nothing."""
    field = "chat_template_kwargs"
    template = model.tokenizer.chat_template
    for name, value in variables.items():
        if name in _OWN_FIELDS:
            raise RequestError(f"{field} has {name}, which is a field of the request: send it there.", param=field)
        if template is None or template.reads(name) or value is None:
            continue
        if name == _THINKING and (value is True or (value is False and model.formats.reasoning is None)):
            continue  # it allows what the model does or cannot do, or forbids what it does not
        raise RequestError(
            f"{field} has {name}, which this model's chat template does not read; leave it out.", param=field
        )


def _thinking(model: Loaded, body: ChatPrompt, effort: str | None) -> dict[str, Any]:
    """The template's variables for a reasoning_effort."""
    template = model.tokenizer.chat_template
    if effort is None or template is None:
        return {}
    if template.reads(_EFFORT):
        return {_EFFORT: effort}
    if effort != "none":
        raise RequestError(
            f"{_EFFORT} is {effort!r}, but this model's chat template knows no degrees of it; leave it out, or give "
            "'none', which switches thinking off where the model can do without.",
            param=_EFFORT,
        )
    if template.reads(_THINKING):
        if (body.chat_template_kwargs or {}).get(_THINKING):
            raise RequestError(f"{_EFFORT} is 'none', but chat_template_kwargs asks for thinking.", param=_EFFORT)
        return {_THINKING: False}
    if model.formats.reasoning is not None:
        raise RequestError(f"{_EFFORT} is 'none', but this model's thinking cannot be switched off.", param=_EFFORT)
    return {}


def _render(model: Loaded, body: ChatPrompt, variables: Mapping[str, Any], *, fits: bool) -> RenderedChat:
    tokenizer = model.tokenizer
    messages = [message.for_template() for message in body.messages]
    template = tokenizer.chat_template
    if template is not None and not template.knows_developer_role:
        for message in messages:  # OpenAI's newer name for it; a template that does not know it would drop it
            if message["role"] == "developer":
                message["role"] = "system"
    if body.tools and template is not None and not template.reads("tools"):
        raise RequestError(
            "This model's chat template does not render tools, so it would not see them; leave tools out, or give the "
            "server a template that does with --chat-template.",
            param="tools",
        )
    tools = [tool.for_template() for tool in body.tools or ()]
    try:
        text = tokenizer.render_chat(
            messages,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            tools=tools,
            variables=variables,
        )
    except ChatTemplateError as error:
        raise RequestError(str(error), param="messages") from error
    return RenderedChat(
        token_ids=encode(model, text, add_special_tokens=body.add_special_tokens, param="messages", fits=fits),
        text=text,
        start=reasoning_start(text, continued=body.messages[-1].content if body.continue_final_message else None),
        messages=messages,
        tools=tools,
        variables=variables,
    )
