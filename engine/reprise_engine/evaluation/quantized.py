"""What quantised weights change: greedy tokens against the float model they were made from, and whether the cache adds
to it.

The float model is computed along the tokens that the engine generated, as in `equality.py`: at each position either the
engine chose the float model's likeliest token, or not. That share is reported, not judged. What is judged is the cache:
cold, warm and without it, the same tokens, but where the two in question were nearly tied.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from reprise_engine.evaluation.engine import Generated
from reprise_engine.evaluation.equality import MODES, Answers, Mode, Progress, Prompted, ReferenceModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Parting:
    """Where a mode's tokens leave those of the cold run. `lead` is by how much, in log-probability, the cold run's
    token led the other one there; None where that one is not among its likeliest."""

    mode: Mode
    position: int
    lead: float | None

    def broken(self, tolerance: float) -> bool:
        return self.lead is None or self.lead > tolerance


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedPrompt:
    name: str
    prompt_tokens: int
    cached_tokens: int
    """Of the warm run."""
    tokens: int
    agreed: int
    """Tokens of the cold run that are the float model's likeliest, given all before them."""
    max_error: float
    """Greatest difference of a log-probability from the float model's."""
    partings: tuple[Parting, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedResult:
    dtype: str
    tolerance: float
    max_tokens: int
    float_model: str
    prompts: tuple[QuantizedPrompt, ...]

    @property
    def ok(self) -> bool:
        return not any(parting.broken(self.tolerance) for prompt in self.prompts for parting in prompt.partings)

    @property
    def agreement(self) -> float:
        """Share of all tokens."""
        return sum(prompt.agreed for prompt in self.prompts) / sum(prompt.tokens for prompt in self.prompts)

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"ok": self.ok, "agreement": self.agreement}


def compare(
    answers: Answers,
    *,
    reference: ReferenceModel,
    float_model: str,
    dtype: str,
    max_tokens: int,
    tolerance: float,
    progress: Progress,
) -> QuantizedResult:
    prompts = []
    for number, prompt in enumerate(answers.prompts):
        progress("float model", number, len(answers.prompts))
        prompts.append(_judge(prompt, {mode: answers.by_mode[mode][number] for mode in MODES}, reference))
    progress("float model", len(prompts), len(prompts))
    return QuantizedResult(
        dtype=dtype, tolerance=tolerance, max_tokens=max_tokens, float_model=float_model, prompts=tuple(prompts)
    )


def _judge(prompt: Prompted, answers: Mapping[Mode, Generated], reference: ReferenceModel) -> QuantizedPrompt:
    cold = answers["cold"]
    logits_TV = reference.logits(prompt.token_ids + cold.token_ids[:-1], last=len(cold.token_ids))
    logprobs_TV = logits_TV.log_softmax(-1)
    likeliest: Sequence[int] = logits_TV.argmax(-1).tolist()
    partings = (_parting(mode, cold, answers[mode]) for mode in MODES if mode != "cold")
    return QuantizedPrompt(
        name=prompt.name,
        prompt_tokens=len(prompt.token_ids),
        cached_tokens=answers["warm"].cached_tokens,
        tokens=len(cold.token_ids),
        agreed=sum(token == expected for token, expected in zip(cold.token_ids, likeliest, strict=True)),
        max_error=max(
            abs(logprob - float(logprobs_TV[position, token]))
            for position, told in enumerate(cold.logprobs)
            for token, logprob in told.top
        ),
        partings=tuple(parting for parting in partings if parting is not None),
    )


def _parting(mode: Mode, cold: Generated, other: Generated) -> Parting | None:
    for position, (token, different) in enumerate(zip(cold.token_ids, other.token_ids, strict=True)):
        if token != different:
            told = dict(cold.logprobs[position].top)
            lead = told[token] - told[different] if different in told else None
            return Parting(mode=mode, position=position, lead=lead)
    return None
