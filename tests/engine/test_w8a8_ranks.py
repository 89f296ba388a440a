"""W8A8 on several ranks, as threads: layers, models on a CPU and on the emulated operators of an NPU, files, memory.

With processes: test_w8a8_parallel.py.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from reprise_engine.attention.base import AttentionBackend
from reprise_engine.attention.npu import NPUAttention
from reprise_engine.attention.npu_310p import NPU310PAttention
from reprise_engine.attention.npu_chip import Chip
from reprise_engine.attention.reference import ReferenceAttention
from reprise_engine.config import ModelConfig
from reprise_engine.entrypoints.cli import main
from reprise_engine.errors import ModelError
from reprise_engine.models.files import find_weights
from reprise_engine.models.loader import LoadedModel, load_model
from reprise_engine.models.npu_layers import fuse_npu_layers
from reprise_engine.models.npu_w8a8 import NPUW8A8StaticLinear, use_npu_operators
from reprise_engine.models.quantization import read_quantization
from reprise_engine.models.quantized_weights import load_quantized
from reprise_engine.models.spec import read_spec
from reprise_engine.models.w8a8 import W8A8DynamicLinear, W8A8StaticLinear
from reprise_engine.parallel.group import Group
from reprise_engine.parallel.layers import NoHead, connect_ranks
from reprise_engine.parallel.shard import Place
from reprise_engine.parallel.talk import for_others
from reprise_engine.request import RequestId, SamplingParams
from reprise_engine.runner.kv_cache import allocate_kv_cache
from reprise_engine.runner.model_runner import ModelRunner
from reprise_engine.step import BlockId, ScheduledRequest, Step
from tests.engine.npu_engine import BLOCK, CPU, prompt_of
from tests.support.npu import npu_operators
from tests.support.rank_threads import on_ranks
from tests.support.tiny_models import tiny_model_path
from tests.support.w8a8 import WEIGHTS, Range, quantize_model, static_tensors
from tests.support.w8a8_slices import quantise_by_slices

DYNAMIC = ("*",)
STATIC = ()
MIXED = ("*.o_proj", "*.gate_proj", "*.up_proj")


def quantized(
    target: Path, family: str, *, dynamic: tuple[str, ...], dtype: torch.dtype = torch.float32, **options: Any
) -> Path:
    calibration = [list(prompt_of(200, seed=seed)) for seed in (3, 4)]
    source = tiny_model_path(family, dtype=dtype)
    return quantize_model(source, target / "quantised", dynamic=dynamic, calibration=calibration, **options)


def load(folder: Path, place: Place | None = None, *, dtype: Any = "auto") -> LoadedModel:
    return load_model(ModelConfig(model=str(folder), quantization="ascend", dtype=dtype), device=CPU, place=place)


def logits_of(
    model: LoadedModel, *, backend: AttentionBackend | None = None, chip: Chip = Chip.A2, place: Place | None = None
) -> torch.Tensor:
    """(36, V): of the end of a prompt, whose first 64 tokens are computed by a step of their own. Nothing but rank 0
    has any."""
    spec = model.spec
    kv = allocate_kv_cache(
        num_layers=spec.num_layers, num_blocks=1, block_size=BLOCK, num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim, dtype=model.kv_dtype, device=CPU, layout=chip.kv_layout,
    )  # fmt: skip
    runner = ModelRunner(model, backend or ReferenceAttention(), kv, seed=0)
    prompt = prompt_of(100, seed=1)
    logits = torch.empty(0)
    for start, end in ((0, 64), (64, 100)):
        request = ScheduledRequest(
            request_id=RequestId("r"), token_ids=prompt[start:end], start=start, block_table=(BlockId(0),),
            samples=False, sampling=SamplingParams(temperature=0.0),
        )  # fmt: skip
        step = Step(step_id=start, requests=(request,))
        if place is None or place.rank == 0:
            logits = runner.logits(step, every_token=True)
        else:
            runner.run(for_others(step))
    return logits.float()


def logits_of_ranks(folder: Path, size: int) -> torch.Tensor:
    def compute(group: Group) -> torch.Tensor:
        model = load(folder, group.place)
        connect_ranks(model.module, group)
        return logits_of(model, place=group.place)

    return on_ranks(size, compute)[0]


# --- whole models on a CPU


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    ("family", "dtype"),
    [("qwen2", torch.bfloat16), ("qwen3", torch.float32), ("qwen3", torch.bfloat16), ("llama", torch.float32)],
)
def test_static_layers_are_one_process_s_to_the_last_bit(
    family: str, dtype: torch.dtype, size: int, tmp_path: Path
) -> None:
    """There are two key/value heads: of four ranks two hold each."""
    folder = quantized(tmp_path, family, dynamic=STATIC, dtype=dtype)
    assert torch.equal(logits_of_ranks(folder, size), logits_of(load(folder)))


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    ("family", "dynamic"),
    [("qwen2", DYNAMIC), ("qwen3", DYNAMIC), ("qwen3", MIXED), ("qwen3-moe", DYNAMIC), ("qwen3-moe", STATIC)],
)
def test_dynamic_layers_quantise_a_row_by_what_each_rank_has_of_it(
    family: str, dynamic: tuple[str, ...], size: int, tmp_path: Path
) -> None:
    """Experts are dynamic, whatever the attention is. What is added behind a sum is added once."""
    folder = quantized(tmp_path, family, dynamic=dynamic)
    if family == "qwen3":
        replace_tensors(folder, {f"model.layers.{i}.self_attn.o_proj.bias": torch.randn(64) for i in range(3)})
    whole, sliced = load(folder), load(folder)
    quantise_by_slices(sliced.module, size)
    logits, expected = logits_of_ranks(folder, size), logits_of(sliced)
    assert torch.equal(logits, expected)
    # The scales are another number's, so it is not the same; but as near to the float model.
    one = logits_of(whole)
    assert not torch.equal(logits, one)
    if family != "qwen3":  # of which the float model has no such bias
        floats = logits_of(load_model(ModelConfig(model=str(tiny_model_path(family))), device=CPU))
        assert (logits - floats).abs().mean() < 1.2 * (one - floats).abs().mean()


@pytest.mark.parametrize(
    ("family", "floats"), [("qwen3", ("*.o_proj", "*.layers.1.*")), ("qwen3-moe", ("*.experts.*",))]
)
def test_float_layers_between_quantised_ones_are_divided_as_ever(
    family: str, floats: tuple[str, ...], tmp_path: Path
) -> None:
    """Their sums round otherwise, which may be the next int8 in a layer behind them."""
    folder = quantized(tmp_path, family, dynamic=STATIC, floats=("lm_head", *floats))
    one = logits_of(load(folder))
    error = (logits_of_ranks(folder, 4) - one).abs().mean() / one.std()
    assert error < 0.01


# --- on an NPU's operators


def on_npu(model: LoadedModel, chip: Chip, dtype: torch.dtype) -> LoadedModel:
    """As load_model does it on a device; before `connect_ranks`."""
    use_npu_operators(model.module, dtype)
    for parameter in model.module.parameters():
        if parameter.dtype == torch.float32 and parameter.dim() == 2:
            parameter.data = parameter.data.to(dtype)  # embedding and head; scales stay
    for name, module in model.module.named_modules():
        if name.endswith("norm"):
            module.to(dtype)
    fuse_npu_layers(model.module, chip=chip)
    return replace(model, kv_dtype=dtype)


@pytest.mark.usefixtures("npu_wheel")
@pytest.mark.parametrize(
    ("chip", "dtype", "family", "dynamic"),
    [
        (Chip.A2, torch.bfloat16, "qwen3", STATIC),
        (Chip.A2, torch.bfloat16, "qwen3", DYNAMIC),
        (Chip.A2, torch.float16, "llama", MIXED),
        (Chip.P310, torch.float16, "qwen3", STATIC),
    ],
)
def test_two_npus_are_as_near_to_the_cpu_as_one(
    chip: Chip, dtype: torch.dtype, family: str, dynamic: tuple[str, ...], tmp_path: Path
) -> None:
    """16 bits round each part of a sum, so it cannot be one NPU's to the bit."""
    folder = quantized(tmp_path, family, dynamic=dynamic)
    expected = logits_of(load(folder, dtype="float32"))

    def backend() -> AttentionBackend:
        return NPU310PAttention(CPU) if chip is Chip.P310 else NPUAttention(CPU)

    def compute(group: Group) -> torch.Tensor:
        model = on_npu(load(folder, group.place, dtype="float32"), chip, dtype)
        connect_ranks(model.module, group)
        return logits_of(model, backend=backend(), chip=chip, place=group.place)

    with npu_operators("310P" if chip is Chip.P310 else "910B"):
        one = logits_of(on_npu(load(folder, dtype="float32"), chip, dtype), backend=backend(), chip=chip)
        two = on_ranks(2, compute)[0]

    def error(logits: torch.Tensor) -> float:
        return float((logits - expected).abs().mean() / expected.std())

    assert error(two) < max(1.5 * error(one), 0.02), f"{error(two):.3f} of two, {error(one):.3f} of one"


# --- what a rank reads


def read(folder: Path, place: Place | None) -> Any:
    """A rank's module, in host memory and unconnected."""
    files = find_weights(str(folder))
    plan = read_quantization(files, requested="ascend")
    assert plan is not None
    return load_quantized(files, read_spec(files, quantized=True), plan, torch.float32, place=place)


DOWN = "model.layers.0.mlp.down_proj"


@pytest.mark.usefixtures("npu_wheel")
def test_shares_of_a_bias_add_up_to_it_and_leave_16_bits_their_precision(tmp_path: Path) -> None:
    """Of activations that are nearly all above zero the offset is large, and so is what it adds to each part."""
    folder = quantized(tmp_path, "qwen3", dynamic=STATIC)
    torch.manual_seed(0)
    weight_OI, bias_O = torch.randn(64, 128) / 8 + 0.1, torch.randn(64)
    made = static_tensors(weight_OI, bias_O, Range(least=-0.1, greatest=6.0), is_bf16=True)
    assert made["input_offset"].item() < -100
    replace_tensors(folder, {f"{DOWN}.{name}": tensor for name, tensor in made.items()})
    x_TI = torch.rand(9, 128)
    whole = read(folder, None).get_submodule(DOWN)

    def compute(group: Group) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        parent = nn.ModuleDict({"down_proj": read(folder, group.place).get_submodule(DOWN)})
        npu = nn.ModuleDict({"down_proj": copy.deepcopy(parent["down_proj"])})
        use_npu_operators(npu, torch.bfloat16)
        connect_ranks(parent, group)
        connect_ranks(npu, group)
        part_TI = x_TI.chunk(4, 1)[group.place.rank]
        share_O: Any = parent["down_proj"].quant_bias
        return share_O.clone(), parent["down_proj"](part_TI), npu["down_proj"](part_TI.bfloat16())

    with npu_operators("910B"):
        shares, sums, sums_in_16_bits = zip(*on_ranks(4, compute), strict=True)
        expected = NPUW8A8StaticLinear(whole, torch.bfloat16)(x_TI.bfloat16()).float()
    assert torch.equal(torch.stack(shares).sum(0, dtype=torch.int32), made["quant_bias"])
    assert all(torch.equal(sum_TO, whole(x_TI)) for sum_TO in sums)
    # Each part is off by at most 2^-9 of itself, and none is larger than all of them.
    error = (sums_in_16_bits[0].float() - expected).abs().max() / expected.abs().max()
    assert error < 2**-7


def replace_tensors(folder: Path, changes: dict[str, torch.Tensor]) -> None:
    save_file(load_file(folder / WEIGHTS) | changes, folder / WEIGHTS)


@pytest.mark.parametrize(("family", "dynamic"), [("qwen2", STATIC), ("qwen3-moe", DYNAMIC)])
@pytest.mark.parametrize("size", [2, 4])
def test_a_rank_has_and_counts_its_part_only(family: str, dynamic: tuple[str, ...], size: int, tmp_path: Path) -> None:
    folder = quantized(tmp_path, family, dynamic=dynamic)
    whole = {name: tensor for name, tensor in read(folder, None).named_parameters() if tensor.dtype == torch.int8}
    for rank in range(size):
        model = load(folder, Place(rank=rank, size=size))
        for name, tensor in read(folder, Place(rank=rank, size=size)).named_parameters():
            if tensor.dtype == torch.int8:
                copies = 2 if size == 4 and name.split(".")[-2] in ("k_proj", "v_proj") else 1
                assert size * tensor.nbytes == copies * whole[name].nbytes
        # What the plan of the memory counts (memory_facts.py).
        assert model.weight_bytes == sum(tensor.nbytes for tensor in unshared(model.module))
        assert isinstance(model.module.get_submodule("lm_head"), NoHead) == (rank > 0)


def unshared(module: nn.Module) -> list[torch.Tensor]:
    return list(dict.fromkeys(module.parameters()))


@pytest.mark.parametrize("kind", [STATIC, DYNAMIC])
def test_a_quantised_head_is_read_by_the_first_rank_alone(kind: tuple[str, ...], tmp_path: Path) -> None:
    folder = quantized(tmp_path, "llama", dynamic=kind, floats=())
    first, second = (read(folder, Place(rank=rank, size=2)).lm_head for rank in range(2))
    assert isinstance(first, W8A8StaticLinear if kind == STATIC else W8A8DynamicLinear)
    assert first.weight.shape == (400, 64)
    assert isinstance(second, NoHead)


QUERY = "model.layers.1.self_attn.q_proj"


@pytest.mark.parametrize(
    "changes",
    [
        {f"{QUERY}.weight": torch.zeros(160, 64, dtype=torch.int8)},
        {f"{QUERY}.deq_scale": torch.ones(129)},
        {f"{DOWN}.weight": torch.zeros(64, 129, dtype=torch.int8)},
        {f"{DOWN}.deq_scale": torch.ones(32)},
    ],
)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_tensor_that_ranks_could_take_for_theirs_is_refused(
    changes: dict[str, torch.Tensor], rank: int, tmp_path: Path
) -> None:
    """Each rank could find as many rows as it looks for."""
    folder = quantized(tmp_path, "qwen3", dynamic=STATIC)
    replace_tensors(folder, changes)
    with pytest.raises(ModelError, match=next(iter(changes))):
        read(folder, Place(rank=rank, size=2))


def test_check_says_which_numbers_of_ranks_go(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    check = ["check", str(quantized(tmp_path, "qwen3", dynamic=DYNAMIC)), "--quantization", "ascend"]
    assert main([*check, "--tensor-parallel-size", "2"]) == 0
    assert main([*check, "--tensor-parallel-size", "3"]) == 2
    assert "--tensor-parallel-size is 3, but the model has 4 attention heads" in capsys.readouterr().err
