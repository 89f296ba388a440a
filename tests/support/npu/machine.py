"""The NPU that is emulated: which chip it is, and the storage formats of its tensors."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

import torch

from tests.support.npu.rules import OP_PLUGIN, Rule

FORMAT_ND = 2
FORMAT_FRACTAL_NZ = 29
"""torch_npu's numbers for storage formats (`ACL_FORMAT_*`)."""

FORMAT_KNOWN = Rule(
    "FORMAT-KNOWN",
    "the engine's formats are ND (2) and FRACTAL_NZ (29)",
    OP_PLUGIN.at("docs/zh/custom_APIs/torch_npu/torch_npu-npu_format_cast.md", 1),
)


class Chip(Enum):
    ASCEND_910B = "910B"
    """A2; 910C (A3) takes the same operators."""
    ASCEND_310P = "310P"


class Atb(Enum):
    """Which ATB is installed beside torch_npu, whose operators are there either way."""

    CANN_9_0 = "9.0"
    CANN_9_1 = "9.1"


@dataclass(frozen=True)
class Formats:
    """Storage formats by storage: the values of a tensor are the same in each, its bytes on the device are not.

    Marked storages are kept alive, so that no later tensor is taken for an earlier one at the same address.
    """

    _marked: dict[int, tuple[torch.UntypedStorage, int]] = field(default_factory=dict)

    def of(self, tensor: torch.Tensor) -> int:
        marked = self._marked.get(tensor.untyped_storage()._cdata)
        return marked[1] if marked else FORMAT_ND

    def mark(self, tensor: torch.Tensor, acl_format: int) -> torch.Tensor:
        values: torch.Tensor = getattr(tensor, "raw", tensor)  # of a tensor of the emulated device
        storage = values.untyped_storage()
        self._marked[storage._cdata] = (storage, acl_format)
        return tensor


@dataclass(frozen=True)
class Machine:
    chip: Chip
    also_float32: bool = False
    """Attention in float32 too, which no NPU has: only for tests that compare tokens to the bit."""
    formats: Formats = field(default_factory=Formats)
    atb: Atb = Atb.CANN_9_1

    def is_half(self, dtype: torch.dtype) -> bool:
        """Whether attention's kernels are compiled for `dtype` here."""
        if dtype == torch.float32:
            return self.also_float32
        if self.chip is Chip.ASCEND_310P:
            return dtype == torch.float16
        return dtype in (torch.float16, torch.bfloat16)


def format_cast(
    machine: Machine,
    x: torch.Tensor,
    acl_format: int,
    *,
    customize_dtype: int | None = None,
    input_dtype: int | None = None,
) -> torch.Tensor:
    FORMAT_KNOWN.require(acl_format in (FORMAT_ND, FORMAT_FRACTAL_NZ), f"format {acl_format}")
    return machine.formats.mark(x.clone(memory_format=torch.contiguous_format), acl_format)


def get_format(machine: Machine, x: torch.Tensor) -> int:
    return machine.formats.of(x)


def empty_with_format(
    machine: Machine,
    size: list[int],
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
    acl_format: int = FORMAT_ND,
    base_addr_aligned_kb: int | None = None,
) -> torch.Tensor:
    FORMAT_KNOWN.require(acl_format in (FORMAT_ND, FORMAT_FRACTAL_NZ), f"format {acl_format}")
    return machine.formats.mark(torch.empty(size, dtype=dtype, device=device or "cpu"), acl_format)


RULES = (FORMAT_KNOWN,)
