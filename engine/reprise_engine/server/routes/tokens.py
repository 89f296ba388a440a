"""POST /tokenize and /detokenize: what the model reads, without running it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from fastapi import APIRouter
from fastapi.responses import Response

from reprise_engine.request import TokenId
from reprise_engine.server.chat_prompt import chat_prompt
from reprise_engine.server.json_route import JsonAnswer, JsonRoute
from reprise_engine.server.prepare import check_token_ids, text_prompt
from reprise_engine.server.protocol_tokens import DetokenizeBody, TokenizeBody, TokenizeTextBody
from reprise_engine.server.state import Model, State
from reprise_engine.text import Tokenizer

router = APIRouter(route_class=JsonRoute)


@router.post("/tokenize")
async def tokenize(body: TokenizeBody, state: State, model: Model) -> Response:
    """The token ids of a text (`prompt`), or of a conversation (`messages`) under the chat template."""
    state.check_model(body.model)
    if isinstance(body, TokenizeTextBody):
        token_ids = await text_prompt(model, body.prompt, add_special_tokens=body.add_special_tokens, fits=False)
    else:
        token_ids = await chat_prompt(model, body, fits=False)
    answer = {
        "count": len(token_ids),
        "max_model_len": model.resolved.max_model_len,
        "tokens": token_ids,
        "token_strs": await asyncio.to_thread(_texts, model.tokenizer, token_ids) if body.return_token_strs else None,
    }
    return JsonAnswer(answer)


def _texts(tokenizer: Tokenizer, token_ids: Sequence[TokenId]) -> list[str]:
    return [tokenizer.token_text(token_id) for token_id in token_ids]


@router.post("/detokenize")
async def detokenize(body: DetokenizeBody, state: State, model: Model) -> dict[str, str]:
    state.check_model(body.model)
    check_token_ids(model, body.tokens, param="tokens")
    return {"prompt": await asyncio.to_thread(model.tokenizer.decode, body.tokens, skip_special_tokens=False)}
