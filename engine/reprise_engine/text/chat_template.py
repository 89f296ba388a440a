"""Chat templates as `transformers` renders them (`utils/chat_template_utils.py`), without importing it.

Same sandbox, same filters and globals, so a template gives the same text here and there; a test compares both.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

_CONTINUE_TAG = "CONTINUE_FINAL_MESSAGE_TAG "
_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")

ChatMessage = Mapping[str, Any]


class JsonText(dict[str, Any]):
    """An object that renders as the JSON text it was read from, not as `json.dumps` would write it anew.

    So the arguments of a tool call come back as the tokens that the model generated, which are in the cache.
    """

    def __init__(self, value: Mapping[str, Any], *, text: str) -> None:
        super().__init__(value)
        self.text = text


class ChatTemplateError(ValueError):
    """The template is broken, or refuses this conversation (its raise_exception)."""


class _Generation(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}` marks the assistant's text for training; here it is just its body."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 declares it so)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    if isinstance(value, JsonText) and indent is None and separators is None and not sort_keys:
        return value.text
    # Jinja's own filter escapes for HTML, which would change what the model reads.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class ChatTemplate:
    """One compiled template. Thread-safe: rendering keeps no state.

    `special_tokens` are the variables a template may print, such as bos_token.
    Raises ChatTemplateError when the source does not compile.
    """

    def __init__(self, source: str, *, special_tokens: Mapping[str, str] | None = None) -> None:
        self.source = source
        self._special_tokens = dict(special_tokens or {})
        environment = _environment()
        try:
            self._template = environment.from_string(source)
            self._variables = jinja2.meta.find_undeclared_variables(environment.parse(source))
        except jinja2.TemplateError as error:
            raise ChatTemplateError(f"the chat template does not compile: {error}") from error

    @property
    def knows_developer_role(self) -> bool:
        """Whether the template treats OpenAI's role `developer` itself."""
        return "developer" in self.source

    def reads(self, variable: str) -> bool:
        """Whether the template reads `variable`: what it does not read, such as tools, the model would never see."""
        return variable in self._variables

    def render(
        self,
        messages: Sequence[ChatMessage],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt text of a conversation. `variables` are chat_template_kwargs.

        `continue_final_message` leaves the last message open, so the model goes on with it.
        Raises ChatTemplateError with the template's own words.
        """
        chat = [_prepare(message) for message in messages]
        final = ""
        if continue_final_message:
            final = str(chat[-1].get("content", "")) if chat else ""
            if not final:
                raise ChatTemplateError("continue_final_message needs a last message with text.")
            chat[-1]["content"] = final + _CONTINUE_TAG
        values: dict[str, Any] = {**self._special_tokens, "tools": None, "documents": None, **(variables or {})}
        values |= {"messages": chat, "add_generation_prompt": add_generation_prompt}
        if tools:
            values["tools"] = list(tools)
        try:
            text = self._template.render(values)
        except jinja2.TemplateError as error:
            raise ChatTemplateError(f"the chat template refuses the conversation: {error}") from error
        except Exception as error:  # a template is a program of the model's author: any error in it is the request's
            raise ChatTemplateError(
                f"the chat template failed on the conversation: {type(error).__name__}: {error}"
            ) from error
        return _cut_after(text, final) if continue_final_message else text


def _prepare(message: ChatMessage) -> dict[str, Any]:
    """A copy without nulls (templates print "None"), the reasoning under each name that templates read."""
    prepared = {key: value for key, value in message.items() if value is not None}
    reasoning = next((prepared[key] for key in _REASONING_FIELDS if key in prepared), None)
    if reasoning is not None:
        prepared = {"thinking": reasoning, **prepared, "reasoning_content": reasoning}
    return prepared


def _cut_after(text: str, final: str) -> str:
    tag = _CONTINUE_TAG.strip()
    if tag not in text or final.strip() not in text:
        raise ChatTemplateError("the chat template drops the last message, so it cannot be continued.")
    at = text.rindex(tag)
    if text[at : at + len(_CONTINUE_TAG)] == _CONTINUE_TAG:
        return text[:at]
    return text[:at].rstrip()  # the template trimmed the message, so its trailing blanks are not the model's


def select_template(value: object, *, name: str = "default") -> str | None:
    """The source among those of a tokenizer_config.json: one string, or named ones as [{name, template}] or a map."""
    named: Mapping[str, str]
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping):
        named = value
    elif isinstance(value, list):
        named = {str(entry.get("name")): str(entry.get("template")) for entry in value if isinstance(entry, Mapping)}
    else:
        return None
    return named.get(name) or next(iter(named.values()), None)
