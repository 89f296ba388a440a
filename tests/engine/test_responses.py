"""POST /v1/responses over real HTTP, with OpenAI's client; what the model says is in SCRIPT of test_chat_tools.py."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

from reprise_engine.server.protocol_chat import ChatMessageBody
from reprise_engine.server.protocol_responses import ResponsesBody
from tests.engine.test_chat_tools import (
    ARGUMENTS,
    HI,
    ODD_ARGUMENTS,
    OPEN_THOUGHT,
    PLAIN,
    SCRIPT,
    THINKS,
    THINKS_AND_CALLS,
    TWO_CALLS,
    WEATHER,
)
from tests.engine.test_server_errors import error_of
from tests.support.engine_server import RunningServer, running_server
from tests.support.qwen_templates import QWEN3
from tests.support.scripted_engine import BREAKS, scripted_options

PATH = "/v1/responses"
QUESTION = HI[0]["content"]
TOOL: Any = {"type": "function", "strict": None, **WEATHER["function"]}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with running_server(scripted_options(tmp_path_factory.mktemp("model"), SCRIPT, template=QWEN3)) as running:
        yield running


def respond(client: httpx.Client, line: int, **body: Any) -> Any:
    response = client.post(PATH, json={"input": QUESTION, "seed": line} | body)
    assert response.status_code == 200, response.text
    return response.json()


def events(client: httpx.Client, line: int, **body: Any) -> list[Any]:
    """Of a stream; checks framing and numbers."""
    response = client.post(PATH, json={"input": QUESTION, "seed": line, "stream": True} | body)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    found = []
    for block in response.text.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


def kinds(found: list[Any]) -> list[str]:
    """The types in order, repeated ones once."""
    names = [event["type"].removeprefix("response.") for event in found]
    return [names[0], *(after for before, after in pairwise(names) if after != before)]


def test_a_response_has_openais_shape(client: httpx.Client) -> None:
    answer = respond(
        client, PLAIN, instructions="Be brief.", max_output_tokens=50, metadata={"k": "v"}, temperature=0.5
    )
    assert answer["id"].startswith("resp_")
    [item] = answer["output"]
    assert item.pop("id").startswith("msg_")
    assert item == {
        "type": "message",
        "role": "assistant",
        "status": "completed",
        "content": [{"type": "output_text", "text": "It is sunny.", "annotations": [], "logprobs": []}],
    }
    usage = answer["usage"]
    assert usage["input_tokens_details"] == {"cached_tokens": 0, "cache_write_tokens": usage["input_tokens"]}
    assert usage["output_tokens_details"] == {"reasoning_tokens": 0}
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    told = {name: answer[name] for name in ("object", "status", "error", "incomplete_details", "model", "instructions")}
    assert told == {
        "object": "response",
        "status": "completed",
        "error": None,
        "incomplete_details": None,
        "model": "scripted",
        "instructions": "Be brief.",
    }
    assert (answer["max_output_tokens"], answer["metadata"], answer["temperature"]) == (50, {"k": "v"}, 0.5)
    assert (answer["store"], answer["previous_response_id"], answer["tool_choice"]) == (False, None, "auto")


def test_it_is_the_prompt_of_a_chat_completion(client: httpx.Client) -> None:
    messages = [{"role": "system", "content": "Be brief."}, *HI]
    chat = client.post("/v1/chat/completions", json={"messages": messages, "tools": [WEATHER], "seed": PLAIN}).json()
    answer = respond(client, PLAIN, instructions="Be brief.", tools=[TOOL])
    assert answer["usage"]["input_tokens"] == chat["usage"]["prompt_tokens"]
    cached = answer["usage"]["input_tokens_details"]["cached_tokens"]
    assert cached == chat["usage"]["prompt_tokens"] - 1
    explained = respond(client, PLAIN, instructions="Be brief!", tools=[TOOL], explain_cache=True)
    assert explained["usage"]["input_tokens_details"]["cache_explanation"]["reason"] == "diverged"


def test_reasoning_and_calls_are_items_of_their_own(client: httpx.Client) -> None:
    answer = respond(client, THINKS_AND_CALLS, tools=[TOOL])
    reasoning, call = answer["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "I should look it up."}]
    assert (reasoning["type"], reasoning["summary"], reasoning["status"]) == ("reasoning", [], "completed")
    assert (call["type"], call["name"], call["arguments"], call["status"]) == (
        *("function_call", "get_weather"),
        *(ARGUMENTS, "completed"),
    )
    assert call["call_id"].startswith("call_")
    assert answer["usage"]["output_tokens_details"]["reasoning_tokens"] > 5


def test_an_answer_that_the_length_cuts_off_is_incomplete(client: httpx.Client) -> None:
    answer = respond(client, PLAIN, max_output_tokens=2)
    assert answer["status"] == "incomplete"
    assert answer["incomplete_details"] == {"reason": "max_output_tokens"}
    assert answer["output"][0]["status"] == "incomplete"
    found = events(client, PLAIN, max_output_tokens=2)
    assert found[-1]["type"] == "response.incomplete"
    assert found[-1]["response"]["output"][0]["status"] == "incomplete"


def test_without_parallel_calls_there_is_one(client: httpx.Client) -> None:
    answer = respond(client, TWO_CALLS, tools=[TOOL], parallel_tool_calls=False)
    assert [item["type"] for item in answer["output"]] == ["message", "function_call"]
    assert answer["parallel_tool_calls"] is False


def test_the_events_of_a_text_come_in_order(client: httpx.Client) -> None:
    found = events(client, PLAIN)
    assert kinds(found) == [
        *("created", "in_progress", "output_item.added", "content_part.added", "output_text.delta"),
        *("output_text.done", "content_part.done", "output_item.done", "completed"),
    ]
    assert "".join(event["delta"] for event in found if event["type"] == "response.output_text.delta") == "It is sunny."
    added, done = found[2]["item"], found[-2]["item"]
    assert (added["status"], added["content"]) == ("in_progress", [])
    assert (done["status"], done["content"][0]["text"]) == ("completed", "It is sunny.")
    assert (found[0]["response"]["status"], found[0]["response"]["usage"]) == ("in_progress", None)
    whole = respond(client, PLAIN)
    same = found[-1]["response"]
    for name in ("id", "created_at", "completed_at"):
        whole.pop(name)
        same.pop(name)
    for response in (whole, same):
        response["output"][0].pop("id")
        response["usage"].pop("input_tokens_details")
    assert same == whole


def test_the_events_of_reasoning_text_and_calls_come_in_order(client: httpx.Client) -> None:
    item = ["output_item.added", "output_item.done"]
    call = [item[0], "function_call_arguments.delta", "function_call_arguments.done", item[1]]
    found = events(client, THINKS_AND_CALLS, tools=[TOOL])
    assert kinds(found) == [
        *("created", "in_progress", "output_item.added", "content_part.added", "reasoning_text.delta"),
        *("reasoning_text.done", "content_part.done", "output_item.done", *call, "completed"),
    ]
    found = events(client, TWO_CALLS, tools=[TOOL])
    assert kinds(found)[7:] == ["output_item.done", *call, *call, "completed"]
    deltas = {1: "", 2: ""}
    for event in found:
        if event["type"] == "response.function_call_arguments.delta":
            deltas[event["output_index"]] += event["delta"]
    assert deltas == {1: ARGUMENTS, 2: ODD_ARGUMENTS}
    ids = {event["output_index"]: event["item"]["id"] for event in found if "item" in event}
    assert all(event["item_id"] == ids[event["output_index"]] for event in found if "item_id" in event)
    assert len(set(ids.values())) == 3


def test_openais_client_reads_whole_and_streamed_responses(sdk: openai.OpenAI) -> None:
    answer = sdk.responses.create(model="scripted", input=QUESTION, extra_body={"seed": THINKS})
    assert answer.output_text == "It is sunny."
    assert answer.usage is not None
    assert answer.usage.output_tokens_details.reasoning_tokens > 5
    with sdk.responses.stream(model="scripted", input=QUESTION, tools=[TOOL], extra_body={"seed": TWO_CALLS}) as stream:
        seen = [event.type for event in stream]
        final = stream.get_final_response()
    assert seen[:2] == ["response.created", "response.in_progress"]
    assert seen[-1] == "response.completed"
    assert final.output_text == "Let me look at both."
    calls = [item for item in final.output if item.type == "function_call"]
    assert [call.arguments for call in calls] == [ARGUMENTS, ODD_ARGUMENTS]
    with pytest.raises(openai.NotFoundError):  # nothing is kept
        sdk.responses.retrieve(final.id)


async def test_a_conversation_with_a_tool_goes_on_from_the_items_of_the_answer(server: RunningServer) -> None:
    server.client.post("/reset_prefix_cache").raise_for_status()
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as sdk:
        items: list[Any] = [{"role": "user", "content": QUESTION}]
        first = await sdk.responses.create(
            model="scripted", input=items, tools=[TOOL], extra_body={"seed": THINKS_AND_CALLS}
        )
        items += first.output
        items += [
            {"type": "function_call_output", "call_id": item.call_id, "output": "sunny"}
            for item in first.output
            if item.type == "function_call"
        ]
        stream = await sdk.responses.create(
            model="scripted", input=items, tools=[TOOL], extra_body={"seed": PLAIN}, stream=True
        )
        last = [event async for event in stream][-1]
    assert last.type == "response.completed"
    assert last.response.output_text == "It is sunny."
    assert first.usage is not None
    assert last.response.usage is not None
    # What was generated is found again, all but its last token (the end of the turn), which nobody computed.
    expected = first.usage.total_tokens - 1
    assert last.response.usage.input_tokens_details.cached_tokens == expected


@pytest.mark.parametrize("line", [PLAIN, TWO_CALLS, THINKS, THINKS_AND_CALLS, OPEN_THOUGHT])
@pytest.mark.parametrize("limit", [None, 1, 3, 5])
def test_every_event_is_of_a_type_that_openais_client_declares(
    client: httpx.Client, line: int, limit: int | None
) -> None:
    """The client itself takes what it gets; here each field that it declares is checked, cut off or not."""
    known = TypeAdapter[Any](ResponseStreamEvent)
    body: dict[str, Any] = {"include": ["message.output_text.logprobs"], "tools": [TOOL], "max_output_tokens": limit}
    found = [known.validate_python(event) for event in events(client, line, **body)]
    assert [event.type for event in found[:2]] == ["response.created", "response.in_progress"]
    assert found[-1].response.status == ("completed" if limit is None else "incomplete")
    opened: list[str] = []
    for event in found:
        match event.type:
            case "response.output_item.added":
                opened.append(event.item.id)
                assert event.output_index == len(opened) - 1
            case "response.output_item.done":
                assert event.item == found[-1].response.output[event.output_index]
            case _ if hasattr(event, "item_id"):
                assert event.item_id == opened[-1]


@pytest.mark.parametrize(
    "dump",
    [
        lambda item: item.model_dump(),
        lambda item: item.model_dump(by_alias=True, mode="json"),
        lambda item: item.model_dump(exclude_none=True),
        lambda item: item.to_dict(),
    ],
    ids=["every field", "by alias", "without null", "as it came"],
)
def test_the_items_come_back_however_a_client_dumps_them(sdk: openai.OpenAI, dump: Callable[[Any], Any]) -> None:
    """The first two have null in fields that only the client's version knows."""
    first = sdk.responses.create(model="scripted", input=QUESTION, tools=[TOOL], extra_body={"seed": THINKS_AND_CALLS})
    results = [
        {"type": "function_call_output", "call_id": item.call_id, "output": "sunny"}
        for item in first.output
        if item.type == "function_call"
    ]
    items: Any = [{"role": "user", "content": QUESTION}, *map(dump, first.output), *results]
    last = sdk.responses.create(model="scripted", input=items, tools=[TOOL], extra_body={"seed": PLAIN})
    assert last.output_text == "It is sunny."
    again: Any = [*items, *map(dump, last.output), {"role": "user", "content": "And now?"}]
    assert sdk.responses.create(model="scripted", input=again, extra_body={"seed": PLAIN}).status == "completed"


def test_null_is_a_field_left_out_whatever_its_name(client: httpx.Client) -> None:
    text = {"type": "input_text", "text": QUESTION, "newer": None}
    message = {"role": "user", "content": [text], "newest": None}
    assert respond(client, PLAIN, input=[message], newest=None)["status"] == "completed"
    part = {"type": "text", "text": QUESTION, "newer": None}
    body = {"messages": [{"role": "user", "content": [part], "newest": None}], "newest": None, "seed": PLAIN}
    assert client.post("/v1/chat/completions", json=body).status_code == 200


def test_logprobs_are_those_of_the_text(client: httpx.Client) -> None:
    body: dict[str, Any] = {"include": ["message.output_text.logprobs"]}
    [reasoning, message] = respond(client, THINKS, **body)["output"]
    logprobs = message["content"][0]["logprobs"]
    assert "".join(entry["token"] for entry in logprobs).strip() == "It is sunny."
    assert "logprobs" not in reasoning["content"][0]
    found = events(client, THINKS, **body)
    told = [entry for event in found if event["type"] == "response.output_text.delta" for entry in event["logprobs"]]
    assert told == logprobs


def test_an_engine_that_dies_is_a_500_where_nothing_is_streamed(tmp_path: Any) -> None:
    with running_server(scripted_options(tmp_path, [f"It is{BREAKS}"], template=QWEN3)) as server:
        response = server.client.post(PATH, json={"input": QUESTION, "seed": 0})
        assert error_of(response, 500)["code"] == "engine_dead"


def test_an_engine_that_dies_fails_the_response(tmp_path: Any) -> None:
    with running_server(scripted_options(tmp_path, [f"It is{BREAKS}"], template=QWEN3)) as server:
        *_, last = events(server.client, 0)
        assert last["type"] == "response.failed"
        assert (last["response"]["status"], last["response"]["error"]["code"]) == ("failed", "server_error")
        assert "engine process" in last["response"]["error"]["message"]
        assert last["response"]["output"][0]["content"][0]["text"].startswith("It")


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"store": True}, "store", "not supported"),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "not supported"),
        ({"conversation": "conv_1"}, "conversation", "not supported"),
        ({"background": True}, "background", "not supported"),
        ({"prompt": {"id": "p"}}, "prompt", "not supported"),
        ({"truncation": "auto"}, "truncation", "not supported"),
        ({"reasoning": {"summary": "auto"}}, "reasoning.summary", "not supported"),
        ({"reasoning": {"effort": "high"}}, "reasoning.effort", "knows no degrees"),
        ({"text": {"verbosity": "low"}}, "text.verbosity", "not supported"),
        ({"include": ["reasoning.encrypted_content"]}, "include[0]", "output_text.logprobs"),
        ({"top_logprobs": 2}, "top_logprobs", "only allowed when include"),
        ({"tools": [{"type": "web_search"}]}, "tools", "'web_search' are not supported"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "f"}}, "tool_choice", "names 'f'"),
        ({"tools": [TOOL], "tool_choice": {"type": "web_search"}}, "tool_choice", "nothing else is supported"),
        ({"stream": True, "stream_options": {"continuous_usage_stats": True}}, "stream_options", "comes at the end"),
        ({"stream": False, "stream_options": {}}, "stream_options", "when stream is true"),
        ({"n": 2}, "n", "Unknown field"),
        ({"input": 5}, "input", "valid string"),
        ({"input": []}, "input", "at least 1 item"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input", "keeps no responses"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input", "'input_image'"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[0].call_id", "required"),
        ({"input": "x" * 9000}, "input", "The prompt has"),
        ({"max_output_tokens": 5000}, "max_output_tokens", "or lower max_output_tokens to at most"),
    ],
)
def test_what_cannot_be_honoured_is_named(client: httpx.Client, body: Any, param: str, words: str) -> None:
    for stream in (False, True):
        error = error_of(client.post(PATH, json={"input": QUESTION, "stream": stream} | body))
        assert error["param"] == param
        assert words in error["message"]


@pytest.mark.parametrize(
    "field",
    [
        {"store": False, "background": False, "previous_response_id": None, "conversation": None},
        {"truncation": "disabled", "service_tier": "auto", "user": "me", "prompt_cache_key": "k"},
        {"text": {"format": {"type": "text"}}, "reasoning": {"effort": None, "summary": None}, "include": []},
        {"tools": [], "tool_choice": "auto", "parallel_tool_calls": True, "metadata": {}},
    ],
    ids=lambda field: next(iter(field)),
)
def test_what_asks_for_nothing_is_accepted(client: httpx.Client, field: Any) -> None:
    assert respond(client, PLAIN, **field)["status"] == "completed"


def test_one_turn_of_the_model_is_one_message() -> None:
    call = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
    body = ResponsesBody.model_validate(
        {
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
                {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
                {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "x"}]},
                call,
                call | {"call_id": "c2"},
                {"type": "function_call_output", "call_id": "c1", "output": "1"},
                {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "2"}]},
                {"role": "assistant", "content": "y"},
                {"role": "assistant", "content": "z"},
                {"type": "reasoning", "id": "r", "summary": []},
                {"role": "developer", "content": "d"},
                call,
            ],
            "instructions": "i",
        }
    )
    function = {"name": "f", "arguments": "{}"}
    calls = [{"id": number, "function": function} for number in ("c1", "c2")]
    assert body.for_chat().messages == [
        ChatMessageBody.model_validate(message)
        for message in (
            {"role": "system", "content": "i"},
            {"role": "user", "content": "a\nb"},
            {"role": "assistant", "reasoning_content": "hm", "content": "x", "tool_calls": calls},
            {"role": "tool", "tool_call_id": "c1", "content": "1"},
            {"role": "tool", "tool_call_id": "c2", "content": "2"},
            {"role": "assistant", "content": "y"},
            {"role": "assistant", "content": "z"},
            {"role": "developer", "content": "d"},
            {"role": "assistant", "tool_calls": calls[:1]},
        )
    ]
