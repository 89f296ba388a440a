"""`npu_rotary_mul`: x·cos + rotate(x)·sin.

The last axis is the head size D; cos and sin are broadcast along others, in the forms that the kernels know.
"""

from __future__ import annotations

import torch

from tests.support.npu.machine import Chip, Machine
from tests.support.npu.rules import OP_PLUGIN, OPS_TRANSFORMER, Rule

_PAGE = "docs/zh/custom_APIs/torch_npu/torch_npu-npu_rotary_mul.md"
_HOST = "posembedding/rotary_position_embedding/op_host"
_HALF = f"{_HOST}/rope_rotate_half_tiling.cpp"
_INTERLEAVED = f"{_HOST}/rope_interleaved_tiling.cpp"

MODE = Rule(
    "ROTARY-MODE",
    "rotary_mode is half or interleave",
    OP_PLUGIN.at("op_plugin/ops/opapi/RotaryMulKernelNpuOpApi.cpp", 41, 45),
)
MODE_310P = Rule("ROTARY-MODE-310P", "no interleaving on 310P", OPS_TRANSFORMER.at(_INTERLEAVED, 352, 353))
DTYPE = Rule("ROTARY-DTYPE", "input, r1 and r2 are float16, bfloat16 or float32", OP_PLUGIN.at(_PAGE, 74, 76))
DTYPE_310P = Rule(
    "ROTARY-DTYPE-310P",
    "no bfloat16 on 310P",
    OPS_TRANSFORMER.at(f"{_HOST}/rotary_position_embedding_def.cpp", 70, 100),
)
DIMS = Rule("ROTARY-DIMS", "all have 3 dimensions, or all 4", OPS_TRANSFORMER.at(_HALF, 578, 594))
HEAD_SIZE = Rule("ROTARY-HEAD-SIZE", "the head size is even, at most 896", OPS_TRANSFORMER.at(_HALF, 596, 609))
HEAD_SIZE_310P = Rule(
    "ROTARY-HEAD-SIZE-310P", "the head size is 32, 64, 96 or 128 on 310P", OPS_TRANSFORMER.at(_HALF, 745, 747)
)
SAME_SHAPE = Rule("ROTARY-SAME-SHAPE", "r1 and r2 have one shape", OPS_TRANSFORMER.at(_HALF, 610, 615))
FULL_SIZE = Rule("ROTARY-FULL-SIZE", "r1 and r2 have the input's head size", OPS_TRANSFORMER.at(_HALF, 620, 624))
FORM = Rule(
    "ROTARY-FORM",
    "r1 is 11SD, B1SD, 1S1D, BS1D, S11D, SB1D, T1D, or the input's shape (interleaved: 11SD, 1S1D, S11D, T1D)",
    OP_PLUGIN.at(_PAGE, 93, 112),
)
HEADS_FIRST = Rule(
    "ROTARY-HEADS-FIRST", "BNSD has at most 8·S sequences and heads", OPS_TRANSFORMER.at(_HALF, 659, 669)
)
MATRIX = Rule(
    "ROTARY-MATRIX",
    "rotate is a head size × head size matrix",
    OP_PLUGIN.at(_PAGE, 78),
)

RULES = (
    MODE,
    MODE_310P,
    DTYPE,
    DTYPE_310P,
    DIMS,
    HEAD_SIZE,
    HEAD_SIZE_310P,
    SAME_SHAPE,
    FULL_SIZE,
    FORM,
    HEADS_FIRST,
    MATRIX,
)

# Axes along which r1 may be broadcast, of those before the last.
_FORMS = {
    ("half", 4): [set(), {0, 1}, {1}, {0, 2}, {2}, {1, 2}],
    ("interleave", 4): [{0, 1}, {0, 2}, {1, 2}],
    ("half", 3): [set(), {1}],
    ("interleave", 3): [{1}],
}


def rotary_mul(
    machine: Machine,
    x: torch.Tensor,
    r1: torch.Tensor,
    r2: torch.Tensor,
    rotary_mode: str = "half",
    rotate: torch.Tensor | None = None,
) -> torch.Tensor:
    """Computed in float32 and rounded once; r1 and r2 are rounded to the input's dtype before."""
    _check(machine, x, r1, r2, rotary_mode)
    size = x.shape[-1]
    wide, cos, sin = (tensor.to(x.dtype).float() for tensor in (x, r1, r2))
    if rotate is not None:
        MATRIX.require(list(rotate.shape) == [size, size], f"{list(rotate.shape)}")
        turned = wide @ rotate.float()
    elif rotary_mode == "half":
        first, second = wide.chunk(2, -1)
        turned = torch.cat((-second, first), -1)
    else:
        turned = torch.stack((-wide[..., 1::2], wide[..., ::2]), -1).flatten(-2)
    return (wide * cos + turned * sin).to(x.dtype)


def _check(machine: Machine, x: torch.Tensor, r1: torch.Tensor, r2: torch.Tensor, rotary_mode: str) -> None:
    on_310p = machine.chip is Chip.ASCEND_310P
    MODE.require(rotary_mode in ("half", "interleave"), f"{rotary_mode!r}")
    MODE_310P.require(rotary_mode == "half" or not on_310p, f"{rotary_mode!r}")
    dtypes = [tensor.dtype for tensor in (x, r1, r2)]
    DTYPE.require(set(dtypes) <= {torch.float16, torch.bfloat16, torch.float32}, f"{dtypes}")
    DTYPE_310P.require(torch.bfloat16 not in dtypes or not on_310p, f"{dtypes}")
    dims = [tensor.dim() for tensor in (x, r1, r2)]
    DIMS.require(dims in ([3, 3, 3], [4, 4, 4]), f"{dims}")
    size = x.shape[-1]
    HEAD_SIZE.require(size % 2 == 0 and size <= 896, f"{size}")
    HEAD_SIZE_310P.require(size in (32, 64, 96, 128) or not on_310p, f"{size}")
    SAME_SHAPE.require(r1.shape == r2.shape, f"{list(r1.shape)} and {list(r2.shape)}")
    FULL_SIZE.require(r1.shape[-1] == size, f"{r1.shape[-1]} and {size}")
    shape, given = x.shape[:-1], r1.shape[:-1]
    broadcast = {axis for axis, (have, wide) in enumerate(zip(shape, given, strict=True)) if have != wide}
    either = broadcast | {axis for axis, have in enumerate(shape) if have == 1}
    known = any(broadcast <= form <= either for form in _FORMS[rotary_mode, x.dim()])
    FORM.require(known and all(given[axis] == 1 for axis in broadcast), f"{list(r1.shape)} for {list(x.shape)}")
    if rotary_mode == "half" and broadcast >= {0, 1} and given[2] > 1:
        HEADS_FIRST.require(shape[0] * shape[1] <= 8 * shape[2], f"{list(shape)}")
