"""Step → tensors → logits → tokens, with steps written by hand; the truth is plain transformers, eager, float32."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import pytest
import torch
from transformers import AutoModelForCausalLM

from reprise_engine.attention.base import AttentionBackend
from reprise_engine.attention.cpu import CPUAttention
from reprise_engine.attention.reference import ReferenceAttention
from reprise_engine.config import DType, ModelConfig, SchedulerConfig
from reprise_engine.errors import NotFinite
from reprise_engine.models.loader import LoadedModel, load_model
from reprise_engine.request import RequestId, SamplingParams
from reprise_engine.runner.batch import build_batch
from reprise_engine.runner.kv_cache import allocate_kv_cache
from reprise_engine.runner.model_runner import ModelRunner
from reprise_engine.runner.profiling import deepest_step, profile_step
from reprise_engine.step import BlockCopy, BlockId, ScheduledRequest, Step
from tests.support.tiny_models import FAMILIES, VOCAB_SIZE, tiny_model_path

CPU = torch.device("cpu")
BLOCK_SIZE = 8
NUM_BLOCKS = 24
GREEDY = SamplingParams(temperature=0.0)


@cache
def loaded(family: str, dtype: DType = "float32") -> LoadedModel:
    return load_model(ModelConfig(model=str(tiny_model_path(family)), dtype=dtype), device=CPU)


def make_runner(model: LoadedModel, backend: AttentionBackend | None = None) -> ModelRunner:
    kv = allocate_kv_cache(
        num_layers=model.spec.num_layers,
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        num_kv_heads=model.spec.num_kv_heads,
        head_dim=model.spec.head_dim,
        dtype=model.kv_dtype,
        device=CPU,
    )
    return ModelRunner(model, backend or CPUAttention(), kv, seed=0)


def tokens(count: int, seed: int = 0) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(3, VOCAB_SIZE, (count,), generator=generator).tolist())


def part(
    name: str, sequence: Sequence[int], table: Sequence[int], *, start: int = 0, samples: bool = True
) -> ScheduledRequest:
    """The part of a request that computes sequence[start:]."""
    return ScheduledRequest(
        request_id=RequestId(name),
        token_ids=tuple(sequence[start:]),
        start=start,
        block_table=tuple(BlockId(block) for block in table),
        samples=samples,
        sampling=GREEDY,
    )


def step(*requests: ScheduledRequest, copies: tuple[BlockCopy, ...] = ()) -> Step:
    return Step(step_id=1, requests=requests, copies=copies)


@cache
def reference_logits(family: str, sequence: tuple[int, ...], weights: torch.dtype = torch.float32) -> torch.Tensor:
    """Float32 logits (T, V) of every position, with weights rounded to `weights`."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model_path(family), attn_implementation="eager", dtype=weights)
    model = model.to(torch.float32)  # type: ignore[arg-type]  # transformers types `to` for its own mixin
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([sequence])).logits[0]
    return logits


# --- the batch


def test_batch_packs_requests_and_maps_positions_to_slots() -> None:
    sequence_a, sequence_b = tokens(11, 1), tokens(20, 2)
    batch = build_batch(
        step(
            part("a", sequence_a, (5, 2), samples=False),
            part("b", sequence_b, (7, 1, 9, 4), start=15),  # one block allocated ahead
            part("c", (42,), (3,)),
        ),
        block_size=8,
        num_blocks=10,
        device=CPU,
    )
    assert batch.input_ids_1T.tolist() == [[*sequence_a, *sequence_b[15:], 42]]
    assert batch.position_ids_1T.tolist() == [[*range(11), *range(15, 20), 0]]
    assert batch.metadata.slot_mapping_T.tolist() == [
        *range(40, 48),
        16,
        17,
        18,
        15,
        *range(72, 76),
        24,
    ]
    assert batch.metadata.block_table_RM.tolist() == [[5, 2, 0], [7, 1, 9], [3, 0, 0]]
    assert batch.metadata.query_lens == (11, 5, 1)
    assert batch.metadata.kv_lens == (11, 20, 1)
    assert batch.logits_rows.tolist() == [15, 16]
    assert [request.request_id for request in batch.sampling] == ["b", "c"]


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (part("r", tokens(9), (0,)), "9 tokens need 2 blocks of 8, but its block table has 1"),
        (part("r", tokens(9), (0, 10)), "outside the pool of 10 blocks"),
        (part("r", tokens(9), (0, -1)), "outside the pool"),
        (part("r", (), (0,)), "0 tokens"),
        (replace(part("r", tokens(2), (0,)), start=-1), "start -1"),
    ],
)
def test_a_step_that_would_leave_its_blocks_is_refused(request_: ScheduledRequest, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_batch(step(request_), block_size=8, num_blocks=10, device=CPU)


def test_a_step_that_writes_a_slot_twice_is_refused() -> None:
    """Two requests may share a block, but only what was in it before the step."""
    shared = (part("a", tokens(20, 1), (4, 1, 5), start=17), part("b", tokens(18, 2), (4, 1, 6), start=16))
    assert len(build_batch(step(*shared), block_size=8, num_blocks=10, device=CPU).metadata.slot_mapping_T) == 5
    twice = (part("a", tokens(12, 1), (4, 1), start=10), part("b", tokens(12, 2), (5, 1), start=11))
    with pytest.raises(ValueError, match="step 1 writes a slot twice"):
        build_batch(step(*twice), block_size=8, num_blocks=10, device=CPU)


def test_an_empty_step_is_refused() -> None:
    with pytest.raises(ValueError, match="no requests"):
        build_batch(step(), block_size=8, num_blocks=10, device=CPU)


def test_kv_cache_is_zero_and_has_the_declared_shape() -> None:
    layers = allocate_kv_cache(
        num_layers=2, num_blocks=3, block_size=4, num_kv_heads=5, head_dim=6, dtype=torch.bfloat16, device=CPU
    )
    assert [layer.key_BSKH.shape for layer in layers] == [torch.Size((3, 4, 5, 6))] * 2
    assert all(not layer.key_BSKH.any() and not layer.value_BSKH.any() for layer in layers)
    layers[0].key_BSKH.fill_(1.0)
    assert not layers[0].value_BSKH.any()
    assert not layers[1].key_BSKH.any()


# --- logits


@pytest.fixture(params=["reference", "cpu"])
def backend(request: pytest.FixtureRequest) -> AttentionBackend:
    return ReferenceAttention() if request.param == "reference" else CPUAttention()


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_transformers_over_a_mixed_step(family: str, backend: AttentionBackend) -> None:
    """Cold prefill, a chunk that starts inside a block, and a decode, in one forward pass."""
    a, b, c = tokens(30, 1), tokens(45, 2), tokens(17, 3)
    runner = make_runner(loaded(family), backend)
    runner.run(step(part("b", b[:21], (9, 3, 6)), part("c", c[:16], (2, 8))))
    logits = runner.logits(
        step(
            part("b", b, (9, 3, 6, 1, 0, 4), start=21),
            part("a", a, (10, 11, 12, 13)),
            part("c", c, (2, 8, 7), start=16),
        )
    )
    expected = torch.stack([reference_logits(family, sequence)[-1] for sequence in (b, a, c)])
    assert expected.std() > 0.5, "logits that hardly differ would prove nothing"
    torch.testing.assert_close(logits, expected, atol=2e-4, rtol=1e-4)


def test_only_requests_that_sample_get_a_token() -> None:
    runner = make_runner(loaded("qwen3"))
    a, b = tokens(10, 1), tokens(9, 2)
    result = runner.run(step(part("a", a, (0, 1), samples=False), part("b", b, (2, 3))))
    assert result.step_id == 1
    assert dict(result.sampled) == {"b": int(reference_logits("qwen3", b)[-1].argmax())}
    assert result.logprobs == {}
    assert runner.run(step(part("a", a, (0, 1), samples=False))).sampled == {}


def test_logprobs_come_with_the_token() -> None:
    runner = make_runner(loaded("qwen3"))
    a = tokens(10, 1)
    request = replace(part("a", a, (0, 1)), sampling=SamplingParams(temperature=0.0, logprobs=2))
    result = runner.run(step(request))
    expected = reference_logits("qwen3", a)[-1].log_softmax(-1)
    assert result.logprobs[RequestId("a")].logprob == pytest.approx(expected.max().item(), abs=1e-4)
    assert result.logprobs[RequestId("a")].top[1][1] == pytest.approx(expected.topk(2).values[1].item(), abs=1e-4)


def test_a_copied_block_serves_a_second_request_and_the_source_stays() -> None:
    """Copy on write: b shares a's first 16 tokens, its last shared block is copied and continued."""
    runner = make_runner(loaded("qwen3"))
    a = tokens(16, 1)
    b = (*a[:12], *tokens(9, 5))
    runner.run(step(part("a", a, (0, 1))))
    logits = runner.logits(step(part("b", b, (0, 5, 6), start=12), copies=(BlockCopy(BlockId(1), BlockId(5)),)))
    torch.testing.assert_close(logits[0], reference_logits("qwen3", b)[-1], atol=2e-4, rtol=1e-4)
    # a's own block was not written: it decodes as if b had never been.
    longer = (*a, 7)
    logits = runner.logits(step(part("a", longer, (0, 1, 2), start=16)))
    torch.testing.assert_close(logits[0], reference_logits("qwen3", longer)[-1], atol=2e-4, rtol=1e-4)


def test_a_copy_outside_the_pool_is_refused() -> None:
    runner = make_runner(loaded("qwen3"))
    bad = BlockCopy(BlockId(0), BlockId(NUM_BLOCKS))
    with pytest.raises(ValueError, match=f"copy of block 0 to {NUM_BLOCKS}"):
        runner.run(step(part("a", tokens(3), (0,)), copies=(bad,)))


@pytest.mark.parametrize("family", ["qwen2", "qwen3-moe", "opt"])
def test_in_bfloat16_warm_equals_cold(family: str) -> None:
    """The KV is rounded once: how the prompt was cut into steps adds nothing to that."""
    sequence = tokens(60, 4)
    model = loaded(family, "bfloat16")
    cold = make_runner(model).logits(step(part("a", sequence, range(8))))
    runner = make_runner(model)
    runner.run(step(part("a", sequence[:13], range(8))))
    runner.run(step(part("a", sequence[:40], range(8), start=13)))
    warm = runner.logits(step(part("a", sequence, range(8), start=40)))
    # The KV of a token may round to the neighbouring bfloat16 where float32 sums differ in their last bit.
    torch.testing.assert_close(warm, cold, atol=0.02 * cold.std().item(), rtol=0.0)


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_weights_are_computed_with_in_float32(family: str) -> None:
    """With a float32 pool the rounding of the weights is all there is, and the reference rounds them too."""
    sequence = tokens(60, 4)
    model = replace(loaded(family, "bfloat16"), kv_dtype=torch.float32)
    logits = make_runner(model).logits(step(part("a", sequence, range(8))))
    expected = reference_logits(family, sequence, torch.bfloat16)[-1]
    torch.testing.assert_close(logits[0], expected, atol=2e-4, rtol=1e-4)


def test_profile_step_fills_the_batch_and_fits_its_blocks() -> None:
    config = SchedulerConfig(max_num_seqs=7, max_num_batched_tokens=100)
    profile, num_blocks = profile_step(config, block_size=8, max_model_len=64)
    assert profile.num_tokens == 100
    assert len(profile.requests) == 7
    assert all(request.samples for request in profile.requests)
    batch = build_batch(profile, block_size=8, num_blocks=num_blocks, device=CPU)
    assert len(set(batch.metadata.slot_mapping_T.tolist())) == 100
    short, _ = profile_step(SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=100), block_size=8, max_model_len=30)
    assert max(len(request.token_ids) for request in short.requests) <= 30


def test_the_deepest_step_ends_the_longest_prompt() -> None:
    config = SchedulerConfig(max_num_seqs=7, max_num_batched_tokens=100)
    for max_model_len, new, num_blocks in ((1000, 100, 13), (104, 100, 13), (100, 100, 13), (60, 60, 8)):
        deepest, needed = deepest_step(config, block_size=8, max_model_len=max_model_len)
        batch = build_batch(deepest, block_size=8, num_blocks=needed, device=CPU)
        assert (batch.metadata.query_lens, batch.metadata.kv_lens) == ((new,), (max_model_len,))
        assert needed == num_blocks, "what its new tokens need, however long the prompt"


# --- what is no number


def spoiled(model: LoadedModel, token: int, value: float) -> LoadedModel:
    """Its embedding of one token, untied from the head, has a number that float16 would not hold."""
    module = copy.deepcopy(model.module)
    weight = module.get_input_embeddings().weight
    assert isinstance(weight, torch.Tensor)
    weight = weight.clone()
    weight[token, 0] = value
    module.get_input_embeddings().weight = torch.nn.Parameter(weight, requires_grad=False)
    return replace(model, module=module)


def test_a_request_without_finite_logits_ends_and_the_others_go_on() -> None:
    model = loaded("qwen3")
    sequence_a, sequence_b = tokens(11, 1), tokens(9, 2)
    assert sequence_b[4] not in sequence_a
    drawn = replace(part("b", sequence_b, (7, 1)), sampling=SamplingParams(temperature=1.0, top_p=0.9, logprobs=2))
    result = make_runner(spoiled(model, sequence_b[4], math.inf)).run(step(part("a", sequence_a, (5, 2)), drawn))
    assert set(result.errors) == {"b"}
    assert isinstance(result.errors[RequestId("b")], NotFinite)
    assert "no finite numbers" in str(result.errors[RequestId("b")])
    alone = make_runner(model).run(step(part("a", sequence_a, (5, 2))))
    assert result.sampled[RequestId("a")] == alone.sampled[RequestId("a")]
    assert not alone.errors


def test_a_prompt_without_finite_log_probabilities_is_told_before_it_samples() -> None:
    model = loaded("qwen3")
    sequence = tokens(9, 2)
    chunk = replace(part("b", sequence, (7, 1), samples=False), scored=sequence[1:])
    result = make_runner(spoiled(model, sequence[4], math.nan)).run(step(chunk))
    assert isinstance(result.errors[RequestId("b")], NotFinite)
    assert not make_runner(model).run(step(chunk)).errors
