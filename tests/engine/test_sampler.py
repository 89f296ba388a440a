"""The sampler against a plain reference: one row at a time, in numpy and float64."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from reprise_engine.request import RequestId, SamplingParams
from reprise_engine.sampler import sample, uniform
from reprise_engine.step import ScheduledRequest

VOCAB = 50


def row(
    sampling: SamplingParams,
    *,
    request_id: str = "r",
    history: tuple[int, ...] | None = None,
    prompt_length: int = 0,
    output_index: int = 0,
    forbidden: tuple[int, ...] = (),
) -> ScheduledRequest:
    return ScheduledRequest(
        request_id=RequestId(request_id),
        token_ids=(1,),
        start=0,
        block_table=(),
        samples=True,
        sampling=sampling,
        forbidden_token_ids=forbidden,
        history=history,
        prompt_length=prompt_length,
        output_index=output_index,
    )


def random_logits(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


def reference_distribution(logits: torch.Tensor, sampling: SamplingParams) -> npt.NDArray[np.float64]:
    """Probabilities after temperature, min-p, top-k and top-p, each by its definition."""
    scores: npt.NDArray[np.float64] = logits.double().numpy() / sampling.temperature
    probability = np.exp(scores - scores.max())
    probability /= probability.sum()
    probability[probability < sampling.min_p * probability.max()] = 0
    if sampling.top_k > 0:
        probability[np.argsort(-probability, kind="stable")[sampling.top_k :]] = 0
    probability /= probability.sum()
    kept, total = [], 0.0
    for token in np.argsort(-probability, kind="stable"):
        kept.append(token)
        total += probability[token]
        if total >= sampling.top_p:
            break
    nucleus: npt.NDArray[np.float64] = np.zeros(len(probability))
    nucleus[kept] = probability[kept]
    nucleus /= nucleus.sum()
    return nucleus


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 1000),
    temperature=st.floats(0.1, 3.0),
    top_k=st.sampled_from([0, 1, 3, 20, 1000]),
    top_p=st.sampled_from([0.05, 0.5, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.02, 0.3]),
    position=st.integers(0, 10_000),
)
def test_draw_is_the_inverse_of_the_reference_distribution(
    seed: int, temperature: float, top_k: int, top_p: float, min_p: float, position: int
) -> None:
    sampling = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
    logits = random_logits(1, seed)
    [choice] = sample(logits, [row(sampling, output_index=position)], engine_seed=0)
    cumulative = reference_distribution(logits[0], sampling).cumsum()
    draw = uniform(str(seed), position)
    # Float32 softmax moves the borders by rounding: the token's interval, widened by that, holds the draw.
    low = cumulative[choice.token_id - 1] if choice.token_id > 0 else 0.0
    assert low - 1e-5 <= draw <= cumulative[choice.token_id] + 1e-5
    assert cumulative[choice.token_id] > low


@pytest.mark.parametrize(
    ("options", "possible"),
    [
        ({"top_p": 0.49}, {0}),
        ({"top_p": 0.51}, {0, 1}),
        ({"top_p": 0.79}, {0, 1}),
        ({"top_p": 0.81}, {0, 1, 2}),
        ({"top_p": 1e-9}, {0}),
        ({"top_k": 2}, {0, 1}),
        ({"top_k": 3, "top_p": 0.8}, {0, 1}),  # of the three kept, 0.5 and 0.3 are 0.84
        ({"min_p": 0.29}, {0, 1, 2}),  # 0.15 is 0.3 of the likeliest
        ({"min_p": 0.31}, {0, 1}),
        ({}, {0, 1, 2, 3}),
    ],
)
def test_filters_keep_exactly_the_tokens_they_should(options: dict[str, float], possible: set[int]) -> None:
    sampling = replace(SamplingParams(seed=1), **options)  # type: ignore[arg-type]
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log().repeat(400, 1)
    rows = [row(sampling, output_index=index) for index in range(400)]
    assert {choice.token_id for choice in sample(logits, rows, engine_seed=0)} == possible


def test_mixed_rows_do_not_disturb_each_other() -> None:
    params = [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=1.0, seed=1),
        SamplingParams(temperature=0.7, top_k=5, seed=2),
        SamplingParams(temperature=1.3, top_p=0.4, seed=3),
        SamplingParams(temperature=1.0, min_p=0.2, seed=4, repetition_penalty=1.3),
    ] * 8  # more rows than are drawn at once
    rows = [row(p, request_id=str(i), output_index=i, history=(1, 2, 3), prompt_length=1) for i, p in enumerate(params)]
    logits = random_logits(len(rows))
    together = sample(logits, rows, engine_seed=0)
    alone = [sample(logits[i : i + 1], [rows[i]], engine_seed=0)[0] for i in range(len(rows))]
    assert together == alone
    assert [together[i].token_id for i in range(0, 40, 5)] == logits[::5].argmax(-1).tolist()


def test_draws_follow_the_distribution() -> None:
    sampling = SamplingParams(temperature=1.0, seed=11)
    logits = torch.tensor([[0.0, math.log(2.0), math.log(5.0)]]).repeat(4000, 1)
    rows = [row(sampling, output_index=index) for index in range(4000)]
    tokens = [choice.token_id for choice in sample(logits, rows, engine_seed=0)]
    shares = np.bincount(tokens, minlength=3) / 4000
    np.testing.assert_allclose(shares, [1 / 8, 2 / 8, 5 / 8], atol=0.025)  # over 3 standard errors


def test_a_seed_fixes_the_draw_whoever_asks_and_positions_differ() -> None:
    sampling = SamplingParams(temperature=1.0, seed=5)
    logits = torch.zeros(30, VOCAB)
    first = sample(logits, [row(sampling, request_id="a", output_index=i) for i in range(30)], engine_seed=0)
    again = sample(logits, [row(sampling, request_id="b", output_index=i) for i in range(30)], engine_seed=9)
    assert first == again
    assert len({choice.token_id for choice in first}) > 10


def test_without_a_seed_requests_draw_apart_and_the_engines_seed_counts() -> None:
    logits = torch.zeros(30, VOCAB)

    def tokens(request_id: str, engine_seed: int) -> list[int]:
        rows = [row(SamplingParams(), request_id=request_id, output_index=i) for i in range(30)]
        return [choice.token_id for choice in sample(logits, rows, engine_seed=engine_seed)]

    assert tokens("a", 0) == tokens("a", 0)
    assert tokens("a", 0) != tokens("b", 0)
    assert tokens("a", 0) != tokens("a", 1)


@pytest.mark.parametrize("temperature", [0.0, 1e-9])
def test_a_temperature_of_nearly_zero_is_greedy(temperature: float) -> None:
    logits = random_logits(3)
    rows = [row(SamplingParams(temperature=temperature, top_p=0.5)) for _ in range(3)]
    assert [c.token_id for c in sample(logits, rows, engine_seed=0)] == logits.argmax(-1).tolist()


def test_penalties_by_hand() -> None:
    logits = torch.tensor([[3.0, 2.9, -1.0, 0.5]])
    history = (0, 2, 1, 1)  # prompt 0, 2; output 1, 1

    def best(**penalties: float) -> int:
        sampling = replace(SamplingParams(temperature=0.0), **penalties)  # type: ignore[arg-type]
        return sample(logits, [row(sampling, history=history, prompt_length=2)], engine_seed=0)[0].token_id

    assert best(repetition_penalty=1.01) == 0  # 3.0 / 1.01 still leads
    assert best(repetition_penalty=7.0) == 3  # 3/7 and 2.9/7 fall below 0.5; token 2 goes further down
    assert best(repetition_penalty=0.5) == 0
    assert best(presence_penalty=-0.2) == 1  # 2.9 + 0.2: presence looks at the output only
    assert best(frequency_penalty=-0.04) == 0  # 2.9 + 2 · 0.04 = 2.98
    assert best(frequency_penalty=-0.06) == 1  # 2.9 + 2 · 0.06 = 3.02
    assert torch.equal(logits, torch.tensor([[3.0, 2.9, -1.0, 0.5]])), "the logits themselves stay"


def test_a_penalty_without_history_is_refused() -> None:
    with pytest.raises(ValueError, match="no history"):
        sample(random_logits(1), [row(SamplingParams(presence_penalty=1.0))], engine_seed=0)


def test_forbidden_tokens_are_never_chosen() -> None:
    logits = random_logits(1)
    order = logits[0].argsort(descending=True).tolist()
    greedy = row(SamplingParams(temperature=0.0), forbidden=(order[0], order[1]))
    assert sample(logits, [greedy], engine_seed=0)[0].token_id == order[2]
    rows = [row(SamplingParams(seed=1), forbidden=tuple(order[:3]), output_index=i) for i in range(200)]
    drawn = {choice.token_id for choice in sample(logits.repeat(200, 1), rows, engine_seed=0)}
    assert drawn.isdisjoint(order[:3])


def test_logprobs_are_of_the_untempered_distribution() -> None:
    logits = random_logits(1)
    sampling = SamplingParams(temperature=2.5, seed=2, logprobs=3, presence_penalty=1.0)
    [choice] = sample(logits, [row(sampling, history=(1,), prompt_length=1)], engine_seed=0)
    expected = logits.double().log_softmax(-1)[0]
    order = expected.argsort(descending=True).tolist()
    assert choice.logprobs is not None
    assert choice.logprobs.token_id == choice.token_id
    assert choice.logprobs.logprob == pytest.approx(expected[choice.token_id].item(), abs=1e-5)
    assert choice.logprobs.rank == order.index(choice.token_id) + 1
    assert [token for token, _ in choice.logprobs.top] == order[:3]
    assert [value for _, value in choice.logprobs.top] == pytest.approx(expected[order[:3]].tolist(), abs=1e-5)


def test_logprobs_zero_reports_the_chosen_token_alone_and_none_nothing() -> None:
    rows = [row(SamplingParams(temperature=0.0, logprobs=0)), row(SamplingParams(temperature=0.0))]
    with_logprobs, without = sample(random_logits(2), rows, engine_seed=0)
    assert with_logprobs.logprobs is not None
    assert with_logprobs.logprobs.top == ()
    assert with_logprobs.logprobs.rank == 1
    assert without.logprobs is None


def test_uniform_is_stable_across_versions() -> None:
    """Recorded once: a seed given by a user must draw the same after an upgrade."""
    assert uniform("5", 0) == 0.4360799941099851
    values = [uniform("5", position) for position in range(2000)]
    assert 0.0 <= min(values) < 0.01
    assert 0.99 < max(values) < 1.0
    assert np.mean(values) == pytest.approx(0.5, abs=0.02)


@pytest.mark.parametrize("temperature", [0.0, 1e-5, 1.0])
@pytest.mark.parametrize(
    ("extreme", "forbidden"),
    [
        (SamplingParams(min_tokens=5), tuple(range(VOCAB))),
        (SamplingParams(repetition_penalty=1e-45), ()),
        (SamplingParams(repetition_penalty=1e-300), ()),
        (SamplingParams(repetition_penalty=1e300), ()),
    ],
)
@pytest.mark.parametrize("filters", [{}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.5}])
def test_a_request_of_extremes_still_gets_a_token_of_the_vocabulary(
    temperature: float, extreme: SamplingParams, forbidden: tuple[int, ...], filters: dict[str, Any]
) -> None:
    """What is outside makes the next step's embedding fail, which ends the engine for everybody."""
    sampling = replace(extreme, temperature=temperature, **filters)
    logits = random_logits(2)
    logits[:, 0] = 0.0
    rows = [
        row(sampling, history=tuple(range(VOCAB)), prompt_length=1, forbidden=forbidden),
        row(SamplingParams(seed=7)),
    ]
    extreme_choice, neighbour = sample(logits, rows, engine_seed=0)
    assert 0 <= extreme_choice.token_id < VOCAB
    assert [neighbour] == sample(logits[1:], rows[1:], engine_seed=0)
