"""Pinning a prefix: one token is generated behind it, and what was computed stays in the cache.

Used by the admin endpoint, and by `--warmup-prompts FILE` before the server is ready. A line of FILE is a JSON object
with the fields of `PinBody`, where the file's name ends in `.jsonl`; else the whole line is a prompt.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from pydantic import ValidationError

from reprise_engine.cache_report import PinnedPrefix
from reprise_engine.errors import RequestError
from reprise_engine.request import EngineRequest, RequestId, SamplingParams, TokenId
from reprise_engine.server import prepare
from reprise_engine.server.chat_prompt import chat_prompt
from reprise_engine.server.errors import describe
from reprise_engine.server.isolation import Isolation
from reprise_engine.server.protocol_admin import PinBody
from reprise_engine.server.protocol_chat import ChatPrompt
from reprise_engine.server.state import Loaded

logger = logging.getLogger(__name__)

_Tenant = tuple[str, Callable[[str | None], str | None]]
"""What its pins' names end in, and how its salt is made of the prompt's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pinned:
    """`cached_tokens` of the prompt were in the cache already."""

    prefix: PinnedPrefix
    prompt_tokens: int
    cached_tokens: int

    def as_json(self) -> dict[str, object]:
        return self.prefix.as_json() | {"prompt_tokens": self.prompt_tokens, "cached_tokens": self.cached_tokens}


async def pin(model: Loaded, body: PinBody, *, name: str, cache_salt: str | None, isolated: bool) -> Pinned:
    """Computes the prompt and pins it under `name`, in the place of what had that name. `isolated`: see EngineRequest.

    Raises RequestError (caching off, too long, …), EngineDead. Cancelled, it pins nothing.
    """
    if not model.resolved.enable_prefix_caching:
        raise RequestError("Prefix caching is off: nothing can be pinned.", code="prefix_caching_off")
    prompt = await _prompt(model, body)
    if not prompt:
        raise RequestError("The prompt is empty: it has no tokens.", param="prompt")
    prepare.resolve_max_tokens(model, len(prompt), 1, None)
    request = EngineRequest(
        request_id=RequestId(f"pin-{uuid.uuid4().hex}"),
        prompt_token_ids=prompt,
        sampling=SamplingParams(max_tokens=1, temperature=0.0),
        cache_salt=cache_salt,
        isolated=isolated,
        pin=name,
        arrival_time=time.monotonic(),
    )
    async with aclosing(model.engine.generate(request)) as outputs:
        async for output in outputs:
            if output.pinned is not None:
                return Pinned(
                    prefix=output.pinned, prompt_tokens=output.prompt_tokens, cached_tokens=output.cached_tokens
                )
    raise RuntimeError("the engine ended a request that pins without saying what it pinned")


async def _prompt(model: Loaded, body: PinBody) -> tuple[TokenId, ...]:
    if body.messages is not None:
        chat = ChatPrompt(
            messages=body.messages,
            tools=body.tools,
            add_generation_prompt=body.add_generation_prompt,
            chat_template_kwargs=body.chat_template_kwargs,
        )
        return await chat_prompt(model, chat)
    if isinstance(body.prompt, str):
        return await prepare.text_prompt(model, body.prompt)
    assert body.prompt is not None
    prepare.check_token_ids(model, body.prompt, param="prompt")
    return tuple(body.prompt)


async def warm_up(
    model: Loaded, file: Path, *, seconds: float, isolation: Isolation, api_keys: Sequence[str] = ()
) -> None:
    """Pins every prompt of `file`, in its order, within `seconds`. What fails is logged, and not fatal.

    With isolation per key, which share nothing, it does so for each of `api_keys`.
    Raises EngineDead only: a server without its warm-up serves, only slower at first.
    """
    begun = time.monotonic()
    tenants: list[_Tenant] = [("", partial(isolation.salt, None))]
    if isolation.per_key:
        tenants = [(f"-key-{i}", partial(isolation.salt, key)) for i, key in enumerate(api_keys, 1)]
    done = 0
    prompts: list[tuple[int, PinBody | str]] = []
    try:
        prompts = await asyncio.to_thread(_read, file)
        async with asyncio.timeout(seconds):
            for number, body in prompts:
                done += await _warm_up_one(model, file, number, body, tenants, isolated=isolation.per_key)
    except TimeoutError:
        logger.warning("warm-up: %s s are over after %d of %d prompts of %s", seconds, done, len(prompts), file)
    except OSError as error:
        logger.warning("warm-up: %s cannot be read: %s", file, error.strerror or error)
    except UnicodeDecodeError as error:
        logger.warning("warm-up: %s is not UTF-8 text: %s", file, error)
    else:
        took = time.monotonic() - begun
        logger.info("warm-up: %d of %d prompts of %s in %.1f s", done, len(prompts), file, took)


async def _warm_up_one(
    model: Loaded, file: Path, number: int, body: PinBody | str, tenants: Sequence[_Tenant], *, isolated: bool
) -> bool:
    """One line for all tenants; False where it failed."""
    where = f"warm-up: line {number} of {file}"
    if isinstance(body, str):
        logger.warning("%s: %s", where, body)
        return False
    for suffix, salt in tenants:
        name = (body.name or f"warmup-{number}") + suffix
        try:
            pinned = await pin(model, body, name=name, cache_salt=salt(body.cache_salt), isolated=isolated)
        except RequestError as error:
            logger.warning("%s: %s", where, error)
            return False
        if pinned.prefix.tokens < pinned.prompt_tokens:
            logger.warning(
                "%s: %d of its %d tokens are pinned, the rest is only cached; raise --prefix-cache-pin-budget",
                *(where, pinned.prefix.tokens, pinned.prompt_tokens),
            )
    return True


def _read(file: Path) -> list[tuple[int, PinBody | str]]:
    """(line number, prompt, or what is wrong with the line). Raises OSError, UnicodeDecodeError."""
    prompts: list[tuple[int, PinBody | str]] = []
    if file.exists() and not (file.is_file() or file.is_dir()):  # reading a pipe or a device may never end
        raise OSError(errno.EINVAL, "It is not a regular file")
    # Not splitlines(): JSON may hold U+2028 and its like as they are.
    for number, line in enumerate(file.read_text(encoding="utf-8-sig").split("\n"), 1):
        if not line.strip():
            continue
        if file.suffix != ".jsonl":
            prompts.append((number, PinBody(prompt=line)))
            continue
        try:
            prompts.append((number, PinBody.model_validate_json(line)))
        except ValidationError as error:
            wrong = error.errors()
            # Of a line that is no object at all it would speak as of a request.
            told = describe(wrong)[0] if wrong[0]["loc"] else f"It must be a JSON object. {wrong[0]['msg']}."
            prompts.append((number, told))
    return prompts
