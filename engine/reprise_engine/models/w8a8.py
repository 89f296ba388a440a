"""Linear layers with int8 weights and int8 activations, on a CPU: exact sums in int32, all else in float32.

    W8A8          q = round(x / input_scale + input_offset)         y = (q · wᵀ + quant_bias) · deq_scale
    W8A8_DYNAMIC  q = round(x / s), s = max |x| of the row / 127    y = q · wᵀ · weight_scale · s + bias

q is held to int8; rounding is to the nearest, ties to even. That is the format's own definition (msmodelslim,
docs/zh/user_guide/quantization_formats/ascendv1.md) and what the NPU's operators compute (`npu_w8a8.py`). A static
layer's bias is part of its quant_bias. Sums of integers are exact in every order, and all else is done element by
element, so a row's result does not depend on which other rows share the step.

Axis letters: T tokens, I inputs, O outputs, E experts, M inner size of an expert, D hidden size, A experts a token.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import nn

_INT8_MIN, _INT8_MAX = -128, 127
# Inputs whose products, of at most 2^14, come to at most 2^24: float32 holds all integers up to there.
_EXACT_INPUTS = 1024
# Of torch's int8 product: with one input torch 2.13 returns memory that it has not written.
_FEWEST_INPUTS = 16


class W8A8Layer(nn.Module):
    """What the quantised modules have in common: nothing but that other ways to compute leave them alone."""


class W8A8StaticLinear(W8A8Layer):
    """`weight` (O, I) int8; `input_scale`, `input_offset` (1,), `deq_scale` (O,) float32; `quant_bias` (O,) int32.

    Of several ranks that have some inputs each, `sum_over` adds up the integers, so every number of them computes the
    same to the last bit.
    """

    def __init__(
        self,
        *,
        weight_OI: torch.Tensor,
        input_scale_1: torch.Tensor,
        input_offset_1: torch.Tensor,
        deq_scale_O: torch.Tensor,
        quant_bias_O: torch.Tensor,
    ) -> None:
        super().__init__()
        self.weight = constant(weight_OI)
        self.input_scale = constant(input_scale_1)
        self.input_offset = constant(input_offset_1)
        self.deq_scale = constant(deq_scale_O)
        self.quant_bias = constant(quant_bias_O)
        self._total: Callable[[torch.Tensor], torch.Tensor] | None = None

    def sum_over(self, total: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """`total` gets this rank's sums, (T, O) int32, with its share of quant_bias, and returns those of all ranks."""
        self._total = total

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (..., I) float32. Returns (..., O) float32."""
        rows_TI = x.reshape(-1, x.shape[-1])
        sums_TO = int8_matmul(quantize_static(rows_TI, self.input_scale, self.input_offset), self.weight)
        sums_TO += self.quant_bias
        if self._total is not None:
            sums_TO = self._total(sums_TO)
        out_TO = sums_TO.to(torch.float32).mul_(self.deq_scale)
        return out_TO.view(*x.shape[:-1], -1)


class W8A8DynamicLinear(W8A8Layer):
    """`weight` (O, I) int8; `weight_scale` (O,) float32; `bias` (O,) float32 or None."""

    def __init__(self, *, weight_OI: torch.Tensor, weight_scale_O: torch.Tensor, bias_O: torch.Tensor | None) -> None:
        super().__init__()
        self.weight = constant(weight_OI)
        self.weight_scale = constant(weight_scale_O)
        self.bias = None if bias_O is None else constant(bias_O)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (..., I) float32. Returns (..., O) float32."""
        out_TO = _dynamic_linear(x.reshape(-1, x.shape[-1]), self.weight, self.weight_scale)
        if self.bias is not None:
            out_TO += self.bias
        return out_TO.view(*x.shape[:-1], -1)


class W8A8Experts(W8A8Layer):
    """The experts of a mixture, W8A8_DYNAMIC: gate and up (E, 2·M, D), down (E, D, M), each with a scale an output.

    Replaces the `experts` module of transformers' Qwen3-MoE block and takes the same arguments.
    """

    def __init__(
        self,
        *,
        gate_up_EOD: torch.Tensor,
        gate_up_scale_EO: torch.Tensor,
        down_EDM: torch.Tensor,
        down_scale_ED: torch.Tensor,
        act_fn: nn.Module,
    ) -> None:
        super().__init__()
        self.gate_up_proj = constant(gate_up_EOD)
        self.gate_up_scale = constant(gate_up_scale_EO)
        self.down_proj = constant(down_EDM)
        self.down_scale = constant(down_scale_ED)
        self.act_fn = act_fn

    def linear(self, x_TI: torch.Tensor, weight_OI: torch.Tensor, weight_scale_O: torch.Tensor) -> torch.Tensor:
        """x (T, I) times one expert's matrix: what differs from device to device."""
        return _dynamic_linear(x_TI, weight_OI, weight_scale_O)

    def forward(self, x_TD: torch.Tensor, expert_TA: torch.Tensor, weight_TA: torch.Tensor) -> torch.Tensor:
        out_TD = torch.zeros_like(x_TD)
        experts_TA = expert_TA.cpu()  # one wait for a device a layer, not one an expert
        for expert in torch.unique(experts_TA).tolist():
            token, choice = (index.to(x_TD.device) for index in torch.where(experts_TA == expert))
            rows_TO = self.linear(x_TD[token], self.gate_up_proj[expert], self.gate_up_scale[expert])
            gate_TM, up_TM = rows_TO.chunk(2, dim=-1)
            hidden_TD = self.linear(self.act_fn(gate_TM) * up_TM, self.down_proj[expert], self.down_scale[expert])
            out_TD.index_add_(0, token, (hidden_TD * weight_TA[token, choice, None]).to(out_TD.dtype))
        return out_TD


class BiasedNorm(nn.Module):
    """A norm with a bias behind it, which smoothing of outliers leaves (msmodelslim's m4; vllm-ascend adds it too)."""

    def __init__(self, norm: nn.Module, bias_D: torch.Tensor) -> None:
        super().__init__()
        self.norm = norm
        self.bias = constant(bias_D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.norm(x)
        return out + self.bias


def constant(tensor: torch.Tensor) -> nn.Parameter:
    """A parameter that is not trained: it moves, and is counted, with the weights."""
    return nn.Parameter(tensor, requires_grad=False)


def quantize_static(x_TI: torch.Tensor, scale_1: torch.Tensor, offset_1: torch.Tensor) -> torch.Tensor:
    """(T, I) int8."""
    return _to_int8(torch.div(x_TI, scale_1).add_(offset_1))


def quantize_dynamic(x_TI: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(T, I) int8, and the scale of each row, (T, 1) float32: 0 for a row of zeros."""
    scale_T1 = x_TI.abs().amax(-1, keepdim=True) / _INT8_MAX
    # A row of zeros has no scale; whatever divides it leaves zeros.
    divisor_T1 = torch.where(scale_T1 == 0, torch.ones_like(scale_T1), scale_T1)
    return _to_int8(x_TI / divisor_T1), scale_T1


def _to_int8(x_TI: torch.Tensor) -> torch.Tensor:
    return x_TI.round_().clamp_(_INT8_MIN, _INT8_MAX).to(torch.int8)


def _dynamic_linear(x_TI: torch.Tensor, weight_OI: torch.Tensor, weight_scale_O: torch.Tensor) -> torch.Tensor:
    q_TI, scale_T1 = quantize_dynamic(x_TI)
    return int8_matmul(q_TI, weight_OI).to(torch.float32).mul_(weight_scale_O).mul_(scale_T1)


def int8_matmul(x_TI: torch.Tensor, weight_OI: torch.Tensor) -> torch.Tensor:
    """int8 times int8 transposed. Returns the exact sums, (T, O) int32."""
    if x_TI.shape[1] >= _FEWEST_INPUTS and _int_mm_is_exact():
        return torch._int_mm(x_TI, weight_OI.t())
    return matmul_in_floats(x_TI, weight_OI)


def matmul_in_floats(x_TI: torch.Tensor, weight_OI: torch.Tensor) -> torch.Tensor:
    """The same sums by float32 products, so few inputs at a time that each sum is an integer that float32 holds."""
    sums_TO = torch.zeros((x_TI.shape[0], weight_OI.shape[0]), dtype=torch.int32)
    for start in range(0, x_TI.shape[1], _EXACT_INPUTS):
        part = slice(start, start + _EXACT_INPUTS)
        sums_TO += (x_TI[:, part].float() @ weight_OI[:, part].float().t()).to(torch.int32)
    return sums_TO


@cache
def _int_mm_is_exact() -> bool:
    """Whether this processor's int8 product keeps every sum: without VNNI, oneDNN adds pairs of products in 16 bits,
    which the largest values overflow."""
    values = torch.tensor([_INT8_MIN, _INT8_MAX], dtype=torch.int8)
    weight_OI = values.repeat_interleave(96).repeat(2, 1).reshape(-1, 96)
    for rows in (1, 40):
        x_TI = values[torch.arange(rows) % 2, None].expand(rows, 96).contiguous()
        if not torch.equal(torch._int_mm(x_TI, weight_OI.t()), matmul_in_floats(x_TI, weight_OI)):
            return False
    return True
