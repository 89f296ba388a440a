"""What is refused, in OpenAI's shape, naming the field; and that nothing else stops working."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest

from reprise_engine.errors import NotFinite
from reprise_engine.server.errors import as_api_error
from tests.support.engine_server import RunningServer, fake_options, running_server

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]


def error_of(response: httpx.Response, status: int = 400) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return error


@pytest.mark.parametrize(
    ("path", "body", "param", "words"),
    [
        # wrong values
        (COMPLETIONS, {"prompt": "a", "temperature": -1}, "temperature", "greater than or equal to 0; got -1"),
        (COMPLETIONS, {"prompt": "a", "temperature": "1"}, "temperature", "valid number"),
        (COMPLETIONS, {"prompt": "a", "top_p": 0}, "top_p", "greater than 0"),
        (COMPLETIONS, {"prompt": "a", "max_tokens": 0}, "max_tokens", "only makes sense with echo"),
        (CHAT, {"messages": HI, "max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
        (COMPLETIONS, {"prompt": "a", "max_tokens": True}, "max_tokens", "valid integer"),
        (COMPLETIONS, {"prompt": "a", "n": 0}, "n", "greater than or equal to 1"),
        (COMPLETIONS, {"prompt": ["a"] * 100, "n": 100}, "n", "at most 1024"),
        (COMPLETIONS, {"prompt": "a", "stop": ["x", ""]}, "stop[1]", "at least 1 character"),
        (COMPLETIONS, {"prompt": "a", "stream": "yes"}, "stream", "valid boolean"),
        (COMPLETIONS, {"prompt": "a", "min_tokens": 9, "max_tokens": 2}, "min_tokens", "more than max_tokens (2)"),
        (COMPLETIONS, {"prompt": "a", "stop_token_ids": [999]}, "stop_token_ids", "token id 999"),
        (COMPLETIONS, {"prompt": "a", "logprobs": 21}, "logprobs", "less than or equal to 20"),
        (COMPLETIONS, {"prompt": "a", "seed": 2**63}, "seed", "less than"),
        (COMPLETIONS, {"prompt": "a", "cache_salt": ""}, "cache_salt", "at least 1 character"),
        (COMPLETIONS, {}, "prompt", "prompt is required"),
        (COMPLETIONS, {"prompt": ""}, "prompt", "empty"),
        (COMPLETIONS, {"prompt": []}, "prompt", "must be a string"),
        (COMPLETIONS, {"prompt": [[]]}, "prompt", "must be a string"),
        (COMPLETIONS, {"prompt": [True]}, "prompt", "must be a string"),
        (COMPLETIONS, {"prompt": [260]}, "prompt", "token id 260; the vocabulary has ids below 260"),
        (COMPLETIONS, {"prompt": [-1]}, "prompt", "must be a string"),
        (CHAT, {"messages": []}, "messages", "at least 1 item"),
        (CHAT, {"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role", "'system', 'developer'"),
        (CHAT, {"messages": [{"role": "user"}]}, "messages", "content is required"),
        (CHAT, {"messages": HI, "top_logprobs": 2}, "top_logprobs", "only allowed when logprobs is true"),
        (CHAT, {"messages": HI, "stream_options": {"include_usage": True}}, "stream_options", "when stream is true"),
        (CHAT, {"messages": HI, "continue_final_message": True}, "continue_final_message", "one of them"),
        (CHAT, {"messages": [*HI, {"role": "assistant", "content": "refuse"}]}, "messages", "conversation is refused"),
        # not supported, and named
        (COMPLETIONS, {"prompt": "a", "tools": [{"type": "function"}]}, "tools", "tools is not supported"),
        (COMPLETIONS, {"prompt": "a", "tool_choice": "required"}, "tool_choice", "not supported"),
        (CHAT, {"messages": HI, "response_format": {"type": "json_object"}}, "response_format", "not supported"),
        (CHAT, {"messages": HI, "store": True}, "store", "not supported"),
        (CHAT, {"messages": HI, "reasoning_effort": "high"}, "reasoning_effort", "knows no degrees"),
        (CHAT, {"messages": HI, "modalities": ["text", "audio"]}, "modalities", "not supported"),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages",
            "'image_url' are not supported",
        ),
        (COMPLETIONS, {"prompt": "a", "suffix": "b"}, "suffix", "not supported"),
        (COMPLETIONS, {"prompt": "a", "best_of": 3}, "best_of", "only the value of n (1)"),
        (COMPLETIONS, {"prompt": "a", "use_beam_search": True}, "use_beam_search", "not supported"),
        # unknown
        (COMPLETIONS, {"prompt": "a", "temprature": 1}, "temprature", "Unknown field 'temprature'"),
        (CHAT, {"messages": HI, "stream": True, "stream_options": {"x": 1}}, "stream_options.x", "Unknown field"),
        ("/tokenize", {"prompt": 5}, "prompt", "valid string"),
        ("/detokenize", {"tokens": [5000]}, "tokens", "token id 5000"),
    ],
)
def test_a_wrong_field_is_named(client: httpx.Client, path: str, body: dict[str, Any], param: str, words: str) -> None:
    error = error_of(client.post(path, json=body))
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert words in error["message"]


@pytest.mark.parametrize(
    "field",
    [
        {"user": "me"},
        {"metadata": {"a": "b"}},
        {"store": False},
        {"tools": []},
        {"tool_choice": "auto"},
        {"parallel_tool_calls": True},
        {"response_format": {"type": "text"}},
        {"logit_bias": {}},
        {"guided_json": None, "structured_outputs": None, "bad_words": [], "prompt_logprobs": None},
        {"return_tokens_as_token_ids": False},
        {"service_tier": "auto"},
        {"include_reasoning": True},
        {"modalities": ["text"]},
        {"prompt_cache_key": "k"},
        {"reasoning_effort": None},
        {"n": None, "stop": None, "temperature": None, "stream": None, "max_tokens": None},
    ],
    ids=lambda field: next(iter(field)),
)
def test_what_asks_for_nothing_is_accepted(client: httpx.Client, field: dict[str, Any]) -> None:
    assert client.post(CHAT, json={"messages": HI, "max_completion_tokens": 1} | field).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body", "param", "words"),
    [
        (COMPLETIONS, {"prompt": "a" * 200}, "prompt", "The prompt has 200 tokens, but this model's maximum"),
        (COMPLETIONS, {"prompt": "a" * 190, "max_tokens": 11}, "max_tokens", "lower max_tokens to at most 10"),
        (CHAT, {"messages": [{"role": "user", "content": "a" * 300}]}, "prompt", "The prompt has 304 tokens"),
        (
            CHAT,
            {"messages": HI, "max_completion_tokens": 195},
            "max_completion_tokens",
            "max_completion_tokens to at most",
        ),
    ],
)
def test_too_long_a_prompt_is_a_400_before_the_stream(
    client: httpx.Client, path: str, body: dict[str, Any], param: str, words: str, stream: bool
) -> None:
    error = error_of(client.post(path, json=body | {"stream": stream}))
    assert error["code"] == "context_length_exceeded"
    assert error["param"] == param
    assert words in error["message"]


def test_what_fits_exactly_is_served(client: httpx.Client) -> None:
    answer = client.post(COMPLETIONS, json={"prompt": "a" * 190, "max_tokens": 10}).json()
    assert answer["usage"]["total_tokens"] == 200


def test_a_pool_smaller_than_the_context_is_the_limit(tmp_path_factory: pytest.TempPathFactory) -> None:
    with running_server(fake_options(tmp_path_factory.mktemp("model"), builder="build_small")) as server:
        error = error_of(server.client.post(COMPLETIONS, json={"prompt": "a" * 40, "stream": True}))
        assert "the KV cache holds 32 tokens (less than max_model_len, 200)" in error["message"]
        answer = server.client.post(CHAT, json={"messages": [{"role": "user", "content": "a" * 10}]}).json()
        assert answer["usage"]["total_tokens"] == 32


@pytest.mark.parametrize(
    ("content", "content_type", "words"),
    [
        (b'{"prompt": ', "application/json", "not valid JSON"),
        (b"[1]", "application/json", "must be a JSON object"),
        (b"", "application/json", "JSON body is required"),
        (b'{"prompt": "a"}', "text/plain", "application/json"),
        (b'{"prompt": "a", "temperature": NaN}', "application/json", "not valid JSON"),
        (b'{"prompt": "\\ud800"}', "application/json", "not valid JSON"),
        (b"\xff\xfe", "application/json", "not valid"),
    ],
)
def test_a_malformed_body_is_a_400(client: httpx.Client, content: bytes, content_type: str, words: str) -> None:
    response = client.post(COMPLETIONS, content=content, headers={"Content-Type": content_type})
    assert words in error_of(response)["message"]


def test_an_unknown_model_is_a_404(client: httpx.Client) -> None:
    for path, body in ((COMPLETIONS, {"prompt": "a"}), (CHAT, {"messages": HI}), ("/tokenize", {"prompt": "a"})):
        error = error_of(client.post(path, json=body | {"model": "gpt-4"}), 404)
        assert (error["param"], error["code"]) == ("model", "model_not_found")
        assert error["message"] == "The model 'gpt-4' does not exist; this server has 'counter', 'other-name'."
    error_of(client.get("/v1/models/gpt-4"), 404)


def test_other_paths_and_methods_have_the_same_shape(client: httpx.Client) -> None:
    assert error_of(client.get("/v1/embeddings"), 404)["message"] == "Not Found: GET /v1/embeddings"
    error_of(client.get(COMPLETIONS), 405)


def test_openais_client_raises_its_own_errors(server: RunningServer) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as sdk:
        with pytest.raises(openai.NotFoundError) as missing:
            sdk.completions.create(model="gpt-4", prompt="a")
        assert missing.value.code == "model_not_found"
        with pytest.raises(openai.BadRequestError) as wrong:
            sdk.completions.create(model="counter", prompt="a", temperature=3)
        assert wrong.value.param == "temperature"


def test_a_template_is_needed_for_chat_only(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("model")
    options = fake_options(folder)
    (folder / "tokenizer_config.json").unlink()
    with running_server(options) as server:
        error = error_of(server.client.post(CHAT, json={"messages": HI}))
        assert "no chat template" in error["message"]
        assert server.client.post(COMPLETIONS, json={"prompt": "a"}).status_code == 200


# --- keys


def test_keys_guard_everything_but_probes_and_metrics(tmp_path_factory: pytest.TempPathFactory) -> None:
    options = fake_options(tmp_path_factory.mktemp("model"), api_keys=("secret-one", "secret-two"))
    assert "secret" not in repr(options)
    with running_server(options) as server:
        for path in ("/health", "/ping", "/metrics"):
            assert server.client.get(path).status_code == 200
        body = {"prompt": "a", "max_tokens": 1}
        for wrong in ({}, {"Authorization": "Bearer secret"}, {"Authorization": "Basic secret-one"}):
            error = error_of(server.client.post(COMPLETIONS, json=body, headers=wrong), 401)
            assert error["code"] == "invalid_api_key"
        for path in ("/v1/models", "/version", "/load", "/docs", "/openapi.json"):
            error_of(server.client.get(path), 401)
        for key in ("secret-one", "secret-two"):
            with openai.OpenAI(base_url=f"{server.url}/v1", api_key=key) as sdk:
                assert sdk.completions.create(model="counter", prompt="a", max_tokens=1).choices[0].text == "b"


def test_no_finite_numbers_are_the_server_s_fault() -> None:
    answer = as_api_error(NotFinite("The model computed no finite numbers."))
    assert answer is not None
    assert answer.status == 500
    assert answer.body["error"] == {
        "message": "The model computed no finite numbers.",
        "type": "server_error",
        "param": None,
        "code": "not_finite",
    }
