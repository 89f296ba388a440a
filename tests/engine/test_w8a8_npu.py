"""W8A8 on the emulated operators of an NPU: their schemas and rules, the CPU's figures, and whole models on them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn

from reprise_engine.attention.npu import NPUAttention
from reprise_engine.attention.npu_310p import NPU310PAttention
from reprise_engine.attention.npu_chip import Chip
from reprise_engine.attention.reference import ReferenceAttention
from reprise_engine.config import ModelConfig
from reprise_engine.errors import UnsupportedModel
from reprise_engine.models.loader import LoadedModel, load_model
from reprise_engine.models.npu_layers import fuse_npu_layers
from reprise_engine.models.npu_w8a8 import check_npu_plan, use_npu_operators
from reprise_engine.models.quantization import QuantizationPlan, Scheme
from reprise_engine.models.w8a8 import W8A8DynamicLinear, W8A8Experts, W8A8StaticLinear
from reprise_engine.request import RequestId, SamplingParams
from reprise_engine.runner.kv_cache import allocate_kv_cache
from reprise_engine.runner.model_runner import ModelRunner
from reprise_engine.step import BlockId, ScheduledRequest, Step
from tests.engine.npu_engine import BLOCK, CPU, prompt_of
from tests.support.npu import npu_operators
from tests.support.tiny_models import tiny_model_path
from tests.support.w8a8 import Range, dynamic_tensors, quantize_model, static_tensors

pytestmark = pytest.mark.usefixtures("npu_wheel")

HALVES = [torch.bfloat16, torch.float16]


@pytest.fixture
def ascend_910b() -> Iterator[None]:
    with npu_operators("910B"):
        yield


def static_linear(inputs: int, outputs: int) -> W8A8StaticLinear:
    made = static_tensors(
        torch.randn(outputs, inputs) / 8, torch.randn(outputs), Range(least=-3.0, greatest=2.5), is_bf16=True
    )
    return W8A8StaticLinear(
        weight_OI=made["weight"],
        input_scale_1=made["input_scale"],
        input_offset_1=made["input_offset"],
        deq_scale_O=made["deq_scale"],
        quant_bias_O=made["quant_bias"],
    )


def dynamic_linear(inputs: int, outputs: int, *, biased: bool = True) -> W8A8DynamicLinear:
    made = dynamic_tensors(torch.randn(outputs, inputs) / 8)
    return W8A8DynamicLinear(
        weight_OI=made["weight"],
        weight_scale_O=made["weight_scale"].flatten(),
        bias_O=torch.randn(outputs) if biased else None,
    )


def on_npu(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    parent = nn.ModuleDict({"layer": module})
    use_npu_operators(parent, dtype)
    replaced = parent["layer"]
    assert type(replaced) is not type(module)
    return replaced


@pytest.mark.usefixtures("ascend_910b")
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("biased", [True, False])
def test_a_dynamic_layer_is_the_cpu_s_rounded_once(dtype: torch.dtype, biased: bool) -> None:
    torch.manual_seed(0)
    linear = dynamic_linear(96, 40, biased=biased)
    x_1TI = torch.randn(1, 7, 96).to(dtype)
    out_1TO = on_npu(linear, dtype)(x_1TI)
    assert out_1TO.dtype == dtype
    torch.testing.assert_close(out_1TO, linear(x_1TI.float()).to(dtype))


@pytest.mark.usefixtures("ascend_910b")
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_a_static_layer_is_the_cpu_s_but_for_its_scale_s_rounding(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    linear = static_linear(96, 40)
    x_1TI = torch.randn(1, 7, 96).to(dtype)
    out_1TO = on_npu(linear, dtype)(x_1TI)
    assert out_1TO.dtype == dtype
    # 1 / scale is rounded to `dtype`: an activation may be the next int8.
    error = (out_1TO.float() - linear(x_1TI.float())).abs().max() / linear(x_1TI.float()).abs().max()
    assert error < 0.02


@pytest.mark.usefixtures("ascend_910b")
def test_experts_are_the_cpu_s() -> None:
    torch.manual_seed(0)
    gate_up = [dynamic_linear(64, 96, biased=False) for _ in range(4)]
    down = [dynamic_linear(48, 64, biased=False) for _ in range(4)]
    experts = W8A8Experts(
        gate_up_EOD=torch.stack([layer.weight for layer in gate_up]),
        gate_up_scale_EO=torch.stack([layer.weight_scale for layer in gate_up]),
        down_EDM=torch.stack([layer.weight for layer in down]),
        down_scale_ED=torch.stack([layer.weight_scale for layer in down]),
        act_fn=nn.SiLU(),
    )
    x_TD, expert_TA = torch.randn(5, 64).bfloat16(), torch.tensor([[0, 1], [1, 3], [3, 0], [0, 3], [1, 0]])
    weight_TA = torch.rand(5, 2)
    expected_TD = experts(x_TD.float(), expert_TA, weight_TA)
    out_TD = on_npu(experts, torch.bfloat16)(x_TD, expert_TA, weight_TA.bfloat16())
    error = (out_TD.float() - expected_TD).abs().max() / expected_TD.abs().max()
    assert error < 0.03


def test_a_layer_that_is_too_large_for_the_operator_is_named() -> None:
    parent = nn.ModuleDict({"lm_head": W8A8DynamicLinear(
        weight_OI=torch.zeros(65536, 1, dtype=torch.int8), weight_scale_O=torch.ones(65536), bias_O=None
    )})  # fmt: skip
    with pytest.raises(UnsupportedModel, match=r"lm_head .* 65536 outputs; npu_quant_matmul takes at most 65535"):
        use_npu_operators(parent, torch.bfloat16)


def test_a_310p_takes_static_layers_only() -> None:
    def plan(*schemes: Scheme) -> QuantizationPlan:
        return QuantizationPlan(source=Path("q.json"), schemes={f"layer{i}": s for i, s in enumerate(schemes)})

    check_npu_plan(plan("W8A8", "W8A8"), Chip.P310)
    check_npu_plan(plan("W8A8", "W8A8_DYNAMIC"), Chip.A2)
    with pytest.raises(UnsupportedModel, match=r"layer1 in q.json is W8A8_DYNAMIC, .* 310P"):
        check_npu_plan(plan("W8A8", "W8A8_DYNAMIC"), Chip.P310)


# --- whole models


def load(folder: Path) -> LoadedModel:
    return load_model(ModelConfig(model=str(folder), dtype="float32", quantization="ascend"), device=CPU)


def logits_of(model: LoadedModel, backend: Any, chip: Chip, *, dtype: torch.dtype, cached: int) -> torch.Tensor:
    """(100 - cached, V): of a prompt, whose first tokens are computed by a step of their own."""
    spec = model.spec
    kv = allocate_kv_cache(
        num_layers=spec.num_layers, num_blocks=1, block_size=BLOCK, num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim, dtype=dtype, device=CPU, layout=chip.kv_layout,
    )  # fmt: skip
    runner = ModelRunner(model, backend, kv, seed=0)
    prompt = prompt_of(100, seed=1)
    for start, end in ((0, cached), (cached, 100)):
        request = ScheduledRequest(
            request_id=RequestId("r"), token_ids=prompt[start:end], start=start, block_table=(BlockId(0),),
            samples=False, sampling=SamplingParams(temperature=0.0),
        )  # fmt: skip
        logits = runner.logits(Step(step_id=start, requests=(request,)), every_token=True)
    return logits.float()


@pytest.mark.parametrize(
    ("chip", "dtype", "dynamic"),
    [
        (Chip.A2, torch.bfloat16, ("*.o_proj",)),
        (Chip.A2, torch.float16, ("*",)),
        (Chip.P310, torch.float16, ()),
    ],
)
@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_a_model_is_near_the_cpu_s(
    chip: Chip, dtype: torch.dtype, dynamic: tuple[str, ...], family: str, tmp_path: Path
) -> None:
    folder = quantize_model(
        tiny_model_path(family), tmp_path / "q", dynamic=dynamic, calibration=[list(prompt_of(200, seed=2))]
    )
    cpu = load(folder)
    expected = logits_of(cpu, ReferenceAttention(), Chip.A2, dtype=torch.float32, cached=64)
    npu = load(folder)
    use_npu_operators(npu.module, dtype)
    for parameter in npu.module.parameters():
        if parameter.dtype == torch.float32 and parameter.dim() == 2:
            parameter.data = parameter.data.to(dtype)  # embedding and head; scales stay
    cast(Any, npu.module).model.norm.to(dtype)
    with npu_operators("310P" if chip is Chip.P310 else "910B"):
        for name, module in npu.module.named_modules():
            if name.endswith("norm"):
                module.to(dtype)
        fuse_npu_layers(npu.module, chip=chip)
        backend = NPU310PAttention(CPU) if chip is Chip.P310 else NPUAttention(CPU)
        logits = logits_of(npu, backend, chip, dtype=dtype, cached=64)
    error = (logits - expected).abs().mean() / expected.std()
    assert error < 0.15, f"{error:.3f} standard deviations of the logits"
