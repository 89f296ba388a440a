"""Out of memory, said by the engine and read by the operator: the line of docs/memory.md, with no code shared."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from reprise_engine.out_of_memory import Phase, as_out_of_memory
from reprise_engine.server.logs import last_words
from reprise_operator.out_of_memory import Shortage, shortage
from reprise_operator.resource import InferenceService
from reprise_operator.spec import parse
from tests.support.fake_engine import NPU_OUT_OF_MEMORY
from tests.support.tiny_models import tiny_model_path

DOCS = Path(__file__).resolve().parents[2] / "docs" / "memory.md"


def service(profile: str, **spec: Any) -> InferenceService:
    metadata = {"name": "svc", "namespace": "ns", "uid": "u1", "generation": 1}
    given = {"model": {"uri": "hostpath:///m"}, "accelerator": {"profile": profile}, **spec}
    return parse({"metadata": metadata, "spec": given})


NPU = service("ascend910b")
LIMITED = service("cpu", runtime={"resources": {"limits": {"memory": "2Gi"}}})


def said(error: Exception, phase: Phase, path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """What the kubelet finds."""
    path.touch()
    monkeypatch.setenv("TERMINATION_LOG_PATH", str(path))
    named = as_out_of_memory(error, phase)
    assert named is not None
    last_words(f"{type(named).__name__}: {named}")
    return path.read_text()


@pytest.mark.parametrize("phase", list(Phase))
def test_every_phase_is_read(phase: Phase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decided = phase in (Phase.KV_CACHE, Phase.RUNNING)
    words = said(RuntimeError(NPU_OUT_OF_MEMORY), phase, tmp_path / "a", monkeypatch)
    found = shortage(NPU, reason="Error", words=words)
    assert found is not None
    assert (found.memory, found.share_helps) == ("device", decided)
    assert "Tried to allocate 2.00 GiB" in found.words
    words = said(MemoryError(), phase, tmp_path / "b", monkeypatch)
    on_npu, on_cpu = (shortage(which, reason="Error", words=words) for which in (NPU, LIMITED))
    assert on_npu == Shortage(memory="host", share_helps=False, words=words.split(": ", 1)[1].strip())
    assert on_cpu is not None
    assert (on_cpu.memory, on_cpu.share_helps) == ("host", decided)


def test_the_page_says_every_phase() -> None:
    text = DOCS.read_text()
    for phase in Phase:
        assert f"`{phase}`" in text
    assert "OutOfMemory: memory=npu phase=kv-cache: " in text


def run(model: Path, *arguments: str, termination_log: Path) -> subprocess.CompletedProcess[str]:
    termination_log.touch()
    command = [sys.executable, "-m", "reprise_engine.entrypoints.cli", "serve", str(model), "--host", "127.0.0.1"]
    return subprocess.run(
        [*command, "--port", "0", "--device", "cpu", *arguments],
        env={**os.environ, "TERMINATION_LOG_PATH": str(termination_log)},
        capture_output=True,
        text=True,
        timeout=180,
    )


@pytest.fixture(scope="module")
def model() -> Path:
    return tiny_model_path("qwen3")


def test_a_real_engine_that_gets_no_memory_for_its_pool_says_so(model: Path, tmp_path: Path) -> None:
    # A pool beyond all that a process can address: the allocation fails on any machine, with any overcommit.
    ended = run(model, "--num-gpu-blocks-override", str(10**13), termination_log=tmp_path / "words")
    assert ended.returncode == 1, ended.stderr
    words = (tmp_path / "words").read_text()
    assert words.startswith("OutOfMemory: memory=host phase=kv-cache: "), ended.stderr
    assert "Traceback" not in ended.stderr
    found = shortage(LIMITED, reason="Error", words=words)
    assert found is not None
    assert found.share_helps


def test_a_share_that_is_too_small_is_another_fault(model: Path, tmp_path: Path) -> None:
    """Lowering it further would make it worse."""
    ended = run(model, "--kv-cache-memory-bytes", "64", termination_log=tmp_path / "words")
    assert ended.returncode == 1, ended.stderr
    words = (tmp_path / "words").read_text()
    assert words.startswith("InsufficientMemory: "), ended.stderr
    assert shortage(LIMITED, reason="Error", words=words) is None


def test_a_kill_while_the_weights_are_loaded_is_seen_in_the_log(model: Path, tmp_path: Path) -> None:
    """The operator reads from the log how far the engine had come: its lines are part of the contract."""
    ended = run(model, "--kv-cache-memory-bytes", "64", termination_log=tmp_path / "words")
    lines = ended.stderr.splitlines(keepends=True)
    (sizing,) = (index for index, line in enumerate(lines) if "Sizing the KV cache" in line)
    loading = "".join(lines[:sizing])
    assert "Loading weights" in loading
    before, after = (
        shortage(LIMITED, reason="OOMKilled", words=words) for words in (loading, "".join(lines[: sizing + 1]))
    )
    assert before == Shortage(memory="host", share_helps=False)
    assert after == Shortage(memory="host", share_helps=True)
