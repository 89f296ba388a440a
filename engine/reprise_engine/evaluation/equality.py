"""Greedy tokens with the cache (cold and warm), without it, and of plain transformers.

The reference is computed along the tokens of each run ("teacher forcing"), so every position counts, also those behind
a first difference: at each the engine must have chosen the reference's likeliest token, unless that leads by less than
the tolerance. If no position differs, the run's tokens are what greedy decoding of the reference gives, by induction.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, Protocol

import torch

from reprise_engine.evaluation.cases import Case
from reprise_engine.evaluation.engine import Generated
from reprise_engine.request import TokenId

Mode = Literal["cold", "warm", "off"]
MODES: tuple[Mode, ...] = ("cold", "warm", "off")

TOLERANCES = {"float32": 0.001, "bfloat16": 0.25, "float16": 0.05}
"""In logits: how far an engine's may be off, and so which lead of the reference's best token decides nothing."""

TOP = 8
"""Log-probabilities compared at each position: the engine's likeliest."""


class Engine(Protocol):
    def generate(
        self, prompts: Sequence[Sequence[TokenId]], *, max_tokens: int, logprobs: int | None = None
    ) -> list[Generated]: ...


class ReferenceModel(Protocol):
    def logits(self, token_ids: Sequence[TokenId], *, last: int) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A position, from 0 in the answer, where the engine did not choose the reference's best token."""

    position: int
    token_id: TokenId
    expected: TokenId
    margin: float
    """By how much the reference's best logit leads its second."""
    error: float
    """Greatest difference of a log-probability there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """One prompt in one mode."""

    mode: Mode
    cached_tokens: int
    token_ids: tuple[TokenId, ...]
    first_difference: Difference | None
    broken: Difference | None
    """The first difference that the tolerance does not explain."""
    max_error: float
    """Greatest difference of a log-probability at any position."""

    def ok(self, tolerance: float) -> bool:
        return self.broken is None and self.max_error <= tolerance


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptResult:
    name: str
    prompt_tokens: int
    verdicts: tuple[Verdict, ...]

    @property
    def same_in_all_modes(self) -> bool:
        return len({verdict.token_ids for verdict in self.verdicts}) == 1


@dataclass(frozen=True, slots=True, kw_only=True)
class EqualityResult:
    dtype: str
    tolerance: float
    max_tokens: int
    prompts: tuple[PromptResult, ...]

    @property
    def ok(self) -> bool:
        return all(verdict.ok(self.tolerance) for prompt in self.prompts for verdict in prompt.verdicts)

    @property
    def max_error(self) -> float:
        return max(verdict.max_error for prompt in self.prompts for verdict in prompt.verdicts)

    def as_json(self) -> dict[str, Any]:
        content = asdict(self) | {"ok": self.ok, "max_error": self.max_error}
        for entry, prompt in zip(content["prompts"], self.prompts, strict=True):
            entry["same_in_all_modes"] = prompt.same_in_all_modes
        return content


@dataclass(frozen=True, slots=True)
class Prompted:
    """A prompt as all modes get it, and the wave it belongs to: those of one wave run together."""

    name: str
    wave: int
    token_ids: tuple[TokenId, ...]


def generate_cold(engine: Engine, cases: Sequence[Case], *, max_tokens: int) -> tuple[list[Prompted], list[Generated]]:
    """Wave n holds the n-th turn of every conversation; its prompts go on from the answers of the wave before."""
    prompts: list[Prompted] = []
    answers: list[Generated] = []
    history: dict[int, tuple[TokenId, ...]] = {}
    for wave in range(max(len(case.turns) for case in cases)):
        present = [number for number, case in enumerate(cases) if wave < len(case.turns)]
        batch = []
        for number in present:
            case = cases[number]
            name = case.name if len(case.turns) == 1 else f"{case.name}, turn {wave + 1}"
            batch.append(Prompted(name, wave, history.get(number, ()) + case.turns[wave]))
        generated = engine.generate([prompt.token_ids for prompt in batch], max_tokens=max_tokens, logprobs=TOP)
        for number, prompt, answer in zip(present, batch, generated, strict=True):
            history[number] = prompt.token_ids + answer.token_ids
        prompts += batch
        answers += generated
    return prompts, answers


def generate_again(engine: Engine, prompts: Sequence[Prompted], *, max_tokens: int) -> list[Generated]:
    """The same prompts, in the same waves."""
    answers: list[Generated] = []
    for wave in range(max(prompt.wave for prompt in prompts) + 1):
        batch = [prompt.token_ids for prompt in prompts if prompt.wave == wave]
        answers += engine.generate(batch, max_tokens=max_tokens, logprobs=TOP)
    return answers


def judge(
    prompt: Prompted,
    answers: Sequence[tuple[Mode, Generated]],
    reference: ReferenceModel,
    *,
    tolerance: float,
) -> PromptResult:
    """Runs the reference once for every different answer."""
    logits: dict[tuple[TokenId, ...], torch.Tensor] = {}
    verdicts = []
    for mode, answer in answers:
        if answer.token_ids not in logits:
            # The last token is chosen from the logits of the one before it.
            sequence = prompt.token_ids + answer.token_ids[:-1]
            logits[answer.token_ids] = reference.logits(sequence, last=len(answer.token_ids))
        verdicts.append(_verdict(mode, answer, logits[answer.token_ids], tolerance))
    return PromptResult(name=prompt.name, prompt_tokens=len(prompt.token_ids), verdicts=tuple(verdicts))


def _verdict(mode: Mode, answer: Generated, logits_TV: torch.Tensor, tolerance: float) -> Verdict:
    logprobs_TV = logits_TV.log_softmax(-1)
    best = logits_TV.topk(2, dim=-1)
    differences: list[Difference] = []
    errors = []
    for position, token_id in enumerate(answer.token_ids):
        error = max(
            abs(logprob - float(logprobs_TV[position, token])) for token, logprob in answer.logprobs[position].top
        )
        errors.append(error)
        expected = int(best.indices[position, 0])
        if token_id != expected:
            differences.append(
                Difference(
                    position=position,
                    token_id=token_id,
                    expected=expected,
                    margin=float(best.values[position, 0] - best.values[position, 1]),
                    error=error,
                )
            )
    return Verdict(
        mode=mode,
        cached_tokens=answer.cached_tokens,
        token_ids=answer.token_ids,
        first_difference=differences[0] if differences else None,
        broken=next((difference for difference in differences if difference.margin > tolerance), None),
        max_error=max(errors),
    )


Progress = Callable[[str, int, int], None]
"""Hears (stage, done, total)."""


@dataclass(frozen=True, slots=True)
class Answers:
    """Of every mode, in the order of the prompts."""

    prompts: tuple[Prompted, ...]
    by_mode: Mapping[Mode, Sequence[Generated]]


def generate_all(
    cases: Sequence[Case], *, open_engine: Callable[[bool], Engine], max_tokens: int, progress: Progress
) -> Answers:
    """`open_engine(caching)` loads a model; only one is alive at a time."""
    total = sum(len(case.turns) for case in cases)
    progress("cache on, cold", 0, total)
    engine = open_engine(True)
    prompts, cold = generate_cold(engine, cases, max_tokens=max_tokens)
    progress("cache on, warm", 0, total)
    warm = generate_again(engine, prompts, max_tokens=max_tokens)
    del engine
    progress("cache off", 0, total)
    off = generate_again(open_engine(False), prompts, max_tokens=max_tokens)
    return Answers(tuple(prompts), {"cold": cold, "warm": warm, "off": off})


def check(
    answers: Answers,
    *,
    reference: ReferenceModel,
    dtype: str,
    max_tokens: int,
    tolerance: float,
    progress: Progress,
) -> EqualityResult:
    results = []
    for number, prompt in enumerate(answers.prompts):
        progress("transformers", number, len(answers.prompts))
        of_prompt = [(mode, answers.by_mode[mode][number]) for mode in MODES]
        results.append(judge(prompt, of_prompt, reference, tolerance=tolerance))
    progress("transformers", len(results), len(results))
    return EqualityResult(dtype=dtype, tolerance=tolerance, max_tokens=max_tokens, prompts=tuple(results))
