"""What both kinds of completions share: wait for the first output, then stream, or collect the whole."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from typing import Any, Protocol

from fastapi import Request
from fastapi.responses import Response

from reprise_engine.request import TokenId
from reprise_engine.server.generation import Generation, Generations
from reprise_engine.server.logprobs import prompt_logprobs
from reprise_engine.server.protocol import GenerationBody
from reprise_engine.server.state import Loaded
from reprise_engine.server.streaming import DONE, ClientGone, EventStream, unless_disconnected
from reprise_engine.text import TextDelta

Deltas = AsyncIterator[tuple[Generation, TextDelta]]

_CLIENT_CLOSED_REQUEST = 499
"""nginx's status for a client that went away; nobody reads it but the access log."""


class Answer(Protocol):
    """An answer in its two shapes."""

    async def whole(self, deltas: Deltas) -> Response: ...

    def stream(self, deltas: Deltas) -> AsyncGenerator[bytes, None]: ...


async def respond(
    request: Request, body: GenerationBody, generations: Generations, answer: Answer, *, closing: bytes = DONE
) -> Response:
    """The answer in the shape the body asks for. A client that goes away aborts its sequences, in both shapes.

    A stream begins when the engine has sent something, so what it refuses is still an HTTP error.
    """
    deltas = generations.deltas()
    try:
        if not body.stream:
            async with aclosing(deltas):
                return await unless_disconnected(request, answer.whole(deltas))
        try:
            first = await unless_disconnected(request, _first(deltas))
        except BaseException:
            await deltas.aclose()
            raise
    except ClientGone:
        return Response(status_code=_CLIENT_CLOSED_REQUEST)
    return EventStream(answer.stream(_chain(first, deltas)), source=deltas, closing=closing)


async def _first(deltas: Deltas) -> tuple[Generation, TextDelta]:
    return await anext(deltas)


async def _chain(first: tuple[Generation, TextDelta], rest: Deltas) -> Deltas:
    yield first
    async for item in rest:
        yield item


def wants_usage(body: GenerationBody, *, force: bool) -> bool:
    options = body.stream_options
    return (
        force
        or body.explain_cache
        or (options is not None and (options.include_usage or options.continuous_usage_stats))
    )


def choice_ids(body: GenerationBody, token_ids: Sequence[TokenId]) -> dict[str, Any]:
    """The field of return_token_ids, where it is asked for."""
    return {"token_ids": list(token_ids)} if body.return_token_ids else {}


async def prompt_logprobs_of(model: Loaded, body: GenerationBody, generation: Generation) -> dict[str, Any]:
    """The field of prompt_logprobs, where it is asked for. A long prompt's takes a while: the event loop goes on."""
    if body.prompt_logprobs is None:
        return {}
    shown = await asyncio.to_thread(
        prompt_logprobs, model.tokenizer, generation.prompt_logprobs, top=body.prompt_logprobs
    )
    return {"prompt_logprobs": shown}
