"""The fields of a body that change or show logits: biases, allowed and banned tokens, logprobs of the prompt."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, Field, StringConstraints, model_validator

from reprise_engine.request import MAX_LOGIT_BIAS
from reprise_engine.server.refusals import refuse

MAX_TOP_LOGPROBS = 20
MAX_BIASED_TOKENS = 1024
MAX_BAD_WORDS = 1024
_TOKEN_ID = re.compile("[0-9]{1,18}")


def _with_token_ids(biases: Any) -> Any:
    """JSON's keys are strings. Raises the complaint about one that is no token id."""
    if not isinstance(biases, dict):
        return biases
    for key in biases:
        if not (isinstance(key, str) and _TOKEN_ID.fullmatch(key)):
            shown = f"{key[:32]}…" if len(key) > 33 else key
            raise refuse("logit_bias", f"logit_bias has the key {shown!r}; its keys must be token ids.")
    return {int(key): bias for key, bias in biases.items()}


_Biases = Annotated[
    dict[int, Annotated[float, Field(ge=-MAX_LOGIT_BIAS, le=MAX_LOGIT_BIAS)]],
    Field(max_length=MAX_BIASED_TOKENS),
    BeforeValidator(_with_token_ids),
]


class LogitFields(BaseModel):
    """vLLM's fields, and OpenAI's `logit_bias`. None asks for nothing."""

    logit_bias: _Biases | None = None
    allowed_token_ids: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)] | None = None
    bad_words: (
        Annotated[list[Annotated[str, StringConstraints(min_length=1)]], Field(max_length=MAX_BAD_WORDS)] | None
    ) = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    return_tokens_as_token_ids: bool | None = False
    truncate_prompt_tokens: Annotated[int, Field(ge=-1)] | None = None
    """Keeps so many tokens at the prompt's end; -1: as many as leave room for max_tokens."""

    @model_validator(mode="before")
    @classmethod
    def _check_logits(cls, data: Any) -> Any:
        if isinstance(data, dict):
            if data.get("truncate_prompt_tokens") == 0:
                raise refuse(
                    "truncate_prompt_tokens", "truncate_prompt_tokens is 0; it must be at least 1, or -1 for what fits."
                )
            if data.get("prompt_logprobs") is not None and data.get("stream"):
                raise refuse("prompt_logprobs", "prompt_logprobs cannot be streamed; leave out stream.")
        return data

    @property
    def scored_prompt(self) -> int | None:
        """How many alternatives each token of the prompt is to have, for this answer; None where none is scored."""
        return self.prompt_logprobs
