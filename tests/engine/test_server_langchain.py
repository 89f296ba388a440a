"""LangChain's ChatOpenAI, as a client that nobody here wrote."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.support.engine_server import RunningServer, fake_options, running_server
from tests.support.qwen_templates import QWEN3
from tests.support.scripted_engine import scripted_options

langchain_openai = pytest.importorskip("langchain_openai", reason="langchain-openai is not installed")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with running_server(fake_options(tmp_path_factory.mktemp("model"), api_keys=("k",))) as running:
        yield running


def test_it_talks_streams_and_counts(server: RunningServer) -> None:
    model = langchain_openai.ChatOpenAI(
        base_url=f"{server.url}/v1", api_key="k", model="counter", max_tokens=4, temperature=0, stream_usage=True
    )
    messages = [("system", "be brief"), ("human", "hi")]
    answer = model.invoke(messages)
    assert answer.content == "BCDE"
    assert answer.usage_metadata["input_tokens"] == len("s:be brief|u:hi|A")
    assert answer.usage_metadata["input_token_details"]["cache_read"] == 0
    chunks = list(model.stream(messages))
    assert "".join(chunk.content for chunk in chunks) == "BCDE"
    [usage] = [chunk.usage_metadata for chunk in chunks if chunk.usage_metadata]
    assert usage["output_tokens"] == 4
    assert usage["input_token_details"]["cache_read"] > 0
    assert [one.content for one in model.batch([messages, "ho"])] == ["BCDE", "BCDE"]


def test_its_user_sees_what_is_wrong(server: RunningServer) -> None:
    model = langchain_openai.ChatOpenAI(base_url=f"{server.url}/v1", api_key="x", model="counter", max_retries=0)
    with pytest.raises(openai.AuthenticationError, match="API key is missing or wrong"):
        model.invoke("hi")


# --- tools

SCRIPT = (
    "<think>\nI should look.\n</think>\n\n"
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>',
    "It is sunny.",
)
CALLS, ANSWERS = range(2)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("responses", [False, True], ids=["chat", "responses"])
def test_it_calls_a_tool_and_goes_on_from_the_cache(tmp_path: Path, responses: bool, stream: bool) -> None:
    messages = pytest.importorskip("langchain_core.messages", reason="langchain-core is not installed")

    def weather(city: str) -> str:
        """The weather of a city."""
        return f"sunny in {city}"

    def say(server: RunningServer, line: int, talk: list[Any]) -> Any:
        model = langchain_openai.ChatOpenAI(
            base_url=f"{server.url}/v1",
            api_key="k",
            model="scripted",
            max_retries=0,
            use_responses_api=responses,
            stream_usage=True,
            extra_body={"seed": line},
        ).bind_tools([weather])
        if not stream:
            return model.invoke(talk)
        first, *rest = model.stream(talk)
        return sum(rest, start=first)

    with running_server(scripted_options(tmp_path, SCRIPT, template=QWEN3)) as server:
        talk: list[Any] = [messages.HumanMessage("What is the weather in Paris?")]
        asked = say(server, CALLS, talk)
        [call] = asked.tool_calls
        assert (call["name"], call["args"]) == ("weather", {"city": "Paris"})
        talk += [asked, messages.ToolMessage(weather(**call["args"]), tool_call_id=call["id"])]
        answer = say(server, ANSWERS, talk)
    assert answer.text == "It is sunny."
    usage = asked.usage_metadata
    assert answer.usage_metadata["input_token_details"]["cache_read"] >= usage["input_tokens"] - 1
