"""A server whose engine is several ranks: it serves, and one dead rank ends it with words that say what to do."""

from __future__ import annotations

import time

import httpx
import psutil

from reprise_engine.config import CacheConfig, EngineConfig, ModelConfig
from reprise_engine.errors import EngineDead
from reprise_engine.messages import DEFAULT_BUILDER
from reprise_engine.server.options import ServerOptions
from tests.support.engine_server import RunningServer, running_server, wait_healthy
from tests.support.process_ends import PATIENCE, have_ended
from tests.support.tiny_models import tiny_model_path


def options() -> ServerOptions:
    return ServerOptions(
        engine=EngineConfig(
            model=ModelConfig(model=str(tiny_model_path("qwen2")), max_model_len=256),
            cache=CacheConfig(num_gpu_blocks_override=64),
            tensor_parallel_size=2,
        ),
        host="127.0.0.1",
        port=0,
        builder=DEFAULT_BUILDER,
    )


def rank_processes() -> list[psutil.Process]:
    return [
        child
        for child in psutil.Process().children(recursive=True)
        if "reprise_engine.parallel.worker" in child.cmdline()
    ]


def goes_red(server: RunningServer) -> bool:
    """Whether /health is no longer 200, or the port is closed, before the patience ends."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        try:
            if server.client.get("/health").status_code != 200:
                return True
        except httpx.TransportError:
            return True
        time.sleep(0.02)
    return False


def test_an_idle_server_finds_out_that_a_rank_is_gone() -> None:
    with running_server(options(), ready=False) as server:
        wait_healthy(server, seconds=180)  # three processes start, on whatever else the machine does
        body = {"prompt": "The capital", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        answer = server.client.post("/v1/completions", json=body)
        assert answer.json()["usage"]["completion_tokens"] == 8

        [rank] = rank_processes()
        [engine] = [process for process in rank.parents() if "reprise_engine.process" in process.cmdline()]
        begun = time.monotonic()
        rank.kill()
        assert goes_red(server)
        assert time.monotonic() - begun < 10
        result = server.join()
        assert isinstance(result, EngineDead)
        assert f"The engine process died: Rank 1 of 2 (process {rank.pid}) was killed by SIGKILL" in str(result)
        assert "start it again" in str(result)
        assert have_ended([engine, rank])
