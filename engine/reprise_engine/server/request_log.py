"""Prompts and sampling parameters in the log: only where `--enable-log-requests` asks for them."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import asdict

from fastapi import Request

from reprise_engine.request import SamplingParams
from reprise_engine.server.access import Exchange, logfmt
from reprise_engine.server.generation import Generations
from reprise_engine.server.state import ServerState
from reprise_engine.text import Tokenizer

logger = logging.getLogger(__name__)

_PLAIN = SamplingParams()


def note(http: Request, state: ServerState, generations: Generations, tokenizer: Tokenizer) -> None:
    """What a request is about to generate: for its line in the access log, and for one of its own where asked for."""
    exchange: Exchange = http.state.exchange
    exchange.generations = generations
    if state.http.log_requests:
        # In a thread: turning a long prompt's tokens into text takes its time.
        asyncio.get_running_loop().run_in_executor(
            None, _log_requests, exchange, generations, tokenizer, state.http.max_log_len
        )


def _log_requests(exchange: Exchange, generations: Generations, tokenizer: Tokenizer, max_len: int | None) -> None:
    """A line for each sequence, before it is computed. `max_len` bounds the characters of a prompt; None: all."""
    for generation in generations.generations:
        ids = generation.request.prompt_token_ids
        # A token has at least one character, save for parts of one: more tokens than characters are never needed.
        text = tokenizer.decode(ids if max_len is None else ids[:max_len], skip_special_tokens=False)
        shown = text if max_len is None else text[:max_len]
        sampling = {
            name: value for name, value in asdict(generation.request.sampling).items() if value != getattr(_PLAIN, name)
        }
        fields = {
            "request_id": exchange.request_id,
            "id": generation.request.request_id,
            "prompt_tokens": len(ids),
            "sampling": sampling,
            "prompt": shown,
        }
        logger.info("received %s", logfmt(fields))
