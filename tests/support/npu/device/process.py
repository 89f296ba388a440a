"""The environment of a process that finds torch_npu, and behind it an emulated NPU."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from tests.support.npu.device.memory import GIB

_ROOT = Path(__file__).resolve().parents[4]
_STAND_IN = Path(__file__).resolve().parents[1] / "stand_in"


def npu_environment(
    chip: str = "910B",
    *,
    memory: int = 2 * GIB,
    taken_by_others: int = 0,
    count: int = 1,
    also_float32: bool = False,
    broken: str | None = None,
    base: Mapping[str, str] = os.environ,
) -> dict[str, str]:
    """`memory` and `taken_by_others` in bytes, a device; `broken`: what importing torch_npu says instead of working."""
    path = [str(_STAND_IN), str(_ROOT), *filter(None, [base.get("PYTHONPATH")])]
    return {
        **base,
        "PYTHONPATH": os.pathsep.join(path),
        "EMULATED_NPU_CHIP": chip,
        "EMULATED_NPU_MEMORY": str(memory),
        "EMULATED_NPU_TAKEN": str(taken_by_others),
        "EMULATED_NPU_COUNT": str(count),
        "EMULATED_NPU_FLOAT32": "1" if also_float32 else "0",
        "EMULATED_NPU_BROKEN": broken or "",
    }
