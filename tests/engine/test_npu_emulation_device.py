"""The emulated device: a process that has one, and the whole engine on it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.npu.device.generate import generate
from tests.support.npu.device.process import npu_environment
from tests.support.tiny_models import tiny_model_path

ROOT = Path(__file__).resolve().parents[2]
MIB = 1024**2

pytestmark = pytest.mark.usefixtures("npu_wheel")


def run(*arguments: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240
    )


def test_the_device_keeps_what_it_promises() -> None:
    """Its own checks, in a process of their own: registering a device cannot be undone."""
    checks = "tests/engine/npu_device_checks.py"
    done = run("-m", "pytest", "-q", "-p", "no:cacheprovider", checks, environment=npu_environment(memory=64 * MIB))
    assert done.returncode == 0, done.stdout[-4000:]
    assert "15 passed" in done.stdout


@pytest.mark.parametrize(("chip", "passed"), [("910B", 15), ("310P", 13)])
def test_whole_engines_on_each_chip(chip: str, passed: int) -> None:
    checks = "tests/engine/npu_engine_checks.py"
    done = run(
        "-m", "pytest", "-q", "-p", "no:cacheprovider", checks, environment=npu_environment(chip, memory=192 * MIB)
    )
    assert done.returncode == 0, done.stdout[-4000:]
    assert f"{passed} passed" in done.stdout, done.stdout[-500:]


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        pytest.param(
            npu_environment(broken="libascendcl.so: cannot open shared object file"),
            "torch_npu cannot be imported: CANN is not found. ",
            id="no CANN",
        ),
        pytest.param(npu_environment(count=0), "torch_npu sees no NPU", id="no device"),
    ],
)
def test_a_machine_whose_npu_does_not_work(environment: dict[str, str], said: str) -> None:
    program = "from reprise_engine.device import resolve_device; resolve_device('npu')"
    assert said in run("-c", program, environment=environment).stderr


def test_the_engine_gives_the_cpus_tokens_on_an_emulated_npu() -> None:
    """Cold, hit, chunked and decoding requests in one step, in float16; the CPU in float32."""
    folder = str(tiny_model_path("qwen2"))
    environment = npu_environment(memory=192 * MIB)
    done = run("-m", "tests.support.npu.device.generate", "npu", folder, "float16", environment=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    answers = json.loads(done.stdout.splitlines()[-1])
    expected = generate("cpu", folder, "float32")
    assert [tokens for tokens, _ in answers] == [tokens for tokens, _ in expected]
    assert [cached for _, cached in answers] == [cached for _, cached in expected]
    assert sum(cached for _, cached in answers if cached) > 200
