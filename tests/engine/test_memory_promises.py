"""Engines of one machine do not count on the same free memory: real processes, started at once and killed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from reprise_engine.memory_probes import cgroup_memory_limit
from reprise_engine.memory_promises import MemoryPromises
from tests.support.tiny_models import tiny_model_path

MIB = 1024**2
GIB = 1024**3

_PROMISE = """
import sys
from pathlib import Path
from reprise_engine.memory_promises import MemoryPromises
promises = MemoryPromises(Path(sys.argv[1]))
with promises.sharing_out() as outstanding:
    promises.promise(int(sys.argv[2]))
print(outstanding, flush=True)
sys.stdin.read()
"""
# Wants all the memory it may have: a share of 0.6 of the machine, which cannot be had twice.
_ENGINE = """
import logging, sys
logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(message)s")
from reprise_engine import LLM
llm = LLM(sys.argv[1], device="cpu", skip_tokenizer_init=True, gpu_memory_utilization=0.6, max_num_seqs=100_000,
          max_num_batched_tokens=64)
print(llm.config.num_gpu_blocks, flush=True)
sys.stdin.read()
"""

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts `python -c code arguments` with a temporary folder of its own for all; each ends with the test."""
    started: list[subprocess.Popen[str]] = []

    def run(code: str, *arguments: str) -> subprocess.Popen[str]:
        pipe = subprocess.PIPE
        environment = {**os.environ, "TMPDIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-c", code, *arguments]
        process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=environment)
        started.append(process)
        return process

    yield run
    for process in started:
        process.kill()
        process.communicate()


def told(process: subprocess.Popen[str]) -> int:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        pytest.fail(f"the process ended: {process.communicate()[1][-2000:]}")
    return int(line)


def outstanding(folder: Path) -> int:
    promises = MemoryPromises(folder)
    with promises.sharing_out() as others:
        promises.close()
        return others


def test_each_sees_what_the_others_were_promised_until_they_end(tmp_path: Path, start: Start) -> None:
    folder = tmp_path / "promises"
    processes = [start(_PROMISE, str(folder), str(growth)) for growth in (GIB, 2 * GIB, 4 * GIB)]
    seen = sorted(told(process) for process in processes)
    # Whoever came first saw nothing, the next one promise, the last two; in GiB they are all different.
    assert seen[0] == 0
    assert round(seen[1] / GIB) in (1, 2, 4)
    assert round(seen[2] / GIB) in (3, 5, 6)
    assert outstanding(folder) == pytest.approx(7 * GIB, rel=0.02)
    processes[2].kill()
    processes[2].wait()
    assert outstanding(folder) == pytest.approx(3 * GIB, rel=0.02)
    assert len(list(folder.glob("engine-*"))) == 2, "the file of the dead one is gone"


def test_memory_that_is_taken_is_no_longer_outstanding(tmp_path: Path) -> None:
    promises = MemoryPromises(tmp_path / "p")
    with promises.sharing_out():
        promises.promise(256 * MIB)
    assert outstanding(tmp_path / "p") == pytest.approx(256 * MIB, rel=0.2)
    taken = bytearray(b"x") * (256 * MIB)
    assert outstanding(tmp_path / "p") < 64 * MIB
    del taken
    promises.close()
    assert outstanding(tmp_path / "p") == 0


def test_a_folder_that_others_can_write_is_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(0o777)
    promises = MemoryPromises(folder)
    assert "only user" in caplog.text
    with promises.sharing_out() as others:
        promises.promise(GIB)
    assert others == 0
    assert list(folder.iterdir()) == []
    private = tmp_path / "private"
    MemoryPromises(private).close()
    assert private.stat().st_mode & 0o777 == 0o700
    assert (private / "lock").stat().st_mode & 0o777 == 0o600


def test_what_is_no_promise_is_ignored(tmp_path: Path) -> None:
    MemoryPromises(tmp_path / "p").close()
    (tmp_path / "p" / "engine-foreign").write_text("garbage")
    assert outstanding(tmp_path / "p") == 0


@pytest.mark.alone
@pytest.mark.skipif(cgroup_memory_limit() is not None, reason="under a cgroup's limit nothing is shared out")
def test_two_engines_that_start_at_once_share_the_memory_out(start: Start) -> None:
    model = str(tiny_model_path("qwen3"))
    free = psutil.virtual_memory().available
    engines = [start(_ENGINE, model), start(_ENGINE, model)]
    blocks = [told(engine) for engine in engines]
    block_bytes = 16 * 2 * 3 * 2 * 32 * 4  # tokens, K and V, layers, heads, head size, float32
    kv = sum(blocks) * block_bytes
    assert min(blocks) > 0
    # Either alone would have taken 0.6 of the machine; other work on it may come and go meanwhile.
    assert kv < free * 1.1, json.dumps({"kv": kv, "free": free, "blocks": blocks})
    logs = []
    for engine in engines:
        engine.kill()
        logs.append(engine.communicate()[1])
    assert len([log for log in logs if re.search(r"promised to other engines +\d", log)]) >= 1
