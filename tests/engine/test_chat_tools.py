"""Tool calls and reasoning over real HTTP, with OpenAI's client; what the model says is in SCRIPT."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import groupby
from typing import Any

import httpx
import openai
import pytest
from pydantic import BaseModel

from tests.engine.test_server_errors import error_of
from tests.support.engine_server import RunningServer, running_server
from tests.support.fake_engine import CHAT_TEMPLATE
from tests.support.qwen_templates import QWEN3, QWEN3_THINKING, QWEN25
from tests.support.scripted_engine import scripted_options

CHAT = "/v1/chat/completions"
ARGUMENTS = '{"city": "Paris", "days": 3}'
ODD_ARGUMENTS = '{ "city":"Orléans",  "days": 1e0 }'  # not as json.dumps would write it
PARIS = '<tool_call>\n{"name": "get_weather", "arguments": ' + ARGUMENTS + "}\n</tool_call>"
ORLEANS = '<tool_call>\n{"name": "get_weather", "arguments": ' + ODD_ARGUMENTS + "}\n</tool_call>"
THOUGHT = "<think>\nI should look it up.\n</think>\n\n"

SCRIPT = (
    "It is sunny.",
    PARIS,
    f"Let me look at both.\n{PARIS}\n{ORLEANS}",
    f"{THOUGHT}It is sunny.",
    f"{THOUGHT}{PARIS}",
    "<tool_call>\nsomething else\n</tool_call>",
    "I should look it up.\n</think>\n\nIt is sunny.",
    ODD_ARGUMENTS,
)
PLAIN, CALL, TWO_CALLS, THINKS, THINKS_AND_CALLS, NO_CALL, OPEN_THOUGHT = range(7)

WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}
HI: Any = [{"role": "user", "content": "What is the weather in Paris?"}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with running_server(scripted_options(tmp_path_factory.mktemp("model"), SCRIPT, template=QWEN3)) as running:
        yield running


def chat(client: httpx.Client, line: int, **body: Any) -> Any:
    response = client.post(CHAT, json={"messages": HI, "seed": line} | body)
    assert response.status_code == 200, response.text
    return response.json()


def pieces(client: httpx.Client, line: int, **body: Any) -> list[Any]:
    """The deltas of a stream's only choice, and its finish_reason at the end."""
    response = client.post(CHAT, json={"messages": HI, "seed": line, "stream": True} | body)
    assert response.status_code == 200, response.text
    lines = [line.removeprefix("data: ") for line in response.text.strip().split("\n\n")]
    assert lines[-1] == "[DONE]"
    choices = [json.loads(line)["choices"][0] for line in lines[:-1]]
    assert [choice["finish_reason"] for choice in choices[:-1]] == [None] * (len(choices) - 1)
    return [*(choice["delta"] for choice in choices), choices[-1]["finish_reason"]]


# --- tool calls


def test_a_call_is_parsed(server: RunningServer) -> None:
    answer = chat(server.client, CALL, tools=[WEATHER])
    [choice] = answer["choices"]
    assert choice["finish_reason"] == "tool_calls"
    [call] = choice["message"].pop("tool_calls")
    assert call.pop("id").startswith("call_")
    assert call == {"type": "function", "function": {"name": "get_weather", "arguments": ARGUMENTS}}
    assert choice["message"] == {
        "role": "assistant",
        "content": None,
        "refusal": None,
        "reasoning": None,
        "reasoning_content": None,
    }


def test_calls_in_parallel_behind_a_text(server: RunningServer) -> None:
    message = chat(server.client, TWO_CALLS, tools=[WEATHER])["choices"][0]["message"]
    assert message["content"] == "Let me look at both."
    assert [call["function"]["arguments"] for call in message["tool_calls"]] == [ARGUMENTS, ODD_ARGUMENTS]
    assert len({call["id"] for call in message["tool_calls"]}) == 2


@pytest.mark.parametrize("stream", [False, True])
def test_without_parallel_calls_the_first_one_ends_the_answer(server: RunningServer, stream: bool) -> None:
    body = {"tools": [WEATHER], "parallel_tool_calls": False}
    if stream:
        *deltas, finish_reason = pieces(server.client, TWO_CALLS, **body)
        calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
        assert {call["index"] for call in calls} == {0}
        assert "".join(call["function"]["arguments"] for call in calls) == ARGUMENTS
        assert finish_reason == "tool_calls"
        return
    both = chat(server.client, TWO_CALLS, tools=[WEATHER])
    one = chat(server.client, TWO_CALLS, **body)
    assert one["choices"][0]["finish_reason"] == "tool_calls"
    assert one["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"] == ARGUMENTS
    assert len(one["choices"][0]["message"]["tool_calls"]) == 1
    assert one["usage"]["completion_tokens"] < both["usage"]["completion_tokens"] - 10
    assert server.client.get("/load").json()["server_load"] == 0


def test_several_choices_end_each_by_itself(server: RunningServer) -> None:
    # The choices of one prompt have seeds that follow each other.
    body = {"tools": [WEATHER], "n": 2, "parallel_tool_calls": False}
    answer = chat(server.client, CALL, **body)
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["tool_calls", "tool_calls"]
    assert [choice["message"]["content"] for choice in answer["choices"]] == [None, "Let me look at both."]
    assert [len(choice["message"]["tool_calls"]) for choice in answer["choices"]] == [1, 1]


def test_a_streamed_call_has_id_and_name_once_and_arguments_in_pieces(server: RunningServer) -> None:
    first, *deltas, last, finish_reason = pieces(server.client, TWO_CALLS, tools=[WEATHER])
    assert (first, last, finish_reason) == ({"role": "assistant", "content": ""}, {}, "tool_calls")
    texts = [delta["content"] for delta in deltas if "content" in delta]
    assert "".join(texts) == "Let me look at both."
    assert len(texts) > 3
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    assert [delta for delta in deltas if "content" not in delta and "tool_calls" not in delta] == []
    for index, (begin, *rest) in groupby_index(calls).items():
        assert begin["id"].startswith("call_")
        assert (begin["type"], begin["function"]) == ("function", {"name": "get_weather", "arguments": ""})
        assert all(set(call) == {"index", "function"} and set(call["function"]) == {"arguments"} for call in rest)
        assert len(rest) > 3
        assert "".join(call["function"]["arguments"] for call in rest) == (ARGUMENTS, ODD_ARGUMENTS)[index]


def groupby_index(calls: list[Any]) -> dict[int, list[Any]]:
    return {index: list(group) for index, group in groupby(calls, key=lambda call: call["index"])}


def test_openais_client_puts_the_stream_together_and_parses_it(sdk: openai.OpenAI) -> None:
    class get_weather(BaseModel):  # noqa: N801  (the name of the function)
        city: str
        days: int

    tools: Any = [
        {"type": "function", "function": {"name": "get_weather", "parameters": get_weather.model_json_schema()}}
    ]
    with sdk.chat.completions.stream(model="scripted", messages=HI, tools=tools, seed=TWO_CALLS) as stream:
        final = stream.get_final_completion()
    assert [call.function.arguments for call in final.choices[0].message.tool_calls or ()] == [ARGUMENTS, ODD_ARGUMENTS]
    assert final.choices[0].finish_reason == "tool_calls"


async def test_the_asynchronous_client_runs_a_tool_and_goes_on(server: RunningServer) -> None:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as sdk:
        messages = list(HI)
        answer = await sdk.chat.completions.create(model="scripted", messages=messages, tools=[WEATHER], seed=CALL)
        message = answer.choices[0].message
        messages.append(message)  # as the client gives it
        for call in message.tool_calls or ():
            assert call.type == "function"
            messages.append({"role": "tool", "tool_call_id": call.id, "content": "sunny"})
        final = await sdk.chat.completions.create(model="scripted", messages=messages, tools=[WEATHER], seed=PLAIN)
    assert final.choices[0].message.content == "It is sunny."
    assert final.choices[0].finish_reason == "stop"


def test_what_is_no_call_is_content(server: RunningServer) -> None:
    choice = chat(server.client, NO_CALL, tools=[WEATHER])["choices"][0]
    assert choice["message"]["content"] == SCRIPT[NO_CALL]
    assert "tool_calls" not in choice["message"]
    assert choice["finish_reason"] == "stop"


def test_a_call_that_the_length_cuts_off_says_so(server: RunningServer) -> None:
    choice = chat(server.client, CALL, tools=[WEATHER], max_tokens=20)["choices"][0]
    [call] = choice["message"]["tool_calls"]
    assert ARGUMENTS.startswith(call["function"]["arguments"])
    assert len(call["function"]["arguments"]) > 1
    assert choice["finish_reason"] == "length"


def test_none_leaves_the_text_alone_and_the_prompt_too(server: RunningServer) -> None:
    choice = chat(server.client, CALL, tools=[WEATHER], tool_choice="none")["choices"][0]
    assert choice["message"]["content"] == PARIS
    assert choice["finish_reason"] == "stop"
    counts = [
        server.client.post("/tokenize", json={"messages": HI, "tools": tools}).json()["count"]
        for tools in (None, [WEATHER])
    ]
    usage = chat(server.client, CALL, tools=[WEATHER], tool_choice="none")["usage"]
    assert counts[0] < counts[1] == usage["prompt_tokens"]
    assert chat(server.client, CALL)["choices"][0]["message"]["content"] == PARIS  # no tools, so no calls


def test_what_a_client_says_of_a_tool_renders_in_one_order(server: RunningServer) -> None:
    def tokens(tool: Any) -> Any:
        return server.client.post("/tokenize", json={"messages": HI, "tools": [tool]}).json()["tokens"]

    function = WEATHER["function"]
    swapped = {"function": dict(reversed(function.items())) | {"strict": None}, "type": "function"}
    assert tokens(swapped) == tokens(WEATHER)
    assert tokens({"type": "function", "function": function | {"description": "else"}}) != tokens(WEATHER)


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"tools": [{"type": "function"}]}, "tools[0].function", "required"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "'function'"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools[0].function.name", "at least 1"),
        ({"tools": [{"type": "function", "function": {"name": 'a"b'}}]}, "tools[0].function.name", "pattern"),
        ({"tools": [WEATHER, WEATHER]}, "tools", "two functions of the name 'get_weather'"),
        ({"tool_choice": "required"}, "tool_choice", "there are no tools"),
        ({"tools": [WEATHER], "tool_choice": "any"}, "tool_choice", "must be 'none', 'auto', 'required', or one"),
        (
            {"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "f"}}},
            "tool_choice",
            "names 'f'; tools has 'get_weather'",
        ),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": [{}]}]}, "messages", "only an assistant"),
        ({"messages": [{"role": "user", "content": "x", "tool_call_id": "c"}]}, "messages", "it is for role 'tool'"),
        ({"messages": [{"role": "tool", "tool_call_id": "c"}]}, "messages", "content is required"),
        ({"messages": [{"role": "function", "content": "x"}]}, "messages", "use role 'tool'"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"id": "c", "type": "function"}]}]},
            "messages[0].tool_calls[0].function",
            "required",
        ),
        ({"reasoning_effort": "high"}, "reasoning_effort", "knows no degrees"),
        (
            {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}},
            "reasoning_effort",
            "asks for",
        ),
    ],
)
def test_what_cannot_be_honoured_is_named(server: RunningServer, body: Any, param: str, words: str) -> None:
    error = error_of(server.client.post(CHAT, json={"messages": HI} | body))
    assert error["param"] == param
    assert words in error["message"]


def test_tools_need_a_template_that_shows_them(tmp_path: Any) -> None:
    options = scripted_options(tmp_path, SCRIPT, template=CHAT_TEMPLATE)
    with running_server(options) as server:
        error = error_of(server.client.post(CHAT, json={"messages": HI, "tools": [WEATHER]}))
        assert (error["param"], "does not show a format" in error["message"]) == ("tools", True)
        error = error_of(server.client.post(CHAT, json={"messages": HI, "tools": [WEATHER], "tool_choice": "none"}))
        assert (error["param"], "does not render tools" in error["message"]) == ("tools", True)
        # Nothing is told apart where the model has no such thing.
        answer = chat(server.client, THINKS, reasoning_effort="none")
        assert set(answer["choices"][0]["message"]) == {"role", "content", "refusal"}
        assert answer["choices"][0]["message"]["content"] == SCRIPT[THINKS]
        assert "completion_tokens_details" not in answer["usage"]


def test_flags_switch_it_off(tmp_path: Any) -> None:
    options = scripted_options(tmp_path, SCRIPT, template=QWEN3, auto_tool_choice=False, reasoning_parser="none")
    with running_server(options) as server:
        error = error_of(server.client.post(CHAT, json={"messages": HI, "tools": [WEATHER]}))
        assert (error["param"], "--no-enable-auto-tool-choice" in error["message"]) == ("tool_choice", True)
        assert chat(server.client, THINKS)["choices"][0]["message"]["content"] == SCRIPT[THINKS]


# --- reasoning


def test_reasoning_is_told_apart(server: RunningServer) -> None:
    answer = chat(server.client, THINKS)
    message = answer["choices"][0]["message"]
    assert message["reasoning"] == message["reasoning_content"] == "I should look it up."
    assert message["content"] == "It is sunny."
    count = server.client.post("/tokenize", json={"prompt": THOUGHT.rstrip("\n")}).json()["count"]
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": count}
    assert chat(server.client, PLAIN)["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}


def test_streamed_reasoning_comes_under_both_names_and_the_usage_counts_it(server: RunningServer) -> None:
    first, *deltas, _, finish_reason = pieces(server.client, THINKS)
    assert first == {"role": "assistant", "content": ""}
    assert finish_reason == "stop"
    thoughts = [delta for delta in deltas if "reasoning" in delta]
    assert all(delta["reasoning"] == delta["reasoning_content"] and len(delta) == 2 for delta in thoughts)
    assert "".join(delta["reasoning"] for delta in thoughts) == "I should look it up."
    assert "".join(delta["content"] for delta in deltas[len(thoughts) :]) == "It is sunny."
    response = server.client.post(
        CHAT, json={"messages": HI, "seed": THINKS, "stream": True, "stream_options": {"include_usage": True}}
    )
    usage = json.loads(response.text.strip().split("\n\n")[-2].removeprefix("data: "))["usage"]
    assert usage["completion_tokens_details"]["reasoning_tokens"] > 5


def test_reasoning_before_a_call(server: RunningServer) -> None:
    choice = chat(server.client, THINKS_AND_CALLS, tools=[WEATHER])["choices"][0]
    assert choice["message"]["reasoning"] == "I should look it up."
    assert choice["message"]["content"] is None
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == ARGUMENTS
    assert choice["finish_reason"] == "tool_calls"


def test_reasoning_that_the_length_cuts_off_is_reasoning(server: RunningServer) -> None:
    choice = chat(server.client, THINKS, max_tokens=6)["choices"][0]
    assert choice["message"]["content"] is None
    assert "I should look it up.".startswith(choice["message"]["reasoning"])
    assert choice["finish_reason"] == "length"


@pytest.mark.parametrize(
    "body",
    [{"chat_template_kwargs": {"enable_thinking": False}}, {"reasoning_effort": "none"}],
    ids=["kwargs", "effort"],
)
def test_thinking_is_switched_off_in_the_prompt(server: RunningServer, body: Any) -> None:
    answer = chat(server.client, PLAIN, return_token_ids=True, **body)
    prompt = server.client.post("/detokenize", json={"tokens": answer["prompt_token_ids"]}).json()["prompt"]
    assert prompt.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert answer["choices"][0]["message"]["content"] == "It is sunny."
    assert answer["choices"][0]["message"]["reasoning"] is None
    # The block is over: what looks like another one is content.
    assert chat(server.client, THINKS, **body)["choices"][0]["message"]["content"] == SCRIPT[THINKS]


def test_a_template_that_opens_the_block_itself(tmp_path: Any) -> None:
    with running_server(scripted_options(tmp_path, SCRIPT, template=QWEN3_THINKING)) as server:
        message = chat(server.client, OPEN_THOUGHT)["choices"][0]["message"]
        assert (message["reasoning"], message["content"]) == ("I should look it up.", "It is sunny.")
        error = error_of(server.client.post(CHAT, json={"messages": HI, "reasoning_effort": "none"}))
        assert "cannot be switched off" in error["message"]


def test_thinking_that_cannot_be_switched_off_is_not_said_to_be(tmp_path: Any) -> None:
    with running_server(scripted_options(tmp_path, SCRIPT, template=QWEN3_THINKING)) as server:
        body: dict[str, Any] = {"messages": HI, "seed": OPEN_THOUGHT, "max_tokens": 2}
        for variables, status in (({"enable_thinking": False}, 400), ({"enable_thinking": True}, 200)):
            response = server.client.post(CHAT, json=body | {"chat_template_kwargs": variables})
            assert response.status_code == status, response.text
        error = error_of(server.client.post(CHAT, json=body | {"chat_template_kwargs": {"enable_thinking": False}}))
        assert error["param"] == "chat_template_kwargs"
        assert "does not read" in error["message"]


@pytest.mark.parametrize("template", [QWEN25, QWEN3])
def test_marks_that_are_special_tokens_are_seen_all_the_same(tmp_path: Any, template: str) -> None:
    with running_server(scripted_options(tmp_path, SCRIPT, template=template, special_marks=True)) as server:
        message = chat(server.client, CALL, tools=[WEATHER])["choices"][0]["message"]
        assert message["tool_calls"][0]["function"]["arguments"] == ARGUMENTS
        assert message["content"] is None


def test_logprobs_and_token_ids_cover_every_token_of_a_stream(server: RunningServer) -> None:
    body = {"messages": HI, "seed": THINKS_AND_CALLS, "tools": [WEATHER], "logprobs": True, "return_token_ids": True}
    whole = server.client.post(CHAT, json=body).json()["choices"][0]
    response = server.client.post(CHAT, json=body | {"stream": True})
    chunks = [json.loads(line.removeprefix("data: ")) for line in response.text.strip().split("\n\n")[:-1]]
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [token for choice in choices for token in choice.get("token_ids", ())] == whole["token_ids"]
    logprobs = [entry for choice in choices if choice["logprobs"] for entry in choice["logprobs"]["content"]]
    assert logprobs == whole["logprobs"]["content"]
