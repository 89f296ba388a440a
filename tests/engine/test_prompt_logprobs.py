"""Log-probabilities of prompts on real models, against plain transformers: in chunks, in pieces of logits, beside
others, preempted, whatever is cached. Those of generated tokens under a cache hit are those of a cold run."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from reprise_engine import LLM, SamplingParams
from reprise_engine.entrypoints.outputs import GenerationOutput
from reprise_engine.errors import RequestError
from reprise_engine.runner.model_runner import SCORED_ROWS, ModelRunner
from tests.engine.test_llm import make_llm
from tests.support.models import unpacked_smollm2
from tests.support.tiny_models import FAMILIES, VOCAB_SIZE, tiny_model_path

GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}


def tokens(count: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    drawn: list[int] = torch.randint(3, VOCAB_SIZE, (count,), generator=generator).tolist()
    return drawn


@cache
def reference(family: str, prompt: tuple[int, ...]) -> torch.Tensor:
    """Log-probabilities (T, V) after each of the prompt's tokens."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model_path(family), attn_implementation="eager")
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([prompt])).logits[0]
    return logits.double().log_softmax(-1)


def check(family: str, output: GenerationOutput, *, top: int) -> None:
    prompt = output.prompt_token_ids
    expected = reference(family, prompt)
    assert output.prompt_logprobs is not None
    assert len(output.prompt_logprobs) == len(prompt)
    assert output.prompt_logprobs[0] is None
    for position, entry in enumerate(output.prompt_logprobs[1:]):
        assert entry is not None
        assert entry.token_id == prompt[position + 1]
        assert entry.logprob == pytest.approx(expected[position, entry.token_id].item(), abs=2e-3)
        values, best = expected[position].topk(top)
        assert [value for _, value in entry.top] == pytest.approx(values.tolist(), abs=2e-3)
        assert [token for token, _ in entry.top][:1] == best.tolist()[:1]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("budget", [7, 256], ids=["chunks", "whole"])
def test_prompt_logprobs_are_those_of_transformers(family: str, budget: int) -> None:
    llm = make_llm(family, max_num_batched_tokens=budget, max_num_seqs=4)
    prompts = [tokens(75, 1), tokens(20, 2), [5], tokens(75, 1)]
    params = [SamplingParams(**GREEDY, max_tokens=3, prompt_logprobs=top) for top in (3, 0, 1, 2)]
    params[1] = SamplingParams(**GREEDY, max_tokens=3)
    outputs = llm.generate(prompts, params)
    for output, top in zip(outputs, (3, None, 1, 2), strict=True):
        if top is None:
            assert output.prompt_logprobs is None
        else:
            check(family, output, top=top)
    llm.close()


def test_the_cache_is_not_read_but_written_and_the_scores_stay_the_same() -> None:
    llm = make_llm()
    prompt = tokens(60, 3)
    scored = SamplingParams(**GREEDY, max_tokens=2, prompt_logprobs=1)
    cold, again = llm.generate(prompt, scored)[0], llm.generate(prompt, scored)[0]
    plain = llm.generate(prompt, SamplingParams(**GREEDY, max_tokens=2))[0]
    assert [output.num_cached_tokens for output in (cold, again, plain)] == [0, 0, 59]
    assert cold.prompt_logprobs == again.prompt_logprobs
    assert cold.outputs[0].token_ids == again.outputs[0].token_ids == plain.outputs[0].token_ids
    llm.close()


def test_a_preempted_request_is_scored_once() -> None:
    llm = make_llm(num_gpu_blocks_override=12, max_model_len=96)
    prompts = [tokens(30, 4), tokens(30, 5)]
    outputs = llm.generate(prompts, SamplingParams(**GREEDY, max_tokens=40, prompt_logprobs=1))
    assert llm.stats.num_preemptions > 0
    for output in outputs:
        check("qwen3", output, top=1)
    llm.close()


def test_a_long_prompt_never_has_all_its_logits_at_once() -> None:
    widest: list[int] = []

    def note(_module: torch.nn.Module, inputs: tuple[torch.Tensor, ...], _output: torch.Tensor) -> None:
        widest.append(inputs[0].shape[-2])

    llm = make_llm(num_gpu_blocks_override=80)
    runner = llm._core._runner
    assert isinstance(runner, ModelRunner)
    runner._head.register_forward_hook(note)
    prompt = tokens(500, 6)
    [output] = llm.generate(prompt, SamplingParams(**GREEDY, max_tokens=1, prompt_logprobs=0))
    assert output.prompt_logprobs is not None
    assert len(output.prompt_logprobs) == 500
    assert max(widest) == SCORED_ROWS
    assert sum(widest) == 500, "499 scored rows and the sampled one: none twice"
    llm.close()


def test_banned_words_need_a_tokenizer_and_ids_a_vocabulary() -> None:
    llm = make_llm(skip_tokenizer_init=True)
    for options, param in (
        ({"bad_words": ("x",)}, "bad_words"),
        ({"allowed_token_ids": (VOCAB_SIZE,)}, "allowed_token_ids"),
        ({"logit_bias": {VOCAB_SIZE: 1.0}}, "logit_bias"),
        ({"bad_words_token_ids": ((1, VOCAB_SIZE),)}, "bad_words_token_ids"),
    ):
        with pytest.raises(RequestError) as refused:
            llm.generate([5, 6], SamplingParams(**options))
        assert refused.value.param == param
    llm.close()


@pytest.mark.real_model
def test_logprobs_and_biases_on_real_weights() -> None:
    llm = LLM(model=str(unpacked_smollm2()), device="cpu", num_gpu_blocks_override=64, max_model_len=512)
    tokenizer = llm.get_tokenizer()
    prompt = "The capital of France is Paris. The capital of Italy is Rome. The capital of Spain is"

    def run(**options: Any) -> GenerationOutput:
        return llm.generate(prompt, SamplingParams(temperature=0.0, **({"max_tokens": 4} | options)))[0]

    # The second run reads the prompt's keys and values from the cache: nothing else may differ.
    cold, hit = run(logprobs=5), run(logprobs=5)
    assert (cold.num_cached_tokens, hit.num_cached_tokens) == (0, len(cold.prompt_token_ids) - 1)
    assert cold.outputs[0].token_ids == hit.outputs[0].token_ids
    assert cold.outputs[0].logprobs is not None
    assert hit.outputs[0].logprobs is not None
    for one, other in zip(cold.outputs[0].logprobs, hit.outputs[0].logprobs, strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
        assert [token for token, _ in one.top] == [token for token, _ in other.top]
    assert "Madrid" in cold.outputs[0].text

    # Words: " Madrid" is found although it is written with a space, and of several tokens or one.
    assert "Madrid" not in run(bad_words=("Madrid",), max_tokens=8).outputs[0].text
    [rome] = tokenizer.encode(" Rome", add_special_tokens=False)
    assert run(logit_bias={rome: 100}, max_tokens=2).outputs[0].text == " Rome Rome"
    assert set(run(allowed_token_ids=(rome, 30)).outputs[0].token_ids) <= {rome, 30}

    # A prompt's scores: the words that follow from what is before are likely, the first of them is not.
    scored = run(prompt_logprobs=1)
    assert scored.prompt_logprobs is not None
    by_token = {tokenizer.token_text(entry.token_id): entry for entry in scored.prompt_logprobs if entry is not None}
    assert by_token[" Paris"].logprob > -1.5
    assert by_token[" Rome"].rank == 1
    llm.close()
