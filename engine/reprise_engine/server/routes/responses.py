"""POST /v1/responses: OpenAI's Responses API, without memory."""

from __future__ import annotations

import time
from collections.abc import Mapping

from fastapi import APIRouter, Request
from fastapi.responses import Response

from reprise_engine.errors import RequestError
from reprise_engine.server import prepare
from reprise_engine.server.answer_form import answer_form
from reprise_engine.server.chat_prompt import render_chat
from reprise_engine.server.json_route import JsonRoute
from reprise_engine.server.parsed_answer import ParsedChoices
from reprise_engine.server.protocol_responses import ResponsesBody
from reprise_engine.server.respond import respond
from reprise_engine.server.responses_answer import ResponsesAnswer
from reprise_engine.server.state import Model, State
from reprise_engine.server.tool_use import tool_use

router = APIRouter(route_class=JsonRoute)

_OWN_NAMES: Mapping[str | None, str] = {
    "messages": "input",
    "prompt": "input",
    "reasoning_effort": "reasoning.effort",
}
"""Of fields that a chat completion has another name for."""


@router.post("/v1/responses")
async def responses(request: Request, body: ResponsesBody, state: State, model: Model) -> Response:
    arrival_time = time.monotonic()
    name = state.check_model(body.model)
    chat_body = body.for_chat()
    try:
        use = tool_use(model, chat_body)
        chat = await render_chat(model, chat_body, effort=chat_body.reasoning_effort)
        generations = await prepare.chat_generations(
            *(model, state, request, chat_body, chat.token_ids),
            structured=answer_form(model, body.form.structured, chat.start, use),
            forbid_calls=use.forbidden,
            max_tokens_field="max_output_tokens",
            arrival_time=arrival_time,
        )
    except RequestError as error:
        raise type(error)(error.message, param=_OWN_NAMES.get(error.param, error.param), code=error.code) from error
    answer = ResponsesAnswer(
        model=model,
        body=body,
        name=name,
        generations=generations,
        parsed=ParsedChoices(model, chat_body, chat, use, generations),
    )
    # Its last event says that it is the last; there is no [DONE].
    return await respond(request, chat_body, generations, answer, closing=b"")
