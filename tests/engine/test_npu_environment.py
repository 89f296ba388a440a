"""Settings of torch_npu, and engines that start on one NPU at once."""

from __future__ import annotations

import importlib.util
import logging
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from reprise_engine.config import CacheConfig, EngineConfig, ModelConfig
from reprise_engine.engine_process import EngineProcess
from reprise_engine.messages import LoadProgress, Ready, Start
from reprise_engine.npu_environment import npu_settings
from reprise_engine.npu_turns import npu_turn
from tests.support.tiny_models import tiny_model_path

NPU = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "TASK_QUEUE_ENABLE": "1"}
NOT_310P = {"PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True", "HCCL_DETERMINISTIC": "true"}


def pci(tmp_path: Path, *devices: tuple[str, str]) -> Path:
    folder = tmp_path / "pci"
    for number, (vendor, device) in enumerate(devices):
        (folder / str(number)).mkdir(parents=True)
        (folder / str(number) / "vendor").write_text(f"{vendor}\n")
        (folder / str(number) / "device").write_text(f"{device}\n")
    return folder


@pytest.fixture
def with_torch_npu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch_npu.py").write_text("raise ImportError('not to be imported')")
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.usefixtures("with_torch_npu")
def test_settings_by_chip(tmp_path: Path) -> None:
    assert npu_settings({}, pci=pci(tmp_path / "910b", ("0x8086", "0x1234"), ("0x19e5", "0xd802"))) == NPU | NOT_310P
    assert npu_settings({}, pci=tmp_path / "none") == NPU | NOT_310P, "torch_npu gives up what a device does not have"
    assert npu_settings({}, pci=pci(tmp_path / "310p", ("0x8086", "0x1234"), ("0x19e5", "0xd500"))) == NPU


@pytest.mark.usefixtures("with_torch_npu")
def test_what_the_user_has_set_stays(tmp_path: Path) -> None:
    given = {
        "PYTORCH_NPU_ALLOC_CONF": "max_split_size_mb:64",
        "TASK_QUEUE_ENABLE": "2",
        "HCCL_DETERMINISTIC": "false",
    }
    assert npu_settings(given, pci=tmp_path) == {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}


@pytest.mark.skipif(importlib.util.find_spec("torch_npu") is not None, reason="torch_npu is installed")
def test_without_torch_npu_nothing_is_set() -> None:
    assert npu_settings({}) == {}


@pytest.mark.usefixtures("with_torch_npu")
def test_the_engine_process_starts_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever starts it: not only the command line, which sets them for itself."""
    for name in NPU | NOT_310P:
        monkeypatch.delenv(name, raising=False)
    given: list[dict[str, str]] = []
    monkeypatch.setattr(subprocess, "Popen", lambda _command, env, **_others: given.append(env))
    started = EngineProcess(Start(EngineConfig(model=ModelConfig(model="/nowhere")), "m:f", logging.INFO))
    started.connection.close()
    started.let_go()
    assert NPU.items() <= given[0].items()


def test_a_broken_torch_npu_does_not_break_the_import_of_torch(tmp_path: Path) -> None:
    """As pip installs it: torch imports such a package by itself, unless it is told not to."""
    (tmp_path / "torch_npu.py").write_text("raise ImportError('libascend_hal.so: cannot open shared object file')")
    info = tmp_path / "torch_npu-2.13.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torch-npu\nVersion: 2.13.0\n")
    (info / "entry_points.txt").write_text("[torch.backends]\ntorch_npu = torch_npu:_autoload\n")
    path = os.pathsep.join([str(tmp_path), *sys.path])
    environment = {name: value for name, value in os.environ.items() if name not in NPU | NOT_310P}
    environment["PYTHONPATH"] = path

    def ends(code: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120
        )

    assert "Failed to load the backend extension: torch_npu" in ends("import torch").stderr
    started = ends(
        "import sys; from reprise_engine.entrypoints import cli\n"
        "code = cli.main(['serve', '/nowhere', '--device', 'npu', '--port', '0', '--host', '127.0.0.1'])\n"
        "sys.exit(code)"
    )
    assert started.returncode == 2, started.stderr
    assert "--device is npu, but torch_npu cannot be imported: The Ascend driver is not visible here." in started.stderr
    assert "Traceback" not in started.stderr


def test_ranks_on_a_cpu_never_meet_a_broken_torch_npu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers imports it wherever it is installed, in each of their processes."""
    (tmp_path / "torch_npu.py").write_text("raise ImportError('libascend_hal.so: cannot open shared object file')")
    info = tmp_path / "torch_npu-2.13.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torch-npu\nVersion: 2.13.0\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    config = EngineConfig(
        model=ModelConfig(model=str(tiny_model_path("qwen3"))),
        cache=CacheConfig(num_gpu_blocks_override=16),
        device="cpu",
        tensor_parallel_size=2,
    )
    engine = EngineProcess(Start(config))
    try:
        while isinstance(told := engine.connection.recv(), LoadProgress):
            pass
        assert isinstance(told, Ready), told
    finally:
        engine.kill()
        engine.process.wait(60)
        engine.connection.close()
        engine.let_go()


def test_engines_of_one_npu_start_one_after_the_other(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    folder = tmp_path / "locks"
    order: list[str] = []
    waiting = threading.Event()

    class Waits(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            waiting.set()

    handler = Waits()
    logging.getLogger("reprise_engine.npu_turns").addHandler(handler)

    def second() -> None:
        with npu_turn(3, folder=folder):
            order.append("second")

    other = threading.Thread(target=second)
    try:
        with npu_turn(3, folder=folder):
            with npu_turn(4, folder=folder):
                order.append("another NPU")
            other.start()
            assert waiting.wait(30)
            order.append("first")
        other.join(30)
    finally:
        logging.getLogger("reprise_engine.npu_turns").removeHandler(handler)
    assert order == ["another NPU", "first", "second"]
    assert caplog.messages == ["another engine is starting on NPU 3: waiting until it has its memory"]


def test_without_a_private_folder_nobody_waits(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(0o777)
    with npu_turn(0, folder=folder), npu_turn(0, folder=folder):
        pass
    assert caplog.text.count("Engines that start on NPU 0 at once may charge each other") == 2
