"""The disk tier behind a whole server: conversations outlive SIGTERM and kill -9, and a reset forgets them."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from tests.support.tiny_models import tiny_model_path

_PATIENCE = 120.0
_SYSTEM = "You answer in a few words. " * 4
MESSAGES = [
    {"role": "system", "content": _SYSTEM},
    {"role": "user", "content": "What does a prefix cache keep? Tell me about keys and values of tokens."},
]


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + _PATIENCE
    while not condition():
        assert time.monotonic() < deadline, f"still waiting until {what}"
        time.sleep(0.05)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def server(folder: Path, *flags: str) -> Iterator[tuple[subprocess.Popen[bytes], httpx.Client]]:
    port = free_port()
    command = [sys.executable, "-m", "reprise_engine.entrypoints.openai.api_server"]
    model = ["--model", str(tiny_model_path("qwen3")), "--served-model-name", "tiny"]
    address = ["--host", "127.0.0.1", "--port", str(port)]
    cache = ["--block-size", "8", "--num-gpu-blocks-override", "64", "--prefix-cache-dir", str(folder)]
    process = subprocess.Popen([*command, *model, *address, *cache, *flags])
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=_PATIENCE) as client:

            def is_healthy() -> bool:
                assert process.poll() is None, f"the server ended with exit code {process.poll()}"
                try:
                    return client.get("/health").status_code == 200
                except httpx.TransportError:
                    return False

            wait_until(is_healthy, "the server is healthy")
            yield process, client
    finally:
        process.kill()
        process.wait()


def chat(client: httpx.Client, messages: list[dict[str, str]]) -> tuple[str, dict[str, Any]]:
    body = {"model": "tiny", "messages": messages, "temperature": 0, "max_tokens": 24, "explain_cache": True}
    response = client.post("/v1/chat/completions", json=body | {"ignore_eos": True})
    assert response.status_code == 200, response.text
    answer = response.json()
    return answer["choices"][0]["message"]["content"], answer["usage"]


def metric(client: httpx.Client, name: str, **labels: str) -> float:
    wanted = "".join(rf'.*{label}="{value}"' for label, value in sorted(labels.items()))
    found = re.search(rf"^{name}\{{{wanted}.*\}} (\S+)$", client.get("/metrics").text, re.MULTILINE)
    return float(found[1]) if found is not None else 0.0


def test_a_conversation_outlives_its_server(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    with server(folder) as (process, client):
        text, usage = chat(client, MESSAGES)
        assert usage["prompt_tokens_details"]["cached_tokens"] == 0
        process.send_signal(signal.SIGTERM)
        assert process.wait(_PATIENCE) == 0
    blocks = usage["prompt_tokens"] // 8
    assert blocks > 8
    turns = [*MESSAGES, {"role": "assistant", "content": text}, {"role": "user", "content": "And then?"}]

    with server(folder) as (process, client):
        again, usage = chat(client, MESSAGES)
        details = usage["prompt_tokens_details"]
        assert again == text
        assert details["cached_tokens"] == min(blocks * 8, usage["prompt_tokens"] - 1)
        assert details["cache_explanation"]["tiers"] == {"device": 0, "host": 0, "disk": details["cached_tokens"]}
        assert metric(client, "reprise:prefix_cache_tier_hits_total", tier="disk") == details["cached_tokens"]
        assert metric(client, "vllm:external_prefix_cache_hits_total") == details["cached_tokens"]
        next_text, usage = chat(client, turns)
        turn_blocks = (usage["prompt_tokens"] + 23) // 8
        # Without a request: an idle engine goes on writing.
        wait_until(
            lambda: metric(client, "reprise:prefix_cache_tier_blocks", tier="disk") >= turn_blocks,
            "the second turn is on the disk",
        )
        process.kill()
        process.wait()

    with server(folder, "--prefix-cache-host-memory", "32MiB") as (_, client):
        again, usage = chat(client, turns)
        assert again == next_text
        assert usage["prompt_tokens_details"]["cached_tokens"] >= usage["prompt_tokens"] // 8 * 8 - 1
        freed = client.post("/reset_prefix_cache").json()
        assert freed["success"]
        assert freed["freed_disk_blocks"] >= turn_blocks
        again, usage = chat(client, turns)
        assert (again, usage["prompt_tokens_details"]["cached_tokens"]) == (next_text, 0)
