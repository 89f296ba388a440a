"""From a request's body to EngineRequests: prompt text, token ids, sampling, and every check that needs the model."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

from fastapi import Request

from reprise_engine.errors import ContextLengthExceeded, RequestError
from reprise_engine.request import EngineRequest, RequestId, SamplingParams, StructuredOutput, TokenId
from reprise_engine.server.generation import Generation, Generations
from reprise_engine.server.isolation import request_api_key
from reprise_engine.server.protocol import GenerationBody
from reprise_engine.server.protocol_chat import ChatCompletionBody
from reprise_engine.server.request_log import note
from reprise_engine.server.state import Loaded, ServerState
from reprise_engine.text import tool_calls
from reprise_engine.text.bad_words import bad_word_tokens

_T = TypeVar("_T")


async def text_prompt(
    model: Loaded, text: str, *, add_special_tokens: bool = True, fits: bool = True
) -> tuple[TokenId, ...]:
    """Raises RequestError like `encode`."""
    return await asyncio.to_thread(
        encode, model, text, add_special_tokens=add_special_tokens, param="prompt", fits=fits
    )


def encode(model: Loaded, text: str, *, add_special_tokens: bool, param: str, fits: bool) -> tuple[TokenId, ...]:
    """Raises RequestError, naming `param`, for text that is not Unicode.

    With `fits` a text that is far too long is refused before all of it is encoded, as ContextLengthExceeded.
    """
    tokenizer = model.tokenizer
    try:
        if fits and (tokens := tokenizer.at_least(text, _longest(model))) >= _longest(model):
            raise _too_long(model, f"at least {tokens}")
        return tokenizer.encode(text, add_special_tokens=add_special_tokens)
    except (UnicodeError, TypeError) as error:  # half of a surrogate pair, which JSON can spell
        raise RequestError(f"{param} holds text that is not valid Unicode.", param=param) from error


def check_token_ids(model: Loaded, token_ids: Sequence[TokenId], *, param: str) -> None:
    """Raises RequestError for ids that the model has no embedding for: on a device they would read foreign memory."""
    vocab_size = model.resolved.vocab_size
    highest = max(token_ids, default=0)
    if highest >= vocab_size:
        raise RequestError(f"{param} holds token id {highest}; the vocabulary has ids below {vocab_size}.", param=param)


def _own(value: _T | None, default: _T) -> _T:
    return default if value is None else value


def sampling_params(
    model: Loaded,
    body: GenerationBody,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    bad_words: Sequence[tuple[TokenId, ...]],
    structured: StructuredOutput | None,
) -> SamplingParams:
    """The request's own values over the server's defaults. Raises RequestError.

    `bad_words` are the body's, as tokens; `structured` is the form of the answer, which may be more than the body's.
    """
    defaults = model.defaults

    stop_token_ids = tuple(body.stop_token_ids or ())
    check_token_ids(model, stop_token_ids, param="stop_token_ids")
    # Each once: so there are no more of them than the vocabulary has.
    allowed_token_ids = None if body.allowed_token_ids is None else tuple(dict.fromkeys(body.allowed_token_ids))
    check_token_ids(model, allowed_token_ids or (), param="allowed_token_ids")
    check_token_ids(model, tuple(body.logit_bias or ()), param="logit_bias")
    check_token_ids(model, [token for word in bad_words for token in word], param="bad_words")
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=_own(body.temperature, defaults.temperature),
        top_p=_own(body.top_p, defaults.top_p),
        top_k=max(0, _own(body.top_k, defaults.top_k)),
        min_p=_own(body.min_p, defaults.min_p),
        repetition_penalty=_own(body.repetition_penalty, defaults.repetition_penalty),
        presence_penalty=_own(body.presence_penalty, 0.0),
        frequency_penalty=_own(body.frequency_penalty, 0.0),
        seed=body.seed,
        min_tokens=body.min_tokens,
        ignore_eos=body.ignore_eos,
        stop_token_ids=stop_token_ids,
        stop=body.stops,
        include_stop_str_in_output=body.include_stop_str_in_output,
        skip_special_tokens=body.skip_special_tokens,
        logprobs=logprobs,
        prompt_logprobs=body.scored_prompt,
        logit_bias=body.logit_bias,
        allowed_token_ids=allowed_token_ids,
        bad_words=tuple(body.bad_words or ()),
        bad_words_token_ids=tuple(bad_words),
        structured=structured,
    )


def _longest(model: Loaded) -> int:
    """Tokens of the longest sequence: the context, or all of the KV cache where that is less."""
    resolved = model.resolved
    return min(resolved.max_model_len, resolved.num_gpu_blocks * resolved.block_size)


def _limit(model: Loaded) -> str:
    """`_longest` in words."""
    limit, context = _longest(model), model.resolved.max_model_len
    if limit == context:
        return f"this model's maximum context length is {limit} tokens"
    return f"the KV cache holds {limit} tokens (less than max_model_len, {context})"


def _too_long(model: Loaded, tokens: str) -> ContextLengthExceeded:
    return ContextLengthExceeded(
        f"The prompt has {tokens} tokens, but {_limit(model)}, and at least one is generated. Shorten the prompt.",
        param="prompt",
        code="context_length_exceeded",
    )


def truncated(
    model: Loaded, prompt: Sequence[TokenId], keep: int | None, *, max_tokens: int | None
) -> Sequence[TokenId]:
    """The last `keep` tokens of the prompt; -1: as many as leave room for `max_tokens`, None: all.

    Raises RequestError for more than the model has room for.
    """
    longest = _longest(model)
    if keep is None:
        return prompt
    if keep > longest:
        raise RequestError(
            f"truncate_prompt_tokens is {keep}, more than the longest sequence of {longest} tokens; lower it, or give "
            f"-1 for what fits.",
            param="truncate_prompt_tokens",
        )
    if keep == -1:
        keep = max(1, longest - max(1, max_tokens or 1))
    return prompt[-keep:]


def resolve_max_tokens(
    model: Loaded, prompt_tokens: int, asked: int | None, default: int | None, *, field: str = "max_tokens"
) -> int:
    """A number for max_tokens: what was asked, else `default` as far as it fits, else all that fits.

    Raises ContextLengthExceeded, so the client learns of it before any stream begins; `field` is its word for it.
    """
    room = _longest(model) - prompt_tokens
    if room < 1:
        raise _too_long(model, str(prompt_tokens))
    if asked is None:
        return room if default is None else min(room, default)
    if asked > room:
        raise ContextLengthExceeded(
            f"You asked for {prompt_tokens + asked} tokens ({prompt_tokens} in the prompt, {field} {asked}), "
            f"but {_limit(model)}. Shorten the prompt or lower {field} to at most {room}.",
            param=field,
            code="context_length_exceeded",
        )
    return asked


async def generations(
    model: Loaded,
    state: ServerState,
    http: Request,
    body: GenerationBody,
    prompts: Sequence[Sequence[TokenId]],
    *,
    max_tokens: int | None,
    default_max_tokens: int | None,
    max_tokens_field: str = "max_tokens",
    logprobs: int | None,
    arrival_time: float,
    structured: StructuredOutput | None,
) -> Generations:
    """n sequences a prompt, indexed prompt by prompt. Raises RequestError before any of them reaches the engine.

    `structured` is the form of every answer. max_tokens 0 keeps back what is generated.
    """
    made: list[Generation] = []
    cache_salt = state.isolation.salt(request_api_key(http), body.cache_salt)
    batch = uuid.uuid4().hex
    bad_words: tuple[tuple[TokenId, ...], ...] = ()
    if body.bad_words:
        bad_words = await asyncio.to_thread(bad_word_tokens, model.tokenizer, body.bad_words)
    for whole in prompts:
        if not whole:
            raise RequestError("The prompt is empty: it has no tokens.", param="prompt")
        prompt = truncated(
            model, whole, body.truncate_prompt_tokens, max_tokens=_own(max_tokens, default_max_tokens or 1)
        )
        limit = resolve_max_tokens(model, len(prompt), max_tokens, default_max_tokens, field=max_tokens_field)
        sampling = sampling_params(
            *(model, body),
            max_tokens=max(1, limit),
            logprobs=logprobs,
            bad_words=bad_words,
            structured=structured,
        )
        for choice in range(body.choices):
            index = len(made)
            request = EngineRequest(
                request_id=RequestId(f"{batch}-{index}"),
                prompt_token_ids=tuple(prompt),
                sampling=_of_choice(sampling, choice, streamed=bool(body.stream)),
                eos_token_ids=model.resolved.eos_token_ids,
                cache_salt=cache_salt,
                isolated=state.isolation.per_key,
                explain_cache=body.explain_cache,
                priority=body.priority,
                arrival_time=arrival_time,
            )
            made.append(
                Generation(
                    *(model.engine, request, model.tokenizer, state.metrics),
                    index=index,
                    choice=choice,
                    prompt_only=limit == 0,
                )
            )
    made_of_request = Generations(made, batch=batch)
    note(http, state, made_of_request, model.tokenizer)
    return made_of_request


async def chat_generations(
    model: Loaded,
    state: ServerState,
    http: Request,
    body: ChatCompletionBody,
    prompt: Sequence[TokenId],
    *,
    structured: StructuredOutput | None,
    forbid_calls: bool,
    arrival_time: float,
    max_tokens_field: str | None = None,
) -> Generations:
    """n sequences of one conversation. Raises RequestError as `generations` does; `max_tokens_field` is the client's
    name for the limit, where it is not a chat completion's."""
    if model.formats.special_marks:
        body = body.model_copy(update={"skip_special_tokens": False})
    if forbid_calls:
        body = body.model_copy(update={"bad_words": [*(body.bad_words or ()), tool_calls.BEGIN]})
    return await generations(
        model,
        state,
        http,
        body,
        [prompt],
        max_tokens=body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens,
        max_tokens_field=max_tokens_field
        or ("max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"),
        default_max_tokens=model.defaults.max_tokens,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        structured=structured,
        arrival_time=arrival_time,
    )


def _of_choice(sampling: SamplingParams, choice: int, *, streamed: bool) -> SamplingParams:
    """The choices of one prompt differ, and each can be made again: choice i has the seed plus i.

    Its log-probabilities are computed once, except in a stream, where no choice waits for another.
    """
    if choice == 0:
        return sampling
    return replace(
        sampling,
        seed=None if sampling.seed is None else sampling.seed + choice,
        prompt_logprobs=sampling.prompt_logprobs if streamed else None,
    )
