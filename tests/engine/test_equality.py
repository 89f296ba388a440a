"""Greedy tokens are those of plain transformers (eager attention, float32), whatever the engine does to be fast:
cache on and off, cold and warm, prompts in chunks that split blocks, batched and alone, preempted and evicted.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from itertools import count, pairwise

import pytest
import torch
from transformers import PreTrainedModel

from reprise_engine.attention import create_attention_backend
from reprise_engine.config import ModelConfig, SchedulerConfig
from reprise_engine.loop import EngineCore
from reprise_engine.models.loader import LoadedModel, load_model
from reprise_engine.native import Kernels, available_levels, open_kernels
from reprise_engine.native.build import library_path
from reprise_engine.request import EngineRequest, RequestId, SamplingParams, TokenId
from reprise_engine.runner.kv_cache import allocate_kv_cache
from reprise_engine.runner.model_runner import ModelRunner
from reprise_engine.scheduler import Scheduler
from reprise_engine.step import BlockId, ScheduledRequest, Step
from reprise_engine.text import load_tokenizer
from tests.support.models import smollm2_path, unpacked_smollm2
from tests.support.tiny_models import FAMILIES, VOCAB_SIZE, tiny_model_path

SMOLLM2 = "smollm2"
# Each model on plain torch, and on the native kernels where they are built.
NATIVE = "-native"
needs_library = pytest.mark.skipif(not library_path().exists(), reason="the CPU kernels are not built (make venv)")
MODELS = [
    *FAMILIES,
    *(pytest.param(family + NATIVE, marks=needs_library) for family in FAMILIES),
    pytest.param(SMOLLM2, marks=pytest.mark.real_model),
    pytest.param(SMOLLM2 + NATIVE, marks=[pytest.mark.real_model, needs_library]),
]
BLOCK_SIZE = 16
# No prompt is a multiple of it, and neither is the block size: chunks end inside blocks.
CHUNK = 21

_SYSTEM = (
    "You are the assistant of a small museum of clocks. It opens at ten and closes at six. Children enter for free. "
    "The oldest clock was made in 1541 in Nuremberg. Answer briefly."
)
_QUESTIONS = ("When does the museum open?", "How much is a ticket for a child?", "Which clock is the oldest one here?")

Prompts = tuple[tuple[TokenId, ...], ...]


def is_smollm2(name: str) -> bool:
    return name.removesuffix(NATIVE) == SMOLLM2


def kernels_of(name: str) -> Kernels | None:
    return open_kernels(available_levels()[0]) if name.endswith(NATIVE) else None


@cache
def loaded(name: str) -> LoadedModel:
    if is_smollm2(name):
        path = unpacked_smollm2() if name.endswith(NATIVE) else smollm2_path()
    else:
        path = tiny_model_path(name.removesuffix(NATIVE))
    config = ModelConfig(model=str(path), dtype="float32")
    return load_model(config, device=torch.device("cpu"), kernels=kernels_of(name))


@cache
def plain_transformers(name: str) -> PreTrainedModel:
    """The same weights in a model of its own that knows nothing of us."""
    ours = loaded(name.removesuffix(NATIVE))
    config = deepcopy(ours.spec.config)
    config._attn_implementation = "eager"
    model = type(ours.module)(config)
    model.load_state_dict(ours.module.state_dict())
    model.train(False)
    return model


def num_new(name: str) -> int:
    """Tokens to generate: enough to cross a block's border, and on the real model no more, since it takes a while."""
    return 12 if is_smollm2(name) else 20


@cache
def prompts_of(name: str) -> Prompts:
    """Three prompts that share a prefix, and one that shares nothing and is a whole number of blocks."""
    if is_smollm2(name):
        tokenizer = load_tokenizer(smollm2_path())
        chats = [
            tokenizer.encode(
                tokenizer.render_chat([{"role": "system", "content": _SYSTEM}, {"role": "user", "content": question}]),
                add_special_tokens=False,
            )
            for question in _QUESTIONS
        ]
        whole = tokenizer.encode("Once upon a time, in a land of clocks, " * 8)[: 4 * BLOCK_SIZE]
        return (*chats, whole)
    generator = torch.Generator().manual_seed(3)

    def random_tokens(length: int) -> tuple[TokenId, ...]:
        return tuple(torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist())

    shared = random_tokens(75)
    return (*(shared + random_tokens(length) for length in (6, 17, 30)), random_tokens(4 * BLOCK_SIZE))


@cache
def expected_tokens(name: str) -> tuple[tuple[TokenId, ...], ...]:
    if name.endswith(NATIVE):
        return expected_tokens(name.removesuffix(NATIVE))
    model = plain_transformers(name)
    outputs: list[tuple[TokenId, ...]] = []
    for prompt in prompts_of(name):
        generated = model.generate(  # type: ignore[operator]  # transformers mixes `generate` in
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=num_new(name),
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        outputs.append(tuple(generated[0, len(prompt) :].tolist()))
    return tuple(outputs)


@dataclass
class Engine:
    """A core over a shared model, with a pool and a scheduler of its own."""

    core: EngineCore
    scheduler: Scheduler
    num_new: int
    ids: count[int]

    @classmethod
    def make(cls, name: str, *, caching: bool = True, num_blocks: int = 128, budget: int = 2048) -> Engine:
        scheduler = Scheduler(
            SchedulerConfig(max_num_batched_tokens=budget),
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            enable_prefix_caching=caching,
            max_model_len=1024,
        )
        return cls(EngineCore(scheduler, make_runner(name, num_blocks)), scheduler, num_new(name), count())

    def generate(self, prompts: Prompts) -> tuple[tuple[TokenId, ...], ...]:
        """All prompts at once."""
        requests = [
            EngineRequest(
                request_id=RequestId(str(next(self.ids))),
                prompt_token_ids=prompt,
                sampling=SamplingParams(temperature=0.0, max_tokens=self.num_new, ignore_eos=True),
                arrival_time=0.0,
            )
            for prompt in prompts
        ]
        assert self.core.submit(requests) == ()
        generated: dict[RequestId, list[TokenId]] = {request.request_id: [] for request in requests}
        while self.core.has_work():
            for output in self.core.step():
                generated[output.request_id] += output.new_token_ids
            self.scheduler.check_invariants()
        return tuple(tuple(generated[request.request_id]) for request in requests)


def make_runner(name: str, num_blocks: int) -> ModelRunner:
    model = loaded(name)
    kv = allocate_kv_cache(
        num_layers=model.spec.num_layers,
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        num_kv_heads=model.spec.num_kv_heads,
        head_dim=model.spec.head_dim,
        dtype=model.kv_dtype,
        device=model.device,
    )
    return ModelRunner(model, create_attention_backend(model.device, kernels_of(name)), kv, seed=0)


@cache
def uncached(name: str, prompt: tuple[TokenId, ...]) -> tuple[TokenId, ...]:
    """What an engine without a cache generates, alone and in one step a prompt: several tests compare with it."""
    (generated,) = Engine.make(name, caching=False).generate((prompt,))
    return generated


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("caching", [True, False], ids=["cache", "no-cache"])
@pytest.mark.parametrize("budget", [2048, CHUNK], ids=["whole", "chunks"])
def test_batched_cold_and_warm(name: str, caching: bool, budget: int) -> None:
    engine = Engine.make(name, caching=caching, budget=budget)
    assert engine.generate(prompts_of(name)) == expected_tokens(name), "cold"
    cold_hits = engine.core.stats().prefix_cache_hits
    if not caching:
        assert cold_hits == 0
        return
    assert engine.generate(prompts_of(name)) == expected_tokens(name), "warm"
    # To the token: of every prompt all but the last one, wherever in a block that is.
    known = sum(len(prompt) - 1 for prompt in prompts_of(name))
    assert engine.core.stats().prefix_cache_hits - cold_hits == known


@pytest.mark.parametrize("name", MODELS)
def test_alone_and_one_after_the_other(name: str) -> None:
    engine = Engine.make(name)
    alone = tuple(engine.generate((prompt,))[0] for prompt in prompts_of(name))
    assert alone == expected_tokens(name)
    assert engine.core.stats().prefix_cache_hits > 0, "the second prompt shares a prefix with the first"


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("budget", [2048, CHUNK], ids=["whole", "chunks"])
def test_a_pool_so_small_that_it_preempts_and_evicts(name: str, budget: int) -> None:
    """It holds the longest sequence and a little, while four want to run; all run twice."""
    longest = max(len(prompt) for prompt in prompts_of(name)) + num_new(name)
    engine = Engine.make(name, num_blocks=-(-longest // BLOCK_SIZE) + 3, budget=budget)
    assert engine.generate(prompts_of(name)) == expected_tokens(name)
    assert engine.generate(prompts_of(name)[::-1]) == expected_tokens(name)[::-1]
    stats = engine.core.stats()
    assert stats.num_preemptions > 0
    assert stats.num_evicted_blocks > 0


@pytest.mark.parametrize("name", MODELS)
def test_generated_tokens_are_cached_too_and_serve_the_next_turn(name: str) -> None:
    engine = Engine.make(name)
    prompt, answer = prompts_of(name)[0], expected_tokens(name)[0]
    engine.generate((prompt,))
    turn = (*prompt, *answer, *prompts_of(name)[3][:9])
    before = engine.core.stats().prefix_cache_hits
    warm = engine.generate((turn,))
    # To the token; the last generated one was never computed.
    known = len(prompt) + len(answer) - 1
    assert engine.core.stats().prefix_cache_hits - before == known
    assert warm == (uncached(name, turn),)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("budget", [2048, 5], ids=["whole", "chunks"])
def test_a_prompt_that_goes_another_way_inside_a_block_reuses_what_is_common(name: str, budget: int) -> None:
    engine = Engine.make(name, budget=budget)
    base = prompts_of(name)[2]
    # Where a block is cut matters to the books, which are the same whatever the model.
    cuts = [7, BLOCK_SIZE + 1] if is_smollm2(name) else [1, 7, BLOCK_SIZE - 1, BLOCK_SIZE + 1, len(base) - 2]
    forks = tuple((*base[:cut], base[cut] + 1, *base[cut + 2 :]) for cut in cuts)
    engine.generate((base,))
    for cut, fork in zip(cuts, forks, strict=True):
        before = engine.core.stats().prefix_cache_hits
        assert engine.generate((fork,)) == (uncached(name, fork),), f"fork at {cut}"
        assert engine.core.stats().prefix_cache_hits - before == cut
    # And what was copied from is unharmed.
    assert engine.generate((base,)) == (uncached(name, base),)


@pytest.mark.parametrize("name", MODELS)
def test_logits_stay_within_rounding_of_transformers(name: str) -> None:
    """Warm: the first two thirds of the prompt in two earlier steps, one of which ends inside a block."""
    prompt = prompts_of(name)[2]
    runner = make_runner(name, 32)
    cuts = [0, CHUNK, 2 * len(prompt) // 3, len(prompt)]
    for start, end in pairwise(cuts[:-1]):
        runner.run(_part(prompt[:end], start))
    logits = runner.logits(_part(prompt, cuts[-2]))[0]
    with torch.inference_mode():
        expected = plain_transformers(name)(torch.tensor([prompt])).logits[0, -1]
    error = (logits - expected).abs().max().item()
    assert error < 2e-5 * expected.abs().max().item(), f"greatest error of a logit: {error}"


def _part(tokens: Sequence[TokenId], start: int) -> Step:
    return Step(
        step_id=0,
        requests=(
            ScheduledRequest(
                request_id=RequestId("r"),
                token_ids=tuple(tokens[start:]),
                start=start,
                block_table=tuple(BlockId(block) for block in range(32)),
                samples=True,
                sampling=SamplingParams(temperature=0.0),
            ),
        ),
    )
