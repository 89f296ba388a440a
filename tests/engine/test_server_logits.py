"""Fields that change or show logits, over real HTTP: their shapes, and what is refused. The model counts
(tests/support/fake_engine.py) and says -0.5 of each token it makes, -0.25 of each token of a prompt; what the fields do
to the logits of a model is tested in test_openai_logits.py."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.engine.test_server import chat, complete, events
from tests.engine.test_server_errors import error_of

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HI = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "object"}


# --- log-probabilities of the prompt


def test_an_echo_has_the_logprobs_of_the_prompt_too(client: httpx.Client) -> None:
    [choice] = complete(client, "xyz", max_tokens=2, min_tokens=2, echo=True, logprobs=1)["choices"]
    assert choice["text"] == "xyzab"
    assert choice["logprobs"] == {
        "tokens": ["x", "y", "z", "a", "b"],
        "token_logprobs": [None, -0.25, -0.25, -0.5, -0.5],
        "top_logprobs": [None, {"y": -0.25}, {"z": -0.25}, {"a": -0.5}, {"b": -0.5}],
        "text_offset": [0, 1, 2, 3, 4],
    }
    [choice] = complete(client, "xyz", max_tokens=1, min_tokens=1, echo=True, logprobs=0)["choices"]
    assert choice["logprobs"]["token_logprobs"] == [None, -0.25, -0.25, -0.5]
    assert choice["logprobs"]["top_logprobs"] is None


def test_offsets_are_those_of_the_text_where_a_character_has_several_tokens(client: httpx.Client) -> None:
    [choice] = complete(client, "hé🙂?", max_tokens=1, echo=True, logprobs=1)["choices"]
    assert choice["text"] == "hé🙂?@"
    # One token a byte: those of one character are all where it begins.
    assert choice["logprobs"]["text_offset"] == [0, 1, 1, 2, 2, 2, 2, 3, 4]
    [choice] = complete(client, "a", max_tokens=2, logprobs=1)["choices"]
    assert choice["logprobs"]["text_offset"] == [0, 1], "without echo the text begins after the prompt"


def test_special_tokens_have_a_text_where_the_prompt_writes_them(client: httpx.Client) -> None:
    body = {"max_tokens": 1, "echo": True, "logprobs": 1}
    [written] = complete(client, "<s>hi", **body)["choices"]
    assert (written["text"], written["logprobs"]["text_offset"]) == ("<s>hij", [0, 3, 4, 5])
    [given] = complete(client, [256, *b"hi"], **body)["choices"]
    assert (given["text"], given["logprobs"]["text_offset"]) == ("hij", [0, 0, 1, 2])
    shown: dict[str, Any] = {"min_tokens": 2, "skip_special_tokens": False, "ignore_eos": True, "max_tokens": 2}
    [after] = complete(client, [256, *b"yz"], **(body | shown))["choices"]
    assert (after["text"], after["logprobs"]["text_offset"]) == ("yz</s>\x02", [0, 0, 1, 2, 6])


@pytest.mark.parametrize("prompt", ["xyz", "x"])
def test_a_streamed_echo_begins_with_the_prompt_and_its_logprobs(client: httpx.Client, prompt: str) -> None:
    body = {"prompt": prompt, "max_tokens": 2, "min_tokens": 2, "echo": True, "logprobs": 2, "n": 2}
    [whole, _] = complete(client, **body)["choices"]
    chunks = [chunk["choices"][0] for chunk in events(client, COMPLETIONS, **body)]
    for index in (0, 1):
        mine = [chunk for chunk in chunks if chunk["index"] == index]
        assert mine[0]["text"] == prompt
        assert "".join(chunk["text"] for chunk in mine) == whole["text"]
        for name in whole["logprobs"]:
            assert [item for chunk in mine for item in chunk["logprobs"][name]] == whole["logprobs"][name]


@pytest.mark.parametrize("stream", [False, True])
def test_max_tokens_0_with_echo_scores_the_prompt_alone(client: httpx.Client, stream: bool) -> None:
    body: dict[str, Any] = {"prompt": "abc", "max_tokens": 0, "echo": True, "logprobs": 1}
    if stream:
        chunks = events(client, COMPLETIONS, **body, stream_options={"include_usage": True})
        choices = [chunk["choices"][0] for chunk in chunks[:-1]]
        text, logprobs, usage = "".join(c["text"] for c in choices), choices[0]["logprobs"], chunks[-1]["usage"]
        reason = choices[-1]["finish_reason"]
    else:
        answer = complete(client, **body)
        [choice] = answer["choices"]
        text, logprobs, reason, usage = choice["text"], choice["logprobs"], choice["finish_reason"], answer["usage"]
    assert (text, reason, usage["completion_tokens"]) == ("abc", "length", 0)
    assert logprobs["tokens"] == ["a", "b", "c"]
    assert logprobs["token_logprobs"] == [None, -0.25, -0.25]


def test_prompt_logprobs_of_completions_and_chats(client: httpx.Client) -> None:
    def entry(token: str, logprob: float, rank: int) -> dict[str, Any]:
        return {str(ord(token)): {"logprob": logprob, "rank": rank, "decoded_token": token}}

    [choice] = complete(client, "abc", max_tokens=1, prompt_logprobs=2)["choices"]
    expected = [None, entry("b", -0.25, 2) | entry("c", -1.125, 2), entry("c", -0.25, 2) | entry("d", -1.125, 2)]
    assert choice["prompt_logprobs"] == expected
    assert "prompt_logprobs" not in complete(client, "abc", max_tokens=1)["choices"][0]
    answer = chat(client, "x", max_tokens=1, prompt_logprobs=0)  # "u:x|A"
    assert answer["prompt_logprobs"][0] is None
    assert [list(tokens) for tokens in answer["prompt_logprobs"][1:]] == [[str(byte)] for byte in b":x|A"]


def test_every_choice_of_every_prompt_has_its_prompts_logprobs(client: httpx.Client) -> None:
    choices = complete(client, ["ab", "xyz"], max_tokens=1, n=2, prompt_logprobs=0, echo=True, logprobs=0)["choices"]
    assert [len(choice["prompt_logprobs"]) for choice in choices] == [2, 2, 3, 3]
    assert [choice["logprobs"]["tokens"][:-1] for choice in choices] == [[*"ab"], [*"ab"], [*"xyz"], [*"xyz"]]


def test_scoring_computes_the_whole_prompt_whatever_is_cached(client: httpx.Client) -> None:
    prompt = "a prompt that fills some blocks of the cache"
    complete(client, prompt, max_tokens=1)
    for _ in range(2):
        scored = complete(client, prompt, max_tokens=1, prompt_logprobs=0, explain_cache=True)
        details = scored["usage"]["prompt_tokens_details"]
        assert details["cached_tokens"] == 0
        assert details["cache_explanation"]["reason"] == "caching_off"
        assert len(scored["choices"][0]["prompt_logprobs"]) == len(prompt)
    again = complete(client, prompt, max_tokens=1)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == len(prompt) - 1


# --- other shapes


def test_tokens_can_be_named_by_their_ids(client: httpx.Client) -> None:
    [choice] = complete(client, "ab", max_tokens=1, echo=True, logprobs=2, return_tokens_as_token_ids=True)["choices"]
    assert choice["logprobs"]["tokens"] == ["token_id:97", "token_id:98", "token_id:99"]
    assert choice["logprobs"]["top_logprobs"][2] == {"token_id:99": -0.5, "token_id:100": -1.5}
    assert choice["logprobs"]["text_offset"] == [0, 1, 2]
    body = {"max_tokens": 1, "logprobs": True, "top_logprobs": 2, "return_tokens_as_token_ids": True}
    [entry] = chat(client, "hi", **body)["choices"][0]["logprobs"]["content"]
    assert (entry["token"], entry["bytes"]) == ("token_id:66", [66])
    assert [top["token"] for top in entry["top_logprobs"]] == ["token_id:66", "token_id:67"]


def test_a_prompt_is_cut_at_its_beginning(client: httpx.Client) -> None:
    answer = complete(client, ["abcdef", "z"], max_tokens=1, truncate_prompt_tokens=2, return_token_ids=True, echo=True)
    assert [bytes(choice["prompt_token_ids"]) for choice in answer["choices"]] == [b"ef", b"z"]
    assert answer["choices"][0]["text"] == "efg"
    assert answer["usage"]["prompt_tokens"] == 3
    fitting = complete(client, "a" * 500, max_tokens=10, truncate_prompt_tokens=-1)["usage"]
    assert (fitting["prompt_tokens"], fitting["total_tokens"]) == (190, 200)
    answer = chat(client, "hello", max_tokens=1, truncate_prompt_tokens=3, return_token_ids=True)
    assert bytes(answer["prompt_token_ids"]) == b"o|A"


# --- refusals


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"logit_bias": {"5": 101}}, "logit_bias[5]", "less than or equal to 100"),
        ({"logit_bias": {"a": 1}}, "logit_bias", "has the key 'a'; its keys must be token ids"),
        ({"logit_bias": {"260": 1}}, "logit_bias", "token id 260; the vocabulary has ids below 260"),
        ({"allowed_token_ids": []}, "allowed_token_ids", "at least 1 item"),
        ({"allowed_token_ids": [260]}, "allowed_token_ids", "token id 260"),
        ({"bad_words": ["x", ""]}, "bad_words[1]", "at least 1 character"),
        ({"bad_words": "x"}, "bad_words", "valid list"),
        ({"bad_words": ["\ud800"]}, "bad_words", "holds NaN, Infinity or half of a surrogate pair"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "at least 1, or -1"),
        ({"truncate_prompt_tokens": 201}, "truncate_prompt_tokens", "more than the longest sequence of 200"),
        # forms
        ({"response_format": {"type": "xml"}}, "response_format.type", "'text', 'json_object'"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "neither without the other"),
        ({"response_format": {"type": "json_object", "json_schema": {"schema": {}}}}, "response_format", "neither"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "response_format.json_schema.schema",
            "required",
        ),
        ({"guided_json": "{"}, "guided_json", "not valid JSON"),
        ({"guided_json": "[]"}, "guided_json", "must be an object"),
        (
            {"guided_json": SCHEMA, "guided_regex": "a"},
            "guided_regex",
            "guided_json and guided_regex give the answer 2",
        ),
        ({"structured_outputs": {}}, "structured_outputs", "has no form"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs", "2 forms; only one"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag", "should be None"),
        (
            {"structured_outputs": {"regex": "a", "disable_any_whitespace": True}},
            "structured_outputs",
            "json_object only",
        ),
        ({"guided_choice": []}, "guided_choice", "at least 1 item"),
        ({"guided_choice": ["a" * 300_000]}, "guided_choice", "at most 131072"),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos", "cannot be honoured together"),
        ({"guided_grammar": "start: x"}, "guided_grammar", "not supported by this engine"),
    ],
)
def test_a_wrong_field_is_named_before_any_stream(
    client: httpx.Client, body: dict[str, Any], param: str, words: str, stream: bool
) -> None:
    for path, prompt in ((COMPLETIONS, {"prompt": "a"}), (CHAT, {"messages": HI})):
        content = json.dumps(prompt | body | {"stream": stream})  # in ASCII: half a surrogate pair can be spelt
        error = error_of(client.post(path, content=content, headers={"Content-Type": "application/json"}))
        assert error["type"] == "invalid_request_error"
        assert error["param"] == param
        assert words in error["message"]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"prompt_logprobs": 21}, "less than or equal to 20"),
        ({"prompt_logprobs": -1}, "greater than or equal to 0"),
        ({"prompt_logprobs": 1, "stream": True}, "cannot be streamed"),
    ],
)
def test_prompt_logprobs_out_of_range_or_streamed(client: httpx.Client, body: dict[str, Any], words: str) -> None:
    for path, prompt in ((COMPLETIONS, {"prompt": "a"}), (CHAT, {"messages": HI})):
        error = error_of(client.post(path, json=prompt | body))
        assert error["param"] == "prompt_logprobs"
        assert words in error["message"]
