"""Many streams at once, and an event loop that stays free while long texts become tokens and tokens become text."""

from __future__ import annotations

import asyncio
import gc
import json
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from reprise_engine.text import load_tokenizer
from tests.support.engine_server import RunningServer, fake_options, running_server
from tests.support.fake_engine import write_model
from tests.support.loop_probe import probing

pytestmark = pytest.mark.alone

STREAMS = 500
TOKENS = 20
LARGEST_SHARE = 0.25
"""Between two ticks, of all that the loop's thread computes: 500 streams get one of their 20 tokens in one go."""


@contextmanager
def many_sockets() -> Iterator[None]:
    """Both ends of every connection are in this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 4 * STREAMS)), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@contextmanager
def young_heap() -> Iterator[None]:
    """A full collection walks whatever the tests before left, in the loop's thread too; a server's heap is its own."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


async def read_streams(server: RunningServer) -> list[tuple[str, str]]:
    """Text and reason of each. None goes on before all of them have begun."""
    begun = asyncio.Barrier(STREAMS)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(server.url, connector=connector) as session:

        async def read(number: int) -> tuple[str, str]:
            body = {"prompt": chr(ord("a") + number % 4), "max_tokens": TOKENS, "stream": True}
            text, reason = "", ""
            async with session.post("/v1/completions", json=body) as response:
                assert response.status == 200
                first = True
                async for line in response.content:
                    if first:
                        first = False
                        await begun.wait()
                    data = line.removeprefix(b"data: ").strip()
                    if data and data != b"[DONE]":
                        [choice] = json.loads(data)["choices"]
                        text += choice["text"]
                        reason = choice["finish_reason"] or reason
                assert data == b"" or data == b"[DONE]"
            return text, reason

        return await asyncio.gather(*(read(number) for number in range(STREAMS)))


def test_five_hundred_streams_are_open_at_once_and_each_is_whole(tmp_path: Path) -> None:
    options = fake_options(tmp_path, builder="build_large", max_num_seqs=STREAMS)
    with many_sockets(), young_heap(), running_server(options) as server:
        with probing(server.loop) as probe:
            answers = asyncio.run(read_streams(server))
        assert server.client.get("/load").json() == {"server_load": 0}
        assert probe.ticks > 10
        assert probe.busy < LARGEST_SHARE * probe.used
    alphabet = "abcdefghijklmnopqrstuvwxyz"
    for number, (text, reason) in enumerate(answers):
        start = number % 4 + 1
        assert (text, reason) == (alphabet[start : start + TOKENS], "length")


@pytest.mark.parametrize(
    ("path", "field", "others"),
    [
        ("/v1/completions", "prompt", {"truncate_prompt_tokens": 200}),  # else not all of it would be encoded
        ("/v1/chat/completions", "messages", {"truncate_prompt_tokens": 200}),
        ("/v1/completions", "bad_words", {"prompt": [97] * 1000}),
    ],
    ids=["completions", "chat", "bad_words"],
)
def test_long_texts_do_not_block_the_event_loop(
    tmp_path: Path, path: str, field: str, others: dict[str, object]
) -> None:
    """Up to a million tokens, others are served meanwhile: the loop waits for a small part of their cost at most."""
    text = "long text " * 1000
    tokenizer = load_tokenizer(write_model(tmp_path / "copy"))
    while True:
        began = time.perf_counter()
        tokenizer.encode(text)
        cost = time.perf_counter() - began
        if cost > 0.5 or len(text) > 1_000_000:
            break
        text *= 2
    with young_heap(), running_server(fake_options(tmp_path / "m")) as server:
        server.client.post("/tokenize", json={"prompt": "a"}).raise_for_status()
        with probing(server.loop) as probe:
            value = {"bad_words": [text], "prompt": text, "messages": [{"role": "user", "content": text}]}[field]
            answer = server.client.post(path, json={field: value, **others})
        error = answer.json()["error"]
        assert error["code"] == "context_length_exceeded"
        assert ("has 1000 tokens" if field == "bad_words" else "has 200 tokens") in error["message"]
        assert probe.ticks > 10
        assert probe.busy < cost / 4
        assert probe.blocked < cost / 2


def test_long_lists_of_tokens_do_not_block_the_event_loop(tmp_path: Path) -> None:
    """The loop reads and checks the list, as it does where the last one is refused; it decodes nothing."""
    token_ids = [97 + number % 26 for number in range(400_000)]
    began = time.thread_time()
    load_tokenizer(write_model(tmp_path / "copy")).decode(token_ids)
    cost = time.thread_time() - began
    with young_heap(), running_server(fake_options(tmp_path / "m")) as server:

        def used(tokens: list[int]) -> tuple[float, dict[str, Any]]:
            with probing(server.loop) as probe:
                answer = server.client.post("/detokenize", json={"tokens": tokens})
            return probe.used, answer.json()

        rounds = [(used([*token_ids, -1]), used(token_ids)) for _ in range(3)]
    assert all("error" in refused and len(told["prompt"]) == len(token_ids) for (_, refused), (_, told) in rounds)
    reading = min(seconds for (seconds, _), _ in rounds)
    whole = min(seconds for _, (seconds, _) in rounds)
    assert whole < reading + cost / 2
