"""The layers of `w8a8.py` on an Ascend NPU, by the operators of torch_npu.

    W8A8          npu_quantize (x · 1/scale + offset)       → npu_quant_matmul (· + quant_bias) · deq_scale
    W8A8_DYNAMIC  npu_dynamic_quant (a scale for each row)  → npu_quant_matmul · weight_scale · scale of the row + bias

Called as vllm-ascend does (`quantization/methods/w8a8_static.py`, `w8a8_dynamic.py`): scale and offset of the
activations in the activations' dtype, which aclnnAscendQuantV3 demands (ops-nn, aclnn_ascend_quant_v3.cpp,
CheckDtypeCompatible), and weights with the inputs first, dense. Scales of weights stay float32, which the operator
takes for bfloat16 and float16 results alike: for float16 it converts deq_scale itself (op-plugin,
QuantMatmulKernelNpuOpApi.cpp, use_trans_quant_param). Schemas: torch-npu 2.13.0. Axis letters as in `w8a8.py`.
"""

from __future__ import annotations

import torch
from torch import nn

from reprise_engine.attention.npu_chip import Chip
from reprise_engine.errors import UnsupportedModel
from reprise_engine.models.quantization import QuantizationPlan
from reprise_engine.models.w8a8 import W8A8DynamicLinear, W8A8Experts, W8A8Layer, W8A8StaticLinear, constant

MOST_SIZE = 65535
"""Of the last axis of either matrix of npu_quant_matmul."""


class NPUW8A8StaticLinear(W8A8Layer):
    """As W8A8StaticLinear, with x, result, scale and offset in `dtype`."""

    def __init__(self, linear: W8A8StaticLinear, dtype: torch.dtype) -> None:
        super().__init__()
        inputs = linear.weight.shape[1]
        scale_I = linear.input_scale.to(dtype).expand(inputs)
        self.weight = constant(linear.weight.t().contiguous())
        self.input_scale_reciprocal = constant((1 / scale_I).contiguous())
        self.input_offset = constant(linear.input_offset.to(dtype).expand(inputs).contiguous())
        self.deq_scale = linear.deq_scale
        self.quant_bias = linear.quant_bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows_TI = x.reshape(-1, x.shape[-1])
        q_TI = torch.ops.npu.npu_quantize(
            rows_TI, self.input_scale_reciprocal, self.input_offset, torch.qint8, -1, False
        )
        out_TO: torch.Tensor = torch.ops.npu.npu_quant_matmul(
            q_TI, self.weight, self.deq_scale, bias=self.quant_bias, output_dtype=x.dtype
        )
        return out_TO.view(*x.shape[:-1], -1)


class NPUW8A8DynamicLinear(W8A8Layer):
    """As W8A8DynamicLinear, with x and result in bfloat16 or float16."""

    def __init__(self, linear: W8A8DynamicLinear) -> None:
        super().__init__()
        self.weight = constant(linear.weight.t().contiguous())
        self.weight_scale = linear.weight_scale
        self.bias = linear.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out_TO = _dynamic_linear(x.reshape(-1, x.shape[-1]), self.weight, self.weight_scale, self.bias)
        return out_TO.view(*x.shape[:-1], -1)


class NPUW8A8Experts(W8A8Experts):
    """As W8A8Experts, an expert after the other; the matrices have the inputs first."""

    def __init__(self, experts: W8A8Experts) -> None:
        super().__init__(
            gate_up_EOD=experts.gate_up_proj.transpose(1, 2).contiguous(),
            gate_up_scale_EO=experts.gate_up_scale,
            down_EDM=experts.down_proj.transpose(1, 2).contiguous(),
            down_scale_ED=experts.down_scale,
            act_fn=experts.act_fn,
        )

    def linear(self, x_TI: torch.Tensor, weight_OI: torch.Tensor, weight_scale_O: torch.Tensor) -> torch.Tensor:
        # Here `weight_OI` is (I, O).
        return _dynamic_linear(x_TI, weight_OI, weight_scale_O, None)


def _dynamic_linear(
    x_TI: torch.Tensor, weight_IO: torch.Tensor, weight_scale_O: torch.Tensor, bias_O: torch.Tensor | None
) -> torch.Tensor:
    q_TI, scale_T = torch.ops.npu.npu_dynamic_quant(x_TI)
    out_TO: torch.Tensor = torch.ops.npu.npu_quant_matmul(
        q_TI, weight_IO, weight_scale_O, pertoken_scale=scale_T, bias=bias_O, output_dtype=x_TI.dtype
    )
    return out_TO


def check_npu_plan(plan: QuantizationPlan, chip: Chip) -> None:
    """Raises UnsupportedModel for a scheme that `chip` has no operators for."""
    dynamic = [name for name, scheme in plan.schemes.items() if scheme == "W8A8_DYNAMIC"]
    if chip is Chip.P310 and dynamic:
        raise UnsupportedModel(
            f"{dynamic[0]} in {plan.source} is W8A8_DYNAMIC, as are {len(dynamic)} layers; an NPU 310P has no operator "
            "that quantises by token. Quantise with W8A8 (static) and FLOAT layers only."
        )


def use_npu_operators(model: nn.Module, dtype: torch.dtype) -> None:
    """Puts the quantised layers of `model`, still in host memory, on the operators. Mutates this instance only.

    Raises UnsupportedModel for a layer that is too large for them.
    """
    for parent_name, parent in list(model.named_modules()):
        for name, child in list(parent.named_children()):
            replacement = _replacement(f"{parent_name}.{name}".removeprefix("."), child, dtype)
            if replacement is not None:
                setattr(parent, name, replacement)


def _replacement(name: str, module: nn.Module, dtype: torch.dtype) -> nn.Module | None:
    match module:
        case W8A8StaticLinear():
            _check_sizes(name, module.weight)
            return NPUW8A8StaticLinear(module, dtype)
        case W8A8DynamicLinear():
            _check_sizes(name, module.weight)
            return NPUW8A8DynamicLinear(module)
        case W8A8Experts():
            return NPUW8A8Experts(module)
        case _:
            return None


def _check_sizes(name: str, weight_OI: torch.Tensor) -> None:
    if max(weight_OI.shape) > MOST_SIZE:
        outputs, inputs = weight_OI.shape
        raise UnsupportedModel(
            f"{name} is quantised and has {inputs} inputs and {outputs} outputs; npu_quant_matmul takes at most "
            f"{MOST_SIZE} of each. Quantise without this layer (disable_names of msmodelslim)."
        )
