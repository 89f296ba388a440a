"""`npu_rotary_mul`: x·cos + rotate(x)·sin, and `npu_apply_rotary_pos_emb`, which does so to queries and keys in place.

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

_APPLY = "posembedding/apply_rotary_pos_emb/op_host/apply_rotary_pos_emb_tiling.cpp"
_APPLY_PAGE = "docs/zh/custom_APIs/torch_npu/torch_npu-apply_rotary_pos_emb.md"

MODE = Rule(
    "ROTARY-MODE",
    "rotary_mode is half or interleave",
    OP_PLUGIN.at("op_plugin/ops/opapi/RotaryMulKernelNpuOpApi.cpp", 41, 45),
)
CHIP_310P = Rule(
    "ROTARY-CHIP-310P",
    "not on 310P, which has it with jit_compile on only: its kernel is none of those that CANN has compiled",
    OP_PLUGIN.at(_PAGE, 114),
)
DTYPE = Rule("ROTARY-DTYPE", "input, r1 and r2 are float16, bfloat16 or float32", OP_PLUGIN.at(_PAGE, 74, 76))
DIMS = Rule("ROTARY-DIMS", "all have 3 dimensions, or all 4", OPS_TRANSFORMER.at(_HALF, 578, 594))
HEAD_SIZE = Rule("ROTARY-HEAD-SIZE", "the head size is even, at most 896", OPS_TRANSFORMER.at(_HALF, 596, 609))
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

APPLY_DIMS = Rule(
    "APPLY-ROTARY-DIMS",
    "layout is BSND with 4 dimensions, or TND with 3",
    OPS_TRANSFORMER.at(_APPLY, 218, 236),
)
APPLY_ROWS = Rule("APPLY-ROTARY-ROWS", "all have the same rows", OPS_TRANSFORMER.at(_APPLY, 246, 262))
APPLY_SIZE = Rule(
    "APPLY-ROTARY-SIZE",
    "heads, cosines and sines have 128 or 64 elements",
    OP_PLUGIN.at(_APPLY_PAGE, 25),
)
APPLY_ONE = Rule("APPLY-ROTARY-ONE", "cosines and sines have one head", OPS_TRANSFORMER.at(_APPLY, 285, 292))
APPLY_DTYPE = Rule("APPLY-ROTARY-DTYPE", "all have one floating dtype", OPS_TRANSFORMER.at(_APPLY, 298, 317))
APPLY_DTYPE_310P = Rule("APPLY-ROTARY-DTYPE-310P", "no bfloat16 on 310P", OP_PLUGIN.at(_APPLY_PAGE, 60))
APPLY_MODE = Rule("APPLY-ROTARY-MODE", "rotary_mode is half", OP_PLUGIN.at(_APPLY_PAGE, 40))

RULES = (
    MODE,
    CHIP_310P,
    DTYPE,
    DIMS,
    HEAD_SIZE,
    APPLY_DIMS,
    APPLY_ROWS,
    APPLY_SIZE,
    APPLY_ONE,
    APPLY_DTYPE,
    APPLY_DTYPE_310P,
    APPLY_MODE,
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
    CHIP_310P.require(machine.chip is not Chip.ASCEND_310P, f"chip {machine.chip.value}")
    MODE.require(rotary_mode in ("half", "interleave"), f"{rotary_mode!r}")
    dtypes = [tensor.dtype for tensor in (x, r1, r2)]
    DTYPE.require(set(dtypes) <= {torch.float16, torch.bfloat16, torch.float32}, f"{dtypes}")
    dims = [tensor.dim() for tensor in (x, r1, r2)]
    DIMS.require(dims in ([3, 3, 3], [4, 4, 4]), f"{dims}")
    size = x.shape[-1]
    HEAD_SIZE.require(size % 2 == 0 and size <= 896, f"{size}")
    SAME_SHAPE.require(r1.shape == r2.shape, f"{list(r1.shape)} and {list(r2.shape)}")
    FULL_SIZE.require(r1.shape[-1] == size, f"{r1.shape[-1]} and {size}")
    shape, given = x.shape[:-1], r1.shape[:-1]
    broadcast = {axis for axis, (have, wide) in enumerate(zip(shape, given, strict=True)) if have != wide}
    either = broadcast | {axis for axis, have in enumerate(shape) if have == 1}
    known = any(broadcast <= form <= either for form in _FORMS[rotary_mode, x.dim()])
    FORM.require(known and all(given[axis] == 1 for axis in broadcast), f"{list(r1.shape)} for {list(x.shape)}")
    if rotary_mode == "half" and broadcast >= {0, 1} and given[2] > 1:
        HEADS_FIRST.require(shape[0] * shape[1] <= 8 * shape[2], f"{list(shape)}")


def apply_rotary_pos_emb(
    machine: Machine,
    query: torch.Tensor,
    key: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    layout: str = "BSND",
    rotary_mode: str = "half",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Writes `query` and `key`. Computed in float32 and rounded once."""
    tensors = (query, key, cos, sin)
    shapes = f"{[list(tensor.shape) for tensor in tensors]}"
    APPLY_MODE.require(rotary_mode == "half", f"{rotary_mode!r}")
    dims = {"BSND": 4, "TND": 3}.get(layout)
    APPLY_DIMS.require(all(tensor.dim() == dims for tensor in tensors), f"{layout!r}, {shapes}")
    APPLY_ROWS.require(len({tensor.shape[:-2] for tensor in tensors}) == 1 and cos.shape == sin.shape, shapes)
    APPLY_SIZE.require(len({tensor.shape[-1] for tensor in tensors}) == 1 and cos.shape[-1] in (64, 128), shapes)
    APPLY_ONE.require(cos.shape[-2] == 1, shapes)
    dtypes = [tensor.dtype for tensor in tensors]
    floats = (torch.float16, torch.bfloat16, torch.float32)
    APPLY_DTYPE.require(len(set(dtypes)) == 1 and query.dtype in floats, f"{dtypes}")
    APPLY_DTYPE_310P.require(query.dtype != torch.bfloat16 or machine.chip is not Chip.ASCEND_310P, f"{dtypes}")
    for x in (query, key):
        wide = x.float()
        first, second = wide.chunk(2, -1)
        x.copy_(wide * cos.float() + torch.cat((-second, first), -1) * sin.float())
    return query, key
