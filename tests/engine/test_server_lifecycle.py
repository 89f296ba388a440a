"""From start to end: loading, failing to load, dying, draining. Whole processes where exit codes and signals matter."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from reprise_engine.errors import ConfigError, EngineDead
from reprise_engine.server.defaults import load_defaults
from tests.support.engine_server import fake_options, running_server
from tests.support.fake_engine import NPU_OUT_OF_MEMORY, write_model

RUN = """
import sys
from pathlib import Path
from reprise_engine.server.start import run
from tests.support.engine_server import fake_options

folder, builder, port, timeout = sys.argv[1:]
import dataclasses
options = fake_options(Path(folder), builder=builder, shutdown_timeout=float(timeout))
sys.exit(run(dataclasses.replace(options, port=int(port))))
"""


@contextmanager
def server_process(
    folder: Path, *, builder: str = "build", port: int | None = None, timeout: float = 100.0, **environment: str
) -> Iterator[tuple[subprocess.Popen[str], httpx.Client]]:
    """A server in a process of its own, over tests/support/fake_engine.py."""
    port = free_port() if port is None else port
    process = subprocess.Popen(
        [sys.executable, "-c", RUN, str(folder), builder, str(port), str(timeout)],
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | environment,
    )
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as client:
            yield process, client
    finally:
        process.kill()
        process.wait()
        assert process.stderr is not None
        process.stderr.close()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def health(client: httpx.Client) -> tuple[int, str]:
    try:
        response = client.get("/health")
    except httpx.TransportError:
        return 0, ""
    return response.status_code, response.json().get("reason", "")


def wait_for(client: httpx.Client, status: int, reason: str = "") -> None:
    deadline = time.monotonic() + 30
    while (seen := health(client)) != (status, reason):
        assert time.monotonic() < deadline, seen
        time.sleep(0.05)


def end(process: subprocess.Popen[str]) -> tuple[int, list[str]]:
    """Exit code and the lines of the log that are no traceback."""
    _, errors = process.communicate(timeout=30)
    return process.returncode, errors.splitlines()


def test_while_loading_the_port_answers_503_and_says_so(tmp_path: Path) -> None:
    with running_server(fake_options(tmp_path, builder="build_for_ever"), ready=False) as server:
        wait_for(server.client, 503, "The model is loading (Loading for ever).")
        response = server.client.post("/v1/completions", json={"prompt": "a"})
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "engine_unavailable"
        assert response.headers["retry-after"] == "5"
        assert server.client.get("/metrics").status_code == 200
        assert server.client.get("/version").status_code == 200
        server.signal()
        assert server.join() == 0


def test_a_dead_engine_is_told_to_everybody_and_ends_the_server(tmp_path: Path) -> None:
    with running_server(fake_options(tmp_path, builder="build_slow")) as server:
        stream = {"prompt": "{", "max_tokens": 150, "stream": True}
        lines: list[str] = []
        started = threading.Event()

        def read() -> None:
            with server.client.stream("POST", "/v1/completions", json=stream) as response:
                for line in response.iter_lines():
                    lines.append(line)
                    started.set()

        reader = threading.Thread(target=read)
        reader.start()
        assert started.wait(20)
        response = server.client.post("/v1/completions", json={"prompt": "!"})
        assert response.status_code == 500
        assert response.json()["error"]["code"] == "engine_dead"
        assert health(server.client) == (503, "The engine process has ended; the server exits.")
        assert "device on fire" in response.json()["error"]["message"]
        reader.join()
        events = [line.removeprefix("data: ") for line in lines if line]
        assert "device on fire" in json.loads(events[-2])["error"]["message"]
        assert events[-1] == "[DONE]"
        result = server.join()
        assert isinstance(result, EngineDead)


@pytest.mark.parametrize(
    ("prompt", "line"),
    [
        (
            "~",
            "EngineDead: The engine process was killed by SIGKILL; "
            "SIGKILL is what the kernel sends when memory runs out.\n",
        ),
        (
            "^",
            f"OutOfMemory: memory=npu phase=running: {NPU_OUT_OF_MEMORY} "
            "Lower --gpu-memory-utilization, --max-num-batched-tokens or --max-num-seqs.\n",
        ),
    ],
    ids=["killed", "out of memory"],
)
def test_a_death_exits_1_and_leaves_one_line_for_the_kubelet(tmp_path: Path, prompt: str, line: str) -> None:
    words = tmp_path / "termination-log"
    words.touch()
    with server_process(tmp_path / "m", TERMINATION_LOG_PATH=str(words)) as (process, client):
        wait_for(client, 200)
        assert client.post("/v1/completions", json={"prompt": prompt}).status_code == 500
        code, _ = end(process)
        assert code == 1
        assert words.read_text() == line


@pytest.mark.parametrize(
    ("builder", "message"),
    [
        ("build_missing", "ModelNotFound: model '{model}' does not exist"),
        ("build_unsupported", "UnsupportedModel: the architecture is multimodal"),
        ("build_buggy", "RepriseError: ZeroDivisionError: a bug"),
        (
            "build_out_of_memory",
            f"OutOfMemory: memory=npu phase=kv-cache: {NPU_OUT_OF_MEMORY} "
            "Lower --gpu-memory-utilization, or end what else uses this memory.",
        ),
    ],
)
def test_a_failed_load_exits_1_with_one_line(tmp_path: Path, builder: str, message: str) -> None:
    words = tmp_path / "termination-log"
    words.touch()
    with server_process(tmp_path / "m", builder=builder, TERMINATION_LOG_PATH=str(words)) as (process, _):
        code, lines = end(process)
    assert code == 1
    assert words.read_text() == message.format(model=tmp_path / "m") + "\n"
    if builder != "build_buggy":  # a bug shows its traceback
        assert not any("Traceback" in line for line in lines), lines


def test_a_port_in_use_is_told_before_anything_is_loaded(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with server_process(tmp_path / "m", builder="build_for_ever", port=port) as (process, _):
            code, lines = end(process)
    assert code == 1
    assert len(lines) == 1
    assert lines[0].endswith(f"ERROR cannot listen on 127.0.0.1:{port}: Address already in use")


def test_sigterm_turns_readiness_off_drains_and_exits_0(tmp_path: Path) -> None:
    with server_process(tmp_path / "m", builder="build_slow") as (process, client):
        wait_for(client, 200)
        children = psutil.Process(process.pid).children()
        answers: list[Any] = []
        body = {"prompt": "{", "max_tokens": 100}

        def ask() -> None:
            answers.append(httpx.post(f"{client.base_url}/v1/completions", json=body, timeout=30).json())

        asker = threading.Thread(target=ask)
        asker.start()
        _until_load(client, 1)
        process.send_signal(signal.SIGTERM)
        wait_for(client, 503, "The server is shutting down.")
        refused = client.post("/v1/completions", json={"prompt": "a"})
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
        asker.join()
        assert answers[0]["usage"]["completion_tokens"] == 100
        code, lines = end(process)
    assert code == 0
    assert any("draining: 1 sequences" in line for line in lines)
    assert not psutil.wait_procs(children, timeout=5)[1]


@pytest.mark.parametrize("way", ["timeout", "second signal"])
def test_a_drain_does_not_last_for_ever(tmp_path: Path, way: str) -> None:
    timeout = 0.2 if way == "timeout" else 100
    with server_process(tmp_path / "m", builder="build_slow", timeout=timeout) as (process, client):
        wait_for(client, 200)
        body = {"prompt": "{", "max_tokens": 190, "stream": True, "n": 64}
        with client.stream("POST", "/v1/completions", json=body) as response:
            stream = response.iter_lines()
            next(stream)
            process.send_signal(signal.SIGTERM)
            if way == "second signal":
                time.sleep(0.3)
                process.send_signal(signal.SIGTERM)
            began = time.monotonic()
            text = "".join(stream)
            assert time.monotonic() - began < 3.5
        assert "shutting down" in text
        code, _ = end(process)
    assert code == 0


def test_the_log_tells_what_is_served_and_keeps_quiet_about_probes(tmp_path: Path) -> None:
    with server_process(tmp_path / "m") as (process, client):
        wait_for(client, 200)
        client.get("/metrics")
        client.post("/v1/completions", json={"prompt": "a"})
        process.send_signal(signal.SIGTERM)
        code, lines = end(process)
    log = "\n".join(lines)
    assert code == 0
    assert f"serves counter, other-name at {str(client.base_url).rstrip('/')}/v1" in log
    assert "64 blocks of 4 = 256 tokens, prefix caching on" in log
    assert re.search(
        r"INFO request_id=\w{32} client=127\.0\.0\.1:\d+ method=POST path=/v1/completions status=200 ", log
    )
    assert "/health" not in log
    assert "/metrics" not in log


def test_streams_end_by_themselves_during_a_drain(tmp_path: Path) -> None:
    with server_process(tmp_path / "m", builder="build_slow") as (process, client):
        wait_for(client, 200)
        body = {"prompt": "{", "max_tokens": 60, "stream": True}
        with client.stream("POST", "/v1/completions", json=body) as response:
            lines = response.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            text = "".join(lines)
        assert '"finish_reason":"length"' in text
        assert text.endswith("data: [DONE]")
        code, log = end(process)
    assert code == 0
    assert any(line.endswith("INFO drained") for line in log)


def test_generation_config_gives_the_defaults(tmp_path: Path) -> None:
    write_model(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"max_new_tokens": 3, "temperature": 0.6}))
    with running_server(fake_options(tmp_path)) as server:
        assert server.client.post("/v1/completions", json={"prompt": "a"}).json()["choices"][0]["text"] == "bcd"
    with running_server(fake_options(tmp_path, generation_config="vllm")) as server:
        assert server.client.post("/v1/completions", json={"prompt": "a"}).json()["usage"]["completion_tokens"] == 16


def _until_load(client: httpx.Client, load: int) -> None:
    deadline = time.monotonic() + 20
    while client.get("/load").json() != {"server_load": load}:
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("name", "value"), [("min_p", 5), ("top_p", 1.5), ("repetition_penalty", 0), ("top_k", -2), ("max_new_tokens", 0)]
)
def test_a_default_out_of_range_is_refused_at_the_start(tmp_path: Path, name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"--override-generation-config: {name} is {value}, which is out of range"):
        load_defaults(str(tmp_path), source="vllm", override={name: value})
