"""The whole engine on a real NPU (docs/ascend.md); without one there is nothing that it could run on."""

from __future__ import annotations

import pytest

from reprise_engine import LLM, SamplingParams
from reprise_engine.attention.npu_chip import Chip
from tests.support.npu_device import NPUUnderTest
from tests.support.tiny_models import VOCAB_SIZE, tiny_model_path

SHARED = [3 + (7 * number) % (VOCAB_SIZE - 3) for number in range(200)]
PROMPTS = [[*SHARED, 5], [*SHARED, 6, 7], SHARED[:150], [9] * 20, [*SHARED, 5]]


def told(ascend: NPUUnderTest, *, cache: bool, eager: bool) -> tuple[list[list[int]], list[int]]:
    """Tokens of a cold round and of one that finds everything cached, and the cached tokens of the second."""
    llm = LLM(
        model=str(tiny_model_path("qwen3")),
        device="npu",
        dtype=ascend.dtype,
        enable_prefix_caching=cache,
        enforce_eager=eager,
        max_model_len=512,
        max_num_seqs=4,
        gpu_memory_utilization=0.2,
    )
    params = SamplingParams(temperature=0, max_tokens=24)
    rounds = [llm.generate(PROMPTS, params) for _ in range(2)]
    tokens = [list(output.outputs[0].token_ids) for outputs in rounds for output in outputs]
    return tokens, [output.num_cached_tokens for output in rounds[1]]


def test_graphs_and_the_cache_change_nothing(ascend: NPUUnderTest) -> None:
    """In 16 bits two tokens may be as likely: where this fails, `reprise eval equality` says whether that is all."""
    if not ascend.real:
        pytest.skip("the engine as a whole needs a real NPU: run `pytest -m npu` where there is one")
    plain, cached = told(ascend, cache=False, eager=True)
    assert cached == [0] * len(PROMPTS)
    for eager in (True, False) if ascend.chip is not Chip.P310 else (True,):
        tokens, cached = told(ascend, cache=True, eager=eager)
        assert tokens == plain
        assert cached == [len(prompt) - 1 for prompt in PROMPTS]
