"""What torch's own operations may do on the device, and how to have a tensor's memory without its storage format."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils.dlpack

from tests.support.npu.machine import FORMAT_ND, Chip, Formats
from tests.support.npu.rules import OPS_NN, TORCH_NPU, Rule

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
    "operations run with jit_compile off: a 310P begins with it on, and compiles each of them for each shape, "
    "by an older set of operators (op-plugin, torchnpugen/gen.py:328-342)",
    TORCH_NPU.at("torch_npu/csrc/framework/interface/EnvVariables.cpp", 172, 186),
)
NO_FLOAT32_MATRICES_310P = Rule(
    "NO-FLOAT32-MATRICES-310P",
    "no products of float32 matrices on 310P: torch_npu has them computed in float16, without a word (Ascend/pytorch "
    "csrc/framework/utils/CalcuOpUtil.cpp:443-452)",
    OPS_NN.at("matmul/batch_mat_mul_v3/docs/aclnnBatchMatMul.md", 162, 166),
    unchecked=True,
)
_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "matmul", "linear", "mv", "addmv", "dot")


def check_operation(chip: Chip, formats: Formats, operation: Any, tensors: Sequence[torch.Tensor]) -> None:
    """Of `tensors`, which are `operation`'s, as the CPU has them."""
    if operation.namespace != "aten" or operation.is_view:
        return
    if chip is Chip.ASCEND_310P and operation._schema.name.removeprefix("aten::") in _PRODUCTS:
        NO_FLOAT32_MATRICES_310P.require(all(tensor.dtype != torch.float32 for tensor in tensors), f"{operation}")
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
    dlpack: Any = torch.utils.dlpack
    to_capsule, from_capsule = dlpack.to_dlpack, dlpack.from_dlpack

    def to_dlpack(tensor: Any) -> Any:
        return Capsule(tensor.raw) if is_device_s(tensor) else to_capsule(tensor)

    def from_dlpack(capsule: Any) -> Any:
        if isinstance(capsule, Capsule):
            return wrap(from_capsule(to_capsule(capsule.raw)))
        return from_capsule(capsule)

    dlpack.to_dlpack, dlpack.from_dlpack = to_dlpack, from_dlpack
