"""The fields of a body that give the answer a form: OpenAI's `response_format`, vLLM's `structured_outputs`, and the
older names of the same."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Discriminator, Field, StringConstraints, Tag, model_validator

from reprise_engine.request import StructuredOutput
from reprise_engine.server.refusals import refuse
from reprise_engine.server.strict_json import read_json

_STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

Text = Annotated[str, StringConstraints(min_length=1)]
Schema = Annotated[
    Annotated[dict[str, Any], Tag("@object")] | Annotated[Text, Tag("@text")],
    Discriminator(lambda value: "@text" if isinstance(value, str) else "@object"),
]
"""As an object, or as the text of one."""
Choices = Annotated[list[Annotated[str, StringConstraints(min_length=1)]], Field(min_length=1)]


class JsonSchemaFormat(BaseModel):
    """OpenAI's. `strict` or not, the answer keeps to the schema."""

    model_config = _STRICT

    name: str = ""
    description: str | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = None


class ResponseFormat(BaseModel):
    model_config = _STRICT

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None

    @model_validator(mode="after")
    def _schema_where_it_belongs(self) -> Self:
        if (self.json_schema is not None) != (self.type == "json_schema"):
            raise refuse(
                "response_format",
                "json_schema goes with the type json_schema of response_format: neither without the other.",
            )
        return self


class StructuredOutputsFields(BaseModel):
    """vLLM's StructuredOutputsParams."""

    model_config = _STRICT

    json_: Annotated[Schema | None, Field(alias="json")] = None
    regex: Text | None = None
    choice: Choices | None = None
    grammar: Text | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool | None = False
    whitespace_pattern: Text | None = None
    disable_fallback: bool | None = False
    """Asks for nothing: there is one way only."""
    disable_additional_properties: Literal[False] | None = False
    structural_tag: None = None
    """The last two are what vLLM's own class writes where nothing is asked for."""


class StructuredFields(BaseModel):
    """At most one of them has a form."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputsFields | None = None
    guided_json: Schema | None = None
    guided_regex: Text | None = None
    guided_choice: Choices | None = None
    guided_grammar: Text | None = None

    @model_validator(mode="after")
    def _one_form(self) -> Self:
        _only(self._forms())
        return self

    @property
    def structured(self) -> StructuredOutput | None:
        """The form asked for."""
        return _only(self._forms())

    def _forms(self) -> list[StructuredOutput]:
        found = [
            *_of_response_format(self.response_format),
            *_of_structured_outputs(self.structured_outputs),
        ]
        if self.guided_json is not None:
            found.append(_of_schema("guided_json", self.guided_json))
        if self.guided_regex is not None:
            found.append(StructuredOutput(kind="regex", text=self.guided_regex, param="guided_regex"))
        if self.guided_choice is not None:
            found.append(_of_choices("guided_choice", self.guided_choice))
        if self.guided_grammar is not None:
            found.append(StructuredOutput(kind="grammar", text=self.guided_grammar, param="guided_grammar"))
        return found


def _only(forms: list[StructuredOutput]) -> StructuredOutput | None:
    if len(forms) > 1:
        names = " and ".join(sorted({str(form.param) for form in forms}))
        raise refuse(str(forms[1].param), f"{names} give the answer {len(forms)} forms; only one is possible.")
    return forms[0] if forms else None


def _of_response_format(format_: ResponseFormat | None) -> list[StructuredOutput]:
    if format_ is None or format_.type == "text":
        return []
    schema = None if format_.json_schema is None else format_.json_schema.schema_
    return [json_form("response_format", schema)]


def json_form(param: str, schema: Mapping[str, Any] | None) -> StructuredOutput:
    """JSON by the schema in the field `param`; any object where there is none."""
    return StructuredOutput(kind="json_object", param=param) if schema is None else _of_schema(param, schema)


def _of_structured_outputs(asked: StructuredOutputsFields | None) -> list[StructuredOutput]:
    if asked is None:
        return []
    param = "structured_outputs"
    found: list[StructuredOutput] = []
    if asked.json_ is not None:
        found.append(_of_schema(param, asked.json_, change=lambda schema: _with_whitespace(schema, asked)))
    if asked.json_object:
        found.append(_of_schema(param, {"type": "object"}, change=lambda schema: _with_whitespace(schema, asked)))
    if asked.regex is not None:
        found.append(StructuredOutput(kind="regex", text=asked.regex, param=param))
    if asked.choice is not None:
        found.append(_of_choices(param, asked.choice))
    if asked.grammar is not None:
        found.append(StructuredOutput(kind="grammar", text=asked.grammar, param=param))
    if not found:
        raise refuse(param, f"{param} has no form; give one of json, regex, choice, grammar and json_object.")
    if (asked.disable_any_whitespace or asked.whitespace_pattern) and asked.json_ is None and not asked.json_object:
        raise refuse(param, "disable_any_whitespace and whitespace_pattern go with json and json_object only.")
    return found


def _with_whitespace(schema: Mapping[str, Any], asked: StructuredOutputsFields) -> Mapping[str, Any]:
    """With llguidance's own options for the whitespace between the tokens of JSON."""
    if asked.whitespace_pattern is not None:
        return {**schema, "x-guidance": {"whitespace_pattern": asked.whitespace_pattern}}
    return {**schema, "x-guidance": {"whitespace_flexible": False}} if asked.disable_any_whitespace else schema


def _of_schema(
    param: str,
    schema: Mapping[str, Any] | str,
    *,
    change: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda schema: schema,
) -> StructuredOutput:
    if isinstance(schema, str):
        try:
            parsed = read_json(schema.encode())
        except ValueError as error:
            raise refuse(param, f"The JSON schema in {param} is not valid JSON: {error}.") from None
        if not isinstance(parsed, dict):
            raise refuse(param, f"The JSON schema in {param} must be an object.")
        schema = parsed
    text = json.dumps(change(schema), ensure_ascii=False, separators=(",", ":"))
    return StructuredOutput(kind="json", text=text, param=param)


def _of_choices(param: str, choices: list[str]) -> StructuredOutput:
    text = json.dumps(choices, ensure_ascii=False)
    return StructuredOutput(kind="choice", text=text, param=param)
