"""The body of POST /v1/responses, OpenAI's Responses API, as far as a server without memory can honour it.

It is translated into the body of a chat completion, which it shares everything with but its shape.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, ConfigDict, Discriminator, Field, PlainValidator, Tag, model_validator

from reprise_engine.request import StructuredOutput
from reprise_engine.server.protocol import (
    Body,
    NonEmpty,
    NotSupported,
    Salt,
    Stops,
    StreamOptions,
    refuse,
)
from reprise_engine.server.protocol_chat import MAX_MESSAGES, ChatCompletionBody
from reprise_engine.server.protocol_logits import MAX_TOP_LOGPROBS
from reprise_engine.server.protocol_structured import json_form
from reprise_engine.server.protocol_tools import (
    MAX_TOOLS,
    Choice,
    FunctionBody,
    ToolBody,
    check_tool_choice,
    read_choice,
)
from reprise_engine.server.responses_input import InputItem, chat_messages, checked_item

LOGPROBS = "message.output_text.logprobs"


class ReasoningOptions(Body):
    within: ClassVar[str] = "reasoning."
    not_supported: ClassVar[NotSupported] = {
        "summary": (),
        "generate_summary": (),
        "context": ("auto",),
        "mode": ("standard",),
    }

    effort: NonEmpty | None = None


class TextFormatBody(Body):
    """What chat completions call response_format; here its fields stand beside its type."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())
    within: ClassVar[str] = "text.format."

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None

    @model_validator(mode="after")
    def _schema_where_it_belongs(self) -> Self:
        if (self.schema_ is not None) != (self.type == "json_schema"):
            raise refuse(
                "text.format", "schema goes with the type json_schema of text.format: neither without the other."
            )
        return self

    @property
    def structured(self) -> StructuredOutput | None:
        return None if self.type == "text" else json_form("text.format", self.schema_)


class TextOptions(Body):
    within: ClassVar[str] = "text."
    not_supported: ClassVar[NotSupported] = {"verbosity": ()}

    format: TextFormatBody | None = None


class ResponseToolBody(FunctionBody):
    """A function; here its fields stand beside its type."""

    not_supported: ClassVar[NotSupported] = {
        "allowed_callers": (["direct"],),
        "defer_loading": (False,),
        "output_schema": (),
    }

    type: Literal["function"]

    @model_validator(mode="before")
    @classmethod
    def _function(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("type") != "function":
            raise refuse("tools", f"Tools of type {data.get('type')!r} are not supported; functions are.")
        return data

    def for_chat(self) -> ToolBody:
        function = FunctionBody(
            name=self.name, description=self.description, parameters=self.parameters, strict=self.strict
        )
        return ToolBody(type="function", function=function)


def _name_of(value: Any) -> str | None:
    function = isinstance(value, dict) and set(value) == {"type", "name"} and value["type"] == "function"
    return value["name"] if function and isinstance(value["name"], str) else None


def _tool_choice(value: Any) -> Choice:
    limits = isinstance(value, dict) and value.get("type") == "allowed_tools"
    return read_choice(
        value,
        name_of=_name_of,
        allowed={name: part for name, part in value.items() if name != "type"} if limits else None,
        shapes='one function as {"type": "function", "name": …}, or some as {"type": "allowed_tools", '
        '"mode": "auto" or "required", "tools": [one such function, …]}',
    )


def _input_kind(value: Any) -> str:
    return "@items" if isinstance(value, list) else "@text"


class ResponsesBody(Body):
    """None means the server's default."""

    not_supported: ClassVar[NotSupported] = {
        # a server without memory has no such thing
        "background": (False,),
        "background_options": (),
        "conversation": (),
        "previous_response_id": (),
        "prompt": (),
        "store": (False,),
        # and one of a single text model none of these
        "access_programs": (),
        "context_management": ([],),
        "image": (),
        "max_tool_calls": (),
        "moderation": (),
        "prompt_cache_options": ({"mode": "implicit"},),
        "prompt_cache_retention": ("in_memory", "in-memory"),
        "service_tier": ("auto", "default"),
        "truncation": ("disabled",),
    }

    model: str | None = None
    input: Annotated[
        Annotated[str, Tag("@text")]
        | Annotated[
            list[Annotated[InputItem, BeforeValidator(checked_item)]],
            Field(min_length=1, max_length=MAX_MESSAGES),
            Tag("@items"),
        ],
        Discriminator(_input_kind),
    ]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    tools: Annotated[list[ResponseToolBody], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Annotated[Choice, PlainValidator(_tool_choice)] = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningOptions | None = None
    text: TextOptions | None = None
    include: list[Literal["message.output_text.logprobs"]] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    metadata: dict[str, str] | None = None
    """Given back."""
    # vLLM's, and ours
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Stops | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0)] | None = None
    priority: int = 0
    cache_salt: Salt | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    explain_cache: bool = False

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise refuse("stream_options", "stream_options is only allowed when stream is true.")
        if self.stream_options is not None and self.stream_options.continuous_usage_stats:
            raise refuse("stream_options", "continuous_usage_stats is not supported here: usage comes at the end.")
        if self.top_logprobs and not self.include:
            raise refuse("top_logprobs", f"top_logprobs is only allowed when include holds {LOGPROBS!r}.")
        check_tool_choice(self.tool_choice, [tool.for_chat() for tool in self.tools or ()])
        return self

    @property
    def form(self) -> TextFormatBody:
        """Of the text that is answered."""
        form = None if self.text is None else self.text.format
        return TextFormatBody(type="text") if form is None else form

    def for_chat(self) -> ChatCompletionBody:
        """The same request as a chat completion, but for the form of its text."""
        return ChatCompletionBody.model_construct(
            model=self.model,
            messages=chat_messages(self.input, instructions=self.instructions),
            tools=[tool.for_chat() for tool in self.tools or ()],
            tool_choice=self.tool_choice,
            parallel_tool_calls=self.parallel_tool_calls,
            max_completion_tokens=self.max_output_tokens,
            reasoning_effort=None if self.reasoning is None else self.reasoning.effort,
            logprobs=bool(self.include),
            **{
                name: getattr(self, name)
                for name in (
                    *("temperature", "top_p", "top_logprobs", "stream", "seed", "top_k", "min_p", "priority"),
                    *("stop", "repetition_penalty", "cache_salt", "chat_template_kwargs", "explain_cache"),
                )
            },
        )
