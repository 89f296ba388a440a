"""Turn n + 1 of a conversation with tools finds turn n in the cache, to the token; where it does not, it is said why.

A real tokenizer (small), templates in Qwen's shape, the real scheduler and prefix cache; what the model says is given.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.engine.test_chat_tools import CHAT, HI, ODD_ARGUMENTS, WEATHER
from tests.support.engine_server import RunningServer, running_server
from tests.support.qwen_templates import QWEN3, QWEN3_THINKING, QWEN25
from tests.support.scripted_engine import scripted_options

CALL = '<tool_call>\n{"name": "get_weather", "arguments": ' + ODD_ARGUMENTS + "}\n</tool_call>"
THOUGHTS = "I should look it up.\n\nIn both cities.\n</think>\n\n"
SCRIPT = (
    f"Let me look.\n\n{CALL}\n{CALL}",
    "It is sunny.",
    f"<think>\n{THOUGHTS}{CALL}",
    "<think>\nBoth are sunny.\n</think>\n\nIt is sunny.",
    f"{THOUGHTS}{CALL}",
)
CALLS, SAYS, THINKS_AND_CALLS, THINKS_AND_SAYS, OPEN_THINKS_AND_CALLS = range(5)


@pytest.fixture(scope="module", params=[QWEN25, QWEN3, QWEN3_THINKING], ids=["qwen2.5", "qwen3", "qwen3-thinking"])
def any_server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with running_server(scripted_options(tmp_path_factory.mktemp("m"), SCRIPT, template=request.param)) as running:
        yield running


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with running_server(scripted_options(tmp_path_factory.mktemp("m"), SCRIPT, template=QWEN3)) as running:
        yield running


class Conversation:
    """A client that sends back what it got."""

    def __init__(self, client: httpx.Client, *, keeps_reasoning: bool = True, **body: Any) -> None:
        client.post("/reset_prefix_cache").raise_for_status()
        self._client = client
        self._keeps_reasoning = keeps_reasoning
        self._body = {"tools": [WEATHER], "explain_cache": True} | body
        self.messages: list[Any] = [{"role": "system", "content": "Be brief."}, *HI]

    def turn(self, line: int) -> Any:
        """The usage; what was said, and the results of tools that were called, are in the conversation then."""
        response = self._client.post(CHAT, json=self._body | {"messages": self.messages, "seed": line})
        assert response.status_code == 200, response.text
        answer = response.json()
        message = answer["choices"][0]["message"]
        if not self._keeps_reasoning:
            message = {key: value for key, value in message.items() if not key.startswith("reasoning")}
        self.messages.append(message)
        self.messages += [
            {"role": "tool", "tool_call_id": call["id"], "content": "sunny"} for call in message.get("tool_calls", ())
        ]
        return answer["usage"]

    def ask(self, text: str) -> None:
        self.messages.append({"role": "user", "content": text})


def cached(usage: Any) -> int:
    return int(usage["prompt_tokens_details"]["cached_tokens"])


def known(usage: Any) -> int:
    """What is in the cache after a turn: all of it but the last token, the end of the turn, which nobody computed."""
    return int(usage["total_tokens"]) - 1


def test_every_turn_with_tools_finds_the_turn_before(any_server: RunningServer) -> None:
    talk = Conversation(any_server.client, chat_template_kwargs={"enable_thinking": True})
    # A template that opens the block takes a text without its end for reasoning; this one is about the others.
    if "<think>" in any_server.client.post("/tokenize", json={"messages": HI, "return_token_strs": True}).text:
        lines = (OPEN_THINKS_AND_CALLS, OPEN_THINKS_AND_CALLS)
    else:
        lines = (CALLS, CALLS)
    before = talk.turn(lines[0])
    assert cached(before) == 0
    for line in lines[1:]:
        usage = talk.turn(line)
        assert cached(usage) == known(before)
        before = usage


@pytest.mark.parametrize("template", [QWEN25, QWEN3], ids=["qwen2.5", "qwen3"])
def test_questions_after_tools_find_everything_where_nothing_was_thought(tmp_path: Any, template: str) -> None:
    with running_server(scripted_options(tmp_path, SCRIPT, template=template)) as server:
        talk = Conversation(server.client)
        before = talk.turn(CALLS)
        for _ in range(2):
            said = talk.turn(SAYS)
            assert cached(said) == known(before)
            talk.ask("And tomorrow?")
            before = talk.turn(CALLS)
            assert cached(before) == known(said)


def test_calls_and_their_reasoning_are_found_again_within_a_turn(qwen3: RunningServer) -> None:
    talk = Conversation(qwen3.client)
    first = talk.turn(THINKS_AND_CALLS)
    second = talk.turn(THINKS_AND_CALLS)
    assert cached(second) == known(first)
    assert cached(talk.turn(THINKS_AND_SAYS)) == known(second)


def test_reasoning_that_the_template_drops_is_told(qwen3: RunningServer) -> None:
    talk = Conversation(qwen3.client)
    first = talk.turn(THINKS_AND_CALLS)
    talk.turn(THINKS_AND_SAYS)
    talk.ask("And tomorrow?")
    usage = talk.turn(SAYS)
    # Up to where the first answer began: its reasoning was there.
    assert cached(usage) == first["prompt_tokens"]
    told = usage["prompt_tokens_details"]["cache_explanation"]
    assert (told["reason"], told["ended_at_token"]) == ("diverged", first["prompt_tokens"])
    assert (told["message_index"], told["rewritten_by"]) == (2, "template")
    assert "messages[2] (assistant). The chat template renders this turn otherwise" in told["message"]
    # From there on it is shared again: the template has dropped what it drops.
    again = talk.turn(SAYS)
    assert cached(again) > usage["prompt_tokens"] - 1


def test_reasoning_that_the_client_leaves_out_is_told(qwen3: RunningServer) -> None:
    talk = Conversation(qwen3.client, keeps_reasoning=False)
    first = talk.turn(THINKS_AND_CALLS)
    told = talk.turn(THINKS_AND_SAYS)["prompt_tokens_details"]["cache_explanation"]
    assert (told["reason"], told["ended_at_token"]) == ("diverged", first["prompt_tokens"])
    assert (told["message_index"], told["rewritten_by"]) == (2, "client")


def test_a_question_that_differs_is_nobodys_rewriting(qwen3: RunningServer) -> None:
    talk = Conversation(qwen3.client)
    talk.turn(SAYS)
    talk.messages[1:] = [{"role": "user", "content": "What is the weather in Rome?"}]
    told = talk.turn(SAYS)["prompt_tokens_details"]["cache_explanation"]
    assert (told["reason"], told["message_index"], told["rewritten_by"]) == ("diverged", 1, None)
    assert told["message"].endswith("messages[1] (user).")
    told = talk.turn(SAYS)["prompt_tokens_details"]["cache_explanation"]
    assert told["reason"] == "not_seen"
    assert "message_index" not in told
