"""What bodies may hold: JSON in the strict sense, null for what is left out, and no more than others can wait for."""

from __future__ import annotations

import gzip
import json
from typing import Any

import httpx
import pytest
from fastapi.responses import JSONResponse

from reprise_engine.server.json_route import JsonAnswer
from reprise_engine.server.protocol import MAX_STOP_LENGTH, MAX_STOP_TOKEN_IDS
from reprise_engine.server.protocol_chat import MAX_MESSAGES
from reprise_engine.server.protocol_tokens import MAX_TOKENS
from tests.engine.test_server_errors import error_of
from tests.support.engine_server import RunningServer
from tests.support.loop_probe import probing

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
RESPONSES = "/v1/responses"
HI = {"role": "user", "content": "hi"}
SHORT: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [HI], "max_tokens": 1},
    COMPLETIONS: {"prompt": "a", "max_tokens": 1},
    RESPONSES: {"input": "hi", "max_output_tokens": 1},
}
JSON_TYPE = {"Content-Type": "application/json"}


def tool(parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": parameters}}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "field",
    [
        {"metadata": {"a": "\ud800"}},
        {"metadata": {"\udfff": "a"}},
        {"text": {"format": {"type": "json_schema", "name": "\ud800", "schema": {}}}},
        {"text": {"format": {"type": "json_schema", "name": "a", "schema": {"minimum": float("nan")}}}},
        {"tools": [{"type": "function", "name": "f", "description": "\ud800"}], "tool_choice": "none"},
        {"tools": [{"type": "function", "name": "f", "parameters": {"maximum": float("inf")}}], "tool_choice": "none"},
        {"seed": -float("inf")},
    ],
    ids=["value", "name", "format", "schema", "description", "parameters", "number"],
)
def test_what_no_answer_could_repeat_is_no_json(client: httpx.Client, field: dict[str, Any], stream: bool) -> None:
    content = json.dumps(SHORT[RESPONSES] | field | {"stream": stream})
    error = error_of(client.post(RESPONSES, content=content, headers=JSON_TYPE))
    [name] = field if len(field) == 1 else ["tools"]
    assert error["message"] == f"The body is not valid JSON: {name} holds NaN, Infinity or half of a surrogate pair."
    assert error["param"] == name


def test_what_clients_in_the_wild_send_is_read(client: httpx.Client) -> None:
    for content in (
        b'\xef\xbb\xbf{"prompt": "a", "max_tokens": 1}',
        b' {"prompt": "\\ud83d\\ude00", "max_tokens": 1}\r\n',
        '{"prompt": "😀", "max_tokens": 1}'.encode(),
    ):
        assert client.post(COMPLETIONS, content=content, headers=JSON_TYPE).status_code == 200
    media_type = {"Content-Type": "application/json; charset=utf-8"}
    assert client.post(COMPLETIONS, content=json.dumps(SHORT[COMPLETIONS]), headers=media_type).status_code == 200


def test_a_compressed_body_is_told_to_be(client: httpx.Client) -> None:
    content = gzip.compress(json.dumps(SHORT[CHAT]).encode())
    response = client.post(CHAT, content=content, headers=JSON_TYPE | {"Content-Encoding": "gzip"})
    assert "Content-Encoding gzip is not supported" in error_of(response, 415)["message"]


@pytest.mark.parametrize("path", SHORT)
def test_null_is_a_field_left_out(client: httpx.Client, path: str) -> None:
    document = client.get("/openapi.json").json()
    reference = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    schema = document["components"]["schemas"][reference.rsplit("/", 1)[1]]
    nulls = dict.fromkeys(name for name in schema["properties"] if name not in schema["required"])
    assert len(nulls) > 20
    assert client.post(path, json=nulls | SHORT[path]).status_code == 200
    for name in schema["required"]:
        assert error_of(client.post(path, json=SHORT[path] | {name: None}))["message"] == f"{name} is required."


def test_null_is_left_out_inside_of_fields_too(client: httpx.Client) -> None:
    body = SHORT[CHAT] | {
        "messages": [HI | {"name": None, "tool_calls": None}],
        "stream": True,
        "stream_options": {"include_usage": None, "include_obfuscation": None},
    }
    answer = client.post(CHAT, json=body)
    assert answer.status_code == 200
    assert '"usage"' not in answer.text


@pytest.mark.parametrize(
    ("path", "field", "param", "words"),
    [
        (CHAT, {"messages": [HI] * (MAX_MESSAGES + 1)}, "messages", f"at most {MAX_MESSAGES} items"),
        (RESPONSES, {"input": [HI] * (MAX_MESSAGES + 1)}, "input", f"at most {MAX_MESSAGES} items"),
        (CHAT, {"stop_token_ids": [1] * (MAX_STOP_TOKEN_IDS + 1)}, "stop_token_ids", f"at most {MAX_STOP_TOKEN_IDS}"),
        (CHAT, {"stop": "a" * (MAX_STOP_LENGTH + 1)}, "stop[0]", f"at most {MAX_STOP_LENGTH} characters"),
        (CHAT, {"logit_bias": {"9" * 5000: 1}}, "logit_bias", "has the key '99999999999999999999999999999999…'"),
        (CHAT, {"logit_bias": {"-1": 1}}, "logit_bias", "has the key '-1'"),
        (CHAT, {"logit_bias": {"260": 1}}, "logit_bias", "token id 260"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "x": 1}]}]}, "messages", "'x'"),
        (
            RESPONSES,
            {"input": [{"role": "user", "content": [{"type": "input_text", "text": "a", "x": 1}]}]},
            "input",
            "'x'",
        ),
        (CHAT, {"tools": [tool({"type": "string"})]}, "tools", "'f' are of type 'string'; a function's must be"),
        (CHAT, {"tools": [tool({"type": ["object", "null"]})]}, "tools", "must be of type 'object'"),
        (CHAT, {"guided_json": True}, "guided_json", "valid dictionary"),
        (
            CHAT,
            {"guided_json": '{"a":' * 5000 + "1" + "}" * 5000},
            "guided_json",
            "valid JSON: it is nested too deeply",
        ),
        (CHAT, {"guided_json": '{"const": NaN}'}, "guided_json", "is not valid JSON"),
        (CHAT, {"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag", "should be None"),
        (CHAT, {"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "messages, which is a field"),
        (CHAT, {"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs", "tools, which is a field"),
        (CHAT, {"chat_template_kwargs": {"enable_thinking": "on"}}, "chat_template_kwargs", "does not read"),
        (RESPONSES, {"chat_template_kwargs": {"sufix": "x"}}, "chat_template_kwargs", "sufix, which this model's"),
    ],
)
def test_what_is_too_much_or_would_be_ignored_is_named(
    client: httpx.Client, path: str, field: dict[str, Any], param: str, words: str
) -> None:
    error = error_of(client.post(path, json=SHORT[path] | field))
    assert error["param"] == param
    assert words in error["message"]
    assert len(error["message"]) < 400


@pytest.mark.parametrize(
    "field",
    [
        {"chat_template_kwargs": {"enable_thinking": False}},  # it does not think anyway
        {"chat_template_kwargs": {"enable_thinking": True}},
        {"chat_template_kwargs": {"enable_thinking": None}},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {"type": "x"}}]}]},
        {"allowed_token_ids": [97] * 5000},
    ],
    ids=["off", "on", "null", "mark", "twice"],
)
def test_what_asks_for_nothing_is_accepted(client: httpx.Client, field: dict[str, Any]) -> None:
    assert client.post(CHAT, json=SHORT[CHAT] | field).status_code == 200


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": [HI], "response_format": {"type": "json_schema", "json_schema": {"schema": "DEEP"}}}),
        (COMPLETIONS, {"prompt": "a", "guided_json": "DEEP"}),
        (RESPONSES, {"input": "a", "text": {"format": {"type": "json_schema", "name": "n", "schema": "DEEP"}}}),
        (CHAT, {"messages": [HI], "chat_template_kwargs": {"suffix": "DEEP"}}),
    ],
    ids=["response_format", "guided_json", "text.format", "chat_template_kwargs"],
)
def test_however_deep_a_body_is_it_is_the_requests_fault(client: httpx.Client, path: str, body: dict[str, Any]) -> None:
    """What can just be read may be too deep to be written again, further down the stack."""
    before, after = json.dumps(body).split('"DEEP"')
    words = set()
    for depth in range(800, 1000, 2):
        content = before + '{"items":' * depth + "{}" + "}" * depth + after
        error = client.post(path, content=content, headers=JSON_TYPE)
        assert error.status_code in (200, 400), (depth, error.text)
        words.add("nested too deeply" in error.text)
    assert True in words, "deep enough to be refused by the parser"


def test_too_many_tokens_to_put_together_are_named(client: httpx.Client) -> None:
    error = error_of(client.post("/detokenize", json={"tokens": [97] * (MAX_TOKENS + 1)}))
    assert error["param"] == "tokens"
    assert f"at most {MAX_TOKENS} items" in error["message"]


def test_an_answer_that_is_written_quickly_is_the_same() -> None:
    tops = [{"5": {"rank": 1, "logprob": 1e-7}}, None]
    content = {"text": 'é😀\u2028"\\\n', "ids": (1, 2), "scores": [-1.5, 0.1], "tops": tops, "ended": True}
    quick, plain = JsonAnswer(content), JSONResponse(content)
    assert json.loads(bytes(quick.body)) == json.loads(bytes(plain.body))
    assert quick.headers["content-type"] == plain.headers["content-type"]


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
def test_a_conversation_of_nothing_but_messages_keeps_others_waiting_for_moments_only(
    server: RunningServer, path: str
) -> None:
    name = "messages" if path == CHAT else "input"
    content = f'{{"{name}": [' + ",".join(['{"role": "user", "content": "a"}'] * 200_000) + "]}"
    encoded = content.encode()
    with probing(server.loop) as probe:
        error = error_of(server.client.post(path, content=encoded, headers=JSON_TYPE))
    assert error["param"] == name
    # 200,000 messages were read and judged one by one in 2.5 s of the event loop; parsing them is what is left.
    assert probe.busy < 1.0
