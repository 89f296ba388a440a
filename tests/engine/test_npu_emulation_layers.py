"""The emulated norms, activation, positions and int8 operators compute their documented formulas."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.engine import npu_calls as calls
from tests.engine.npu_calls import HALF, ints


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_norms_are_their_formula(npu: Any, dtype: torch.dtype) -> None:
    x, residual, gamma = (torch.randn(*shape).to(dtype) for shape in ((3, 5, 32), (3, 5, 32), (32,)))
    out, rstd = npu.npu_rms_norm(x, gamma, 1e-5)
    torch.testing.assert_close(out, F.rms_norm(x.float(), (32,), gamma.float(), 1e-5).to(dtype))
    torch.testing.assert_close(rstd, 1 / (x.float().square().mean(-1, keepdim=True) + 1e-5).sqrt())
    normed, _, total = npu.npu_add_rms_norm(x, residual, gamma, 1e-5)
    assert torch.equal(total, x + residual)
    assert torch.equal(normed, npu.npu_rms_norm(x + residual, gamma, 1e-5)[0])


def test_swiglu_gates_the_second_half_with_the_first(npu: Any) -> None:
    x = torch.randn(3, 8, 10)
    torch.testing.assert_close(npu.npu_swiglu(x), F.silu(x[..., :5]) * x[..., 5:])
    torch.testing.assert_close(npu.npu_swiglu(x, 1), F.silu(x[:, :4]) * x[:, 4:])


@pytest.mark.parametrize("mode", ["half", "interleave"])
def test_rotary_turns_pairs_by_their_angle(npu: Any, mode: str) -> None:
    """As multiplication of complex numbers."""
    x = torch.randn(1, 5, 3, 32)
    angles = torch.rand(1, 5, 1, 16) * 6
    pairs = torch.complex(x[..., :16], x[..., 16:]) if mode == "half" else torch.view_as_complex(x.view(1, 5, 3, 16, 2))
    turned = pairs * torch.polar(torch.ones(()), angles)
    joined = torch.cat((turned.real, turned.imag), -1) if mode == "half" else torch.view_as_real(turned).flatten(-2)
    full = torch.cat((angles, angles), -1) if mode == "half" else angles.repeat_interleave(2, -1)
    torch.testing.assert_close(npu.npu_rotary_mul(x, full.cos(), full.sin(), mode), joined, atol=1e-5, rtol=1e-5)


def test_queries_and_keys_are_rotated_in_place(npu: Any) -> None:
    call = calls.apply_rotary()
    expected = [npu.npu_rotary_mul(call[name].clone(), call["cos"], call["sin"]) for name in ("query", "key")]
    rotated = npu.npu_apply_rotary_pos_emb(**call)
    for name, result, right in zip(("query", "key"), rotated, expected, strict=True):
        assert torch.equal(result, right)
        assert torch.equal(call[name], right)


def test_rotary_by_a_matrix(npu: Any) -> None:
    call = calls.rotary()
    halves = torch.zeros(64, 64, dtype=HALF)
    halves[32:, :32], halves[:32, 32:] = -torch.eye(32, dtype=HALF), torch.eye(32, dtype=HALF)
    assert torch.equal(npu.npu_rotary_mul(**call, rotate=halves), npu.npu_rotary_mul(**call))


def test_quantize_rounds_to_even_and_clamps(npu: Any) -> None:
    x = torch.tensor([[0.5, 1.5, -2.5, 500.0]])
    one = torch.ones(1)
    assert npu.npu_quantize(x, one, None, torch.qint8, -1, False).tolist() == [[0, 2, -2, 127]]
    assert npu.npu_quantize(x, 2 * one, 3 * one, torch.qint8, -1, False).tolist() == [[4, 6, -2, 127]]
    divided = npu.npu_quantize(x, 2 * one, ints(3), torch.quint8, -1, True)
    assert (divided.tolist(), divided.dtype) == ([[3, 4, 2, 253]], torch.uint8)


def test_dynamic_quantisation_of_the_pages_example(npu: Any) -> None:
    """torch_npu-npu_dynamic_quant.md, lines 72 to 83."""
    x = torch.tensor([[0.7261, 0.3726, 0.9126], [0.9023, 0.9990, 0.1279], [0.8628, 0.6240, 0.9028]]).half()
    quantised, scale = npu.npu_dynamic_quant(x)
    assert quantised.tolist() == [[101, 52, 127], [115, 127, 16], [121, 88, 127]]
    torch.testing.assert_close(scale, torch.tensor([0.0072, 0.0079, 0.0071]), atol=5e-5, rtol=0)
    smoothed, _ = npu.npu_dynamic_quant(x, smooth_scales=torch.tensor([1.0, 1.0, 0.0]).half())
    assert smoothed[:, 2].tolist() == [0, 0, 0]
    assert npu.npu_dynamic_quant(torch.zeros(2, 3, dtype=HALF))[0].tolist() == [[0, 0, 0]] * 2


def test_int8_matmul_is_exact_before_its_scales(npu: Any) -> None:
    call = calls.matmul()
    total = call["x1"].long() @ call["x2"].long()
    scaled = total.float() * call["scale"] * call["pertoken_scale"].unsqueeze(-1)
    torch.testing.assert_close(npu.npu_quant_matmul(**call), scaled.bfloat16())
    bias = torch.arange(48, dtype=torch.int32)
    whole = npu.npu_quant_matmul(**calls.matmul(pertoken_scale=None, output_dtype=torch.int32, bias=bias))
    assert torch.equal(whole, (total + bias).int())
    added = npu.npu_quant_matmul(**calls.matmul(bias=bias.float()))
    torch.testing.assert_close(added, (scaled + bias).bfloat16())


def test_a_scale_without_tokens_loses_its_low_bits(npu: Any) -> None:
    """aclnnTransQuantParam keeps 19 bits of a float32: 1/3 becomes smaller by 2⁻¹³ or so, bfloat16 results aside."""
    third = torch.full((48,), 1 / 3)
    call = calls.matmul(scale=third, pertoken_scale=None)
    whole = npu.npu_quant_matmul(**call)
    cut = npu.npu_quant_matmul(**call | {"output_dtype": torch.float16})
    total = (call["x1"].long() @ call["x2"].long()).float()
    assert torch.equal(whole, (total * third).bfloat16())
    assert torch.equal(cut, (total * 0.333251953125).half())
