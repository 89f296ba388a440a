"""Structured output below HTTP: what grammars allow, and that a sequence's state is a function of its tokens."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from functools import cache
from typing import Any

import llguidance
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reprise_engine import LLM, SamplingParams, StructuredOutput
from reprise_engine.entrypoints.outputs import GenerationOutput
from reprise_engine.errors import RequestError
from reprise_engine.loop import EngineCore
from reprise_engine.request import EngineRequest, FinishReason, RequestId, RequestOutput, TokenId
from reprise_engine.step import ScheduledRequest
from reprise_engine.structured.masks import Grammars
from reprise_engine.structured.vocabulary import grammar_tokenizer
from reprise_engine.text import load_tokenizer
from tests.engine.paged_fake import World
from tests.engine.test_llm import make_llm
from tests.engine.test_sampler import row
from tests.support.models import unpacked_smollm2
from tests.support.tiny_models import EOS_ID, VOCAB_SIZE, tiny_model_path

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
TOKENIZER = load_tokenizer(tiny_model_path("qwen3"))


def schema(value: Any) -> StructuredOutput:
    return StructuredOutput(kind="json", text=json.dumps(value), param="response_format")


def regex(text: str) -> StructuredOutput:
    return StructuredOutput(kind="regex", text=text)


@cache
def vocabulary() -> llguidance.LLTokenizer:
    return grammar_tokenizer(TOKENIZER, vocab_size=VOCAB_SIZE, eos_token_ids=(EOS_ID,))


@pytest.fixture
def grammars() -> Iterator[Grammars]:
    made = Grammars(vocabulary, vocab_size=VOCAB_SIZE, max_sequences=4)
    yield made
    made.close()


def under(structured: StructuredOutput | None, output: Sequence[TokenId], name: str = "r") -> ScheduledRequest:
    request = row(SamplingParams(structured=structured), request_id=name)
    return ScheduledRequest(
        request_id=request.request_id,
        token_ids=request.token_ids,
        start=0,
        block_table=(),
        samples=True,
        sampling=request.sampling,
        output=None if structured is None else tuple(output),
    )


def allowed(grammars: Grammars, *requests: ScheduledRequest) -> list[set[TokenId] | None]:
    """Of each request; None where everything is."""
    found: list[set[TokenId] | None] = [None] * len(requests)
    pending = grammars.masks(requests)
    if pending is not None:
        masks = pending.result()
        assert not masks.errors, masks.errors
        for at, words in zip(masks.rows, masks.words_MW, strict=True):
            bits = np.unpackbits(words.view(np.uint8), bitorder="little", count=VOCAB_SIZE)
            found[at] = set(np.flatnonzero(bits).tolist())
    return found


def ids(text: str) -> tuple[TokenId, ...]:
    return TOKENIZER.encode(text, add_special_tokens=False)


# --- masks


def test_the_mask_is_what_may_follow_and_at_the_end_only_the_end(grammars: Grammars) -> None:
    [start] = allowed(grammars, under(regex("(ab|ac)x"), ()))
    assert start is not None
    assert {TOKENIZER.decode([token]) for token in start} <= {"a", "ab", "ac", "abx", "acx"}
    [middle] = allowed(grammars, under(regex("(ab|ac)x"), ids("ab"), "other"))
    assert middle == {ids("x")[0]}
    [end] = allowed(grammars, under(regex("(ab|ac)x"), ids("acx"), "third"))
    assert end == {EOS_ID}


def test_thousands_of_choices_are_one_form(grammars: Grammars) -> None:
    choices = [f"c{number}" for number in range(5000)] + ['"\\', "日本\n"]
    structured = StructuredOutput(kind="choice", text=json.dumps(choices))
    [start] = allowed(grammars, under(structured, ()))
    assert start is not None
    assert {TOKENIZER.decode([token])[:1] for token in start} <= {"c", '"', "日", "\ufffd"}
    [middle] = allowed(grammars, under(structured, ids("c499"), "other"))
    assert middle is not None
    assert EOS_ID in middle  # c499 is one of them, and so is c4990
    assert {TOKENIZER.decode([token]) for token in middle - {EOS_ID}} <= set("0123456789")


def test_rows_without_a_grammar_are_free(grammars: Grammars) -> None:
    assert grammars.masks([under(None, ())]) is None
    assert [one is None for one in allowed(grammars, under(None, ()), under(regex("a+"), (), "b"))] == [True, False]


@settings(deadline=None, max_examples=40)
@given(data=st.data())
def test_a_sequences_mask_depends_on_its_tokens_only(data: st.DataObject) -> None:
    """Step by step, from nothing, taken back, and squeezed out of memory by others: the mask is the same."""
    structured = schema(PERSON)
    grammars = Grammars(vocabulary, vocab_size=VOCAB_SIZE, max_sequences=2)
    fresh = Grammars(vocabulary, vocab_size=VOCAB_SIZE, max_sequences=100)
    try:
        outputs: dict[str, list[TokenId]] = {name: [] for name in "abc"}
        for turn in range(data.draw(st.integers(1, 25))):
            name = data.draw(st.sampled_from("abc"))
            output = outputs[name]
            if output and data.draw(st.integers(0, 9)) == 0:
                del output[data.draw(st.integers(0, len(output))) :]
            [mine] = allowed(grammars, under(structured, output, name))
            assert mine == allowed(fresh, under(structured, output, f"new-{turn}"))[0]
            assert mine
            output.append(data.draw(st.sampled_from(sorted(mine))))
            if output[-1] == EOS_ID:
                output.clear()
    finally:
        grammars.close()
        fresh.close()


def test_a_sequence_whose_tokens_changed_is_read_anew(grammars: Grammars) -> None:
    for first, second in (("a", "b"), ("c", "d"), ("a", "b")):
        assert allowed(grammars, under(regex("(ab|cd)"), ids(first))) == [{ids(second)[0]}]


def test_the_grammar_may_begin_after_a_mark(grammars: Grammars) -> None:
    mark = ids("</think>")
    assert len(mark) > 1
    structured = StructuredOutput(kind="regex", text="ab", start_after=mark)
    thought = ids("well < /think") + mark[:1]
    assert allowed(grammars, under(structured, thought)) == [None]
    assert allowed(grammars, under(structured, thought + ids("x") + mark[1:])) == [None], "the mark was not whole"
    [begun] = allowed(grammars, under(structured, ids("well ") + mark))
    assert begun is not None
    assert begun <= {*ids("a"), *ids("ab")}
    assert (
        allowed(grammars, under(structured, ids("well ") + mark + ids("a")), under(structured, mark, "x"))[1] == begun
    )


@pytest.mark.parametrize(
    ("structured", "words"),
    [
        (schema({"type": "string", "enum": []}), "Unsatisfiable schema"),
        (schema({"type": "integer", "minimum": 5, "maximum": 3}), "minimum (5) is greater than maximum (3)"),
        (schema({"type": "strin"}), "Invalid type: strin"),
        (schema({"type": "array", "uniqueItems": True}), 'Unimplemented keys: ["uniqueItems"]'),
        (schema({"$ref": "https://example.com/schema"}), "not present in a registry"),
        (schema({"$ref": "#"}), "no text fits it"),
        (StructuredOutput(kind="json", text="{", param="response_format"), "Expecting property name"),
        (StructuredOutput(kind="json", text="[]", param="response_format"), "must be an object"),
        (schema(json.loads('{"items":' * 300 + "{}" + "}" * 300)), "recursion limit exceeded"),
        (regex("("), "unclosed group"),
        (regex("a(?=b)"), "look-around"),
        (regex(r"[^\s\S]"), "no text fits it"),
        (regex("\ud800"), "surrogates not allowed"),
        (StructuredOutput(kind="grammar", text="start: foo"), 'unknown name: "foo"'),
        (StructuredOutput(kind="grammar", text="start: <|nowhere|>"), "unknown special token"),
        (StructuredOutput(kind="grammar", text='root ::= "a" | nowhere'), "Rule 'nowhere' not found"),
        (StructuredOutput(kind="grammar", text="start: A\nA: /a/ & /b/"), "no text fits it"),
        (StructuredOutput(kind="choice", text="nonsense"), "Expecting value"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.kind,
)
def test_what_cannot_be_honoured_is_told_in_one_line(
    grammars: Grammars, structured: StructuredOutput, words: str
) -> None:
    error = grammars.prepare(structured).exception()
    assert isinstance(error, RequestError)
    assert words in error.message
    assert "\n" not in error.message
    assert len(error.message) < 450
    assert error.param == structured.param
    assert error.code == "invalid_structured_output"
    if structured.param is not None:
        assert "in response_format" in error.message


@pytest.mark.parametrize(
    "structured",
    [
        StructuredOutput(
            kind="grammar", text="\n".join(["start: r0", *(f"r{i}: /a/ r{i + 1}" for i in range(6000)), "r6000: /b/"])
        ),
        schema(
            {
                "$defs": {str(i): {"items": {"$ref": f"#/$defs/{i + 1}"}} for i in range(2500)} | {"2500": {}},
                "$ref": "#/$defs/0",
            }
        ),
    ],
    ids=["rules", "references"],
)
def test_a_chain_as_long_as_the_limit_allows_does_not_overflow_the_stack(
    grammars: Grammars, structured: StructuredOutput
) -> None:
    grammars.prepare(structured).result()
    [mask] = allowed(grammars, under(structured, ()))
    assert mask
    with pytest.raises(RequestError, match="at most 131072"):
        StructuredOutput(kind="grammar", text="a" * 131_073)


def test_a_token_that_the_grammar_forbids_ends_its_request_alone(grammars: Grammars) -> None:
    pending = grammars.masks([under(regex("ab"), ids("x")), under(regex("ab"), (), "good")])
    assert pending is not None
    masks = pending.result()
    assert masks.rows == (1,)
    assert list(masks.errors) == ["r"]


def test_a_model_without_an_end_is_refused() -> None:
    bare = load_tokenizer(tiny_model_path("qwen3"))
    bare.special_tokens.pop("eos_token", None)
    with pytest.raises(RequestError, match="end-of-sequence"):
        grammar_tokenizer(bare, vocab_size=VOCAB_SIZE, eos_token_ids=())


# --- the queue in front of the scheduler


class SlowCompiler:
    """Ends when the test says so."""

    def __init__(self) -> None:
        self.under_way: list[Future[None]] = []

    def prepare(self, structured: StructuredOutput) -> Future[None]:
        self.under_way.append(Future())
        return self.under_way[-1]

    def close(self) -> None:
        """No threads."""


def waiting_core() -> tuple[EngineCore, SlowCompiler, World]:
    world, compiler = World(), SlowCompiler()
    return EngineCore(world.scheduler, world.runner, clock=lambda: 5.0, grammars=compiler), compiler, world


def request(name: str, structured: StructuredOutput | None = None) -> EngineRequest:
    return EngineRequest(
        request_id=RequestId(name),
        prompt_token_ids=(1, 2, 3),
        sampling=SamplingParams(max_tokens=2, structured=structured),
        arrival_time=1.0,
    )


def test_only_the_request_itself_waits_for_its_grammar() -> None:
    core, compiler, _ = waiting_core()
    assert core.submit([request("slow", regex("a")), request("quick")]) == ()
    assert core.stats().num_waiting == 2
    seen = [output.request_id for _ in range(2) for output in core.step()]
    assert seen == ["quick", "quick"]
    assert core.has_work()
    assert core.step() == ()
    threading.Timer(0.02, lambda: compiler.under_way[0].set_result(None)).start()
    outputs: list[RequestOutput] = []
    while core.has_work():
        outputs += core.step()
    assert [output.request_id for output in outputs] == ["slow", "slow"]
    assert outputs[-1].finish_reason is FinishReason.LENGTH


def test_a_refusal_is_an_output_and_an_abort_needs_no_compilation() -> None:
    core, compiler, _ = waiting_core()
    core.submit([request("bad", regex("a")), request("gone", regex("b"))])
    [duplicate] = core.submit([request("bad", regex("a"))])
    assert isinstance(duplicate.error, RequestError)
    assert duplicate.error.param == "request_id"
    compiler.under_way[0].set_exception(RequestError("no"))
    [refused] = core.step()
    assert (refused.request_id, str(refused.error)) == ("bad", "no")
    [ended] = core.abort([RequestId("gone")])
    assert (ended.finish_reason, ended.prompt_tokens) == (FinishReason.ABORT, 3)
    assert not core.has_work()


def test_what_the_scheduler_refuses_is_refused_after_compiling_too() -> None:
    core, compiler, _ = waiting_core()
    too_long = EngineRequest(
        request_id=RequestId("long"),
        prompt_token_ids=tuple(range(64)),
        sampling=SamplingParams(max_tokens=2, structured=regex("a")),
        arrival_time=1.0,
    )
    core.submit([too_long])
    compiler.under_way[0].set_result(None)
    [refused] = core.step()
    assert isinstance(refused.error, RequestError)


# --- the engine


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    made = make_llm(num_gpu_blocks_override=24, max_model_len=128)
    yield made
    made.close()


def matches(output: GenerationOutput, pattern: str) -> bool:
    [completion] = output.outputs
    assert completion.finish_reason == "stop"
    return re.fullmatch(pattern, completion.text) is not None


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_any_model_keeps_to_the_form(llm: LLM, temperature: float) -> None:
    patterns = ["[0-9]{3}-[a-f]{4}", "(yes|no)!", "a{20}b"]
    params = [
        SamplingParams(temperature=temperature, seed=i, max_tokens=60, structured=regex(pattern))
        for i, pattern in enumerate(patterns * 4)
    ]
    params.append(SamplingParams(temperature=temperature, seed=3, max_tokens=5, ignore_eos=True))
    outputs = llm.generate([[5, 6, 7]] * len(params), params)
    assert all(matches(output, pattern) for output, pattern in zip(outputs, patterns * 4, strict=False))
    # A neighbour without a form is what it is alone.
    assert outputs[-1].outputs == llm.generate([5, 6, 7], params[-1])[0].outputs


def test_a_preempted_request_goes_on_where_it_was(llm: LLM) -> None:
    before = llm.stats.num_preemptions
    pattern = "[a-z ]{70}"
    params = [SamplingParams(temperature=1.0, seed=i, max_tokens=100, structured=regex(pattern)) for i in range(4)]
    prompts = [[5, 6, 7 + i] * 8 for i in range(4)]
    together = llm.generate(prompts, params)
    assert llm.stats.num_preemptions > before
    llm.reset_prefix_cache()
    alone = [llm.generate(prompt, one)[0] for prompt, one in zip(prompts, params, strict=True)]
    assert [output.outputs for output in together] == [output.outputs for output in alone]
    assert all(matches(output, pattern) for output in together)


def test_a_cache_hit_changes_nothing(llm: LLM) -> None:
    llm.reset_prefix_cache()
    params = SamplingParams(temperature=1.0, seed=4, max_tokens=60, structured=schema(PERSON), logprobs=2)
    cold, hit = llm.generate([9] * 30, params)[0], llm.generate([9] * 30, params)[0]
    assert (cold.num_cached_tokens, hit.num_cached_tokens) == (0, 29)
    [one], [other] = cold.outputs, hit.outputs
    assert (one.text, one.token_ids, one.finish_reason) == (other.text, other.token_ids, other.finish_reason)
    assert one.logprobs is not None
    assert other.logprobs is not None
    for first, second in zip(one.logprobs, other.logprobs, strict=True):
        assert first.logprob == pytest.approx(second.logprob, abs=1e-4)
        assert [token for token, _ in first.top] == [token for token, _ in second.top]


def test_min_tokens_gives_way_where_the_form_is_full(llm: LLM) -> None:
    long = SamplingParams(temperature=0.0, max_tokens=40, min_tokens=8, structured=regex("a+"), stop=("b",))
    [output] = llm.generate([5, 6, 7], long)
    assert len(output.outputs[0].token_ids) >= 8
    full = SamplingParams(temperature=0.0, max_tokens=40, min_tokens=30, structured=regex("abc"))
    assert matches(llm.generate([5, 6, 7], full)[0], "abc")
    banned = SamplingParams(temperature=0.0, max_tokens=40, bad_words=("c",), structured=regex("ab[cd]"))
    assert matches(llm.generate([5, 6, 7], banned)[0], "abd")


def test_a_refused_form_stops_nobody_else(llm: LLM) -> None:
    with pytest.raises(RequestError, match="unclosed group"):
        llm.generate([5, 6, 7], SamplingParams(structured=regex("(")))
    assert matches(llm.generate([5, 6, 7], SamplingParams(max_tokens=9, structured=regex("ok")))[0], "ok")


def test_ignore_eos_and_a_form_exclude_each_other() -> None:
    with pytest.raises(RequestError) as refused:
        SamplingParams(ignore_eos=True, structured=regex("a"))
    assert refused.value.param == "ignore_eos"


@pytest.mark.real_model
def test_real_weights_answer_in_json() -> None:
    llm = LLM(model=str(unpacked_smollm2()), device="cpu", num_gpu_blocks_override=64, max_model_len=512)
    question = [{"role": "user", "content": "Which city is the capital of France, and what is the country's currency?"}]
    form = schema(
        {
            "type": "object",
            "properties": {"city": {"type": "string"}, "currency": {"enum": ["euro", "pound"]}},
            "required": ["city", "currency"],
            "additionalProperties": False,
        }
    )
    params = SamplingParams(temperature=0.0, max_tokens=60, structured=form)
    cold, hit = llm.chat(question, params)[0], llm.chat(question, params)[0]
    assert json.loads(cold.outputs[0].text)["city"] == "Paris"
    assert json.loads(cold.outputs[0].text)["currency"] in ("euro", "pound")
    assert (cold.outputs[0].finish_reason, cold.outputs) == ("stop", hit.outputs)
    assert hit.num_cached_tokens > 0
    llm.close()
