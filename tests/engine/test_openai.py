"""The whole way on a real model (small, random): OpenAI's client → API process → engine process → paged KV cache."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest

from tests.engine.test_server_lifecycle import free_port
from tests.support.tiny_models import tiny_model_path

SYSTEM = "You are a helpful assistant who answers each question in one short sentence. " * 4


@dataclass(frozen=True)
class Server:
    url: str
    process: subprocess.Popen[bytes]

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    port = free_port()
    command = [sys.executable, "-m", "reprise_engine.entrypoints.cli", "serve", str(tiny_model_path("qwen3"))]
    command += ["--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(port), "--device", "cpu"]
    command += ["--num-gpu-blocks-override", "256", "--dtype", "float32", "--max-model-len", "1024"]
    process = subprocess.Popen(command)
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 120
        while not _healthy(url):
            assert process.poll() is None, "the server ended"
            assert time.monotonic() < deadline
            time.sleep(0.2)
        yield Server(url, process)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()


def _healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health").status_code == 200
    except httpx.TransportError:
        return False


def test_a_conversation_remembers_its_prefix(server: Server) -> None:
    messages: list[Any] = [{"role": "system", "content": SYSTEM}]
    cached, prompts, outputs = [], [], []
    with server.client() as client:
        for question in ("What is a cache?", "And a prefix?", "Why both?"):
            messages.append({"role": "user", "content": question})
            reply = client.chat.completions.create(model="tiny", messages=messages, temperature=0, max_tokens=20)
            messages.append({"role": "assistant", "content": "A fixed answer, so that the prompt is known."})
            assert reply.usage is not None
            assert reply.usage.prompt_tokens_details is not None
            cached.append(reply.usage.prompt_tokens_details.cached_tokens or 0)
            prompts.append(reply.usage.prompt_tokens)
            outputs.append(reply.choices[0].message.content)
        assert cached[0] == 0  # that the field is there at all: test_server.py
        # Each turn finds the turn before to the token, up to where the assistant's text begins to differ.
        for turn in (1, 2):
            assert prompts[turn - 1] - 1 <= cached[turn] < prompts[turn]
        again = client.chat.completions.create(model="tiny", messages=messages[:-1], temperature=0, max_tokens=20)
    assert again.choices[0].message.content == outputs[2]
    metrics = httpx.get(f"{server.url}/metrics").text
    assert f'vllm:prompt_tokens_total{{engine="0",model_name="tiny"}} {sum(prompts) + prompts[2]:.1f}' in metrics


def test_streaming_gives_the_same_text(server: Server) -> None:
    messages: list[Any] = [{"role": "user", "content": "Count to ten, naïvely: 🙂"}]
    with server.client() as client:
        whole = client.chat.completions.create(model="tiny", messages=messages, temperature=0, max_tokens=40)
        stream = client.chat.completions.create(
            model="tiny",
            messages=messages,
            temperature=0,
            max_tokens=40,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_a_seed_makes_sampling_repeatable_and_choices_differ(server: Server) -> None:
    def sample(seed: int) -> list[str]:
        with server.client() as client:
            answer = client.completions.create(
                model="tiny", prompt="Once", max_tokens=12, seed=seed, n=3, temperature=1
            )
        return [choice.text for choice in answer.choices]

    assert sample(1) == sample(1)
    assert sample(1) != sample(2)
    assert len(set(sample(1))) == 3


def test_logprobs_are_of_the_chosen_tokens(server: Server) -> None:
    with server.client() as client:
        answer = client.completions.create(model="tiny", prompt="Once", max_tokens=4, temperature=0, logprobs=3)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.token_logprobs is not None
    assert logprobs.top_logprobs is not None
    assert len(logprobs.token_logprobs) == 4
    for chosen, top in zip(logprobs.token_logprobs, logprobs.top_logprobs, strict=True):
        assert chosen == pytest.approx(max(top.values()))


def test_a_client_that_leaves_a_stream_frees_the_engine(server: Server) -> None:
    with server.client() as client:
        stream = client.completions.create(
            model="tiny", prompt="Once", max_tokens=900, stream=True, extra_body={"ignore_eos": True}
        )
        next(iter(stream))
        stream.close()
    deadline = time.monotonic() + 10
    while httpx.get(f"{server.url}/load").json()["server_load"]:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    metrics = httpx.get(f"{server.url}/metrics").text
    assert 'vllm:request_success_total{engine="0",finished_reason="abort",model_name="tiny"} 1.0' in metrics


def test_torch_is_loaded_by_the_engine_process_only(server: Server) -> None:
    def loads_torch(pid: int) -> bool:
        return "libtorch" in Path(f"/proc/{pid}/maps").read_text()

    [engine] = psutil.Process(server.process.pid).children()
    assert not loads_torch(server.process.pid)
    assert loads_torch(engine.pid)
