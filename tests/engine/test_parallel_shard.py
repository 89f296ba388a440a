"""Which part of which weight a rank holds: tables, and what must hold for every model and number of ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig, OPTConfig, Qwen2Config, Qwen3MoeConfig

from reprise_engine.config import CacheConfig, EngineConfig, ModelConfig
from reprise_engine.errors import ConfigError, InsufficientMemory, UnsupportedModel
from reprise_engine.memory import BlockShape, MemoryFacts
from reprise_engine.models.spec import ModelSpec, _spec_of
from reprise_engine.parallel.shard import Cut, Place, check_size, cut_of, is_zero, kv_heads, rank_spec
from reprise_engine.parallel.sizing import plan_for_ranks

GIB = 2**30
QWEN2 = _spec_of(
    Qwen2Config(hidden_size=896, num_attention_heads=14, num_key_value_heads=2, intermediate_size=4864),
    "Qwen2ForCausalLM",
)
LLAMA = _spec_of(
    LlamaConfig(hidden_size=64, num_attention_heads=8, num_key_value_heads=2, intermediate_size=96), "LlamaForCausalLM"
)
_MIXTURE: dict[str, Any] = {
    "hidden_size": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "num_experts": 4,
    "moe_intermediate_size": 24,
    "intermediate_size": 100,
}
MOE = _spec_of(Qwen3MoeConfig(**_MIXTURE, decoder_sparse_step=1, mlp_only_layers=[]), "Qwen3MoeForCausalLM")


def place(rank: int, size: int) -> Place:
    return Place(rank=rank, size=size)


LAYER = "model.layers.3"


@pytest.mark.parametrize(
    ("name", "shape", "rank", "size", "expected"),
    [
        # 8 heads and 2 key/value heads of 8.
        ("self_attn.q_proj.weight", (64, 64), 1, 2, Cut(0, ((32, 64),))),
        ("self_attn.q_proj.bias", (64,), 1, 4, Cut(0, ((16, 32),))),
        ("self_attn.k_proj.weight", (16, 64), 1, 2, Cut(0, ((8, 16),))),
        # Four ranks on two heads: the first two hold the first.
        ("self_attn.k_proj.weight", (16, 64), 1, 4, Cut(0, ((0, 8),))),
        ("self_attn.v_proj.bias", (16,), 2, 4, Cut(0, ((8, 16),))),
        ("self_attn.o_proj.weight", (64, 64), 1, 2, Cut(1, ((32, 64),))),
        ("mlp.gate_proj.weight", (96, 64), 1, 2, Cut(0, ((48, 96),))),
        ("mlp.up_proj.bias", (96,), 0, 2, Cut(0, ((0, 48),))),
        ("mlp.down_proj.weight", (64, 96), 1, 2, Cut(1, ((48, 96),))),
        # Experts, one matrix each, and all in one tensor.
        ("mlp.experts.7.up_proj.weight", (24, 64), 1, 2, Cut(0, ((12, 24),))),
        ("mlp.experts.7.down_proj.weight", (64, 24), 0, 2, Cut(1, ((0, 12),))),
        ("mlp.experts.gate_up_proj", (4, 48, 64), 1, 2, Cut(1, ((12, 24), (36, 48)))),
        ("mlp.experts.down_proj", (4, 64, 24), 1, 2, Cut(2, ((12, 24),))),
        # Of quantised layers: what there is for each output goes with the outputs.
        ("self_attn.q_proj.weight_scale", (64, 1), 1, 2, Cut(0, ((32, 64),))),
        ("self_attn.k_proj.weight_offset", (16, 1), 3, 4, Cut(0, ((8, 16),))),
        ("self_attn.v_proj.deq_scale", (16,), 0, 4, Cut(0, ((0, 8),))),
        ("mlp.gate_proj.quant_bias", (96,), 1, 2, Cut(0, ((48, 96),))),
        ("mlp.experts.7.up_proj.weight_scale", (24, 1), 1, 2, Cut(0, ((12, 24),))),
        ("self_attn.o_proj.deq_scale", (64,), 1, 2, None),
        ("mlp.down_proj.quant_bias", (64,), 1, 2, None),
        ("mlp.experts.7.down_proj.weight_scale", (64, 1), 1, 2, None),
        ("self_attn.q_proj.input_scale", (1,), 1, 2, None),
        ("mlp.up_proj.input_offset", (1,), 1, 2, None),
        # Whole on every rank.
        ("self_attn.o_proj.bias", (64,), 1, 2, None),
        ("mlp.down_proj.bias", (64,), 1, 2, None),
        ("self_attn.q_norm.weight", (8,), 1, 2, None),
        ("input_layernorm.weight", (64,), 1, 2, None),
        ("mlp.gate.weight", (4, 64), 1, 2, None),
    ],
)
def test_what_a_rank_keeps(name: str, shape: tuple[int, ...], rank: int, size: int, expected: Cut | None) -> None:
    assert cut_of(f"{LAYER}.{name}", shape, LLAMA, place(rank, size)) == expected


def test_embedding_and_head_are_whole() -> None:
    for name in ("model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"):
        assert cut_of(name, (400, 64), LLAMA, place(1, 2)) is None


def test_a_bias_behind_a_sum_is_added_by_the_first_rank_alone() -> None:
    biases = ("self_attn.o_proj.bias", "mlp.down_proj.bias")
    assert [is_zero(f"{LAYER}.{name}", place(0, 2)) for name in biases] == [False, False]
    assert [is_zero(f"{LAYER}.{name}", place(1, 2)) for name in biases] == [True, True]
    assert not is_zero(f"{LAYER}.self_attn.q_proj.bias", place(1, 2))
    assert not is_zero(f"{LAYER}.mlp.experts.down_proj", place(1, 2))


@given(kv=st.sampled_from([1, 2, 4, 8]), size=st.sampled_from([1, 2, 4, 8, 16]), groups=st.integers(1, 4))
def test_every_query_head_finds_its_key_head_on_its_own_rank(kv: int, size: int, groups: int) -> None:
    heads = kv * size * groups
    held = [0] * kv
    for rank in range(size):
        first, last = place(rank, size).part(heads)
        own_first, own_last = kv_heads(kv, place(rank, size))
        wanted = {head * kv // heads for head in range(first, last)}
        assert wanted == set(range(own_first, own_last))
        for head in wanted:
            held[head] += 1
    assert set(held) == {max(1, size // kv)}


def keep(tensor: torch.Tensor, cut: Cut | None) -> torch.Tensor:
    if cut is None:
        return tensor
    return torch.cat([tensor.narrow(cut.axis, first, last - first) for first, last in cut.intervals], dim=cut.axis)


@given(size=st.sampled_from([1, 2, 3, 4, 6]), each=st.integers(1, 3), experts=st.integers(1, 3), seed=st.integers(0, 9))
def test_the_ranks_parts_of_an_mlp_add_up_to_the_whole(size: int, each: int, experts: int, seed: int) -> None:
    hidden, inner = 5, size * each
    torch.manual_seed(seed)
    x = torch.randn(2, hidden, dtype=torch.float64)
    gate, up = torch.randn(2, inner, hidden, dtype=torch.float64).unbind(0)
    down = torch.randn(hidden, inner, dtype=torch.float64)
    whole = (torch.nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T
    merged = torch.cat([gate, up]).expand(experts, -1, -1)
    downs = down.expand(experts, -1, -1)
    apart, together = torch.zeros_like(whole), torch.zeros_like(whole)
    for rank in range(size):
        at = place(rank, size)
        own_gate, own_up, own_down = (
            keep(weight, cut_of(f"{LAYER}.mlp.{name}.weight", weight.shape, MOE, at))
            for name, weight in (("gate_proj", gate), ("up_proj", up), ("down_proj", down))
        )
        apart += (torch.nn.functional.silu(x @ own_gate.T) * (x @ own_up.T)) @ own_down.T
        both = keep(merged, cut_of(f"{LAYER}.mlp.experts.gate_up_proj", merged.shape, MOE, at))
        half_gate, half_up = both[-1].chunk(2)
        last_down = keep(downs, cut_of(f"{LAYER}.mlp.experts.down_proj", downs.shape, MOE, at))[-1]
        together += (torch.nn.functional.silu(x @ half_gate.T) * (x @ half_up.T)) @ last_down.T
    torch.testing.assert_close(apart, whole)
    torch.testing.assert_close(together, whole)


def test_a_rank_sees_a_model_of_its_own_size() -> None:
    part = rank_spec(LLAMA, 4)
    assert (part.num_heads, part.num_kv_heads, part.head_dim, part.intermediate_size) == (2, 1, 8, 24)
    assert part.config.num_attention_heads == 2
    assert part.config.head_dim == 8
    assert LLAMA.config.num_attention_heads == 8
    assert part.kv_bytes_per_token(bytes_per_element=2) * 2 == LLAMA.kv_bytes_per_token(bytes_per_element=2)

    part = rank_spec(MOE, 2)
    assert (part.num_kv_heads, part.expert_size, part.intermediate_size) == (2, 12, 100)
    assert part.config.moe_intermediate_size == 12


@pytest.mark.parametrize(
    ("spec", "size", "words"),
    [
        (QWEN2, 4, "--tensor-parallel-size is 4, but the model has 14 attention heads, which 4 does not divide"),
        (QWEN2, 7, "the model has 2 key/value heads: neither number divides the other. Use one of 1, 2"),
        (
            replace(QWEN2, intermediate_size=4865),
            2,
            "intermediate size of 4865, which 2 does not divide. Use one of 1.",
        ),
        (replace(MOE, expert_size=25), 2, "experts have an intermediate size of 25"),
    ],
)
def test_a_size_that_does_not_divide_the_model_is_refused(spec: ModelSpec, size: int, words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check_size(spec, size)
    assert words in str(refused.value)


def test_sizes_that_divide_the_model_and_models_that_cannot_be_divided() -> None:
    check_size(QWEN2, 1)
    check_size(QWEN2, 2)
    check_size(LLAMA, 8)  # four ranks hold each key head
    check_size(MOE, 8)  # its one odd size, 100, is of dense layers, and it has none
    opt = _spec_of(OPTConfig(hidden_size=64, num_attention_heads=4, ffn_dim=128), "OPTForCausalLM")
    check_size(opt, 1)
    with pytest.raises(UnsupportedModel, match="--tensor-parallel-size is 2, but OPTForCausalLM is served by one rank"):
        check_size(opt, 2)


@pytest.mark.parametrize("size", [0, -1, 17])
def test_a_number_of_ranks_that_no_pod_has_is_refused(size: int) -> None:
    with pytest.raises(ConfigError, match=f"--tensor-parallel-size is {size}; it must be from 1 to 16"):
        EngineConfig(model=ModelConfig(model="m"), tensor_parallel_size=size)


def facts(device: str, **changes: int) -> MemoryFacts:
    sizes = {
        "total": 64 * GIB,
        "free": 63 * GIB,
        "weights": 8 * GIB,
        "process": GIB,
        "activations": GIB,
        "host_tier": 0,
    }
    return MemoryFacts(device=device, limit=None, **(sizes | changes))  # type: ignore[arg-type]


SHAPE = BlockShape(block_size=128, bytes_per_block=GIB // 64, tensor_elements_per_block=2**16)


def blocks(*seen: MemoryFacts, cache: CacheConfig | None = None, max_model_len: int = 128) -> int:
    plan = plan_for_ranks(
        seen,
        SHAPE,
        cache or CacheConfig(gpu_memory_utilization=0.5),
        max_model_len=max_model_len,
        max_model_len_is_explicit=True,
        max_num_seqs=10_000,
    )
    return plan.num_blocks


def test_the_npu_with_the_least_room_decides() -> None:
    assert blocks(facts("npu")) == 22 * 64
    assert blocks(facts("npu"), facts("npu", weights=9 * GIB), facts("npu")) == 21 * 64


def test_ranks_on_a_cpu_share_one_memory() -> None:
    # 32 GiB, of which both ranks' weights, processes and activations take 20; a block takes a part of it on each.
    assert blocks(facts("cpu"), facts("cpu")) == 12 * 64 // 2


def test_a_host_tier_counts_with_the_parts_of_all_ranks() -> None:
    wanted = facts("npu", host_tier=40 * GIB, host_memory=64 * GIB)
    assert blocks(wanted) == 22 * 64
    with pytest.raises(InsufficientMemory, match=r"Rank 0 of 2: --prefix-cache-host-memory: .* ask for 80"):
        blocks(wanted, wanted)


def test_the_rank_that_has_no_room_is_named() -> None:
    with pytest.raises(InsufficientMemory, match=r"^Rank 1 of 2: Not one sequence of max_model_len 128 fits"):
        blocks(facts("npu"), facts("npu", weights=30 * GIB))
