"""The OpenAI surface over real HTTP. The model counts: "a" goes on with "bcdef…" (tests/support/fake_engine.py)."""

from __future__ import annotations

import json
import socket
import time
from typing import Any
from urllib.parse import urlsplit

import httpx
import openai
import pytest

from tests.support.engine_server import RunningServer, fake_options, running_server


def post(client: httpx.Client, path: str, **body: Any) -> Any:
    response = client.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def complete(client: httpx.Client, prompt: Any, **body: Any) -> Any:
    return post(client, "/v1/completions", prompt=prompt, **body)


def chat(client: httpx.Client, *contents: str, **body: Any) -> Any:
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": content} for i, content in enumerate(contents)]
    return post(client, "/v1/chat/completions", messages=messages, **body)


def events(client: httpx.Client, path: str, **body: Any) -> list[Any]:
    """The data of a stream, whose last event is [DONE]; checks the framing."""
    response = client.post(path, json=body | {"stream": True})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.text.endswith("\n\n")
    lines = response.text.removesuffix("\n\n").split("\n\n")
    assert all(line.startswith("data: ") and "\n" not in line for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


# --- models


def test_models_lists_every_served_name(client: httpx.Client) -> None:
    listed = client.get("/v1/models").json()
    assert listed["object"] == "list"
    assert [(card["id"], card["object"], card["max_model_len"]) for card in listed["data"]] == [
        ("counter", "model", 200),
        ("other-name", "model", 200),
    ]
    assert client.get("/v1/models/other-name").json()["id"] == "other-name"
    assert complete(client, "a", model="other-name")["model"] == "other-name"


# --- chat completions


def test_a_chat_completion_has_openais_shape(client: httpx.Client) -> None:
    answer = chat(client, "hi", max_tokens=3, model="counter")
    assert answer["object"] == "chat.completion"
    assert answer["id"].startswith("chatcmpl-")
    assert answer["model"] == "counter"
    [choice] = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": "BCD", "refusal": None}
    assert choice["finish_reason"] == "length"
    assert choice["logprobs"] is None
    assert answer["usage"] == {
        "prompt_tokens": 6,
        "completion_tokens": 3,
        "total_tokens": 9,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def test_each_turn_of_a_conversation_reuses_the_turns_before(client: httpx.Client) -> None:
    turns = ["tell me something long enough", "", "more"]
    first = chat(client, turns[0], max_tokens=8)
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    second = chat(client, turns[0], "ignored reply", "more", max_tokens=4)
    prompt = f"u:{turns[0]}|"
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == len(prompt)
    third = chat(client, turns[0], "ignored reply", "more", max_tokens=4)
    assert third["usage"]["prompt_tokens_details"]["cached_tokens"] > len(prompt)
    assert third["usage"]["prompt_tokens"] > third["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert third["choices"] == second["choices"]


def test_a_salt_keeps_tenants_apart(client: httpx.Client) -> None:
    def cached(salt: str | None) -> int:
        usage = complete(client, "a long prompt to share", cache_salt=salt)["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    assert [cached("one"), cached("one"), cached("two"), cached(None)] == [0, 21, 0, 0]


def test_a_streamed_chat_begins_with_the_role_and_ends_with_a_reason_and_the_usage(client: httpx.Client) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
    chunks = events(client, "/v1/chat/completions", **body, stream_options={"include_usage": True})
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert [chunk["choices"][0]["delta"] for chunk in chunks[1:-1]] == [
        {"content": "B"},
        {"content": "C"},
        {"content": "D"},
        {},
    ]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks[:-1]] == [None, None, None, None, "length"]
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 3
    assert chunks[-1]["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    assert all("usage" not in chunk for chunk in events(client, "/v1/chat/completions", **body))


def test_usage_can_come_with_every_chunk(client: httpx.Client) -> None:
    chunks = events(
        client, "/v1/completions", prompt="a", max_tokens=2, stream_options={"continuous_usage_stats": True}
    )
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 2, 2]


def test_characters_of_several_tokens_stream_whole(client: httpx.Client) -> None:
    # é is the bytes C3 A9, ê is C3 AA: the model counts from C2, so it makes C3, C4, C5 …: each of them incomplete.
    chunks = events(client, "/v1/completions", prompt=[0xC1], max_tokens=2)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "\ufffd\ufffd"
    answer = complete(client, [0xC1], max_tokens=2)
    assert answer["choices"][0]["text"] == "\ufffd\ufffd"


def test_chat_prompts_follow_the_template_and_its_variables(client: httpx.Client) -> None:
    def prompt_of(**body: Any) -> str:
        token_ids = chat(client, "hi", max_tokens=1, return_token_ids=True, **body)["prompt_token_ids"]
        return bytes(token_ids).decode()

    assert prompt_of() == "u:hi|A"
    assert prompt_of(add_generation_prompt=False) == "u:hi|"
    assert prompt_of(chat_template_kwargs={"suffix": "?"}) == "u:hi|?A"


def test_developer_is_the_system_role_and_parts_are_joined(client: httpx.Client) -> None:
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    ]
    answer = post(client, "/v1/chat/completions", messages=messages, max_tokens=1, return_token_ids=True)
    assert bytes(answer["prompt_token_ids"]) == b"s:be brief|u:a\nb|A"


def test_the_last_message_can_be_continued(client: httpx.Client) -> None:
    answer = chat(
        client, "count", "abc", add_generation_prompt=False, continue_final_message=True, max_tokens=3, temperature=0
    )
    assert answer["choices"][0]["message"]["content"] == "def"


def test_an_openai_reply_dumped_by_its_client_can_be_sent_back(server: RunningServer, client: httpx.Client) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as sdk:
        reply = sdk.chat.completions.create(model="counter", messages=[{"role": "user", "content": "hi"}], max_tokens=2)
        dumped = reply.choices[0].message.model_dump()
        messages: Any = [{"role": "user", "content": "hi"}, dumped, {"role": "user", "content": "more"}]
        again = sdk.chat.completions.create(model="counter", messages=messages, max_completion_tokens=1)
    assert again.usage is not None
    assert again.usage.completion_tokens == 1


# --- completions


def test_a_completion_has_openais_shape(client: httpx.Client) -> None:
    answer = complete(client, "a", max_tokens=3)
    assert answer["object"] == "text_completion"
    assert answer["choices"] == [
        {"index": 0, "text": "bcd", "finish_reason": "length", "stop_reason": None, "logprobs": None}
    ]
    assert complete(client, "a")["usage"]["completion_tokens"] == 16


def test_prompts_as_text_and_token_ids_one_and_several(client: httpx.Client) -> None:
    assert complete(client, [97], max_tokens=2)["choices"][0]["text"] == "bc"
    several = complete(client, ["a", "k"], max_tokens=2)
    assert [choice["text"] for choice in several["choices"]] == ["bc", "lm"]
    assert several["usage"]["prompt_tokens"] == 2
    several = complete(client, [[97], [107, 108]], max_tokens=2, n=2)
    assert [(c["index"], c["text"]) for c in several["choices"]] == [(0, "bc"), (1, "bc"), (2, "mn"), (3, "mn")]
    assert (several["usage"]["prompt_tokens"], several["usage"]["completion_tokens"]) == (3, 8)


def test_echo_repeats_the_prompt(client: httpx.Client) -> None:
    assert complete(client, "xa", max_tokens=1, echo=True)["choices"][0]["text"] == "xab"
    chunks = events(client, "/v1/completions", prompt=[120, 97], max_tokens=1, echo=True)
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["xa", "b"]


def test_choices_stream_side_by_side(client: httpx.Client) -> None:
    chunks = events(client, "/v1/completions", prompt=["a", "k"], max_tokens=3)
    texts = {0: "", 1: ""}
    for chunk in chunks:
        [choice] = chunk["choices"]
        texts[choice["index"]] += choice["text"]
    assert texts == {0: "bcd", 1: "lmn"}
    assert sum(chunk["choices"][0]["finish_reason"] == "length" for chunk in chunks) == 2


# --- ends of a sequence


def test_the_end_of_sequence_token_ends_and_ignore_eos_does_not(client: httpx.Client) -> None:
    [choice] = complete(client, "x", max_tokens=5)["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("yz", "stop", None)
    assert complete(client, "x", max_tokens=5)["usage"]["completion_tokens"] == 3
    [choice] = complete(client, "x", max_tokens=5, ignore_eos=True, skip_special_tokens=False)["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("yz</s>\x02\x03", "length")
    [choice] = complete(client, "x", max_tokens=5, min_tokens=4)["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("yzabc", "length")


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings_and_stop_tokens(client: httpx.Client, stream: bool) -> None:
    def end(**body: Any) -> tuple[str, str, Any]:
        if not stream:
            [choice] = complete(client, "a", max_tokens=20, **body)["choices"]
            return choice["text"], choice["finish_reason"], choice["stop_reason"]
        chunks = events(client, "/v1/completions", prompt="a", max_tokens=20, **body)
        last = chunks[-1]["choices"][0]
        return "".join(c["choices"][0]["text"] for c in chunks), last["finish_reason"], last["stop_reason"]

    assert end(stop="ef") == ("bcd", "stop", "ef")
    assert end(stop=["zz", "ef"], include_stop_str_in_output=True) == ("bcdef", "stop", "ef")
    assert end(stop="bx") == ("bcdefghijklmnopqrstu", "length", None)
    assert end(stop_token_ids=[100]) == ("bc", "stop", 100)
    assert end(stop="c", min_tokens=3) == ("bcdefghijklmnopqrstu", "length", None)


def test_a_stop_string_ends_the_work_of_the_engine_too(server: RunningServer, client: httpx.Client) -> None:
    complete(client, "{", max_tokens=180, stop="}")
    deadline = time.monotonic() + 10
    while client.get("/load").json()["server_load"]:
        assert time.monotonic() < deadline
    assert 'num_requests_running{engine="0",model_name="counter"} 0.0' in client.get("/metrics").text


# --- logprobs and token ids


def test_logprobs_of_a_completion(client: httpx.Client) -> None:
    [choice] = complete(client, "a", max_tokens=2, logprobs=2)["choices"]
    assert choice["logprobs"] == {
        "tokens": ["b", "c"],
        "token_logprobs": [-0.5, -0.5],
        "top_logprobs": [{"b": -0.5, "c": -1.5}, {"c": -0.5, "d": -1.5}],
        "text_offset": [0, 1],
    }
    chunks = events(client, "/v1/completions", prompt="a", max_tokens=2, logprobs=0)
    assert [chunk["choices"][0]["logprobs"]["text_offset"] for chunk in chunks] == [[0], [1]]
    assert chunks[0]["choices"][0]["logprobs"]["top_logprobs"] is None


def test_logprobs_of_a_chat(client: httpx.Client) -> None:
    [choice] = chat(client, "hi", max_tokens=1, logprobs=True, top_logprobs=1)["choices"]
    assert choice["logprobs"]["content"] == [
        {
            "token": "B",
            "logprob": -0.5,
            "bytes": [66],
            "top_logprobs": [{"token": "B", "logprob": -0.5, "bytes": [66]}],
        }
    ]
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1, "logprobs": True}
    chunks = events(client, "/v1/chat/completions", **body)
    assert chunks[1]["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []


def test_token_ids_on_demand(client: httpx.Client) -> None:
    [choice] = complete(client, "a", max_tokens=2, return_token_ids=True)["choices"]
    assert (choice["prompt_token_ids"], choice["token_ids"]) == ([97], [98, 99])
    chunks = events(client, "/v1/completions", prompt="a", max_tokens=2, return_token_ids=True)
    assert chunks[0]["choices"][0]["prompt_token_ids"] == [97]
    assert [chunk["choices"][0]["token_ids"] for chunk in chunks[1:]] == [[98], [99]]


# --- the rest


def test_tokenize_and_detokenize(client: httpx.Client) -> None:
    assert post(client, "/tokenize", prompt="hé") == {
        "count": 3,
        "max_model_len": 200,
        "tokens": [104, 195, 169],
        "token_strs": None,
    }
    answer = post(client, "/tokenize", messages=[{"role": "user", "content": "h"}], return_token_strs=True)
    assert answer["token_strs"] == ["u", ":", "h", "|", "A"]
    assert post(client, "/detokenize", tokens=[104, 195, 169, 257]) == {"prompt": "hé</s>"}


def test_operations(client: httpx.Client) -> None:
    assert client.get("/health").json() == {"status": "ok"}
    assert client.get("/ping").status_code == 200
    assert client.get("/version").json() == {"version": "0.1.0"}
    assert client.get("/load").json() == {"server_load": 0}
    complete(client, "abcdefgh")
    assert post(client, "/reset_prefix_cache")["success"] is True
    assert complete(client, "abcdefgh")["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}


# --- clients that go away (fault 11)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_aborts_its_request(tmp_path_factory: pytest.TempPathFactory, stream: bool) -> None:
    with running_server(fake_options(tmp_path_factory.mktemp("model"), builder="build_slow")) as server:
        body = json.dumps({"prompt": "{", "max_tokens": 190, "stream": stream, "n": 2}).encode()
        address = urlsplit(server.url)
        with socket.create_connection((address.hostname, address.port)) as connection:
            head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
            connection.sendall(f"{head}Content-Type: application/json\r\n\r\n".encode() + body)
            _until(server.client, "vllm:num_requests_running", 2)
            if stream:
                assert connection.recv(100).startswith(b"HTTP/1.1 200")
        began = time.monotonic()
        _until(server.client, "vllm:num_requests_running", 0)
        assert time.monotonic() - began < 2.5  # 190 steps of 20 ms are 3.8 s
        _until(server.client, 'vllm:request_success_total{engine="0",finished_reason="abort"', 2)
        assert server.client.get("/load").json() == {"server_load": 0}


def _until(client: httpx.Client, series: str, value: float) -> None:
    deadline = time.monotonic() + 20
    while True:
        [line] = [line for line in client.get("/metrics").text.splitlines() if line.startswith(series)]
        if float(line.rpartition(" ")[2]) == value:
            return
        assert time.monotonic() < deadline, line
        time.sleep(0.02)
