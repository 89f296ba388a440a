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


def generated(*options: str) -> tuple[list[object], str]:
    """What the engine says in float16, and its log."""
    folder = str(tiny_model_path("qwen3"))
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.npu.device.generate", "npu", folder, "float16", *options],
        cwd=ROOT,
        env=npu_environment(memory=192 * MIB),
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    answers: list[object] = json.loads(done.stdout.splitlines()[-1])
    return answers, done.stderr


def blocks(log: str) -> int:
    (found,) = re.findall(r"= blocks +([\d,]+) =", log)
    return int(found.replace(",", ""))


def test_the_same_tokens_and_less_room_for_the_cache() -> None:
    replayed, log = generated()
    eager, eager_log = generated("eager")
    assert replayed == eager
    assert "captured graphs of decode steps" in log
    assert "graphs" not in eager_log
    assert blocks(log) < blocks(eager_log), "what graphs take is not the cache's"
