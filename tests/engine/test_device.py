"""Which device is chosen, and how many threads a container may use."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from transformers.utils.import_utils import is_torch_npu_available

from reprise_engine.device import cgroup_cpu_quota, resolve_device, settle_torch_npu
from reprise_engine.errors import ConfigError, DeviceError
from reprise_engine.npu_environment import ALLOCATOR, AUTOLOAD, SUMS, TASK_QUEUE
from tests.support.npu.device.process import npu_environment


@pytest.mark.skipif(importlib.util.find_spec("torch_npu") is not None, reason="torch_npu is installed")
def test_without_torch_npu_auto_is_the_cpu_and_npu_is_an_error() -> None:
    assert resolve_device("auto") == torch.device("cpu")
    with pytest.raises(ConfigError, match="--device is npu, but torch_npu is not installed"):
        resolve_device("npu")


def test_a_torch_npu_that_cannot_be_imported_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine without CANN."""
    (tmp_path / "torch_npu.py").write_text("raise ImportError('libhccl.so: cannot open shared object file')")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert resolve_device("auto") == torch.device("cpu")
    with pytest.raises(
        ConfigError, match=r"--device is npu, but torch_npu cannot be imported: CANN is not found\. .*: libhccl\.so: "
    ):
        resolve_device("npu")


def test_who_needs_no_npu_never_meets_a_broken_torch_npu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers imports it wherever it is installed."""
    (tmp_path / "torch_npu.py").write_text("raise ImportError('libascend_hal.so: cannot open shared object file')")
    monkeypatch.syspath_prepend(str(tmp_path))
    for requested in ("cpu", "auto"):
        settle_torch_npu(requested)
        assert importlib.util.find_spec("torch_npu") is None
        assert not is_torch_npu_available.__wrapped__()
        del sys.modules["torch_npu"]
    with pytest.raises(ConfigError, match="The Ascend driver is not visible here"):
        settle_torch_npu("npu")


def test_an_explicit_cpu_asks_nothing_of_torch_npu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch_npu.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert resolve_device("cpu") == torch.device("cpu")


@pytest.fixture
def npu_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Makes this a machine with so many NPUs, `fault` being what opening one says."""

    def make(found: int, *, visible: str | None = None, fault: str | None = None) -> None:
        (tmp_path / "torch_npu.py").write_text("")
        monkeypatch.syspath_prepend(str(tmp_path))
        for name in (ALLOCATOR, TASK_QUEUE, AUTOLOAD, SUMS):
            monkeypatch.setenv(name, "by the user")
        monkeypatch.delenv("ASCEND_RT_VISIBLE_DEVICES", raising=False)
        if visible is not None:
            monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", visible)

        def set_device(_index: int) -> None:
            if fault is not None:
                raise RuntimeError(fault)

        npu = SimpleNamespace(
            is_available=lambda: found > 0,
            device_count=lambda: found,
            set_device=set_device,
            set_compile_mode=lambda jit_compile: None,
        )
        monkeypatch.setattr(torch, "npu", npu, raising=False)

    yield make
    sys.modules.pop("torch_npu", None)


@pytest.mark.parametrize("chip", ["910B", "310P"])
@pytest.mark.usefixtures("npu_wheel")
def test_the_first_visible_npu_is_taken_and_its_operators_are_not_compiled_for_each_shape(chip: str) -> None:
    """In a process of its own: torch forgets no device."""
    program = (
        "from reprise_engine.device import npu_number, resolve_device\n"
        "found = [resolve_device(requested) for requested in ('auto', 'npu')]\n"
        "import torch\n"
        "print(*found, *map(npu_number, found), torch.npu.state.jit_compile)"
    )
    environment = npu_environment(chip, count=8) | {"ASCEND_RT_VISIBLE_DEVICES": "3,5"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["npu:0", "npu:0", "3", "3", "False"], done.stderr


@pytest.mark.parametrize(
    ("version", "warned"),
    [("9.0.0", True), ("8.5.RC1", True), ("9.1.0-beta.2", False), ("9.1.0", False), ("10.0.0", False), ("", False)],
)
@pytest.mark.usefixtures("npu_wheel")
def test_a_cann_whose_attention_is_known_to_be_wrong_is_told(version: str, warned: bool) -> None:
    program = "import logging; logging.basicConfig()\nfrom reprise_engine.device import resolve_device as r; r('npu')"
    environment = npu_environment() | {"EMULATED_NPU_CANN": version}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert (f"CANN is {version}, and wrong answers may come" in done.stderr) is warned


def test_settings_are_there_before_torch_npu_is_imported(
    npu_machine: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    npu_machine(0)
    monkeypatch.delenv("TASK_QUEUE_ENABLE")
    monkeypatch.setenv("PYTORCH_NPU_ALLOC_CONF", "by the user")
    (tmp_path / "torch_npu.py").write_text(
        "import os; assert os.environ['TASK_QUEUE_ENABLE'] == '1'\n"
        "assert os.environ['PYTORCH_NPU_ALLOC_CONF'] == 'by the user'"
    )
    resolve_device("auto")
    assert "torch_npu" in sys.modules, "it has been imported"
    monkeypatch.delenv("TASK_QUEUE_ENABLE")


def test_no_npu_is_told_with_what_to_do(npu_machine: Callable[..., None]) -> None:
    npu_machine(0)
    assert resolve_device("auto") == torch.device("cpu")
    with pytest.raises(ConfigError, match=r"--device is npu, but torch_npu sees no NPU\. Give the container one"):
        resolve_device("npu")
    npu_machine(0, visible="7")
    with pytest.raises(ConfigError, match=r"sees no NPU \(ASCEND_RT_VISIBLE_DEVICES is 7\)"):
        resolve_device("npu")


@pytest.mark.parametrize("requested", ["auto", "npu"])
@pytest.mark.parametrize("value", ["", " ", "0, 1", "0,", "a", "npu0", "0;1", "-1", "1,0", "0,0", "\u0660"])
def test_a_malformed_list_of_devices_is_one_message(
    npu_machine: Callable[..., None], value: str, requested: str
) -> None:
    npu_machine(2, visible=value)
    with pytest.raises(ConfigError) as told:
        resolve_device(requested)  # type: ignore[arg-type]
    assert str(told.value).startswith("ASCEND_RT_VISIBLE_DEVICES is ")
    assert "ascending, such as 0 or 0,1" in str(told.value)


def test_devices_that_are_named_and_not_there(npu_machine: Callable[..., None]) -> None:
    npu_machine(1, visible="0,8")
    with pytest.raises(ConfigError, match=r"is 0,8, but of these only 1 are there\. In a container .* from 0"):
        resolve_device("npu")


@pytest.mark.parametrize("requested", ["auto", "npu"])
def test_an_npu_that_cannot_be_opened_is_no_reason_to_serve_on_the_cpu(
    npu_machine: Callable[..., None], requested: str
) -> None:
    npu_machine(
        1, visible="4", fault="SetDevice(device_id_), error code is 507033\n[Error]: Failed to start the device."
    )
    with pytest.raises(DeviceError) as told:
        resolve_device(requested)  # type: ignore[arg-type]
    assert str(told.value).startswith("NPU 4 cannot be used. The NPU could not be started. Check with `npu-smi info`")
    assert "\n" not in str(told.value)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"cpu.max": "150000 100000\n"}, 1.5),
        ({"cpu.max": "max 100000\n"}, None),
        ({"cpu/cpu.cfs_quota_us": "400000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 4.0),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
        ({}, None),
    ],
)
def test_cpu_quota_of_both_cgroup_versions(tmp_path: Path, files: dict[str, str], expected: float | None) -> None:
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    assert cgroup_cpu_quota(tmp_path) == expected


def test_each_rank_has_an_npu_of_its_own_and_too_few_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    torch_npu = ModuleType("torch_npu")
    torch_npu.__spec__ = ModuleSpec("torch_npu", None)
    monkeypatch.setitem(sys.modules, "torch_npu", torch_npu)
    taken: list[int] = []
    modes: list[bool] = []
    npu = SimpleNamespace(
        is_available=lambda: True,
        device_count=lambda: 2,
        set_device=taken.append,
        set_compile_mode=lambda jit_compile: modes.append(jit_compile),
    )
    monkeypatch.setattr(torch, "npu", npu, raising=False)
    chosen: list[object] = []
    monkeypatch.setattr(torch, "device", lambda *given: chosen.append(given))  # "npu" is no device without torch_npu

    resolve_device("npu", rank=1, size=2)
    assert (chosen, taken, modes) == ([("npu", 1)], [1], [False])
    with pytest.raises(ConfigError, match=r"--tensor-parallel-size is 4, but 2 NPUs are visible\. Lower it to 2"):
        resolve_device("npu", rank=0, size=4)
    assert taken == [1]
