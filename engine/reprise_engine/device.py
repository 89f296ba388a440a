"""Which device the engine runs on, and how many threads it may use there."""

from __future__ import annotations

import importlib
import logging
import math
import os
import re
from pathlib import Path
from typing import Any

import torch

from reprise_engine.config import Device
from reprise_engine.errors import ConfigError, DeviceError
from reprise_engine.npu_environment import (
    VISIBLE_DEVICES,
    check_visible,
    hide_torch_npu,
    is_torch_npu_installed,
    npu_settings,
    visible_devices,
)
from reprise_engine.npu_troubles import told

logger = logging.getLogger(__name__)


def resolve_device(requested: Device, *, rank: int = 0, size: int = 1) -> torch.device:
    """ "auto" is the NPU when torch_npu is installed and sees one, else the CPU. Of `size` ranks each has an NPU of its
    own, of the visible ones in their order.

    Raises ConfigError for an explicit NPU that is not there, too few of them, and for an ASCEND_RT_VISIBLE_DEVICES that
    means nothing; DeviceError for an NPU that cannot be opened.
    """
    if requested == "cpu":
        return torch.device("cpu")
    reason = _import_torch_npu()
    if reason is None:
        _check_enough(size)
        _open_npu(rank)
        return torch.device("npu", rank)
    if requested == "npu":
        raise ConfigError(f"--device is npu, but {reason}")
    logger.log(
        logging.WARNING if is_torch_npu_installed() else logging.INFO,
        "device auto: cpu (%s)",
        reason,
    )
    return torch.device("cpu")


def settle_torch_npu(requested: Device, *, rank: int = 0, size: int = 1) -> None:
    """To be called in a process of ours before transformers is imported: where the device is not an NPU, torch_npu is
    hidden from it. Raises as `resolve_device`."""
    if is_torch_npu_installed() and resolve_device(requested, rank=rank, size=size).type != "npu":
        hide_torch_npu()


def npu_number(device: torch.device) -> int:
    """The number of an NPU by which other processes of this machine or container know it too."""
    return _number_of(device.index or 0)


def _number_of(index: int) -> int:
    visible = visible_devices(os.environ)
    return index if visible is None else visible[index]


def _import_torch_npu() -> str | None:
    """Imports torch_npu, which registers the device and its operators. Returns why there is no NPU and what to do, or
    None. Raises ConfigError for an ASCEND_RT_VISIBLE_DEVICES that means nothing."""
    if not is_torch_npu_installed():
        return (
            "torch_npu is not installed. Install the engine with its [npu] extra on an Ascend machine with CANN, or "
            "use --device cpu."
        )
    visible = visible_devices(os.environ)
    os.environ.update(npu_settings(os.environ))  # where torch was imported by somebody else; elsewhere they are set
    try:
        importlib.import_module("torch_npu")
        npu = getattr(torch, "npu", None)
        found = npu.device_count() if npu is not None and npu.is_available() else 0
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        return f"torch_npu cannot be imported: {told(error)}"
    if found == 0:
        named = "" if visible is None else f" ({VISIBLE_DEVICES} is {os.environ[VISIBLE_DEVICES]})"
        return (
            f"torch_npu sees no NPU{named}. Give the container one (in Kubernetes a profile with NPUs in "
            "spec.accelerator, with Docker --device for /dev/davinci0, /dev/davinci_manager, /dev/devmm_svm and "
            "/dev/hisi_hdc), or use --device cpu."
        )
    check_visible(visible, found=found)
    return None


def _check_enough(size: int) -> None:
    """Raises ConfigError where there are fewer NPUs than ranks."""
    if size > 1:
        visible = torch.npu.device_count()  # type: ignore[attr-defined]  # of torch_npu
        if visible < size:
            raise ConfigError(
                f"--tensor-parallel-size is {size}, but {visible} NPUs are visible. Lower it to {visible}, or give the "
                "engine more (ASCEND_RT_VISIBLE_DEVICES, or the pod's resource)."
            )


def _open_npu(index: int) -> None:
    """Makes it this process's device, which opens it. Raises DeviceError.

    Operators are those that CANN has compiled, for every shape. It is torch_npu's default but on a 310P, where it would
    compile each operator anew for each shape, by an older set of them (Ascend/pytorch csrc/framework/interface/
    EnvVariables.cpp, `CheckJitDisableInner`, 9e73e70; vllm-ascend sets it too, _310p/worker_310p.py, 182b75e).
    """
    npu: Any = torch.npu  # type: ignore[attr-defined]  # of torch_npu
    try:
        npu.set_device(index)
        npu.set_compile_mode(jit_compile=False)
    except (RuntimeError, AssertionError) as error:
        raise DeviceError(f"NPU {_number_of(index)} cannot be used. {told(error)}") from error
    _warn_of_old_cann()


_OLDEST_CANN = (9, 1)


def _warn_of_old_cann() -> None:
    """Attention of CANN 9.0 divides the keys of few long requests among cores, and combines the parts without waiting
    for each (ops-transformer, 40890f601, CombineScale.hpp: cured in 9.1.0)."""
    try:
        version = str(importlib.import_module("torch_npu.npu.utils").get_cann_version())
    except (ImportError, AttributeError, RuntimeError):
        return
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is not None and (int(found[1]), int(found[2])) < _OLDEST_CANN:
        logger.warning(
            "CANN is %s, and wrong answers may come without an error: its attention has faults that 9.1.0 cures. Use "
            "the engine's image for NPUs (docs/ascend.md), or a newer CANN.",
            version,
        )


def limit_cpu_threads(*, sharing: int = 1) -> int:
    """Keeps torch from using more threads than the process may run on (affinity, cgroup CPU quota), which would make
    them wait for each other; `sharing` processes of the engine share them. OMP_NUM_THREADS, when set, is left alone.
    Returns the number of threads in use."""
    if "OMP_NUM_THREADS" not in os.environ:
        allowed = len(os.sched_getaffinity(0))
        quota = cgroup_cpu_quota()
        if quota is not None:
            allowed = min(allowed, max(1, math.ceil(quota)))
        allowed = max(1, allowed // sharing)
        if allowed < torch.get_num_threads():
            torch.set_num_threads(allowed)
    return torch.get_num_threads()


def cgroup_cpu_quota(root: Path = Path("/sys/fs/cgroup")) -> float | None:
    """CPUs the cgroup may use (version 2, else 1), as a container sees its own; None without a limit."""
    try:
        quota, period = (root / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        pass
    try:
        micros = int((root / "cpu/cpu.cfs_quota_us").read_text())
        return None if micros < 0 else micros / int((root / "cpu/cpu.cfs_period_us").read_text())
    except (OSError, ValueError):
        return None
