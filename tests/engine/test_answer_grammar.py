"""What a tool choice, strict tools and a schema allow a model to say, by llguidance itself."""

from __future__ import annotations

import json
from typing import Any

import llguidance
import pytest

from reprise_engine.request import StructuredOutput
from reprise_engine.structured.grammar import grammar_of
from reprise_engine.structured.vocabulary import grammar_tokenizer
from reprise_engine.text import Tokenizer, load_tokenizer
from reprise_engine.text.answer_grammar import AnswerGrammar, GrammarFunction
from reprise_engine.text.reasoning import ReasoningStart
from tests.support.fake_engine import write_model
from tests.support.qwen_templates import QWEN3
from tests.support.scripted_engine import write_scripted_model

WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/city"}, "days": {"type": "integer"}},
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"city": {"enum": ["Paris", "Orléans"]}},
}
FUNCTIONS = (
    GrammarFunction(name="weather", parameters=WEATHER),
    GrammarFunction(name="now", parameters=None),
    GrammarFunction(name="any", parameters=WEATHER, checked=False),
)


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


PARIS = call("weather", '{"city": "Paris", "days": 3}')
NOW = call("now", "{}")
THOUGHT = "<think>\nPerhaps.\n</think>\n\n"


@pytest.fixture(scope="module", params=["tokens", "special tokens", "spelled"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """The marks as a real model has them, and spelled letter by letter."""
    folder = tmp_path_factory.mktemp("model")
    if request.param == "spelled":
        return load_tokenizer(write_model(folder))
    special = request.param == "special tokens"
    return load_tokenizer(write_scripted_model(folder, (), template=QWEN3, special_marks=special))


def allowed(tokenizer: Tokenizer, lark: str, text: str) -> bool:
    """Whether it is an answer, whole."""
    return accepts(tokenizer, StructuredOutput(kind="grammar", text=lark), text)


def accepts(tokenizer: Tokenizer, structured: StructuredOutput, text: str) -> bool:
    vocabulary = grammar_tokenizer(tokenizer, vocab_size=tokenizer.vocab_size, eos_token_ids=())
    matcher = llguidance.LLMatcher(vocabulary, grammar_of(structured), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    tokens = list(tokenizer.encode(text, add_special_tokens=False))
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def grammar(tokenizer: Tokenizer, start: ReasoningStart | None = None) -> AnswerGrammar:
    return AnswerGrammar(token_id=tokenizer.token_id, start=start)


@pytest.mark.parametrize(
    ("text", "fine"),
    [
        (PARIS, True),
        (NOW, True),
        (call("any", '{"x": [1, null]}'), True),
        (call("weather", '{"city": "Orléans"}'), True),
        (f"{PARIS}\n{NOW}", True),
        ("", False),
        ("Hello", False),
        (f"Hello {PARIS}", False),
        (f"{PARIS} and", False),
        (call("weather", "{}"), False),
        (call("weather", '{"city": "Rome"}'), False),
        (call("weather", '{"city":"Paris"}'), False),  # the separators that the template would write
        (call("now", '{"x": 1}'), False),
        (call("other", "{}"), False),
        (THOUGHT + PARIS, False),
    ],
)
def test_a_forced_call(tokenizer: Tokenizer, text: str, fine: bool) -> None:
    assert allowed(tokenizer, grammar(tokenizer).forced(FUNCTIONS, single=False), text) is fine


def test_a_single_call_is_one(tokenizer: Tokenizer) -> None:
    lark = grammar(tokenizer).forced(FUNCTIONS, single=True)
    assert allowed(tokenizer, lark, PARIS)
    assert not allowed(tokenizer, lark, f"{PARIS}\n{NOW}")


@pytest.mark.parametrize(
    ("text", "fine"),
    [
        ("", True),
        ("Hello <b>\n", True),
        (f"Let me look.\n{PARIS}\n{NOW}\nSo", True),
        (call("any", '{"x": 1}'), True),
        (call("weather", "{}"), False),
        (call("other", "{}"), False),
        ("Hello <tool_call> you", False),
    ],
)
def test_calls_among_text(tokenizer: Tokenizer, text: str, fine: bool) -> None:
    assert allowed(tokenizer, grammar(tokenizer).free(FUNCTIONS), text) is fine


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize(
    ("text", "own", "fine"),
    [
        ('{"a":1}', None, True),
        ('{ "a" : 1 }', None, True),
        ('{\n    "a": [\n        1,\n        2\n    ]\n}', None, True),
        ('{\r\n\t"a": 1\r\n}', None, True),
        ('{"a":' + " " * 20 + "1}", None, True),
        ('{"a":' + " " * 21 + "1}", None, False),
        ('{"a":' + "\n" * 21 + "1}", None, False),
        ('{"a":' + " " * 50 + "1}", {"whitespace_flexible": True}, True),  # the schema's own word goes first
        ('{"a": 1}', {"whitespace_flexible": False}, False),
    ],
)
def test_blanks_between_the_tokens_of_json_have_an_end(
    tokenizer: Tokenizer, text: str, own: dict[str, Any] | None, fine: bool, wrapped: bool
) -> None:
    """Else a small model writes them up to max_tokens."""
    schema = json.dumps({"type": "object", "required": ["a"]} | ({} if own is None else {"x-guidance": own}))
    form = StructuredOutput(kind="json", text=schema)
    if wrapped:  # as beside tools, and behind reasoning
        form = StructuredOutput(kind="grammar", text=grammar(tokenizer).formed(schema, FUNCTIONS))
    assert accepts(tokenizer, form, text) is fine


def test_a_form_or_calls(tokenizer: Tokenizer) -> None:
    lark = grammar(tokenizer).formed('{"type": "object", "required": ["a"]}', FUNCTIONS)
    assert allowed(tokenizer, lark, '{"a": 1}')
    assert allowed(tokenizer, lark, f"{NOW}\n{PARIS}")
    for text in ("{}", "Hello", '{"a": 1}\n' + NOW):
        assert not allowed(tokenizer, lark, text)
    assert not allowed(tokenizer, grammar(tokenizer).formed('{"type": "object"}'), NOW)


@pytest.mark.parametrize(
    ("start", "text", "fine"),
    [
        (ReasoningStart.UNDECIDED, NOW, True),
        (ReasoningStart.UNDECIDED, THOUGHT + NOW, True),
        (ReasoningStart.UNDECIDED, THOUGHT + THOUGHT + NOW, False),
        (ReasoningStart.UNDECIDED, THOUGHT, False),
        (ReasoningStart.OPEN, THOUGHT.removeprefix("<think>") + NOW, True),
        (ReasoningStart.OPEN, NOW, False),
        (ReasoningStart.CLOSED, NOW, True),
        (ReasoningStart.CLOSED, THOUGHT + NOW, False),
    ],
)
def test_reasoning_comes_first(tokenizer: Tokenizer, start: ReasoningStart, text: str, fine: bool) -> None:
    assert allowed(tokenizer, grammar(tokenizer, start).forced(FUNCTIONS, single=True), text) is fine
