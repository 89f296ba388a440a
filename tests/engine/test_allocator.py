"""Freed tensors go back to the system, from the engine's start on; thresholds that were set from outside stay."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

from reprise_engine.allocator import return_freed_memory
from tests.support.tiny_models import tiny_model_path

MIB = 1024**2
pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="is about glibc's allocator")

# A tensor of 16 MiB is freed, then tensors of 8 MiB come and go with one between them that stays. With a threshold that
# follows what is freed all of them would be of the heap, and the heap could not shrink below the one that stays.
_KEPT = """
import sys
import psutil, torch
{start}
del_me = torch.zeros(16 * 2**20, dtype=torch.uint8)
del del_me
before = psutil.Process().memory_info().rss
for _ in range(2):
    freed = [torch.ones(8 * 2**20, dtype=torch.uint8) for _ in range(4)]
    stays = torch.ones(2**20, dtype=torch.uint8)
    del freed
print(psutil.Process().memory_info().rss - before)
"""


def kept(start: str, **environment: str) -> int:
    """Bytes that the process still has after `start` and the tensors above."""
    done = subprocess.run(
        [sys.executable, "-c", _KEPT.format(start=start)],
        capture_output=True, text=True, check=False, env={**os.environ, **environment}, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return int(done.stdout.split()[-1])


def test_what_is_freed_goes_back_to_the_system() -> None:
    call = "from reprise_engine.allocator import return_freed_memory\nassert return_freed_memory()"
    assert kept("") > 24 * MIB, "this C library keeps nothing by itself: the test says nothing"
    assert kept(call) < 8 * MIB


def test_an_engine_on_the_cpu_starts_so() -> None:
    model = str(tiny_model_path("qwen3"))
    start = f"from reprise_engine import LLM\nllm = LLM(model={model!r}, device='cpu', num_gpu_blocks_override=64)"
    assert kept(start) < 8 * MIB


@pytest.mark.parametrize(
    "environment",
    [
        {"MALLOC_MMAP_THRESHOLD_": "1000000"},
        {"MALLOC_TRIM_THRESHOLD_": "1000000"},
        {"GLIBC_TUNABLES": "glibc.malloc.arena_max=2:glibc.malloc.mmap_threshold=1000000"},
    ],
)
def test_thresholds_that_were_set_from_outside_stay(environment: dict[str, str]) -> None:
    assert not return_freed_memory(environment)
