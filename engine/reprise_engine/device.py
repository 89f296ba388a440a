"""Which device the engine runs on, and how many threads it may use there."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import math
import os
from pathlib import Path

import torch

from reprise_engine.config import Device
from reprise_engine.errors import ConfigError

logger = logging.getLogger(__name__)


def resolve_device(requested: Device, *, rank: int = 0, size: int = 1) -> torch.device:
    """ "auto" is the NPU when torch_npu is installed and sees one, else the CPU. Of `size` ranks each has an NPU of its
    own. Raises ConfigError for an explicit NPU that is not there, or too few of them."""
    if requested == "cpu":
        return torch.device("cpu")
    reason = _import_torch_npu()
    if reason is None:
        # The visible NPUs in their order; one process uses one of them.
        _take_npu(rank, size)
        return torch.device("npu", rank)
    if requested == "npu":
        raise ConfigError(
            f"--device is npu, but {reason}. Install the engine with its [npu] extra on an Ascend machine with CANN, "
            f"or use --device cpu."
        )
    logger.info("device auto: cpu (%s)", reason)
    return torch.device("cpu")


def _import_torch_npu() -> str | None:
    """Imports torch_npu, which registers the device and its operators. Returns why there is no NPU, or None."""
    if importlib.util.find_spec("torch_npu") is None:
        return "torch_npu is not installed"
    try:
        importlib.import_module("torch_npu")
    except (ImportError, OSError, RuntimeError) as error:
        return f"torch_npu cannot be imported: {error}"
    npu = getattr(torch, "npu", None)
    if npu is None or not npu.is_available():
        return "torch_npu sees no NPU"
    return None


def _take_npu(rank: int, size: int) -> None:
    """Raises ConfigError where there are fewer NPUs than ranks."""
    npu = torch.npu  # type: ignore[attr-defined]  # of torch_npu
    if size > 1:
        visible = npu.device_count()
        if visible < size:
            raise ConfigError(
                f"--tensor-parallel-size is {size}, but {visible} NPUs are visible. Lower it to {visible}, or give the "
                "engine more (ASCEND_RT_VISIBLE_DEVICES, or the pod's resource)."
            )
        npu.set_device(rank)


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
