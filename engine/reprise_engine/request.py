"""What a client asks for, and what it gets back: the messages that cross between API process and engine process.

Frozen, picklable, free of torch. The scheduler's own mutable state of a request is in `request_state.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal, NewType

from reprise_engine.cache_report import CacheExplanation, PinnedPrefix
from reprise_engine.errors import RequestError

RequestId = NewType("RequestId", str)
TokenId = int

MAX_LOGIT_BIAS = 100
"""OpenAI's: enough to ban a token or to force it."""
MAX_STRUCTURE_LENGTH = 128 * 1024
"""Characters of a schema, an expression or a grammar: how deep it can be is what the stack of its compiler allows."""


class FinishReason(Enum):
    """Why a request ended; the value is OpenAI's word for it."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutput:
    """The form that generated text must have. It decides which tokens are possible, and so ends the text as well.

    `text` is, by kind: a JSON schema; nothing, for any JSON object; a regular expression; a JSON list of strings, one
    of which is chosen; a grammar in Lark's syntax, with the extensions of llguidance, or in GBNF.
    With `start_after` the text is free until these tokens have been generated in a row (the end of a chain of thought).
    Raises RequestError for more than MAX_STRUCTURE_LENGTH characters.
    """

    kind: Literal["json", "json_object", "regex", "choice", "grammar"]
    text: str = ""
    start_after: tuple[TokenId, ...] = ()
    param: str | None = field(default=None, compare=False)
    """The field that it came from, for errors."""

    def __post_init__(self) -> None:
        if len(self.text) > MAX_STRUCTURE_LENGTH:
            raise RequestError(
                f"{self.param or 'structured'} has a {self.kind} of {len(self.text)} characters; at most "
                f"{MAX_STRUCTURE_LENGTH} are possible.",
                param=self.param,
                code="invalid_structured_output",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to choose the next token. Stop *strings* are the text layer's; here are only token ids.

    temperature 0 is greedy. top_k 0 and top_p 1 switch their filter off. `logprobs` is the number of alternatives
    reported per generated token (0: only the chosen one), None reports nothing.
    `prompt_logprobs` is the same for the prompt's tokens, and computes all of it: the cache has keys and values, but no
    logits.
    A seed makes a request reproducible whatever else runs in the batch: the draw depends on (seed, position) only.
    `logit_bias` is added to the logits of its tokens, -100 to 100. `bad_words` are never generated; the engine knows
    them as `bad_words_token_ids`, which the text layer makes of them. `allowed_token_ids`: no others are generated.
    `stop` may be given as one string, and all sequences as lists. Raises RequestError for a value out of range;
    max_tokens and token ids are checked where the model is known.
    """

    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[TokenId, ...] = ()
    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: Mapping[TokenId, float] | None = None
    allowed_token_ids: tuple[TokenId, ...] | None = None
    bad_words: tuple[str, ...] = ()
    bad_words_token_ids: tuple[tuple[TokenId, ...], ...] = ()
    structured: StructuredOutput | None = None
    skip_reading_prefix_cache: bool = False

    def __post_init__(self) -> None:
        # A string is a sequence too: taken for one, it would stop at each of its characters.
        stop: object = self.stop
        self._settle(
            stop=(stop,) if isinstance(stop, str) else tuple(self.stop),
            stop_token_ids=tuple(self.stop_token_ids),
            bad_words=tuple(self.bad_words),
            bad_words_token_ids=tuple(map(tuple, self.bad_words_token_ids)),
            allowed_token_ids=None if self.allowed_token_ids is None else tuple(self.allowed_token_ids),
            logit_bias=dict(self.logit_bias) if self.logit_bias else None,
        )
        if "" in self.stop:
            raise RequestError("stop holds an empty string; leave it out.", param="stop")
        if "" in self.bad_words or () in self.bad_words_token_ids:
            raise RequestError("bad_words holds an empty string; leave it out.", param="bad_words")
        for name, fine, limits in (
            ("temperature", 0 <= self.temperature < math.inf, "at least 0"),
            ("top_p", 0 <= self.top_p <= 1, "from 0 to 1"),
            ("top_k", self.top_k >= -1, "at least 1, or 0 or -1 for all tokens"),
            ("min_p", 0 <= self.min_p <= 1, "from 0 to 1"),
            ("repetition_penalty", 0 < self.repetition_penalty < math.inf, "above 0"),
            ("presence_penalty", math.isfinite(self.presence_penalty), "a finite number"),
            ("frequency_penalty", math.isfinite(self.frequency_penalty), "a finite number"),
            ("min_tokens", self.min_tokens >= 0, "at least 0"),
            ("logprobs", self.logprobs is None or self.logprobs >= 0, "at least 0, or None for none"),
            ("prompt_logprobs", (self.prompt_logprobs or 0) >= 0, "at least 0, or None for none"),
            ("allowed_token_ids", self.allowed_token_ids != (), "at least one token, or None for all"),
        ):
            if not fine:
                raise RequestError(f"{name} is {getattr(self, name)}; it must be {limits}.", param=name)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens is {self.min_tokens}, more than max_tokens ({self.max_tokens}).", param="min_tokens"
            )
        for token, bias in (self.logit_bias or {}).items():
            if not -MAX_LOGIT_BIAS <= bias <= MAX_LOGIT_BIAS:
                raise RequestError(
                    f"logit_bias of token {token} is {bias}; it must be from -{MAX_LOGIT_BIAS} to {MAX_LOGIT_BIAS}.",
                    param="logit_bias",
                )
        if self.structured is not None and self.ignore_eos:
            raise RequestError(
                "ignore_eos cannot be honoured together with structured output, which ends where its grammar does; "
                "leave one of them out.",
                param="ignore_eos",
            )

    def _settle(self, **values: object) -> None:
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def reads_prefix_cache(self) -> bool:
        """What is not computed has no logits."""
        return not self.skip_reading_prefix_cache and self.prompt_logprobs is None

    @property
    def needs_history(self) -> bool:
        """Whether a penalty makes the choice depend on the tokens seen so far."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """One sequence to generate, as the API process hands it to the engine process.

    `sampling.max_tokens` is already resolved to a number, and prompt + max_tokens ≤ max_model_len is already checked.
    `arrival_time` is time.monotonic() of the API process (one clock on one machine). Lower `priority` is served first.
    """

    request_id: RequestId
    prompt_token_ids: tuple[TokenId, ...]
    sampling: SamplingParams
    eos_token_ids: tuple[TokenId, ...] = ()
    cache_salt: str | None = None
    isolated: bool = False
    """Salts tell clients apart that must not learn of each other: why it missed is told as if there were no others."""
    explain_cache: bool = False
    """Whether its outputs say what the prefix cache had of the prompt, and why not more."""
    pin: str | None = None
    """Pins what it computed, under this name, when it ends by itself: `RequestOutput.pinned` says how much."""
    priority: int = 0
    arrival_time: float


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probability (natural, of the untempered distribution) of the chosen token and of the likeliest ones."""

    token_id: TokenId
    logprob: float
    rank: int
    top: tuple[tuple[TokenId, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTimes:
    """time.monotonic() of a request's milestones, in seconds; None where not reached."""

    arrival: float
    first_scheduled: float | None = None
    first_token: float | None = None
    last_token: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """What one step (or a refusal) brought a request.

    `cached_tokens` and `prompt_tokens` are those of the first admission and never change afterwards:
    cached + computed = prompt, cached ≤ prompt - 1.
    `error` is set alone, when the engine refuses the request.
    """

    request_id: RequestId
    new_token_ids: tuple[TokenId, ...] = ()
    new_logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """With the sampling's `prompt_logprobs`: of the prompt's tokens but the first, in order, as they are computed."""
    finish_reason: FinishReason | None = None
    stop_token_id: TokenId | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    cache_explanation: CacheExplanation | None = None
    """With `explain_cache`, once the request was admitted."""
    pinned: PinnedPrefix | None = None
    """With `pin`, at its end."""
    times: RequestTimes | None = None
    error: Exception | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None or self.error is not None
