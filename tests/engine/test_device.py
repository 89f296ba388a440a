"""Which device is chosen, and how many threads a container may use."""

from __future__ import annotations

import importlib.util
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from reprise_engine.device import cgroup_cpu_quota, resolve_device
from reprise_engine.errors import ConfigError


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
    with pytest.raises(ConfigError, match=r"cannot be imported: libhccl\.so"):
        resolve_device("npu")


def test_an_explicit_cpu_asks_nothing_of_torch_npu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch_npu.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert resolve_device("cpu") == torch.device("cpu")


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
    npu = SimpleNamespace(is_available=lambda: True, device_count=lambda: 2, set_device=taken.append)
    monkeypatch.setattr(torch, "npu", npu, raising=False)
    chosen: list[object] = []
    monkeypatch.setattr(torch, "device", lambda *given: chosen.append(given))  # "npu" is no device without torch_npu

    resolve_device("npu", rank=1, size=2)
    assert (chosen, taken) == ([("npu", 1)], [1])
    with pytest.raises(ConfigError, match=r"--tensor-parallel-size is 4, but 2 NPUs are visible\. Lower it to 2"):
        resolve_device("npu", rank=0, size=4)
    assert taken == [1]
