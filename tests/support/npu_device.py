"""The NPU of a test: the real one where `pytest -m npu` asks for it and torch_npu is installed, else the emulated one.

Tests ask for it by the fixture `ascend` (tests/engine/conftest.py), which also gives them the marker. Tensors of the
emulated one are on the CPU, so what is tried on it are the parts of the engine: batches, backends, layers, the runner
and its graphs. The engine as a whole needs a device, and its tests skip without one.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from reprise_engine.attention.npu_chip import Chip, chip_of
from reprise_engine.config import DType
from reprise_engine.device import resolve_device
from tests.support.fake_npu_graphs import FakeNPU
from tests.support.npu import npu_operators


@dataclass(frozen=True, slots=True, kw_only=True)
class NPUUnderTest:
    """`dtype` is one that its attention computes in: float32 on the emulated one, so that tokens compare to the bit."""

    device: torch.device
    chip: Chip
    dtype: DType
    name: str
    real: bool

    def graphs(self) -> Any:
        """The module torch.npu, or what stands for it."""
        return torch.npu if self.real else FakeNPU()  # type: ignore[attr-defined]  # of torch_npu


def is_asked_for(mark_expression: str) -> bool:
    """Whether `-m` selects tests of an NPU by name."""
    return re.search(r"(?<!not )\bnpu\b", mark_expression) is not None


@contextmanager
def npu_under_test(mark_expression: str) -> Iterator[NPUUnderTest]:
    """Raises ConfigError or DeviceError where a real NPU is asked for and torch_npu is there, but cannot use one:
    whoever asks wants to know. Raises WheelMissing where the emulation has no schemas."""
    if is_asked_for(mark_expression) and importlib.util.find_spec("torch_npu") is not None:
        device = resolve_device("npu")
        chip = chip_of(device)
        name = str(torch.npu.get_device_name(device))  # type: ignore[attr-defined]  # of torch_npu
        dtype: DType = "float16" if chip is Chip.P310 else "bfloat16"
        yield NPUUnderTest(device=device, chip=chip, dtype=dtype, name=name, real=True)
        return
    with npu_operators("910B", also_float32=True):
        yield NPUUnderTest(
            device=torch.device("cpu"), chip=Chip.A2, dtype="float32", name="emulated Ascend 910B", real=False
        )
