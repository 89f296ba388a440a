"""Reasoning and tool calls out of a model's text: the same however the text is cut, and what comes of broken ones."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from reprise_engine.text.answer import AnswerParser
from reprise_engine.text.answer_parts import (
    ContentText,
    Part,
    ReasoningText,
    ToolCallArguments,
    ToolCallBegin,
    ToolCallEnd,
    joined,
)
from reprise_engine.text.json_scan import JsonScanner, Scan
from reprise_engine.text.reasoning import ReasoningSplitter, ReasoningStart, reasoning_start
from reprise_engine.text.tool_calls import HermesToolCalls

# Words of which models' texts are made, whole and by halves, so that every rule meets every other.
WORDS = [
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "\n", "\n\n", " ", "a", "Paris", "<", "</", "tool_call>"),
    *('{"name": "f", "arguments": {"x": 1}}', '{"name": "f"', ', "arguments": ', '{"x": [1, {"y": "}"}]}', "}", "{"),
    *('{"arguments": {"s": "</tool_call>\n"}, "name": "g"}', '"', "\\", "null", "1.5e3", "é🙂", ":", ",", "[", "]"),
]
texts = st.lists(st.sampled_from(WORDS) | st.text(max_size=3), max_size=14).map("".join)


@st.composite
def cut_texts(draw: st.DrawFn) -> tuple[str, list[str]]:
    text = draw(texts)
    cuts = sorted(draw(st.sets(st.integers(0, len(text)), max_size=12)))
    return text, [text[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def parser(start: ReasoningStart | None = None, *, tools: bool = True, single: bool = False) -> AnswerParser:
    return AnswerParser(
        reasoning=None if start is None else ReasoningSplitter(start),
        tools=HermesToolCalls(single=single) if tools else None,
    )


def parsed(answer: AnswerParser, pieces: Sequence[str]) -> list[Part]:
    parts: list[Part] = []
    for piece in pieces:
        parts += answer.push(piece, tokens=1)
    return joined(parts + answer.finish())


@pytest.mark.parametrize("single", [False, True])
@pytest.mark.parametrize("start", [None, *ReasoningStart])
@given(cut=cut_texts())
@example(cut=("\n\n<think>\n\na\n\n</think>\n\nb\n", ["\n", "\n<th", "ink>\n", "\na\n\n</", "think>\n", "\nb\n"]))
@example(cut=('<tool_call>\n{"name": "f", "arguments": "{}"}', ['<tool_call>\n{"name": "f", "arguments": "', '{}"}']))
def test_the_parts_do_not_depend_on_how_the_text_is_cut(
    start: ReasoningStart | None, single: bool, cut: tuple[str, list[str]]
) -> None:
    text, pieces = cut
    whole = parsed(parser(start, single=single), [text])
    assert parsed(parser(start, single=single), pieces) == whole
    assert parsed(parser(start, single=single), list(text)) == whole


@given(cut=cut_texts())
def test_arguments_of_a_whole_call_are_json_and_calls_are_in_order(cut: tuple[str, list[str]]) -> None:
    arguments: dict[int, str] = {}
    for part in parsed(parser(), cut[1]):
        match part:
            case ToolCallBegin(index, name):
                assert index == len(arguments)
                assert name
                arguments[index] = ""
            case ToolCallArguments(index, text):
                assert index == len(arguments) - 1
                arguments[index] += text
            case ToolCallEnd(index):
                json.loads(arguments[index])


@given(texts)
def test_without_marks_the_text_is_the_content(text: str) -> None:
    if "<tool_call>" not in text and not text.lstrip().startswith("<think>"):
        content = [ContentText(text)] if text else []
        assert parsed(parser(ReasoningStart.UNDECIDED), [text]) == content
    assert parsed(parser(tools=False), [text]) == ([ContentText(text)] if text else [])


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
arguments = st.dictionaries(st.text(), values, max_size=4)
names = st.text(min_size=1, max_size=8)
dumps = st.sampled_from(
    [json.dumps, lambda value: json.dumps(value, ensure_ascii=False), lambda value: json.dumps(value, indent=1)]
)


@given(
    calls=st.lists(st.tuples(names, arguments), min_size=1, max_size=3),
    dump=dumps,
    swapped=st.booleans(),
    content=st.sampled_from(["", "Let me look.", "I call\nboth:\n"]),
)
def test_every_call_comes_out_as_it_was_written(
    calls: list[tuple[str, dict[str, Any]]], dump: Callable[[Any], str], swapped: bool, content: str
) -> None:
    text = content
    for number, (name, value) in enumerate(calls):
        fields = [f'"name": {dump(name)}', f'"arguments": {dump(value)}']
        if swapped:
            fields.reverse()
        text += "\n" * bool(content or number) + "<tool_call>\n{" + ", ".join(fields) + "}\n</tool_call>"
    expected: list[Part] = [ContentText(content)] if content else []
    for index, (name, value) in enumerate(calls):
        expected += [ToolCallBegin(index, name), ToolCallArguments(index, dump(value)), ToolCallEnd(index)]
    assert parsed(parser(), list(text)) == expected


def test_arguments_are_given_out_while_they_are_written() -> None:
    answer = parser()
    pieces = ['<tool_call>\n{"name": "weather"', ', "arguments": ', '{"city": "Pa', 'ris", "days', '": 3}', "}\n</tool"]
    assert [answer.push(piece, tokens=1) for piece in pieces] == [
        [],
        [],
        [ToolCallBegin(0, "weather"), ToolCallArguments(0, '{"city": "Pa')],
        [ToolCallArguments(0, 'ris", "days')],
        [ToolCallArguments(0, '": 3}')],
        [ToolCallEnd(0)],
    ]
    assert answer.push("_call>", tokens=1) == answer.finish() == []


CALL = '{"name": "f", "arguments": {"x": 1}}'


def begin(index: int = 0, name: str = "f", text: str = '{"x": 1}') -> list[Part]:
    return [ToolCallBegin(index, name), ToolCallArguments(index, text)]


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        # slips of models that are forgiven
        (f"<tool_call>{CALL}", [*begin(), ToolCallEnd(0)]),
        (f"<tool_call>{CALL}}}</tool_call>\n", [*begin(), ToolCallEnd(0)]),
        (f"<tool_call>{CALL}<tool_call>{CALL}", [*begin(), ToolCallEnd(0), *begin(1), ToolCallEnd(1)]),
        ('<tool_call>{"name": "f"}</tool_call>', [*begin(text="{}"), ToolCallEnd(0)]),
        ('<tool_call>{"name": "f", "arguments": null}</tool_call>', [*begin(text="{}"), ToolCallEnd(0)]),
        (r'<tool_call>{"name": "f", "arguments": "{\"x\": 1}"}', [*begin(), ToolCallEnd(0)]),
        ('<tool_call>{"name": "f", "arguments": "x"}', [*begin(text='"x"'), ToolCallEnd(0)]),
        ('<tool_call>{"name": "f", "arguments": 12 }', [*begin(text="12"), ToolCallEnd(0)]),
        ('<tool_call>{"name": "f", "arguments": {"x": "a\n\tb"}}', [*begin(text=r'{"x": "a\n\tb"}'), ToolCallEnd(0)]),
        ('<tool_call>{"id": [7], "name": "f", "arguments": {"x": 1}}', [*begin(), ToolCallEnd(0)]),
        ('<tool_call>{"name": "f", "arguments": {"x": 1}, "name": "g"}', [*begin(), ToolCallEnd(0)]),
        ('<tool_call>{"name": "f", "arguments": {"x": 1} oops</tool_call>', [*begin(), ToolCallEnd(0)]),
        (f"<tool_call>{CALL}</tool_call> done", [*begin(), ToolCallEnd(0), ContentText(" done")]),
        # no calls
        ("<tool_call>nothing</tool_call>", [ContentText("<tool_call>nothing</tool_call>")]),
        ("a\n<tool_call>\n[1]", [ContentText("a\n<tool_call>\n[1]")]),
        ('<tool_call>{"name": ""}', [ContentText('<tool_call>{"name": ""}')]),
        ('<tool_call>{"name": 5, "arguments": {}}', [ContentText('<tool_call>{"name": 5, "arguments": {}}')]),
        ('<tool_call>{"arguments": {}}', [ContentText('<tool_call>{"arguments": {}}')]),
        (f"<tool_call><tool_call>{CALL}", [ContentText("<tool_call>"), *begin(), ToolCallEnd(0)]),
        ("<tool_call>{'name': 'f'}", [ContentText("<tool_call>{'name': 'f'}")]),
        # cut off, or broken inside the arguments: passed on as they are, without an end
        ("a\n\n<tool", [ContentText("a\n\n<tool")]),
        ('a\n<tool_call>\n{"name": "f', [ContentText('a\n<tool_call>\n{"name": "f')]),
        ('<tool_call>{"name": "f", "arguments": {"x": ', begin(text='{"x": ')),
        ('<tool_call>{"name": "f", "arguments": {"x": 1', begin(text='{"x": 1')),
        (r'<tool_call>{"name": "f", "arguments": "{\"x', begin(text=r'"{\"x')),
        (
            f'<tool_call>{{"name": "f", "arguments": {{x: 1}}}}\n</tool_call>\n<tool_call>{CALL}',
            [*begin(text="{x: 1}}"), *begin(1), ToolCallEnd(1)],
        ),
        ("", []),
        ("\n", [ContentText("\n")]),
    ],
)
def test_what_models_write_instead(text: str, parts: list[Part]) -> None:
    assert parsed(parser(), [text]) == parts


def test_one_call_is_enough_where_one_is_wanted() -> None:
    answer = parser(single=True)
    seen = []
    for piece in (f"<tool_call>{CALL}"[:-1], f"}}</tool_call><tool_call>{CALL} and more"):
        seen.append((answer.push(piece, tokens=9), answer.complete))
    assert seen == [(begin(), False), ([ToolCallEnd(0)], True)]
    assert answer.finish() == []


def test_calls_that_are_only_thought_of_are_reasoning() -> None:
    text = f"<think>\nI could <tool_call>{CALL}</tool_call>\n</think>\n\nNo."
    assert parsed(parser(ReasoningStart.UNDECIDED), [text]) == [
        ReasoningText(f"I could <tool_call>{CALL}</tool_call>"),
        ContentText("No."),
    ]


@pytest.mark.parametrize(
    ("start", "text", "reasoning", "content"),
    [
        (ReasoningStart.UNDECIDED, "<think>\nhm\n</think>\n\nYes", "hm", "Yes"),
        (ReasoningStart.UNDECIDED, "\n<think>hm", "hm", ""),
        (ReasoningStart.UNDECIDED, "Yes <think>hm</think>", "", "Yes <think>hm</think>"),
        (ReasoningStart.UNDECIDED, "<think>\n\n</think>\n\nYes\n", "", "Yes\n"),
        (ReasoningStart.UNDECIDED, " <thin", "", " <thin"),
        (ReasoningStart.OPEN, "hm\n\nhm\n</think>\n\nYes", "hm\n\nhm", "Yes"),
        (ReasoningStart.OPEN, "\n<think>\nhm</think>Yes</think>", "hm", "Yes</think>"),
        (ReasoningStart.OPEN, "hm </thin", "hm </thin", ""),
        (ReasoningStart.OPEN, "hm\n", "hm", ""),
        (ReasoningStart.CLOSED, "<think>hm</think>", "", "<think>hm</think>"),
        (ReasoningStart.CLOSED, "\nYes", "", "\nYes"),
    ],
)
def test_reasoning_and_answer(start: ReasoningStart, text: str, reasoning: str, content: str) -> None:
    expected = joined([ReasoningText(reasoning), ContentText(content)])
    assert parsed(parser(start, tools=False), [text]) == expected


@pytest.mark.parametrize(
    ("start", "tokens", "expected"),
    [
        (ReasoningStart.UNDECIDED, ["<think>", "\n", "hm", "\n", "</think>", "\n\n", "Yes"], 5),
        (ReasoningStart.UNDECIDED, ["<", "think", ">", "hm", "</", "think>", "Yes"], 6),
        (ReasoningStart.UNDECIDED, ["<", "b", ">", "hm"], 0),
        (ReasoningStart.OPEN, ["\n", "hm", "</think>", "Yes", "!"], 3),
        (ReasoningStart.OPEN, ["hm", "hm"], 2),
        (ReasoningStart.CLOSED, ["Yes"], 0),
    ],
)
def test_tokens_of_the_reasoning_are_counted_with_its_marks(
    start: ReasoningStart, tokens: list[str], expected: int
) -> None:
    answer = parser(start)
    for token in tokens:
        answer.push(token, tokens=1)
    assert answer.reasoning_tokens == expected


@pytest.mark.parametrize(
    ("prompt", "continued", "expected"),
    [
        ("user: what does <think> mean?\nassistant\n", None, ReasoningStart.UNDECIDED),
        ("user: hi\nassistant\n<think>\n", None, ReasoningStart.OPEN),
        ("user: hi\nassistant\n<think>\n\n</think>\n\n", None, ReasoningStart.CLOSED),
        ("user: hi\nassistant\n<think>\nSo the", "<think>\nSo the", ReasoningStart.OPEN),
        ("user: hi\nassistant\nSo the", "So the", ReasoningStart.CLOSED),
    ],
)
def test_the_prompt_says_how_the_answer_begins(prompt: str, continued: str | None, expected: ReasoningStart) -> None:
    assert reasoning_start(prompt, continued=continued) is expected


# --- JSON, character by character


def scanned(text: str) -> bool:
    """Whether it is one JSON value and nothing else but blanks."""
    scanner = JsonScanner()
    for at, character in enumerate(text + " "):
        scan = scanner.push(character)
        if scan is Scan.INVALID:
            return False
        if scan in (Scan.END, Scan.BEHIND):
            return not (text + " ")[at + (scan is Scan.END) :].strip(" \t\n\r")
    return False


def is_json(text: str) -> bool:
    try:
        json.loads(text, strict=False, parse_constant=_refuse)
    except ValueError:
        return False
    return True


def _refuse(constant: str) -> None:
    raise ValueError(constant)  # NaN and Infinity are Python's, not JSON


@given(
    st.lists(
        st.sampled_from([*'{}[],:"\\ \n', '"a"', "1", "-", "0", "1.5", "e3", "true", "null", "nul", "\\u00", "00"]),
        max_size=12,
    ).map("".join)
)
@example('{"a": [1, -0.5e+3, {"b": null}], "c": "\\u00e9"}')
@example("01")
@example("-")
@example('["\\u00g0"]')
def test_the_scanner_takes_what_json_is(text: str) -> None:
    assert scanned(text) == is_json(text)


@given(value=values, dump=dumps)
def test_the_scanner_takes_every_value(value: Any, dump: Callable[[Any], str]) -> None:
    assert scanned(dump(value))


def test_deep_nesting_is_no_recursion() -> None:
    assert scanned("[" * 50_000 + "]" * 50_000)
