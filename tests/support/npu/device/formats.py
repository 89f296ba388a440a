"""What torch's own operations make of a tensor in a format of the device's own, and how to have its memory without."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from tests.support.npu.machine import FORMAT_ND, Formats
from tests.support.npu.rules import TORCH_NPU, Rule

NZ_IS_FOR_OPERATORS = Rule(
    "NZ-IS-FOR-OPERATORS",
    "torch's own operations are not given tensors of format NZ, nor views of them: a copy from the host converts one "
    "view's values into the whole storage, and all others convert the whole storage, some for good (op-plugin, "
    "IndexPutKernelNpu.cpp:286)",
    TORCH_NPU.at("torch_npu/csrc/aten/common/CopyKernel.cpp", 248, 267),
    unchecked=True,
)

COMPILED_BEFOREHAND = Rule(
    "COMPILED-BEFOREHAND",
    "operations run with jit_compile off: a 310P begins with it on, and then compiles each of them anew for each shape, "
    "by its older set of operators (op-plugin, torchnpugen/gen.py:328-342)",
    TORCH_NPU.at("torch_npu/csrc/framework/interface/EnvVariables.cpp", 172, 186),
)


def check_formats(formats: Formats, operation: Any, tensors: Iterable[torch.Tensor]) -> None:
    """Of `tensors`, which are `operation`'s, as the CPU has them."""
    if operation.namespace != "aten" or operation.is_view:
        return
    for tensor in tensors:
        found = formats.of(tensor)
        NZ_IS_FOR_OPERATORS.require(found == FORMAT_ND, f"{operation} of one of format {found}")


@dataclass(frozen=True)
class Capsule:
    """DLPack's, of a tensor of the device."""

    raw: torch.Tensor


def patch_dlpack(is_device_s: Callable[[object], bool], wrap: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """As torch_npu does when it is imported (torch_npu/utils/dlpack.py): what comes out of a capsule has a storage of
    its own, over the same memory, in a plain format (aten/common/DLConvertor.cpp, from_blob.cpp)."""
    to_capsule, from_capsule = torch.utils.dlpack.to_dlpack, torch.utils.dlpack.from_dlpack

    def to_dlpack(tensor: Any) -> Any:
        return Capsule(tensor.raw) if is_device_s(tensor) else to_capsule(tensor)

    def from_dlpack(capsule: Any) -> torch.Tensor:
        if isinstance(capsule, Capsule):
            return wrap(from_capsule(to_capsule(capsule.raw)))
        return from_capsule(capsule)

    torch.utils.dlpack.to_dlpack = to_dlpack
    torch.utils.dlpack.from_dlpack = from_dlpack
