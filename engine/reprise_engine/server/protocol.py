"""What the bodies of requests share, and completions. What cannot be honoured is refused by name; nothing is ignored.

Three kinds of fields: declared ones are honoured; `_HARMLESS` ones ask for nothing that a server of one model does, and
are accepted on purpose; `_NOT_SUPPORTED` ones are accepted with a value that asks for nothing, else they are a 400.
Any other field is unknown, and a 400 as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    StringConstraints,
    model_validator,
)

from reprise_engine.server.protocol_logits import MAX_TOP_LOGPROBS, LogitFields
from reprise_engine.server.protocol_structured import StructuredFields
from reprise_engine.server.refusals import refuse as refuse

MAX_CHOICES = 128
MAX_SEQUENCES = 1024
MAX_STOPS = 64
MAX_STOP_LENGTH = 4096
MAX_STOP_TOKEN_IDS = 1024
MAX_SALT_LENGTH = 256

TokenIdField = Annotated[int, Field(ge=0)]
NonEmpty = Annotated[str, StringConstraints(min_length=1)]


def _valid_salt(salt: str) -> str:
    try:
        salt.encode()
    except UnicodeEncodeError:  # half of a surrogate pair, which JSON can spell
        raise refuse("cache_salt", "cache_salt holds text that is not valid Unicode.") from None
    return salt


Salt = Annotated[str, StringConstraints(min_length=1, max_length=MAX_SALT_LENGTH), AfterValidator(_valid_salt)]
"""Bounded: it is kept as long as anything is cached under it."""

_HARMLESS = frozenset(
    {
        "user",
        "metadata",
        "safety_identifier",
        "prompt_cache_key",  # routes between OpenAI's servers; here one cache serves all
        "parallel_tool_calls",  # says something about tools only
    }
)

NotSupported = Mapping[str, tuple[Any, ...]]
"""Fields that are refused, each with the values, besides null, that ask for nothing."""

_NOT_SUPPORTED: NotSupported = {
    # OpenAI's. After each name: the values, besides null, that ask for nothing.
    "audio": (),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "prediction": (),
    "prompt_cache_retention": ("in_memory", "in-memory"),
    "reasoning_effort": (),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "verbosity": (),
    "web_search_options": (),
    # vLLM's
    "chat_template": (),
    "documents": ([],),
    "include_reasoning": (True,),
    "kv_transfer_params": (),
    "length_penalty": (1.0,),
    "logits_processors": ([],),
    "mm_processor_kwargs": (),
    "prompt_embeds": (),
    "spaces_between_special_tokens": (True,),
    "use_beam_search": (False,),
    "vllm_xargs": (),
}


def is_neutral(value: Any, neutral: tuple[Any, ...]) -> bool:
    return value is None or any(value == allowed and type(value) is type(allowed) for allowed in neutral)


class Body(BaseModel):
    """Strict: a string is no number, and an unknown field is an error."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    not_supported: ClassVar[NotSupported] = _NOT_SUPPORTED
    within: ClassVar[str] = ""
    """What the names of its fields begin with in messages, where it is a part of a body."""

    @model_validator(mode="before")
    @classmethod
    def _sort_out(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        kept = {}
        for name, value in data.items():
            if value is None:
                # What clients write for a field that they leave out, those of a newer API among them: a dump of an
                # answer by OpenAI's client has every field that its class knows.
                continue
            if name in cls.model_fields:
                kept[name] = value
            elif name in _HARMLESS:
                continue
            elif name in cls.not_supported:
                if not is_neutral(value, cls.not_supported[name]):
                    raise refuse(
                        cls.within + name, f"{cls.within}{name} is not supported by this server; leave it out."
                    )
            else:
                kept[name] = value  # pydantic's own complaint about unknown fields
        return kept


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


_Stop = Annotated[str, StringConstraints(min_length=1, max_length=MAX_STOP_LENGTH)]
Stops = Annotated[list[_Stop], BeforeValidator(_as_list), Field(max_length=MAX_STOPS)]


class StreamOptions(Body):
    within: ClassVar[str] = "stream_options."

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: Literal[False] = False


class GenerationBody(LogitFields, StructuredFields, Body):
    """What chat completions and completions have in common. None means the server's default."""

    model: str | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = 1
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Stops | None = None
    # vLLM's
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0)] | None = None
    min_tokens: Annotated[int, Field(ge=0)] = 0
    ignore_eos: bool = False
    stop_token_ids: Annotated[list[TokenIdField], Field(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    priority: int = 0
    cache_salt: Salt | None = None
    return_token_ids: bool | None = False
    # ours
    explain_cache: bool = False
    """Puts usage.prompt_tokens_details.cache_explanation into the answer."""

    @model_validator(mode="after")
    def _stream_options_need_stream(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise refuse("stream_options", "stream_options is only allowed when stream is true.")
        return self

    @property
    def choices(self) -> int:
        return 1 if self.n is None else self.n

    @property
    def stops(self) -> tuple[str, ...]:
        return tuple(self.stop or ())


def split_prompt(prompt: Any) -> list[str] | list[list[int]]:
    """One entry a prompt. Raises the complaint about anything that is not of the four shapes."""
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt, list) and prompt:
        if all(isinstance(entry, str) for entry in prompt):
            return prompt
        if _is_token_ids(prompt):
            return [prompt]
        if all(isinstance(entry, list) and entry and _is_token_ids(entry) for entry in prompt):
            return prompt
    raise refuse("prompt", "prompt must be a string, a list of strings, a list of token ids, or a list of such lists.")


def _is_token_ids(entries: list[Any]) -> bool:
    return all(type(entry) is int and entry >= 0 for entry in entries)  # a bool is no token id


class CompletionBody(GenerationBody):
    """POST /v1/completions. `prompt` is one text, several, the token ids of one, or those of several."""

    prompt: Annotated[list[str] | list[list[int]], PlainValidator(split_prompt)]
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    """0 with `echo`: only the prompt is wanted, and its log-probabilities."""
    echo: bool | None = False
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    best_of: int | None = None
    add_special_tokens: bool = True

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.best_of is not None and self.best_of != self.choices:
            raise refuse("best_of", f"best_of is {self.best_of}; only the value of n ({self.choices}) is supported.")
        if len(self.prompt) * self.choices > MAX_SEQUENCES:
            raise refuse(
                "n", f"prompts times n is {len(self.prompt) * self.choices}; at most {MAX_SEQUENCES} a request."
            )
        if self.max_tokens == 0 and not self.echo:
            raise refuse("max_tokens", "max_tokens is 0, which only makes sense with echo: nothing is generated.")
        return self

    @property
    def scored_prompt(self) -> int | None:
        """An echo has the log-probabilities of the prompt as well."""
        if not self.echo or self.logprobs is None:
            return self.prompt_logprobs
        return max(self.logprobs, self.prompt_logprobs or 0)
