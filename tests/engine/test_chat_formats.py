"""What a chat template says of a model's formats, and arguments of calls that render as they were written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from reprise_engine.server.protocol_tools import CalledFunctionBody, ToolCallBody
from reprise_engine.text import ChatTemplate, load_tokenizer
from reprise_engine.text.chat_formats import ChatFormats, chat_formats
from tests.support.fake_engine import CHAT_TEMPLATE
from tests.support.qwen_templates import QWEN3, QWEN3_THINKING, QWEN25
from tests.support.scripted_engine import write_scripted_model

HERMES_BUT_NO_TOOLS = "{# <tool_call> </tool_call> arguments #}{{ messages }}"
XML = QWEN25 + "{# <function=name> #}"
SETS_TOOLS = "{% if not tools is defined %}{% set tools = none %}{% endif %}{{ tools }}"


@pytest.mark.parametrize(
    ("template", "flags", "expected"),
    [
        (QWEN25, {}, ChatFormats(tool_calls="hermes")),
        (QWEN3, {}, ChatFormats(tool_calls="hermes", reasoning="qwen3")),
        (QWEN3_THINKING, {}, ChatFormats(tool_calls="hermes", reasoning="qwen3")),
        (QWEN3, {"reasoning_parser": "none"}, ChatFormats(tool_calls="hermes")),
        (CHAT_TEMPLATE, {}, ChatFormats()),
        (CHAT_TEMPLATE, {"tool_call_parser": "hermes"}, ChatFormats(tool_calls="hermes")),
        (CHAT_TEMPLATE, {"reasoning_parser": "qwen3"}, ChatFormats(reasoning="qwen3")),
        (HERMES_BUT_NO_TOOLS, {}, ChatFormats()),
        (XML, {}, ChatFormats()),
    ],
)
def test_the_template_or_a_flag_says_the_formats(
    tmp_path: Path, template: str, flags: dict[str, Any], expected: ChatFormats
) -> None:
    tokenizer = load_tokenizer(write_scripted_model(tmp_path, (), template=template))
    assert chat_formats(tokenizer, **flags) == expected


def test_marks_among_the_special_tokens_are_noticed(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_scripted_model(tmp_path, (), template=QWEN3, special_marks=True))
    assert chat_formats(tokenizer).special_marks
    assert not chat_formats(tokenizer, reasoning_parser="none").reasoning


@pytest.mark.parametrize(
    ("template", "variable", "read"),
    [
        (QWEN3, "tools", True),
        (QWEN3, "enable_thinking", True),
        (QWEN25, "enable_thinking", False),
        (CHAT_TEMPLATE, "tools", False),
        (SETS_TOOLS, "tools", True),
    ],
)
def test_a_template_reads_its_variables(template: str, variable: str, read: bool) -> None:
    assert ChatTemplate(template).reads(variable) is read


@pytest.mark.parametrize("template", [QWEN25, QWEN3])
@pytest.mark.parametrize(
    ("arguments", "rendered"),
    [
        ('{ "city":"Orl\\u00e9ans",  "days": 1e0 }', '{ "city":"Orl\\u00e9ans",  "days": 1e0 }'),
        ("{}", "{}"),
        ("", "{}"),
    ],
)
def test_arguments_render_as_they_were_written(template: str, arguments: str, rendered: str) -> None:
    call = ToolCallBody(id="c", function=CalledFunctionBody(name="f", arguments=arguments))
    text = ChatTemplate(template).render(
        [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "", "tool_calls": [call.for_template()]}]
    )
    assert f'<tool_call>\n{{"name": "f", "arguments": {rendered}}}\n</tool_call><|im_end|>\n' in text


def test_arguments_are_an_object_for_templates_that_look_into_them() -> None:
    source = (
        "{% for m in messages %}{% for name, value in m.a | items %}{{ name }}={{ value }};{% endfor %}{% endfor %}"
    )
    arguments = CalledFunctionBody(name="f", arguments='{"x": 1, "y": [2]}').for_template()["arguments"]
    assert ChatTemplate(source).render([{"role": "user", "a": arguments}]) == "x=1;y=[2];"
    nested = ChatTemplate("{{ messages[0] | tojson }} {{ messages[0].a | tojson(indent=0) }}")
    assert nested.render([{"a": arguments}]) == '{"a": {"x": 1, "y": [2]}} {\n"x": 1,\n"y": [\n2\n]\n}'
