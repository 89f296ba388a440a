"""Layers on the fused operators of an NPU compute what transformers' own do, and nothing else is touched."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from reprise_engine.attention.npu_chip import Chip
from reprise_engine.attention.reference import ReferenceAttention
from reprise_engine.models.loader import LoadedModel
from reprise_engine.models.npu_layers import (
    NPUMLP,
    NPUDecoderLayer,
    NPUExperts,
    NPURMSNorm,
    NPURotary,
    NPUSelfAttention,
    Residual,
    fuse_npu_layers,
)
from reprise_engine.models.npu_saturation import SaturationWatch
from reprise_engine.models.w8a8 import BiasedNorm
from reprise_engine.request import RequestId, SamplingParams
from reprise_engine.runner.kv_cache import allocate_kv_cache
from reprise_engine.runner.model_runner import ModelRunner
from reprise_engine.step import BlockId, ScheduledRequest, Step
from tests.engine.npu_engine import CPU, load, prompt_of
from tests.support.npu import npu_operators

pytestmark = pytest.mark.usefixtures("npu_wheel")

FAMILIES = ("qwen2", "qwen2-sliding", "qwen3", "qwen3-moe", "llama")
SEQUENCES = (prompt_of(40, seed=1), prompt_of(7, seed=2), prompt_of(1, seed=3))


@pytest.fixture(params=Chip)
def chip(request: pytest.FixtureRequest) -> Iterator[Chip]:
    chip: Chip = request.param
    with npu_operators("310P" if chip is Chip.P310 else "910B"):
        yield chip


class Calls(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """Counts the operators of an NPU that are called."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "npu":
            self.count[func._schema.name.removeprefix("npu::npu_")] += 1
        return func(*args, **(kwargs or {}))


def logits_of(model: LoadedModel) -> torch.Tensor:
    """Of every token of all sequences, computed in one step on the reference backend."""
    kv = allocate_kv_cache(
        num_layers=model.spec.num_layers,
        num_blocks=9,
        block_size=8,
        num_kv_heads=model.spec.num_kv_heads,
        head_dim=model.spec.head_dim,
        dtype=model.kv_dtype,
        device=CPU,
    )
    requests, block = [], 0
    for index, sequence in enumerate(SEQUENCES):
        count = -(-len(sequence) // 8)
        requests.append(
            ScheduledRequest(
                request_id=RequestId(str(index)),
                token_ids=sequence,
                start=0,
                block_table=tuple(BlockId(i) for i in range(block, block + count)),
                samples=True,
                sampling=SamplingParams(temperature=0.0),
            )
        )
        block += count
    runner = ModelRunner(model, ReferenceAttention(), kv, seed=0)
    return runner.logits(Step(step_id=1, requests=tuple(requests)), every_token=True)


@pytest.mark.parametrize("family", FAMILIES)
def test_fused_layers_equal_the_definition_s(family: str, chip: Chip) -> None:
    model = load(family, torch.float32)
    expected = logits_of(model)
    fuse_npu_layers(model.module, chip=chip)
    assert all(isinstance(layer, NPUDecoderLayer) for layer in cast(Any, model.module).model.layers)
    assert expected.std() > 0.5, "logits that hardly differ would prove nothing"
    torch.testing.assert_close(logits_of(model), expected, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize(("dtype", "part"), [(torch.float16, 0.02), (torch.bfloat16, 0.15)])
def test_in_16_bits_they_differ_by_rounding_only(dtype: torch.dtype, part: float) -> None:
    """From the same weights in float32, as a part of the logits' standard deviation."""
    model = load("qwen3", dtype)
    cast(Any, model.module).float()
    exact = logits_of(replace(model, kv_dtype=torch.float32))
    cast(Any, model.module).to(dtype)
    with npu_operators("910B"):
        fuse_npu_layers(model.module, chip=Chip.A2)
        error = (logits_of(model) - exact).abs().max() / exact.std()
    assert error < part


def test_each_layer_takes_the_fewest_launches() -> None:
    model = load("qwen3", torch.float32)
    with npu_operators("910B"):
        fuse_npu_layers(model.module, chip=Chip.A2)
        with Calls() as calls:
            logits_of(model)
    # Three layers: the first begins with a plain norm, each norms queries and keys, the last sum is the final norm's.
    assert calls.count == {"rms_norm": 1 + 2 * 3, "add_rms_norm": 3 + 2 + 1, "swiglu": 3, "rotary_mul": 2 * 3}


def test_what_the_310p_does_not_take_stays_torch() -> None:
    """Heads of 32 are not rotated by its operator."""
    model = load("qwen3", torch.float32)
    with npu_operators("310P"):
        fuse_npu_layers(model.module, chip=Chip.P310)
        with Calls() as calls:
            logits_of(model)
    assert calls.count == {"rms_norm": 7, "add_rms_norm": 6, "swiglu": 3}


class OfMatrices(nn.Module):
    """As older versions of transformers compute it."""

    def __init__(self, rotary: Any) -> None:
        super().__init__()
        self.inv_freq, self.attention_scaling = rotary.inv_freq, rotary.attention_scaling

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        angles = (self.inv_freq[None, :, None] @ position_ids[:, None, :].float()).transpose(1, 2)
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


def test_angles_are_no_products_of_matrices() -> None:
    """Which a 310P has in float16 only. `Qwen3RotaryEmbedding` is whatever the installed transformers makes of it."""
    model = load("qwen3", torch.float16)
    inner = cast(Any, model.module).model
    positions = torch.tensor([[0, 1, 2047, 4099, 100_003]])
    plain = inner.rotary_emb
    inner.rotary_emb = type("Qwen3RotaryEmbedding", (OfMatrices,), {})(plain)
    fuse_npu_layers(model.module, chip=Chip.P310)
    assert type(inner.rotary_emb) is NPURotary
    x = torch.zeros(1, dtype=torch.float32)
    for ours, expected in zip(inner.rotary_emb(x, positions), plain(x, positions), strict=True):
        assert torch.equal(ours, expected)


@pytest.mark.parametrize(("chip", "operator"), [(Chip.A2, "rotary_mul"), (Chip.P310, "apply_rotary_pos_emb")])
def test_heads_of_128_are_rotated_by_the_chip_s_own_operator(chip: Chip, operator: str) -> None:
    attention: Any = nn.Module()
    attention.head_dim, attention.scaling, attention.layer_idx = 128, 1.0, 0
    shapes = {"q_proj": 4 * 128, "k_proj": 2 * 128, "v_proj": 2 * 128}
    for name, outputs in shapes.items():
        setattr(attention, name, nn.Linear(64, outputs, bias=False).half())
    attention.o_proj = nn.Identity()
    seen: list[torch.Tensor] = []

    class Backend:
        def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
            seen.extend((q, k, v))
            return q

    angles = torch.linspace(0, 6, 5 * 64).view(1, 5, 64).repeat(1, 1, 2)
    x, cosine, sine = torch.randn(1, 5, 64).half(), angles.cos().half(), angles.sin().half()
    paged = SimpleNamespace(backend=Backend(), kv=[None], metadata=None)
    with torch.inference_mode():
        for rotates in (True, False):
            with npu_operators("310P" if chip is Chip.P310 else "910B"), Calls() as calls:
                layer = NPUSelfAttention(attention, chip=chip, rotates_by_operator=rotates)
                layer(x, (cosine, sine), cast(Any, paged))
            assert set(calls.count) == ({operator} if rotates else set())
    for by_operator, plain in zip(seen[:3], seen[3:], strict=True):
        torch.testing.assert_close(by_operator, plain, atol=4e-3, rtol=4e-3)
    assert (seen[0] - (x[0] @ attention.q_proj.weight.T).unflatten(-1, (4, 128))).abs().max() > 0.1, (
        "nothing was turned"
    )


class Products(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """Rows of the products of matrices."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self.rows: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func._schema.name not in ("aten::mm", "aten::addmm"), "a product that is not looked at"
        if func._schema.name == "aten::linear":
            self.rows.add(args[0].shape[:-1].numel())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama", "qwen3-moe"])
def test_a_310p_multiplies_rows_by_sixteens(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of other numbers it would convert the weights at every call; a mixture's experts get what they get."""
    monkeypatch.setattr(f"{__name__}.SEQUENCES", (prompt_of(21, seed=1), prompt_of(1, seed=3)))
    model = load(family, torch.float32)
    expected = logits_of(model)
    with npu_operators("310P"):
        fuse_npu_layers(model.module, chip=Chip.P310)
        with Products() as products:
            logits = logits_of(model)
    assert logits.shape == expected.shape
    torch.testing.assert_close(logits, expected, atol=2e-4, rtol=1e-4)
    assert any(rows % 16 for rows in products.rows) == (family == "qwen3-moe")
    assert 32 in products.rows, "the head's"


def test_a_310p_tells_once_that_hidden_states_are_cut(caplog: pytest.LogCaptureFixture) -> None:
    for factor, told in ((1.0, []), (3e6, ["Hidden states of layer 0 and 2 others reach 65504"])):
        model = load("llama", torch.float16)
        weight = cast(Any, model.module).model.embed_tokens.weight
        weight.data = weight.data.float().mul_(factor).clamp_(-65504, 65504).half()
        with npu_operators("310P"):
            fuse_npu_layers(model.module, chip=Chip.P310)
            for _ in range(3):
                logits_of(model)
        assert [record.getMessage()[: len(words)] for record, words in zip(caplog.records, told, strict=True)] == told
    with npu_operators("910B"):
        other = load("llama", torch.float16)
        fuse_npu_layers(other.module, chip=Chip.A2)
        assert cast(Any, other.module).model.layers[0]._watch is None


def test_steps_of_decodes_are_not_looked_at() -> None:
    watch = SaturationWatch()
    stream = torch.full((1, 3, 4), 65504.0)
    watch.look(stream, decodes=True)
    assert not watch._peaks
    watch.look(stream, decodes=False)
    assert [peak.item() for peak in watch._peaks] == [65504.0]
    watch.begin_step()
    watch.look(stream, decodes=False)
    assert not watch._peaks, "it looks on after it has told"


def test_scaled_cosines_are_not_given_to_the_operator() -> None:
    """It is specified for cosines from -1 to 1; YaRN's are beyond."""
    model = load("llama", torch.float32)
    cast(Any, model.module).model.rotary_emb.attention_scaling = 1.2
    expected = logits_of(model)
    with npu_operators("910B"):
        fuse_npu_layers(model.module, chip=Chip.A2)
        with Calls() as calls:
            torch.testing.assert_close(logits_of(model), expected, atol=2e-4, rtol=1e-4)
    assert "rotary_mul" not in calls.count


def test_weights_are_joined_and_given_up() -> None:
    model = load("qwen2", torch.float32)
    before = sum(parameter.numel() for parameter in model.module.parameters())
    fuse_npu_layers(model.module, chip=Chip.A2)
    layer = cast(Any, model.module).model.layers[0]
    assert isinstance(layer.self_attn, NPUSelfAttention)
    assert layer.self_attn.qkv_proj is not None
    assert layer.self_attn.qkv_proj.weight.shape == (64 + 2 * 32, 64)
    assert layer.self_attn.qkv_proj.bias.shape == (128,)
    assert layer.mlp.gate_up_proj.weight.shape == (256, 64)
    assert sum(parameter.numel() for parameter in model.module.parameters()) == before
    assert not any("q_proj" in name or "gate_proj" in name for name, _ in model.module.named_parameters())


class Halved(nn.Linear):
    """A linear layer that computes something else, as a quantised one or a part of one does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) / 2


def test_layers_that_are_not_plain_are_left_alone(chip: Chip) -> None:
    model = load("llama", torch.float32)
    layer = cast(Any, model.module).model.layers[1]
    for parent, name in ((layer.self_attn, "k_proj"), (layer.mlp, "up_proj")):
        plain = getattr(parent, name)
        other = Halved(plain.in_features, plain.out_features, bias=False)
        other.weight = plain.weight
        setattr(parent, name, other)
    expected = logits_of(model)
    fuse_npu_layers(model.module, chip=chip)
    layer = cast(Any, model.module).model.layers[1]
    assert layer.self_attn.qkv_proj is None
    assert isinstance(layer.self_attn.k_proj, Halved)
    assert not isinstance(layer.mlp, NPUMLP)
    torch.testing.assert_close(logits_of(model), expected, atol=2e-4, rtol=1e-4)


def test_an_mlp_with_another_activation_is_left_alone(chip: Chip) -> None:
    model = load("llama", torch.float32)
    cast(Any, model.module).model.layers[1].mlp.act_fn = nn.GELU()
    expected = logits_of(model)
    fuse_npu_layers(model.module, chip=chip)
    assert not isinstance(cast(Any, model.module).model.layers[1].mlp, NPUMLP)
    torch.testing.assert_close(logits_of(model), expected, atol=2e-4, rtol=1e-4)


def test_layers_whose_norms_have_a_bias_stay_apart(chip: Chip) -> None:
    """As smoothing leaves them behind in quantised weights: a sum and a norm are then two things."""
    model = load("llama", torch.float32)
    layer = cast(Any, model.module).model.layers[1]
    layer.input_layernorm = BiasedNorm(layer.input_layernorm, torch.randn(64))
    expected = logits_of(model)
    fuse_npu_layers(model.module, chip=chip)
    layers = cast(Any, model.module).model.layers
    assert not any(isinstance(layer, NPUDecoderLayer) for layer in layers)
    assert isinstance(layers[1].input_layernorm.norm, NPURMSNorm)
    torch.testing.assert_close(logits_of(model), expected, atol=2e-4, rtol=1e-4)


def test_another_instance_stays_as_it_was() -> None:
    fused, other = load("qwen3-moe", torch.float32), load("qwen3-moe", torch.float32)
    expected = logits_of(other)
    fuse_npu_layers(fused.module, chip=Chip.A2)
    kinds = {type(module) for module in other.module.modules()}
    assert not kinds & {NPUDecoderLayer, NPUExperts, NPUMLP, NPURMSNorm}
    assert torch.equal(logits_of(other), expected)  # no operator of an NPU is defined here


def test_a_norm_ends_the_residual_stream(chip: Chip) -> None:
    norm = cast(Any, load("llama", torch.float32).module).model.norm
    norm.variance_epsilon = 0.1  # not the operators' own
    stream, delta = torch.randn(2, 1, 5, 64)
    expected = norm(stream + delta)
    fused = NPURMSNorm(norm)
    torch.testing.assert_close(fused(stream), norm(stream))
    torch.testing.assert_close(fused(Residual(stream, delta)), expected)
    normed, total = fused.add(Residual(stream, delta))
    torch.testing.assert_close(normed, expected)
    torch.testing.assert_close(total, stream + delta)
