"""The forms in which `LLM` takes prompts, conversations and sampling parameters: one, or several."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypedDict

from reprise_engine.errors import RequestError
from reprise_engine.request import SamplingParams, TokenId
from reprise_engine.text import Tokenizer
from reprise_engine.text.bad_words import bad_word_tokens

ChatMessage = Mapping[str, Any]


class TextPrompt(TypedDict):
    """A prompt as text."""

    prompt: str


class TokensPrompt(TypedDict):
    """A prompt that is tokenised already."""

    prompt_token_ids: Sequence[TokenId]


Prompt = str | Sequence[TokenId] | TextPrompt | TokensPrompt


def as_prompts(prompts: Any) -> list[Prompt]:
    """One prompt or several; a list of integers is one."""
    if isinstance(prompts, str | Mapping):
        return [prompts]  # type: ignore[list-item]  # a mapping's keys are checked when it is encoded
    items = list(prompts)
    if items and all(isinstance(item, int) for item in items):
        return [items]
    return items


def as_conversations(messages: Any) -> list[Sequence[ChatMessage]]:
    items = list(messages)
    if items and isinstance(items[0], Mapping):
        return [items]
    return items


def as_params(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if params is None:
        return [SamplingParams()] * count
    if isinstance(params, SamplingParams):
        return [params] * count
    if len(params) != count:
        raise RequestError(
            f"There are {len(params)} sampling_params for {count} prompts; give one for all, or one each.",
            param="sampling_params",
        )
    return list(params)


def complete_params(params: SamplingParams, *, vocab_size: int, tokenizer: Tokenizer | None) -> SamplingParams:
    """With the tokens of its banned words. Raises RequestError for token ids that the model does not have."""
    if params.bad_words:
        if tokenizer is None:
            raise RequestError("`bad_words` need a tokenizer, but skip_tokenizer_init is set.", param="bad_words")
        words = (*params.bad_words_token_ids, *bad_word_tokens(tokenizer, params.bad_words))
        params = replace(params, bad_words_token_ids=words)
    for name, tokens in (
        ("stop_token_ids", params.stop_token_ids),
        ("allowed_token_ids", params.allowed_token_ids or ()),
        ("logit_bias", tuple(params.logit_bias or ())),
        ("bad_words_token_ids", tuple(token for word in params.bad_words_token_ids for token in word)),
    ):
        unknown = [token for token in tokens if not 0 <= token < vocab_size]
        if unknown:
            raise RequestError(
                f"{name} holds {unknown[0]}; the model's vocabulary goes from 0 to {vocab_size - 1}.", param=name
            )
    return params
