"""The whole engine on the emulated NPU operators: the reference's tokens, whatever the cache had of a prompt."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import pytest
import torch

from reprise_engine.attention.npu import NPUAttention
from reprise_engine.attention.npu_chip import Chip
from tests.engine.npu_engine import BLOCK, CPU, Judge, make_engine, prompt_of
from tests.support.npu import npu_operators

FAMILIES = ("qwen2", "qwen2-sliding", "qwen3", "qwen3-moe", "llama")
EMULATED = {Chip.A2: "910B", Chip.P310: "310P"}
PROMPT = prompt_of(300, seed=1)
"""Two blocks and 44 tokens."""


@cache
def judge(family: str, dtype: torch.dtype = torch.float32) -> Judge:
    return Judge(family, dtype)


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=Chip)
def chip(request: pytest.FixtureRequest) -> Iterator[Chip]:
    chip: Chip = request.param
    with npu_operators(EMULATED[chip], also_float32=True):
        yield chip


@pytest.fixture
def ascend_910b() -> Iterator[None]:
    with npu_operators("910B", also_float32=True):
        yield


def test_cold_hit_and_partial_blocks(family: str, chip: Chip) -> None:
    engine = make_engine(family, chip)
    [(cold, cached)] = engine.generate([PROMPT])
    judge(family).check(PROMPT, cold)
    assert cached == 0
    # The very same: all but the last token, into a copy of the last block.
    [(again, cached)] = engine.generate([PROMPT])
    judge(family).check(PROMPT, again)
    assert cached == 299
    assert [copy for step in engine.steps for copy in step.copies]
    # A turn later, and one that diverges inside the second block.
    longer = (*PROMPT, *cold, *prompt_of(20, seed=2))
    other = (*PROMPT[:200], *prompt_of(50, seed=3))
    [(turn, turn_cached), (diverged, diverged_cached)] = engine.generate([longer, other])
    judge(family).check(longer, turn)
    judge(family).check(other, diverged)
    assert (turn_cached, diverged_cached) == (304, 200)


def test_chunks_and_decodes_in_one_step(family: str, chip: Chip) -> None:
    """A budget that splits blocks, so that prompts are computed in chunks beside requests that decode already."""
    engine = make_engine(family, chip, max_num_batched_tokens=90)
    prompts = [prompt_of(length, seed=length) for length in (20, 250, 131, 64)]
    judge(family).check_all(prompts, engine.generate(prompts, max_tokens=8))
    lengths = [sorted(len(request.token_ids) for request in step.requests) for step in engine.steps]
    assert any(step[0] == 1 and step[-1] > 1 for step in lengths), "no step was mixed"
    assert any(step[-1] == 1 for step in lengths), "no step only decoded"


def test_the_preempted_go_on_where_they_were(chip: Chip) -> None:
    engine = make_engine("qwen3", chip, num_blocks=4)
    prompts = [prompt_of(125, seed=seed) for seed in (4, 5, 6)]
    judge("qwen3").check_all(prompts, engine.generate(prompts, max_tokens=8))
    starts = [request.start for step in engine.steps for request in step.requests if len(request.token_ids) > 1]
    assert len(starts) > 3, "nobody was preempted"


@pytest.mark.usefixtures("ascend_910b")
@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_a_prefix_shared_by_a_step_is_read_once(family: str) -> None:
    backend = NPUAttention(CPU, least_cascade_bytes=0)
    engine = make_engine(family, Chip.A2, backend=backend)
    engine.generate([PROMPT])
    prompts = [(*PROMPT[: 2 * BLOCK], *prompt_of(10 + seed, seed=seed)) for seed in (7, 8, 9)]
    answers = engine.generate([*prompts, prompt_of(40, seed=10)], max_tokens=6)
    judge(family).check_all([*prompts, prompt_of(40, seed=10)], answers)
    assert [cached for _, cached in answers] == [256, 256, 256, 0]
    plan = backend._plan
    assert plan is not None
    assert plan.cascade is not None
    assert plan.cascade.prefix_lens == [256]


def test_blocks_come_back_from_host_memory(chip: Chip) -> None:
    engine = make_engine("qwen3", chip, num_blocks=4, host_slots=8)
    [(cold, _)] = engine.generate([PROMPT])
    judge("qwen3").check(PROMPT, cold)
    engine.generate([prompt_of(400, seed=11)])
    assert [store for step in engine.steps for store in step.stores], "nothing went down"
    [(again, cached)] = engine.generate([PROMPT])
    judge("qwen3").check(PROMPT, again)
    assert cached == 256
    assert [load for step in engine.steps for load in step.loads], "nothing came up"


@pytest.mark.usefixtures("ascend_910b")
def test_the_judge_sees_a_wrong_block() -> None:
    """What all of these tests rest on: a token that the model would not say fails."""
    engine = make_engine("qwen3", Chip.A2)
    [(cold, _)] = engine.generate([PROMPT])
    wrong = (*PROMPT[:BLOCK], *prompt_of(BLOCK, seed=12), *PROMPT[2 * BLOCK :])
    with pytest.raises(AssertionError, match="falls short of the best logits"):
        judge("qwen3").check(wrong, cold)


@pytest.mark.parametrize("chip", Chip)
def test_in_float16_the_tokens_are_the_reference_s_too(chip: Chip) -> None:
    """Without float32, on what the hardware has: a turn of a conversation beside a prompt of its own."""
    with npu_operators(EMULATED[chip]):
        engine = make_engine("qwen3", chip, dtype=torch.float16, max_num_batched_tokens=150)
        engine.generate([PROMPT])
        prompts = [(*PROMPT[:290], *prompt_of(30, seed=13)), prompt_of(200, seed=14)]
        answers = engine.generate(prompts, max_tokens=8)
    judge("qwen3", torch.float16).check_all(prompts, answers)
    assert [cached for _, cached in answers] == [290, 0]
