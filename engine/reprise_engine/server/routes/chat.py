"""POST /v1/chat/completions."""

from __future__ import annotations

import time

from fastapi import APIRouter, Request
from fastapi.responses import Response

from reprise_engine.server import prepare
from reprise_engine.server.answer_form import answer_form
from reprise_engine.server.chat_answer import ChatAnswer
from reprise_engine.server.chat_prompt import render_chat
from reprise_engine.server.json_route import JsonRoute
from reprise_engine.server.parsed_answer import ParsedChoices
from reprise_engine.server.protocol_chat import ChatCompletionBody
from reprise_engine.server.respond import respond, wants_usage
from reprise_engine.server.state import Model, State
from reprise_engine.server.tool_use import tool_use

router = APIRouter(route_class=JsonRoute)


@router.post("/v1/chat/completions")
async def chat_completions(request: Request, body: ChatCompletionBody, state: State, model: Model) -> Response:
    arrival_time = time.monotonic()
    name = state.check_model(body.model)
    use = tool_use(model, body)
    chat = await render_chat(*(model, body), effort=body.reasoning_effort, fits=body.truncate_prompt_tokens is None)
    generations = await prepare.chat_generations(
        *(model, state, request, body, chat.token_ids),
        structured=answer_form(model, body.structured, chat.start, use),
        forbid_calls=use.forbidden,
        arrival_time=arrival_time,
    )
    answer = ChatAnswer(
        model=model,
        body=body,
        name=name,
        generations=generations,
        parsed=ParsedChoices(model, body, chat, use, generations),
        include_usage=wants_usage(body, force=state.force_include_usage),
    )
    return await respond(request, body, generations, answer)
