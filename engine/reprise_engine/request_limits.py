"""What a request may ask of this engine. Checked when it is queued: nothing that can never end is ever waited for."""

from __future__ import annotations

from reprise_engine.errors import ContextLengthExceeded, RequestError
from reprise_engine.kv.hashing import MAX_TOKEN_ID
from reprise_engine.request import EngineRequest


def check_prompt(request: EngineRequest) -> None:
    """Raises RequestError for an empty prompt, or a token id that is in no vocabulary."""
    prompt = request.prompt_token_ids
    if not prompt:
        raise RequestError("The prompt is empty; at least one token is needed.", param="prompt")
    if min(prompt) < 0 or max(prompt) > MAX_TOKEN_ID:
        raise RequestError("The prompt holds a token id that is not in any vocabulary.", param="prompt")


def checked_max_tokens(request: EngineRequest, *, max_model_len: int, room: int) -> int:
    """How many tokens it may generate; `room` is what the whole KV pool holds.

    Raises RequestError for max_tokens below 1, ContextLengthExceeded where prompt + max_tokens fit not both limits.
    """
    prompt_length = len(request.prompt_token_ids)
    asked = request.sampling.max_tokens
    if asked is not None and asked < 1:
        raise RequestError(f"max_tokens is {asked}; it must be at least 1.", param="max_tokens")
    # At least one token is generated, also where the prompt leaves no room: that is the error below.
    max_tokens = max(1, min(max_model_len, room) - prompt_length) if asked is None else asked
    total = prompt_length + max_tokens
    if total > max_model_len:
        raise ContextLengthExceeded(
            f"The prompt has {prompt_length} tokens and max_tokens is {max_tokens}, {total} together; the model's "
            f"context length is {max_model_len}. Shorten the prompt or lower max_tokens.",
            param="max_tokens" if prompt_length < max_model_len else "prompt",
            code="context_length_exceeded",
        )
    if total > room:
        raise ContextLengthExceeded(
            f"The prompt has {prompt_length} tokens and max_tokens is {max_tokens}, {total} together; the whole KV "
            f"cache holds {room}. Shorten the prompt, lower max_tokens, or raise --gpu-memory-utilization.",
            param="max_tokens" if prompt_length < room else "prompt",
            code="context_length_exceeded",
        )
    return max_tokens
