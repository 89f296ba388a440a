"""Stands for torch_npu: importing it gives this process an NPU, as importing the real one does (device/install.py)."""

from __future__ import annotations

import os
import sys
from types import ModuleType
from typing import Any

import torch

from tests.support.npu.device.install import install

npu = install()
"""torch.npu, under its other name."""


class _Utils(ModuleType):
    """torch_npu.npu.utils"""

    @staticmethod
    def get_cann_version(module: str = "CANN") -> str:
        return os.environ.get("EMULATED_NPU_CANN", "9.1.0")


sys.modules["torch_npu.npu.utils"] = _Utils("torch_npu.npu.utils")


def __getattr__(name: str) -> Any:
    """Operators, under the names that torch_npu gives them. Libraries import some that nobody calls here."""
    namespace = torch.ops.atb if name.startswith("_npu_") else torch.ops.npu
    operator = getattr(namespace, name, None)
    if operator is None and not name.startswith(("npu_", "_npu_")):
        raise AttributeError(f"the emulated torch_npu has no {name}")

    def missing(*args: object, **kwargs: object) -> None:
        raise NotImplementedError(f"{name} is not emulated")

    return operator or missing
