"""The whole engine on the emulated NPU operators: the reference's tokens, whatever the cache had of a prompt."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch

from reprise_engine.attention.npu import NPUAttention
from reprise_engine.attention.npu_chip import Chip
from tests.engine.npu_engine import BLOCK, CPU, Engine, Judge, make_engine, prompt_of
from tests.support.npu import npu_operators

pytestmark = pytest.mark.usefixtures("npu_wheel")

PROMPT = prompt_of(300, seed=1)
"""Two blocks and 44 tokens."""


@dataclass(frozen=True)
class Setting:
    """A model on a chip. In float32 tokens must be the judge's to the bit; a 310P's pool holds float16 only."""

    family: str
    chip: Chip = Chip.A2
    dtype: torch.dtype = torch.float32

    @contextmanager
    def engine(self, **options: Any) -> Iterator[Engine]:
        name = "310P" if self.chip is Chip.P310 else "910B"
        with npu_operators(name, also_float32=self.dtype == torch.float32):
            backend = options.pop("backend", lambda: None)()
            yield make_engine(self.family, self.chip, dtype=self.dtype, backend=backend, **options)

    @property
    def judge(self) -> Judge:
        return _judge(self.family, self.dtype)

    def __str__(self) -> str:
        return f"{self.family} on {self.chip.value}"


@cache
def _judge(family: str, dtype: torch.dtype) -> Judge:
    return Judge(family, dtype)


QWEN3_310P = Setting("qwen3", Chip.P310, torch.float16)
SLIDING_310P = Setting("qwen2-sliding", Chip.P310, torch.float16)
MIXTURE_310P = Setting("qwen3-moe", Chip.P310, torch.float16)
"""Its experts' rows, 2 · 48, are what npu_swiglu does not take there."""


@pytest.mark.parametrize(
    "setting",
    [
        Setting("qwen2"),
        Setting("qwen2-sliding"),
        Setting("qwen3"),
        Setting("qwen3-moe"),
        Setting("llama"),
        QWEN3_310P,
        SLIDING_310P,
        MIXTURE_310P,
    ],
    ids=str,
)
def test_cold_hit_and_partial_blocks(setting: Setting) -> None:
    judge = setting.judge
    with setting.engine() as engine:
        [(cold, cached)] = engine.generate([PROMPT])
        judge.check(PROMPT, cold)
        assert cached == 0
        # The very same: all but the last token, into a copy of the last block.
        [(again, cached)] = engine.generate([PROMPT])
        judge.check(PROMPT, again)
        assert cached == 299
        assert [copy for step in engine.steps for copy in step.copies]
        # A turn later, and one that diverges inside the second block.
        longer = (*PROMPT, *cold, *prompt_of(20, seed=2))
        other = (*PROMPT[:200], *prompt_of(50, seed=3))
        [(turn, turn_cached), (diverged, diverged_cached)] = engine.generate([longer, other])
        judge.check(longer, turn)
        judge.check(other, diverged)
        assert (turn_cached, diverged_cached) == (304, 200)


@pytest.mark.parametrize(
    "setting", [Setting("qwen3-moe"), Setting("qwen2-sliding"), Setting("llama", Chip.P310, torch.float16)], ids=str
)
def test_chunks_and_decodes_in_one_step(setting: Setting) -> None:
    """A budget that splits blocks, so that prompts are computed in chunks beside requests that decode already."""
    with setting.engine(max_num_batched_tokens=90) as engine:
        prompts = [prompt_of(length, seed=length) for length in (20, 250, 131, 64)]
        setting.judge.check_all(prompts, engine.generate(prompts, max_tokens=8))
    lengths = [sorted(len(request.token_ids) for request in step.requests) for step in engine.steps]
    assert any(step[0] == 1 and step[-1] > 1 for step in lengths), "no step was mixed"
    assert any(step[-1] == 1 for step in lengths), "no step only decoded"


@pytest.mark.parametrize("setting", [Setting("qwen3"), QWEN3_310P], ids=str)
def test_the_preempted_go_on_where_they_were(setting: Setting) -> None:
    with setting.engine(num_blocks=4) as engine:
        prompts = [prompt_of(125, seed=seed) for seed in (4, 5, 6)]
        setting.judge.check_all(prompts, engine.generate(prompts, max_tokens=8))
    prefills = [request for step in engine.steps for request in step.requests if len(request.token_ids) > 1]
    assert len(prefills) > 3, "nobody was preempted"


def test_a_prefix_shared_by_a_step_is_read_once() -> None:
    setting = Setting("llama")
    backends: list[NPUAttention] = []

    def backend() -> NPUAttention:
        backends.append(NPUAttention(CPU, least_cascade_bytes=0))
        return backends[0]

    with setting.engine(backend=backend) as engine:
        engine.generate([PROMPT])
        prompts = [(*PROMPT[: 2 * BLOCK], *prompt_of(10 + seed, seed=seed)) for seed in (7, 8, 9)]
        prompts.append(prompt_of(40, seed=10))
        answers = engine.generate(prompts, max_tokens=6)
    setting.judge.check_all(prompts, answers)
    assert [cached for _, cached in answers] == [256, 256, 256, 0]
    plan = backends[0]._plan
    assert plan is not None
    assert plan.cascade is not None
    assert plan.cascade.prefix_lens == [256]


@pytest.mark.parametrize("setting", [Setting("qwen3"), QWEN3_310P], ids=str)
def test_blocks_come_back_from_host_memory(setting: Setting) -> None:
    with setting.engine(num_blocks=4, host_slots=8) as engine:
        [(cold, _)] = engine.generate([PROMPT])
        setting.judge.check(PROMPT, cold)
        engine.generate([prompt_of(400, seed=11)])
        assert [store for step in engine.steps for store in step.stores], "nothing went down"
        [(again, cached)] = engine.generate([PROMPT])
        setting.judge.check(PROMPT, again)
        assert cached == 256
        assert [load for step in engine.steps for load in step.loads], "nothing came up"


def test_in_float16_the_tokens_are_the_reference_s_too() -> None:
    """What the hardware has, on a turn of a conversation beside a prompt of its own."""
    setting = Setting("qwen3", dtype=torch.float16)
    with setting.engine(max_num_batched_tokens=150) as engine:
        engine.generate([PROMPT])
        prompts = [(*PROMPT[:290], *prompt_of(30, seed=13)), prompt_of(200, seed=14)]
        answers = engine.generate(prompts, max_tokens=8)
    setting.judge.check_all(prompts, answers)
    assert [cached for _, cached in answers] == [290, 0]


def test_the_judge_sees_a_wrong_block() -> None:
    """What all of these tests rest on: a token that the model would not say fails."""
    setting = Setting("qwen3")
    with setting.engine() as engine:
        [(cold, _)] = engine.generate([PROMPT])
    wrong = (*PROMPT[:BLOCK], *prompt_of(BLOCK, seed=12), *PROMPT[2 * BLOCK :])
    with pytest.raises(AssertionError, match="falls short of the best logits"):
        setting.judge.check(wrong, cold)
