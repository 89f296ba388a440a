"""Graphs in a whole engine, on the emulated device: captured, charged, replayed; left out where they are not wanted."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.npu.device.process import npu_environment
from tests.support.tiny_models import tiny_model_path

ROOT = Path(__file__).resolve().parents[2]
MIB = 1024**2

pytestmark = pytest.mark.usefixtures("npu_wheel")


def start(*options: str) -> subprocess.Popen[str]:
    """An engine that generates in float16, and logs."""
    folder = str(tiny_model_path("qwen3"))
    return subprocess.Popen(
        [sys.executable, "-m", "tests.support.npu.device.generate", "npu", folder, "float16", *options],
        cwd=ROOT,
        env=npu_environment(memory=192 * MIB),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(engine: subprocess.Popen[str]) -> tuple[list[object], str]:
    """What it said, and its log."""
    with engine:
        said, log = engine.communicate(timeout=240)
    assert engine.returncode == 0, log[-4000:]
    answers: list[object] = json.loads(said.splitlines()[-1])
    return answers, log


def blocks(log: str) -> int:
    (found,) = re.findall(r"= blocks +([\d,]+) =", log)
    return int(found.replace(",", ""))


def test_the_same_tokens_and_less_room_for_the_cache() -> None:
    engines = start(), start("eager")  # side by side: most of it is waiting for imports
    (replayed, log), (eager, eager_log) = map(ended, engines)
    assert replayed == eager
    assert "captured graphs of decode steps" in log
    assert "graphs" not in eager_log
    assert blocks(log) < blocks(eager_log), "what graphs take is not the cache's"
