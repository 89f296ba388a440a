"""The forms in which `LLM` takes prompts, conversations and sampling parameters: one, or several."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from reprise_engine.errors import RequestError
from reprise_engine.request import SamplingParams, TokenId

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
