"""LangChain's ChatOpenAI, as a client that nobody here wrote."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from tests.support.engine_server import RunningServer, fake_options, running_server

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
