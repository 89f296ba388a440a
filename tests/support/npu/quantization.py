"""`npu_quantize`, `npu_dynamic_quant` and `npu_quant_matmul`, for int8 weights and activations.

Not emulated, and said so: four-bit and eight-bit floats, int4 in int32, groups, int64 scales.
Types are torch's numbers of scalar types: 1 int8, 3 int32, 5 float16, 12 qint8, 13 quint8, 14 qint32, 15 bfloat16.
"""

from __future__ import annotations

import torch

from tests.support.npu.machine import Chip, Machine
from tests.support.npu.rules import OP_PLUGIN, Rule

_PAGES = "docs/zh/custom_APIs/torch_npu"
_QUANTIZE = f"{_PAGES}/torch_npu-npu_quantize.md"
_DYNAMIC = f"{_PAGES}/torch_npu-npu_dynamic_quant.md"
_MATMUL = f"{_PAGES}/torch_npu-npu_quant_matmul.md"
_MATMUL_CPP = "op_plugin/ops/opapi/QuantMatmulKernelNpuOpApi.cpp"

QUANTIZE_DTYPE = Rule(
    "QUANTIZE-DTYPE", "the input is float32, float16 or (not on 310P) bfloat16", OP_PLUGIN.at(_QUANTIZE, 34, 36)
)
QUANTIZE_SCALES = Rule(
    "QUANTIZE-SCALES",
    "scales are float32 (or bfloat16, not on 310P) to divide by, and of the input's dtype to multiply by",
    OP_PLUGIN.at(_QUANTIZE, 39, 45),
)
QUANTIZE_SHAPE = Rule("QUANTIZE-SHAPE", "one-dimensional scales have the axis' size, or 1", OP_PLUGIN.at(_QUANTIZE, 43))
QUANTIZE_ZEROS = Rule(
    "QUANTIZE-ZEROS",
    "zero_points have the scales' shape, and their dtype where scales are multiplied by",
    OP_PLUGIN.at(_QUANTIZE, 48, 54),
)
QUANTIZE_TYPE = Rule(
    "QUANTIZE-TYPE",
    "the result is qint8, quint8 or qint32; qint8 where scales are multiplied by",
    OP_PLUGIN.at(_QUANTIZE, 57, 61),
)
DYNAMIC_CHIP = Rule("DYNAMIC-CHIP", "only A2 and A3 have it", OP_PLUGIN.at(_DYNAMIC, 5, 8))
DYNAMIC_DTYPE = Rule("DYNAMIC-DTYPE", "the input is float16 or bfloat16", OP_PLUGIN.at(_DYNAMIC, 38))
DYNAMIC_DIMS = Rule("DYNAMIC-DIMS", "the input has more than one dimension", OP_PLUGIN.at(_DYNAMIC, 38))
DYNAMIC_SMOOTH = Rule(
    "DYNAMIC-SMOOTH",
    "smooth_scales are one-dimensional, of the last axis' size and the input's dtype",
    OP_PLUGIN.at(_DYNAMIC, 40, 59),
)
MATMUL_DTYPE = Rule("MATMUL-DTYPE", "x1 and x2 are int8", OP_PLUGIN.at(_MATMUL, 37, 45))
MATMUL_DIMS = Rule("MATMUL-DIMS", "x1 and x2 have 2 to 6 dimensions", OP_PLUGIN.at(_MATMUL, 37, 42))
MATMUL_INNER = Rule("MATMUL-INNER", "x1's last axis is x2's last but one", OP_PLUGIN.at(_MATMUL, 18))
MATMUL_BATCH = Rule("MATMUL-BATCH", "leading axes can be broadcast", OP_PLUGIN.at(_MATMUL_CPP, 94, 96))
MATMUL_LIMIT = Rule("MATMUL-LIMIT", "last axes are at most 65,535", OP_PLUGIN.at(_MATMUL, 84))
MATMUL_SCALE = Rule("MATMUL-SCALE", "scale is one-dimensional, of x2's last axis or 1", OP_PLUGIN.at(_MATMUL, 47))
MATMUL_OFFSET = Rule(
    "MATMUL-OFFSET", "offset is float32, like scale, and only for int8 results", OP_PLUGIN.at(_MATMUL, 108, 118)
)
MATMUL_TOKENS = Rule("MATMUL-TOKENS", "pertoken_scale is float32, one for each row of x1", OP_PLUGIN.at(_MATMUL, 54))
MATMUL_TOKENS_310P = Rule("MATMUL-TOKENS-310P", "no pertoken_scale on 310P", OP_PLUGIN.at(_MATMUL, 54))
MATMUL_BIAS = Rule("MATMUL-BIAS", "bias is one-dimensional, of x2's last axis", OP_PLUGIN.at(_MATMUL, 55))
MATMUL_TYPES = Rule("MATMUL-TYPES", "the types are one row of the page's tables", OP_PLUGIN.at(_MATMUL, 101, 118))

RULES = (
    QUANTIZE_DTYPE,
    QUANTIZE_SCALES,
    QUANTIZE_SHAPE,
    QUANTIZE_ZEROS,
    QUANTIZE_TYPE,
    DYNAMIC_CHIP,
    DYNAMIC_DTYPE,
    DYNAMIC_DIMS,
    DYNAMIC_SMOOTH,
    MATMUL_DTYPE,
    MATMUL_DIMS,
    MATMUL_INNER,
    MATMUL_BATCH,
    MATMUL_LIMIT,
    MATMUL_SCALE,
    MATMUL_OFFSET,
    MATMUL_TOKENS,
    MATMUL_TOKENS_310P,
    MATMUL_BIAS,
    MATMUL_TYPES,
)

_TYPES = {1: torch.int8, 3: torch.int32, 5: torch.float16, 15: torch.bfloat16}
_QUANTIZED = {12: torch.int8, 13: torch.uint8, 14: torch.int32, 1: torch.int8, 3: torch.int32}


def quantize(
    machine: Machine,
    x: torch.Tensor,
    scales: torch.Tensor,
    zero_points: torch.Tensor | None,
    dtype: int,
    axis: int = 1,
    div_mode: bool = True,
) -> torch.Tensor:
    """round(input / scales + zero_points), or with `div_mode` off input · scales, clamped to the result's range."""
    on_310p = machine.chip is Chip.ASCEND_310P
    floats = [torch.float32, torch.float16, *([] if on_310p else [torch.bfloat16])]
    QUANTIZE_DTYPE.require(x.dtype in floats, f"{x.dtype}")
    wanted = [torch.float32, *([] if on_310p else [torch.bfloat16])] if div_mode else [x.dtype]
    QUANTIZE_SCALES.require(scales.dtype in wanted, f"{scales.dtype} for {x.dtype}")
    QUANTIZE_TYPE.require(dtype in _QUANTIZED and (div_mode or _QUANTIZED[dtype] == torch.int8), f"{dtype}")
    if not div_mode:
        axis = -2 if axis == -2 else -1
    QUANTIZE_SHAPE.require(
        scales.dim() == 1 and scales.shape[0] in (1, x.shape[axis]), f"{list(scales.shape)} for {list(x.shape)}"
    )
    shape = [1] * x.dim()
    shape[axis] = scales.shape[0]
    wide = scales.float().view(shape)
    result = x.float() / wide if div_mode else x.float() * wide
    if zero_points is not None:
        QUANTIZE_ZEROS.require(
            zero_points.shape == scales.shape and (div_mode or zero_points.dtype == scales.dtype),
            f"{zero_points.dtype} {list(zero_points.shape)}",
        )
        result = result + zero_points.float().view(shape)
    limits = torch.iinfo(_QUANTIZED[dtype])
    return result.round().clamp(limits.min, limits.max).to(_QUANTIZED[dtype])


def dynamic_quant(
    machine: Machine,
    x: torch.Tensor,
    *,
    smooth_scales: torch.Tensor | None = None,
    group_index: torch.Tensor | None = None,
    dst_type: int | None = None,
    quant_mode: str = "pertoken",
    dst_type_max: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each row over its scale, max|row|/127, in int8; and the scales, float32. Zeros stay zeros, their scale is 0."""
    DYNAMIC_CHIP.require(machine.chip is Chip.ASCEND_910B, f"chip {machine.chip.value}")
    if group_index is not None or dst_type not in (None, 1) or quant_mode != "pertoken" or dst_type_max != 0:
        raise NotImplementedError("only pertoken int8 without groups is emulated")
    DYNAMIC_DTYPE.require(x.dtype in (torch.float16, torch.bfloat16), f"{x.dtype}")
    DYNAMIC_DIMS.require(x.dim() > 1, f"{x.dim()}")
    wide = x.float()
    if smooth_scales is not None:
        fits = list(smooth_scales.shape) == [x.shape[-1]] and smooth_scales.dtype == x.dtype
        DYNAMIC_SMOOTH.require(fits, f"{smooth_scales.dtype} {list(smooth_scales.shape)}")
        wide = wide * smooth_scales.float()
    scale = wide.abs().amax(-1) / 127
    quantised = (wide / scale.clamp_min(torch.finfo(torch.float32).tiny).unsqueeze(-1)).round().clamp(-128, 127)
    return quantised.to(torch.int8), scale


def quant_matmul(
    machine: Machine,
    x1: torch.Tensor,
    x2: torch.Tensor,
    scale: torch.Tensor,
    *,
    offset: torch.Tensor | None = None,
    pertoken_scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    output_dtype: int | None = None,
    x1_dtype: int | None = None,
    x2_dtype: int | None = None,
    pertoken_scale_dtype: int | None = None,
    scale_dtype: int | None = None,
    group_sizes: list[int] | None = None,
    y_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """(…, M, K) int8 @ (…, K, N) int8, summed exactly, then scaled per column (N) and per row (M).

    Without pertoken_scale a float32 scale loses its low 13 bits on the way to the hardware, unless the result is
    bfloat16 or int32 (`use_trans_quant_param` in op-plugin; the formula is aclnnTransQuantParam's).
    """
    others = (x1_dtype, x2_dtype, pertoken_scale_dtype, scale_dtype, group_sizes, y_scale)
    if any(other is not None for other in others) or scale.dtype == torch.int64:
        raise NotImplementedError("only int8 with float scales is emulated")
    MATMUL_DTYPE.require(x1.dtype == x2.dtype == torch.int8, f"{x1.dtype} and {x2.dtype}")
    MATMUL_DIMS.require(2 <= x1.dim() <= 6 and 2 <= x2.dim() <= 6, f"{x1.dim()} and {x2.dim()}")
    MATMUL_LIMIT.require(x1.shape[-1] <= 65535 and x2.shape[-1] <= 65535, f"{x1.shape[-1]} and {x2.shape[-1]}")
    MATMUL_INNER.require(x1.shape[-1] == x2.shape[-2], f"{list(x1.shape)} and {list(x2.shape)}")
    MATMUL_BATCH.require(_broadcastable(x1.shape[:-2], x2.shape[:-2]), f"{list(x1.shape)} and {list(x2.shape)}")
    rows, columns = x1.shape[-2], x2.shape[-1]
    MATMUL_SCALE.require(scale.dim() == 1 and scale.shape[0] in (1, columns), f"{list(scale.shape)} for {columns}")
    result = torch.int8 if output_dtype is None else _TYPES.get(output_dtype)
    _check_types(machine, scale, offset, pertoken_scale, bias, result)
    assert result is not None
    if bias is not None:
        MATMUL_BIAS.require(list(bias.shape) == [columns], f"{list(bias.shape)} for {columns}")
    if pertoken_scale is not None:
        MATMUL_TOKENS.require(list(pertoken_scale.shape) == [rows], f"{list(pertoken_scale.shape)} for {rows}")
    total = x1.double() @ x2.double()
    if bias is not None and bias.dtype == torch.int32:
        total = total + bias
    if result == torch.int32:
        return total.to(torch.int32)
    wide = scale.float()
    if scale.dtype == torch.float32 and pertoken_scale is None and result != torch.bfloat16:
        wide = (scale.view(torch.int32) & -8192).view(torch.float32)
    scaled = total.float() * wide
    if pertoken_scale is not None:
        scaled = scaled * pertoken_scale.unsqueeze(-1)
    if bias is not None and bias.dtype != torch.int32:
        scaled = scaled + bias.float()
    if offset is not None:
        scaled = scaled + offset
    return scaled.round().clamp(-128, 127).to(result) if result == torch.int8 else scaled.to(result)


def _check_types(
    machine: Machine,
    scale: torch.Tensor,
    offset: torch.Tensor | None,
    pertoken_scale: torch.Tensor | None,
    bias: torch.Tensor | None,
    result: torch.dtype | None,
) -> None:
    """The page's tables 1 and 2, of int8."""
    on_310p = machine.chip is Chip.ASCEND_310P
    MATMUL_TOKENS_310P.require(pertoken_scale is None or not on_310p, "it was given")
    if pertoken_scale is not None:
        MATMUL_TOKENS.require(pertoken_scale.dtype == torch.float32, f"{pertoken_scale.dtype}")
    if offset is not None:
        fits = result == torch.int8 and offset.dtype == torch.float32 and offset.shape == scale.shape
        MATMUL_OFFSET.require(fits, f"{offset.dtype} {list(offset.shape)} for {result}")
    float32, bfloat16, int32 = torch.float32, torch.bfloat16, torch.int32
    by_token = pertoken_scale is not None
    rows: dict[torch.dtype, tuple[list[torch.dtype], list[torch.dtype], bool]] = {
        torch.int8: ([float32], [int32], not by_token),
        torch.float16: ([float32], [int32, bfloat16, float32] if by_token else [int32], True),
    }
    if not on_310p:
        rows[bfloat16] = ([float32, bfloat16], [int32, bfloat16, float32], True)
        rows[int32] = ([float32, bfloat16], [int32], not by_token)
    given = f"scale {scale.dtype}, bias {bias.dtype if bias is not None else None}, per token {by_token}: {result}"
    MATMUL_TYPES.require(result in rows, given)
    assert result is not None
    scales, biases, tokens_fit = rows[result]
    MATMUL_TYPES.require(scale.dtype in scales and tokens_fit and (bias is None or bias.dtype in biases), given)


def _broadcastable(left: torch.Size, right: torch.Size) -> bool:
    return all(a == b or 1 in (a, b) for a, b in zip(reversed(left), reversed(right), strict=False))
