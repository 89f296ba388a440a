"""Which Ascend processors the backends know: they differ in their operators and in the layout of the pool."""

from __future__ import annotations

import re
from enum import Enum
from functools import cache

import torch

from reprise_engine.attention.base import KVLayout
from reprise_engine.errors import ConfigError


class Chip(Enum):
    """A generation of processors with the same operators."""

    A2 = "910B or 910C"
    """Atlas A2 and A3."""
    P310 = "310P"
    """Atlas 300I Duo, 300V and 200I Pro: float16 only, and no fused attention operator."""

    @property
    def kv_layout(self) -> KVLayout:
        return KVLayout.NZ if self is Chip.P310 else KVLayout.BSKH


def chip_named(name: str) -> Chip:
    """The chip of a device name such as Ascend910B4 (A2), Ascend910_9392 (A3) or Ascend310P3. Raises ConfigError.

    Ascend910B without a number is of the first generation (torch_npu, csrc/core/npu/NpuVariables.cpp, 94c0533ba).
    """
    if name.startswith("Ascend310P"):
        return Chip.P310
    if re.match(r"Ascend910(B\d|_93)", name):
        return Chip.A2
    raise ConfigError(
        f"The NPU is {name!r}, which is not supported: attention has backends for 910B, 910C and 310P. "
        "Use one of these, or --device cpu."
    )


@cache
def chip_of(device: torch.device) -> Chip:
    """The chip behind a device of type "npu". Raises ConfigError for one that is not supported."""
    return chip_named(str(torch.npu.get_device_name(device)))  # type: ignore[attr-defined]  # of torch_npu
