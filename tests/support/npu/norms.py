"""`npu_rms_norm` and `npu_add_rms_norm`."""

from __future__ import annotations

import torch

from tests.support.npu.machine import Chip, Machine
from tests.support.npu.rules import OP_PLUGIN, OPS_NN, Rule

_PAGE = "docs/zh/custom_APIs/torch_npu/（beta）torch_npu-npu_rms_norm.md"
_TILING = "norm/rms_norm/op_host/rms_norm_tiling.cpp"
_ADD_ACLNN = "norm/add_rms_norm/op_host/op_api/aclnn_add_rms_norm.cpp"

DTYPES = Rule(
    "RMS-DTYPES",
    "gamma has the input's dtype; A2 and A3 also take float32 gammas, 310P no bfloat16",
    OP_PLUGIN.at(_PAGE, 45, 61),
)
SHAPE = Rule("RMS-SHAPE", "gamma has the input's last axes", OPS_NN.at(_TILING, 133, 159))
NOT_EMPTY = Rule("RMS-NOT-EMPTY", "neither is empty", OPS_NN.at(_TILING, 146, 167))
TAIL_310P = Rule("RMS-TAIL-310P", "the last axis has at least 32 bytes on 310P", OP_PLUGIN.at(_PAGE, 44))
ADD_DTYPES = Rule("ADD-RMS-DTYPES", "x1, x2 and gamma have one dtype", OPS_NN.at(_ADD_ACLNN, 104, 109))
ADD_DTYPES_310P = Rule("ADD-RMS-DTYPES-310P", "no bfloat16 on 310P", OPS_NN.at(_ADD_ACLNN, 65, 96))
ADD_SHAPE = Rule("ADD-RMS-SHAPE", "x1 and x2 have one shape", OPS_NN.at(_ADD_ACLNN, 136))

RULES = (DTYPES, SHAPE, NOT_EMPTY, TAIL_310P, ADD_DTYPES, ADD_DTYPES_310P, ADD_SHAPE)

_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def rms_norm(
    machine: Machine, x: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-6
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the input over its root mean square times gamma, and the reciprocal of the root, computed in float32."""
    allowed = [x.dtype] if machine.chip is Chip.ASCEND_310P else [x.dtype, torch.float32]
    supported = x.dtype in _FLOATS and not (machine.chip is Chip.ASCEND_310P and x.dtype == torch.bfloat16)
    DTYPES.require(supported and gamma.dtype in allowed, f"{x.dtype} and {gamma.dtype} on {machine.chip.value}")
    _check_shapes(machine, x, gamma)
    return _normalised(x.float(), x.dtype, gamma, epsilon)


def add_rms_norm(
    machine: Machine, x1: torch.Tensor, x2: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-6
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the norm of x1 + x2, the reciprocal of its root mean square, and the sum, rounded to x1's dtype.

    In float16 the norm is of the rounded sum; in bfloat16 the kernel keeps the sum in float32 up to its end. Neither is
    documented to the bit: the rounded sum is taken for both.
    """
    on_310p = machine.chip is Chip.ASCEND_310P
    ADD_DTYPES.require(
        x1.dtype in _FLOATS and x1.dtype == x2.dtype == gamma.dtype, f"{x1.dtype}, {x2.dtype}, {gamma.dtype}"
    )
    ADD_DTYPES_310P.require(x1.dtype != torch.bfloat16 or not on_310p, f"{x1.dtype}")
    ADD_SHAPE.require(x1.shape == x2.shape, f"{list(x1.shape)} and {list(x2.shape)}")
    _check_shapes(machine, x1, gamma)
    total = x1 + x2
    out, rstd = _normalised(total.float(), x1.dtype, gamma, epsilon)
    return out, rstd, total


def _check_shapes(machine: Machine, x: torch.Tensor, gamma: torch.Tensor) -> None:
    shapes = f"gamma {list(gamma.shape)}, x {list(x.shape)}"
    SHAPE.require(0 < gamma.dim() <= x.dim() and x.shape[-gamma.dim() :] == gamma.shape, shapes)
    NOT_EMPTY.require(x.numel() > 0, shapes)
    enough = x.shape[-1] * x.dtype.itemsize >= 32
    TAIL_310P.require(enough or machine.chip is not Chip.ASCEND_310P, shapes)


def _normalised(
    wide: torch.Tensor, dtype: torch.dtype, gamma: torch.Tensor, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor]:
    axes = tuple(range(-gamma.dim(), 0))
    rstd = (wide.square().mean(axes, keepdim=True) + epsilon).rsqrt()
    return (wide * rstd * gamma.float()).to(dtype), rstd
