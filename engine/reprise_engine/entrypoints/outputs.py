"""What `LLM` returns."""

from __future__ import annotations

from dataclasses import dataclass

from reprise_engine.cache_report import CacheExplanation
from reprise_engine.request import TokenId, TokenLogprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """The generated sequence. `stop_reason` is the stop string or stop token that ended it, if one of those did."""

    index: int
    text: str
    token_ids: tuple[TokenId, ...]
    finish_reason: str
    stop_reason: str | int | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationOutput:
    """One prompt and what became of it. `num_cached_tokens` of the prompt were not computed but found in the cache;
    `cache_explanation` says why not more."""

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[TokenId, ...]
    outputs: tuple[Completion, ...]
    num_cached_tokens: int
    cache_explanation: CacheExplanation | None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    """Where they are asked for, one a token; None of the first, before which there is nothing."""
    finished: bool = True
