"""What changes single tokens' chances, and the log-probabilities of given tokens, against plain definitions."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from reprise_engine.errors import RequestError
from reprise_engine.request import SamplingParams
from reprise_engine.sampler import mask_logits, sample
from reprise_engine.step import ScheduledRequest
from reprise_engine.token_logprobs import token_logprobs
from tests.engine.test_sampler import VOCAB, random_logits, row

TOKENS = st.integers(0, VOCAB - 1)


def adjusted(logits_V: list[float], request: ScheduledRequest) -> list[float]:
    """By vLLM's order, one token at a time: allowed, forbidden, bias, then the penalties."""
    sampling = request.sampling
    scores = list(logits_V)
    allowed = range(VOCAB) if sampling.allowed_token_ids is None else sampling.allowed_token_ids
    for token in range(VOCAB):
        if token not in allowed or token in request.forbidden_token_ids:
            scores[token] = -math.inf
        scores[token] += (sampling.logit_bias or {}).get(token, 0.0)
        if token in (request.history or ()):
            repetition = sampling.repetition_penalty
            scores[token] = scores[token] / repetition if scores[token] > 0 else scores[token] * repetition
    return scores


@settings(deadline=None, max_examples=150)
@given(
    seed=st.integers(0, 1000),
    bias=st.dictionaries(TOKENS, st.floats(-100, 100), max_size=6),
    allowed=st.none() | st.lists(TOKENS, min_size=8, max_size=20),
    forbidden=st.lists(TOKENS, max_size=5, unique=True),
    repetition=st.sampled_from([1.0, 1.3]),
    history=st.lists(TOKENS, min_size=1, max_size=5),
)
def test_the_choice_is_the_best_by_definition(
    seed: int,
    bias: dict[int, float],
    allowed: list[int] | None,
    forbidden: list[int],
    repetition: float,
    history: list[int],
) -> None:
    sampling = SamplingParams(
        temperature=0.0,
        logit_bias=bias,
        allowed_token_ids=None if allowed is None else tuple(allowed),
        repetition_penalty=repetition,
    )
    request = row(sampling, history=tuple(history), prompt_length=1, forbidden=tuple(forbidden))
    logits = random_logits(3, seed)
    before = logits.clone()
    # Between neighbours that ask for nothing: rows must not be mixed up.
    plain = row(SamplingParams(temperature=0.0))
    choices = sample(logits, [plain, request, plain], engine_seed=0)
    scores = adjusted(logits[1].double().tolist(), request)
    if max(scores) > -math.inf:
        assert scores[choices[1].token_id] == pytest.approx(max(scores), abs=1e-4)
    assert [choices[0].token_id, choices[2].token_id] == logits[[0, 2]].argmax(-1).tolist()
    assert torch.equal(logits, before), "the logits themselves stay"


def test_a_bias_of_100_bans_and_forces() -> None:
    logits = random_logits(1)
    order = logits[0].argsort(descending=True).tolist()
    for temperature in (0.0, 1.0):

        def chosen(bias: dict[int, float], temperature: float = temperature) -> int:
            sampling = SamplingParams(temperature=temperature, seed=1, logit_bias=bias)
            return sample(logits, [row(sampling)], engine_seed=0)[0].token_id

        assert chosen({order[-1]: 100}) == order[-1]
        assert chosen(dict.fromkeys(order[:-1], -100)) == order[-1]


def test_a_bias_comes_before_the_repetition_penalty_as_in_vllm() -> None:
    logits = torch.tensor([[1.0, 2.5, 0.0, 0.0]])
    # (1 + 4) / 2 = 2.5 and not 1 / 2 + 4 = 4.5: which is second to 2.6.
    sampling = SamplingParams(temperature=0.0, logit_bias={0: 4.0, 1: 0.1}, repetition_penalty=2.0)
    [choice] = sample(logits, [row(sampling, history=(0,), prompt_length=1)], engine_seed=0)
    assert choice.token_id == 1


def test_what_would_leave_nothing_gives_way_in_turn() -> None:
    logits = random_logits(1)
    masked = logits.clone()
    words = np.zeros((1, 2), dtype=np.uint32)
    words[0, 0] = 1 << 7 | 1 << 9
    mask_logits(masked, [0], words)
    best = max((7, 9), key=lambda token: float(logits[0, token]))

    def chosen(scores: torch.Tensor, forbidden: tuple[int, ...] = (), **options: Any) -> int:
        request = row(SamplingParams(temperature=1.0, seed=3, **options), forbidden=forbidden)
        return sample(scores, [request], engine_seed=0)[0].token_id

    assert chosen(masked, allowed_token_ids=(9, 30)) == 9, "both hold where both can"
    assert chosen(masked, allowed_token_ids=(30, 31)) in (7, 9), "the grammar stands"
    assert chosen(masked, forbidden=(best,)) == 16 - best
    assert chosen(masked, forbidden=(7, 9)) in (7, 9), "a text that has to end ends"
    assert chosen(logits, forbidden=(30, 31), allowed_token_ids=(30, 31)) in (30, 31)


@settings(deadline=None, max_examples=60)
@given(vocab=st.integers(1, 200), data=st.data())
def test_a_mask_keeps_the_tokens_whose_bits_are_set(vocab: int, data: st.DataObject) -> None:
    allowed = data.draw(st.sets(st.integers(0, vocab - 1), min_size=1))
    words = np.zeros((1, -(-vocab // 32)), dtype=np.uint32)
    for token in allowed:
        words[0, token // 32] |= np.uint32(1 << token % 32)
    logits = torch.randn(3, vocab)
    expected = logits.clone()
    expected[1, [token for token in range(vocab) if token not in allowed]] = -math.inf
    mask_logits(logits, [1], words)
    assert torch.equal(logits, expected)


def test_logprobs_of_a_masked_row_are_of_what_the_grammar_allows() -> None:
    logits = random_logits(1)
    words = np.zeros((1, 2), dtype=np.uint32)
    words[0, 0] = 1 << 7 | 1 << 9
    mask_logits(logits, [0], words)
    [choice] = sample(logits, [row(SamplingParams(temperature=0.0, logprobs=3))], engine_seed=0)
    assert choice.logprobs is not None
    (first, p_first), (second, p_second), (_, none) = choice.logprobs.top
    assert {first, second} == {7, 9}
    assert math.exp(p_first) + math.exp(p_second) == pytest.approx(1.0)
    assert none == -math.inf


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 1000), rows=st.integers(1, 9), top=st.sampled_from([0, 1, 5, 1000]), data=st.data())
def test_logprobs_of_given_tokens_by_definition(seed: int, rows: int, top: int, data: st.DataObject) -> None:
    logits = random_logits(rows, seed)
    tokens = data.draw(st.lists(TOKENS, min_size=rows, max_size=rows))
    expected = logits.double().log_softmax(-1)
    for r, entry in enumerate(token_logprobs(logits, tokens, num_top=top)):
        order = expected[r].argsort(descending=True, stable=True).tolist()
        assert entry.token_id == tokens[r]
        assert entry.logprob == pytest.approx(expected[r, tokens[r]].item(), abs=1e-5)
        assert entry.rank == order.index(tokens[r]) + 1
        assert [token for token, _ in entry.top] == order[:top]
        assert [value for _, value in entry.top] == pytest.approx(expected[r, order[:top]].tolist(), abs=1e-5)


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"logit_bias": {1: 100.5}}, "logit_bias"),
        ({"logit_bias": {1: math.nan}}, "logit_bias"),
        ({"allowed_token_ids": ()}, "allowed_token_ids"),
        ({"bad_words": ("",)}, "bad_words"),
        ({"bad_words_token_ids": ((),)}, "bad_words"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
    ],
)
def test_values_out_of_range_are_refused(options: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as refused:
        SamplingParams(**options)
    assert refused.value.param == param
