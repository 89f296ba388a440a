"""`npu_swiglu`."""

from __future__ import annotations

import torch
from torch.nn import functional

from tests.support.npu.machine import Chip, Machine
from tests.support.npu.rules import OP_PLUGIN, OPS_NN, Rule

_PAGE = "docs/zh/custom_APIs/torch_npu/（beta）torch_npu-npu_swiglu.md"
_TILING = "activation/swi_glu/op_host/swi_glu_tiling.cpp"

DTYPE = Rule("SWIGLU-DTYPE", "the input is float32, float16 or bfloat16", OP_PLUGIN.at(_PAGE, 28))
DTYPE_310P = Rule("SWIGLU-DTYPE-310P", "no bfloat16 on 310P", OPS_NN.at(_TILING, 349, 356))
AXIS = Rule("SWIGLU-AXIS", "dim is one of the input's", OPS_NN.at(_TILING, 177, 180))
EVEN = Rule("SWIGLU-EVEN", "the axis can be halved", OPS_NN.at(_TILING, 189, 195))
CONTIGUOUS = Rule("SWIGLU-CONTIGUOUS", "the input is contiguous and not empty", OP_PLUGIN.at(_PAGE, 28))
ALIGNED_310P = Rule(
    "SWIGLU-ALIGNED-310P",
    "half of the axis, with the axes after it, is a multiple of 64 bytes on 310P",
    OPS_NN.at(_TILING, 427, 432),
)

RULES = (DTYPE, DTYPE_310P, AXIS, EVEN, CONTIGUOUS, ALIGNED_310P)


def swiglu(machine: Machine, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """silu(first half) · second half along `dim`, computed in float32."""
    on_310p = machine.chip is Chip.ASCEND_310P
    DTYPE.require(x.dtype in (torch.float32, torch.float16, torch.bfloat16), f"{x.dtype}")
    DTYPE_310P.require(x.dtype != torch.bfloat16 or not on_310p, f"{x.dtype}")
    AXIS.require(-x.dim() <= dim < x.dim(), f"dim {dim} of {x.dim()}")
    EVEN.require(x.shape[dim] % 2 == 0, f"{x.shape[dim]}")
    CONTIGUOUS.require(x.is_contiguous() and x.numel() > 0, f"{list(x.shape)}, strides {x.stride()}")
    half = x.shape[dim] * x.stride(dim) // 2 * x.dtype.itemsize
    ALIGNED_310P.require(half % 64 == 0 or not on_310p, f"{half} bytes")
    gate, up = x.float().chunk(2, dim)
    return (functional.silu(gate) * up).to(x.dtype)
