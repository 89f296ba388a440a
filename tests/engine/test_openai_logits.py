"""The logits part of the surface on real weights: OpenAI's client → API process → engine process → SmolLM2."""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from reprise_engine.config import CacheConfig, EngineConfig, ModelConfig
from reprise_engine.server.options import ServerOptions
from reprise_engine.text import load_tokenizer
from tests.support.engine_server import RunningServer, running_server
from tests.support.models import smollm2_path

pytestmark = pytest.mark.real_model

QUESTION: list[Any] = [{"role": "user", "content": "Which city is the capital of France, and since when?"}]
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 30}, "year": {"type": "integer"}},
    "required": ["city", "year"],
    "additionalProperties": False,
}
FORMAT: dict[str, Any] = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY, "strict": True}}
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    options = ServerOptions(
        engine=EngineConfig(
            model=ModelConfig(model=str(smollm2_path()), max_model_len=512),
            cache=CacheConfig(num_gpu_blocks_override=96),
            device="cpu",
        ),
        host="127.0.0.1",
        port=0,
        served_names=("small",),
    )
    with running_server(options, ready=True) as running:
        yield running


def complete(client: httpx.Client, prompt: Any, **body: Any) -> Any:
    response = client.post(COMPLETIONS, json={"prompt": prompt, "temperature": 0} | body)
    assert response.status_code == 200, response.text
    return response.json()


def ask(client: httpx.Client, **body: Any) -> str:
    response = client.post(CHAT, json={"messages": QUESTION, "temperature": 0, "max_tokens": 60} | body)
    assert response.status_code == 200, response.text
    [choice] = response.json()["choices"]
    assert choice["finish_reason"] == "stop"
    return str(choice["message"]["content"])


# --- structured output


def test_an_answer_by_a_json_schema_whole_and_streamed_cold_and_warm(sdk: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "small", "messages": QUESTION, "temperature": 0, "max_tokens": 60}
    create: Any = sdk.chat.completions.create
    cold, warm = (create(**asked, response_format=FORMAT) for _ in range(2))
    stream = create(**asked, response_format=FORMAT, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert cold.choices[0].message.content is not None
    answer = json.loads(cold.choices[0].message.content)
    assert (list(answer), answer["city"], type(answer["year"])) == (["city", "year"], "Paris", int)
    assert cold.choices[0].finish_reason == "stop"
    assert text == warm.choices[0].message.content == cold.choices[0].message.content
    assert warm.usage is not None
    assert warm.usage.prompt_tokens_details is not None
    assert warm.usage.prompt_tokens_details.cached_tokens == warm.usage.prompt_tokens - 1


def test_every_way_to_ask_for_a_form(client: httpx.Client) -> None:
    form: dict[str, Any]
    schema: dict[str, Any] = {"structured_outputs": {"json": CITY}}
    assert json.loads(ask(client, **schema))["city"] == "Paris"
    assert json.loads(ask(client, structured_outputs={"json": json.dumps(CITY)}))["city"] == "Paris"
    compact = ask(client, structured_outputs={"json": CITY, "disable_any_whitespace": True})
    assert re.fullmatch(r'\{"city":"[^"]*","year":-?\d+\}', compact)
    spaced = ask(client, structured_outputs={"json": CITY, "whitespace_pattern": " "})
    assert re.fullmatch(r'\{ ?"city" ?: ?"[^"]*" ?, ?"year" ?: ?-?\d+ ?\}', spaced)
    assert json.loads(ask(client, guided_json=CITY))["city"] == "Paris"
    for form in ({"structured_outputs": {"choice": ["London", "Paris"]}}, {"guided_choice": ["London", "Paris"]}):
        assert ask(client, **form) in ("London", "Paris")
    for form in ({"structured_outputs": {"regex": "In [0-9]{4}"}}, {"guided_regex": "In [0-9]{4}"}):
        assert re.fullmatch("In [0-9]{4}", ask(client, **form))
    for grammar in ('start: "Yes" | "No"', 'root ::= answer "!"\nanswer ::= "Yes" | "No"'):
        for form in ({"structured_outputs": {"grammar": grammar}}, {"guided_grammar": grammar}):
            assert ask(client, **form).rstrip("!") in ("Yes", "No")
    for form in ({"response_format": {"type": "json_object"}}, {"structured_outputs": {"json_object": True}}):
        response = client.post(CHAT, json={"messages": QUESTION, "max_tokens": 40, "temperature": 0} | form)
        assert response.json()["choices"][0]["message"]["content"].startswith("{")
    [choice] = complete(client, "The capital of France is", guided_choice=[" Rome", " Paris"])["choices"]
    assert (choice["text"], choice["finish_reason"]) == (" Paris", "stop")


def test_choices_and_neighbours_keep_their_own_state(client: httpx.Client) -> None:
    body = {"messages": QUESTION, "response_format": FORMAT, "n": 4, "seed": 5, "temperature": 1.2, "max_tokens": 70}

    def sampled() -> list[str]:
        return [choice["message"]["content"] for choice in client.post(CHAT, json=body).json()["choices"]]

    with ThreadPoolExecutor(2) as pool:
        free = pool.submit(complete, client, "Once upon a time", max_tokens=20)
        texts = sampled()
        beside = free.result()["choices"][0]["text"]
    assert len(set(texts)) > 1
    for text in texts:
        assert list(json.loads(text)) == ["city", "year"]
    assert texts == sampled(), "a seed draws the same again"
    assert beside == complete(client, "Once upon a time", max_tokens=20)["choices"][0]["text"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("form", "param", "words"),
    [
        ({"guided_regex": "("}, "guided_regex", "unclosed group"),
        ({"guided_json": {"type": "array", "uniqueItems": True}}, "guided_json", "uniqueItems"),
        ({"structured_outputs": {"json": {"enum": []}}}, "structured_outputs", "Unsatisfiable"),
        ({"structured_outputs": {"grammar": "start: nowhere"}}, "structured_outputs", "unknown name"),
        ({"guided_grammar": "start: <|nowhere|>"}, "guided_grammar", "unknown special token"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "strin"}}}},
            "response_format",
            "Invalid type: strin",
        ),
    ],
)
def test_a_form_that_cannot_be_honoured_is_a_400_before_the_stream(
    client: httpx.Client, form: dict[str, Any], param: str, words: str, stream: bool
) -> None:
    response = client.post(CHAT, json={"messages": QUESTION, "n": 2, "stream": stream} | form)
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["param"], error["code"]) == (param, "invalid_structured_output")
    assert words in error["message"]
    # Nothing is left of it in the engine.
    deadline = time.monotonic() + 10
    while client.get("/load").json()["server_load"]:
        assert time.monotonic() < deadline


# --- log-probabilities


def test_logprobs_are_the_same_whatever_is_cached(client: httpx.Client) -> None:
    prompt = "The capital of France is Paris. The capital of Spain is"
    cold, hit = (complete(client, prompt, max_tokens=5, logprobs=3) for _ in range(2))
    assert hit["usage"]["prompt_tokens_details"]["cached_tokens"] == hit["usage"]["prompt_tokens"] - 1
    [one], [other] = cold["choices"], hit["choices"]
    assert one["text"] == other["text"]
    assert one["logprobs"]["token_logprobs"] == pytest.approx(other["logprobs"]["token_logprobs"], abs=1e-4)
    for first, second in zip(one["logprobs"]["top_logprobs"], other["logprobs"]["top_logprobs"], strict=True):
        assert first == pytest.approx(second, abs=1e-4)


def test_an_echoed_answer_scores_as_it_was_generated(client: httpx.Client) -> None:
    """What evaluation harnesses do: generate, then score prompt and answer as a prompt. One truth, two ways."""
    prompt = "The capital of France is Paris — naïve? The capital of Spain is"
    [generated] = complete(client, prompt, max_tokens=6, logprobs=2)["choices"]
    whole = prompt + generated["text"]
    [scored] = complete(client, whole, max_tokens=0, echo=True, logprobs=2)["choices"]
    logprobs, mine = scored["logprobs"], generated["logprobs"]
    assert scored["text"] == whole
    count = len(mine["tokens"])
    assert logprobs["tokens"][-count:] == mine["tokens"]
    assert logprobs["token_logprobs"][-count:] == pytest.approx(mine["token_logprobs"], abs=1e-3)
    assert logprobs["token_logprobs"][0] is None
    assert [offset + len(prompt) for offset in mine["text_offset"]] == logprobs["text_offset"][-count:]
    for token, start, end in zip(
        logprobs["tokens"], logprobs["text_offset"], logprobs["text_offset"][1:], strict=False
    ):
        if "\ufffd" not in token:
            assert whole[start:end] == token
    shown = complete(client, whole, max_tokens=1, prompt_logprobs=1, return_token_ids=True)["choices"][0]
    for token_id, logprob, entry in zip(
        shown["prompt_token_ids"][1:], logprobs["token_logprobs"][1:], shown["prompt_logprobs"][1:], strict=True
    ):
        assert entry[str(token_id)]["logprob"] == pytest.approx(logprob, abs=1e-3)
        assert len(entry) == (1 if entry[str(token_id)]["rank"] == 1 else 2)


def test_a_chats_prompt_logprobs(client: httpx.Client) -> None:
    body = {"messages": QUESTION, "max_tokens": 1, "prompt_logprobs": 0, "return_token_ids": True}
    answer = client.post(CHAT, json=body).json()
    tokens = [next(iter(entry)) for entry in answer["prompt_logprobs"][1:]]
    assert tokens == [str(token) for token in answer["prompt_token_ids"][1:]]


# --- biases


@pytest.mark.parametrize(
    "penalty", [{"presence_penalty": 2}, {"frequency_penalty": 2}, {"repetition_penalty": 2}], ids=str
)
def test_penalties_keep_the_model_from_repeating_itself(client: httpx.Client, penalty: dict[str, int]) -> None:
    def most_often(**body: Any) -> int:
        answer = complete(client, "one two one two one two one", max_tokens=16, return_token_ids=True, **body)
        token_ids = answer["choices"][0]["token_ids"]
        return max(Counter(token_ids).values())

    assert most_often(**penalty) < most_often()


def test_biases_and_bans_choose_other_words(client: httpx.Client, sdk: openai.OpenAI) -> None:
    tokenizer = load_tokenizer(smollm2_path())
    [rome] = tokenizer.encode(" Rome", add_special_tokens=False)
    prompt = "The capital of France is Paris. The capital of Spain is"
    free = complete(client, prompt, max_tokens=6)["choices"][0]["text"]
    assert "Madrid" in free
    assert "Madrid" not in complete(client, prompt, max_tokens=6, bad_words=["Madrid"])["choices"][0]["text"]
    biased = sdk.completions.create(model="small", prompt=prompt, max_tokens=2, logit_bias={str(rome): 100})
    assert biased.choices[0].text == " Rome Rome"
    only = complete(client, prompt, max_tokens=6, allowed_token_ids=[rome, 30], return_token_ids=True)["choices"][0]
    assert set(only["token_ids"]) <= {rome, 30}
