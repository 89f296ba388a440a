"""The commands as a person or a pod runs them: exit codes, one clear line, no torch where it has no business."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SERVE = ["-m", "reprise_engine.entrypoints.cli", "serve"]
API_SERVER = ["-m", "reprise_engine.entrypoints.openai.api_server"]


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | environment,
        check=False,
    )


def test_the_version() -> None:
    done = run("-m", "reprise_engine.entrypoints.cli", "--version")
    assert (done.returncode, done.stdout) == (0, "reprise 0.1.0\n")


def test_help_lists_the_flags() -> None:
    done = run(*SERVE, "--help")
    assert done.returncode == 0
    assert "--no-enable-prefix-caching" in done.stdout


@pytest.mark.parametrize("command", [SERVE, [*API_SERVER, "--model"]], ids=["reprise serve", "api_server"])
def test_a_model_that_is_not_there_exits_1_with_one_line(command: list[str], tmp_path: Path) -> None:
    words = tmp_path / "termination-log"
    words.touch()
    done = run(*command, "/no/such/model", "--port", "0", "--device", "cpu", TERMINATION_LOG_PATH=str(words))
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "/no/such/model" in done.stderr.splitlines()[-1]
    assert words.read_text().startswith("ModelNotFound: ")


def test_a_wrong_value_exits_2_and_tells_the_kubelet(tmp_path: Path) -> None:
    words = tmp_path / "termination-log"
    words.touch()
    done = run(*SERVE, "m", "--gpu-memory-utilization", "7", TERMINATION_LOG_PATH=str(words))
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert words.read_text() == "ConfigError: --gpu-memory-utilization is 7.0; it must be above 0 and at most 1.\n"


def test_a_command_is_needed() -> None:
    done = run("-m", "reprise_engine.entrypoints.cli")
    assert done.returncode == 2
    assert "COMMAND" in done.stderr


@pytest.mark.parametrize(
    "module",
    [
        "reprise_engine.text",
        "reprise_engine.engine",
        "reprise_engine.server.lifecycle",
        "reprise_engine.entrypoints.cli",
        "reprise_engine.entrypoints.openai.api_server",
    ],
)
def test_the_api_process_imports_neither_torch_nor_transformers(module: str) -> None:
    code = f"import {module}, sys; print([m for m in ('torch', 'transformers', 'numpy') if m in sys.modules])"
    assert run("-c", code).stdout == "[]\n"


def test_a_server_starts_its_engine_process_before_it_imports_what_http_needs() -> None:
    libraries = ("fastapi", "starlette", "uvicorn", "aiohttp", "tokenizers", "jinja2")
    code = (
        "import sys, reprise_engine.entrypoints.openai.api_server, reprise_engine.entrypoints.cli;"
        f"print([m for m in {libraries} if m in sys.modules])"
    )
    assert run("-c", code).stdout == "[]\n"
