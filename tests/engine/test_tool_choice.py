"""`tool_choice` and schemas on a real model (small, random): what it says has the form that was asked for.

Its tokenizer has the marks of calls and reasoning as tokens, as Qwen's has.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import httpx
import openai
import pytest
from pydantic import BaseModel

from reprise_engine.config import CacheConfig, EngineConfig, ModelConfig
from reprise_engine.server.options import ServerOptions
from tests.engine.test_server_errors import error_of
from tests.support.engine_server import RunningServer, running_server
from tests.support.qwen_templates import QWEN3, QWEN3_THINKING
from tests.support.scripted_engine import write_scripted_model
from tests.support.tiny_models import tiny_model_path

CHAT = "/v1/chat/completions"
HI: Any = [{"role": "user", "content": "What is the weather in Paris?"}]
NOT_THINKING = {"chat_template_kwargs": {"enable_thinking": False}}


class Weather(BaseModel):
    """Finite, so that a random model comes to an end."""

    city: Literal["Paris", "Rome"]
    tomorrow: bool


def tool(name: str, **fields: Any) -> Any:
    schema = Weather.model_json_schema() | {"additionalProperties": False}
    return {"type": "function", "function": {"name": name, "parameters": schema, **fields}}


TOOLS = [tool("get_weather"), tool("get_climate")]


def serving(folder: Path, template: str) -> ServerOptions:
    return ServerOptions(
        engine=EngineConfig(
            model=ModelConfig(
                model=str(tiny_model_path("qwen3")),
                tokenizer=str(write_scripted_model(folder, (), template=template)),
                dtype="float32",
                max_model_len=2048,
            ),
            cache=CacheConfig(num_gpu_blocks_override=192),
            device="cpu",
        ),
        host="127.0.0.1",
        port=0,
        served_names=("tiny",),
    )


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with running_server(serving(tmp_path_factory.mktemp("tokenizer"), QWEN3)) as running:
        yield running


def ask(client: httpx.Client, **body: Any) -> Any:
    response = client.post(CHAT, json={"messages": HI, "max_tokens": 200, "seed": 1} | NOT_THINKING | body)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]


@pytest.mark.parametrize("seed", range(3))
def test_required_calls_some_function(server: RunningServer, seed: int) -> None:
    body = {"tools": TOOLS, "tool_choice": "required", "seed": seed}
    choice = ask(server.client, **body, parallel_tool_calls=False)
    [call] = choice["message"]["tool_calls"]
    assert call["function"]["name"] in ("get_weather", "get_climate")
    Weather.model_validate_json(call["function"]["arguments"])
    assert choice["message"]["content"] is None
    assert choice["finish_reason"] == "tool_calls"
    several = ask(server.client, **body)["message"]["tool_calls"]
    assert several[0]["function"] == call["function"]
    assert ask(server.client, tools=TOOLS, seed=seed)["message"].get("tool_calls") is None  # random text


@pytest.mark.parametrize("name", ["get_weather", "get_climate"])
def test_a_named_function_is_called(server: RunningServer, name: str) -> None:
    choice = ask(server.client, tools=TOOLS, tool_choice={"type": "function", "function": {"name": name}})
    [call] = choice["message"]["tool_calls"]
    assert call["function"]["name"] == name
    Weather.model_validate_json(call["function"]["arguments"])
    assert choice["finish_reason"] == "tool_calls"


def allowed(mode: str, *names: str) -> Any:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


@pytest.mark.parametrize("mode", ["auto", "required"])
@pytest.mark.parametrize("name", ["get_weather", "get_climate"])
def test_only_allowed_tools_are_called_and_the_prompt_shows_all(server: RunningServer, mode: str, name: str) -> None:
    [mark] = server.client.post("/tokenize", json={"prompt": "<tool_call>"}).json()["tokens"]
    strict = [tool("get_weather", strict=True), tool("get_climate", strict=True)]
    prompts = set()
    for seed in range(3):
        # Where a call may begin it does, so that the model's own choice is one of functions.
        body = {"messages": HI, "tools": strict, "seed": seed, "max_tokens": 200, "logit_bias": {str(mark): 100}}
        body |= NOT_THINKING | {"parallel_tool_calls": False}
        answer = server.client.post(CHAT, json=body | {"tool_choice": allowed(mode, name)}).json()
        [call] = answer["choices"][0]["message"]["tool_calls"]
        assert call["function"]["name"] == name
        Weather.model_validate_json(call["function"]["arguments"])
        free = server.client.post(CHAT, json=body | {"max_tokens": 1}).json()
        prompts |= {answer["usage"]["prompt_tokens"], free["usage"]["prompt_tokens"]}
        assert free["usage"]["prompt_tokens_details"]["cached_tokens"] == free["usage"]["prompt_tokens"] - 1
    assert len(prompts) == 1


def test_tools_without_a_schema_can_be_left_out_too(server: RunningServer) -> None:
    [mark] = server.client.post("/tokenize", json={"prompt": "<tool_call>"}).json()["tokens"]
    body: dict[str, Any] = {"tools": TOOLS, "logit_bias": {str(mark): 100}, "max_tokens": 60, "temperature": 0}
    choice = ask(server.client, **body, tool_choice=allowed("auto", "get_climate"))
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "get_climate"


def test_responses_have_allowed_tools_in_their_own_shape(server: RunningServer) -> None:
    flat = [tool(name)["function"] | {"type": "function"} for name in ("get_weather", "get_climate")]
    choice = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "get_climate"}]}
    body = {"input": HI, "tools": flat, "tool_choice": choice, "parallel_tool_calls": False, **NOT_THINKING}
    answer = server.client.post("/v1/responses", json=body | {"max_output_tokens": 200}).json()
    [item] = answer["output"]
    assert item["name"] == "get_climate"
    assert answer["tool_choice"] == choice


@pytest.mark.parametrize(
    ("choice", "words"),
    [
        (allowed("auto", "get_rich"), "names 'get_rich'; tools has 'get_weather', 'get_climate'"),
        (allowed("sometimes", "get_weather"), "must be 'none', 'auto', 'required', or one function"),
        (allowed("auto"), "nothing else is supported"),
        ({"type": "allowed_tools"}, "nothing else is supported"),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": ["get_weather"]}}, "nothing else"),
        ({"type": "custom", "custom": {"name": "get_weather"}}, "nothing else is supported"),
    ],
    ids=["foreign", "mode", "none", "nothing", "name", "custom"],
)
def test_a_choice_that_cannot_be_met_is_named(server: RunningServer, choice: Any, words: str) -> None:
    error = error_of(server.client.post(CHAT, json={"messages": HI, "tools": TOOLS, "tool_choice": choice}))
    assert error["param"] == "tool_choice"
    assert words in error["message"]


def test_arguments_are_an_object_where_the_schema_does_not_say_so(server: RunningServer) -> None:
    loose = {"type": "function", "function": {"name": "f", "parameters": {"additionalProperties": {"const": 1}}}}
    for seed in range(3):
        body: dict[str, Any] = {"tools": [loose], "tool_choice": "required", "seed": seed, "max_tokens": 60}
        [call] = ask(server.client, **body)["message"]["tool_calls"]
        assert call["function"]["arguments"].startswith("{")


def test_what_vllms_own_class_writes_is_read(server: RunningServer) -> None:
    nothing: dict[str, Any] = {
        "json": None,
        "regex": None,
        "grammar": None,
        "json_object": None,
        "whitespace_pattern": None,
    }
    nothing |= {"disable_fallback": False, "disable_any_whitespace": False, "disable_additional_properties": False}
    form = nothing | {"choice": ["yes", "no"], "structural_tag": None}
    assert ask(server.client, structured_outputs=form)["message"]["content"] in ("yes", "no")


def test_a_schema_is_refused_under_the_name_of_its_field(server: RunningServer) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "nonsense"}}}
    asked: dict[str, dict[str, Any]] = {
        "text.format": {"text": {"format": {"type": "json_schema", "name": "a", "schema": schema}}},
        "response_format": {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}},
    }
    for stream in (False, True):
        for (param, body), (path, rest) in zip(
            asked.items(), (("/v1/responses", {"input": HI}), (CHAT, {"messages": HI})), strict=True
        ):
            error = error_of(server.client.post(path, json=body | rest | NOT_THINKING | {"stream": stream}))
            assert error["param"] == param
            assert f"in {param} cannot be honoured" in error["message"]


def test_none_keeps_the_model_from_calling(server: RunningServer) -> None:
    [mark] = server.client.post("/tokenize", json={"prompt": "<tool_call>"}).json()["tokens"]
    # Of two texts the model takes the mark of a call, where it may.
    body = {"structured_outputs": {"grammar": f'start: <[{mark}]> | "no"'}, "logit_bias": {str(mark): 100}}
    assert ask(server.client, **body)["message"]["content"] == "<tool_call>"
    assert ask(server.client, **body, tools=TOOLS, tool_choice="none")["message"]["content"] == "no"


def test_the_streamed_call_is_the_same(server: RunningServer) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as sdk:
        body: Any = {"model": "tiny", "messages": HI, "tools": TOOLS, "tool_choice": "required", "temperature": 0}
        body |= {"parallel_tool_calls": False, "extra_body": NOT_THINKING, "max_tokens": 200}
        whole = sdk.chat.completions.create(**body).choices[0]
        with sdk.chat.completions.stream(**body) as stream:
            streamed = stream.get_final_completion().choices[0]
    assert whole.message.tool_calls is not None
    assert streamed.message.tool_calls is not None
    assert [call.function.to_dict() for call in streamed.message.tool_calls] == [
        call.function.to_dict() | {"parsed_arguments": None} for call in whole.message.tool_calls
    ]
    assert streamed.finish_reason == whole.finish_reason == "tool_calls"


def test_thinking_is_allowed_before_a_forced_call_and_nothing_else(server: RunningServer) -> None:
    begun = set()
    for seed in range(6):
        body = {"messages": HI, "tools": TOOLS, "tool_choice": "required", "seed": seed, "max_tokens": 60}
        choice = server.client.post(CHAT, json=body | {"return_token_ids": True}).json()["choices"][0]
        text = server.client.post("/detokenize", json={"tokens": choice["token_ids"]}).json()["prompt"]
        begun.add(next((mark for mark in ("<think>", "<tool_call>") if text.startswith(mark)), text))
    assert begun <= {"<think>", "<tool_call>"}


@pytest.fixture(scope="module")
def opening(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """Its template opens the reasoning."""
    with running_server(serving(tmp_path_factory.mktemp("opening"), QWEN3_THINKING)) as running:
        yield running


@pytest.mark.parametrize(
    ("which", "opened"),
    [pytest.param("server", 2, id="the model opens it"), pytest.param("opening", 1, id="the template opens it")],
)
@pytest.mark.parametrize("required", [False, True], ids=["schema", "call"])
def test_a_form_is_kept_behind_the_reasoning(
    request: pytest.FixtureRequest, which: str, opened: int, required: bool
) -> None:
    client = request.getfixturevalue(which).client
    client.post("/reset_prefix_cache").raise_for_status()
    marks = client.post("/tokenize", json={"prompt": "<think></think>"}).json()["tokens"]
    # Wherever a mark is possible it comes, so a random model thinks, and comes to an end of it.
    body: dict[str, Any] = {
        "messages": HI,
        "seed": 1,  # some draws end a form in more spaces than there are tokens for
        "max_tokens": 400,
        "logit_bias": {str(mark): 100 for mark in marks},
    }
    if required:
        body |= {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}
    else:
        schema = Weather.model_json_schema() | {"additionalProperties": False}
        body["response_format"] = {"type": "json_schema", "json_schema": {"name": "w", "schema": schema}}
    answer = client.post(CHAT, json=body).json()
    message = answer["choices"][0]["message"]
    Weather.model_validate_json(message["tool_calls"][0]["function"]["arguments"] if required else message["content"])
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": opened}
    assert message["reasoning"] is None  # nothing was thought


def test_json_or_calls_where_both_are_possible(server: RunningServer) -> None:
    schema = Weather.model_json_schema() | {"additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "w", "schema": schema}}
    strict = [tool("get_weather", strict=True)]
    for seed in range(4):
        choice = ask(server.client, tools=strict, response_format=form, parallel_tool_calls=False, seed=seed)
        calls = choice["message"].get("tool_calls")
        texts = [calls[0]["function"]["arguments"]] if calls else [choice["message"]["content"]]
        Weather.model_validate_json(texts[0])
    error = error_of(
        server.client.post(CHAT, json={"messages": HI, "tools": TOOLS, "structured_outputs": {"choice": ["a", "b"]}})
    )
    assert "cannot be combined with tools" in error["message"]


def test_strict_tools_are_honoured_when_the_choice_is_the_models(server: RunningServer) -> None:
    ask(server.client, tools=[tool("get_weather", strict=True)], max_tokens=20)
    broken = tool("get_weather", strict=True)
    broken["function"]["parameters"] = {"type": "nonsense"}
    error = error_of(server.client.post(CHAT, json={"messages": HI, "tools": [broken]}))
    assert error["param"] == "tools"


def test_openais_client_parses_answers_of_both_apis(server: RunningServer) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as sdk:
        chat = sdk.chat.completions.parse(model="tiny", messages=HI, response_format=Weather, extra_body=NOT_THINKING)
        response = sdk.responses.parse(
            model="tiny", input=HI[0]["content"], text_format=Weather, extra_body=NOT_THINKING
        )
        tools: Any = [openai.pydantic_function_tool(Weather)]
        called = sdk.chat.completions.parse(
            model="tiny",
            messages=HI,
            tools=tools,
            tool_choice="required",
            parallel_tool_calls=False,
            extra_body=NOT_THINKING,
        )
    assert isinstance(chat.choices[0].message.parsed, Weather)
    assert isinstance(response.output_parsed, Weather)
    assert response.text is not None
    assert response.text.format is not None
    assert response.text.format.type == "json_schema"
    calls = called.choices[0].message.tool_calls
    assert calls is not None
    [call] = calls
    assert isinstance(call.function.parsed_arguments, Weather)
