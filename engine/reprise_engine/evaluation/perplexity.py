"""Perplexity of a text by windows with a stride (https://huggingface.co/docs/transformers/perplexity), computed by the
engine with and without its cache, and by plain transformers.

With the cache each window's context is computed by a request of its own, and the window then computes only the tokens
that are scored, on the context's cached KV. That is the engine's scheduler, prefix index, paging and attention, and the
logits of every token instead of the last; neither the sampler nor HTTP takes part.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch

from reprise_engine.evaluation.engine import InProcessEngine
from reprise_engine.evaluation.equality import ReferenceModel
from reprise_engine.loop import Runner
from reprise_engine.request import RequestId, TokenId
from reprise_engine.step import Step, StepResult

TOLERANCES = {"float32": 1e-4, "bfloat16": 0.02, "float16": 0.01}
"""By how much, as a share, perplexities may differ."""

SCORED_TOKENS_A_STEP = 256
"""A step computes a row of logits for each: 256 rows of 150,000 are 150 MB."""


@dataclass(frozen=True, slots=True)
class Window:
    """Tokens [start, end) of the text; those from `scored_from` on are scored, each given all before it in here."""

    start: int
    scored_from: int
    end: int


def make_windows(num_tokens: int, *, context: int, stride: int) -> list[Window]:
    """Every token but the first is scored once, with at least context - stride tokens before it where there are."""
    windows: list[Window] = []
    scored = 1
    for start in range(0, num_tokens, stride):
        end = min(start + context, num_tokens)
        if end > scored:
            windows.append(Window(start, scored, end))
            scored = end
    return windows


class TokenLogits(Protocol):
    """Of `ModelRunner`: the logits (T, V) of all tokens of a step."""

    def logits(self, step: Step, *, every_token: bool = False) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """`logprob` of a token that is there, and the token that was likeliest."""

    logprob: float
    likeliest: TokenId


class ScoringRunner:
    """Notes how every prompt token is scored that a step computes the token before."""

    def __init__(self, inner: TokenLogits) -> None:
        self._inner = inner
        self.prompts: dict[RequestId, tuple[TokenId, ...]] = {}
        self.scored: dict[RequestId, dict[int, ScoredToken]] = {}

    def run(self, step: Step) -> StepResult:
        logits_TV = self._inner.logits(step, every_token=True)
        row = 0
        sampled: dict[RequestId, TokenId] = {}
        for part in step.requests:
            rows_TV = logits_TV[row : row + len(part.token_ids)]
            row += len(part.token_ids)
            prompt = self.prompts[part.request_id]
            targets = prompt[part.start + 1 : part.start + 1 + len(part.token_ids)]
            if targets:
                scores = score_tokens(rows_TV[: len(targets)], targets)
                found = self.scored.setdefault(part.request_id, {})
                found |= {part.start + 1 + offset: score for offset, score in enumerate(scores)}
            if part.samples:
                sampled[part.request_id] = int(rows_TV[-1].argmax())
        return StepResult(step_id=step.step_id, sampled=sampled)


def score_tokens(logits_TV: torch.Tensor, targets: Sequence[TokenId]) -> list[ScoredToken]:
    chosen_T = logits_TV.gather(1, torch.tensor(targets, device=logits_TV.device).unsqueeze(1)).squeeze(1)
    logprobs: list[float] = (chosen_T - logits_TV.logsumexp(-1)).tolist()
    likeliest: list[TokenId] = logits_TV.argmax(-1).tolist()
    return [ScoredToken(*pair) for pair in zip(logprobs, likeliest, strict=True)]


class ScoringEngine:
    """An engine whose prompts are scored. `open_engine` is given the wrapper of its runner."""

    def __init__(self, open_engine: Callable[[Callable[[TokenLogits], Runner]], InProcessEngine]) -> None:
        self._scoring: ScoringRunner | None = None

        def wrap(runner: TokenLogits) -> Runner:
            self._scoring = ScoringRunner(runner)
            return self._scoring

        self._engine = open_engine(wrap)

    @property
    def dtype(self) -> str:
        return self._engine.resolved.dtype

    @property
    def vocab_size(self) -> int:
        return self._engine.resolved.vocab_size

    def score(self, prompt: Sequence[TokenId]) -> tuple[Mapping[int, ScoredToken], int]:
        """By position, of all positions whose predecessor was computed; and the cached tokens."""
        assert self._scoring is not None
        request_id = self._engine.next_request_id
        self._scoring.prompts[request_id] = tuple(prompt)
        [generated] = self._engine.generate([prompt], max_tokens=1)
        del self._scoring.prompts[request_id]
        return self._scoring.scored.pop(request_id, {}), generated.cached_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """Of one way to compute. `logprobs` are of the scored tokens, in the text's order."""

    way: str
    logprobs: tuple[float, ...]
    likeliest: tuple[TokenId, ...]
    """At the same positions."""
    cached_tokens: int = 0
    """Of all windows' prompts."""

    @classmethod
    def of(cls, way: str, tokens: Sequence[ScoredToken], *, cached_tokens: int = 0) -> Score:
        return cls(
            way=way,
            logprobs=tuple(token.logprob for token in tokens),
            likeliest=tuple(token.likeliest for token in tokens),
            cached_tokens=cached_tokens,
        )

    @property
    def perplexity(self) -> float:
        return math.exp(-math.fsum(self.logprobs) / len(self.logprobs))


@dataclass(frozen=True, slots=True, kw_only=True)
class PerplexityResult:
    dtype: str
    tolerance: float
    num_tokens: int
    context: int
    stride: int
    scores: tuple[Score, ...]
    """cache on, cache off, transformers."""
    float_model: str | None = None
    """What transformers computes where the engine's weights are quantised; None where both have the same weights."""

    @property
    def spread(self) -> float:
        """The greatest perplexity over the smallest, less one, of those that must agree."""
        same = self.scores if self.float_model is None else self.scores[:-1]
        perplexities = [score.perplexity for score in same]
        return max(perplexities) / min(perplexities) - 1

    @property
    def ok(self) -> bool:
        return self.spread <= self.tolerance

    @property
    def increase(self) -> float:
        """By how much, as a share, the perplexity is above transformers'."""
        return self.scores[0].perplexity / self.scores[-1].perplexity - 1

    def agreement(self, score: Score) -> float:
        """Share of the positions where its likeliest token is transformers'."""
        pairs = zip(score.likeliest, self.scores[-1].likeliest, strict=True)
        return sum(ours == theirs for ours, theirs in pairs) / len(score.likeliest)

    def max_error(self, score: Score) -> float:
        """Greatest difference of a token's log-probability from transformers'."""
        return max(abs(ours - theirs) for ours, theirs in zip(score.logprobs, self.scores[-1].logprobs, strict=True))

    def as_json(self) -> dict[str, Any]:
        content = asdict(self) | {"ok": self.ok, "spread": self.spread, "increase": self.increase}
        for entry, score in zip(content["scores"], self.scores, strict=True):
            entry |= {
                "perplexity": score.perplexity,
                "max_error": self.max_error(score),
                "agreement": self.agreement(score),
            }
        return content


Progress = Callable[[str, int, int], None]


def score_with_engine(
    engine: ScoringEngine, token_ids: Sequence[TokenId], windows: Sequence[Window], *, way: str, progress: Progress
) -> Score:
    """A context is computed before its window, with and without a cache; the window's own positions are scored."""
    scored: list[ScoredToken] = []
    cached = 0
    for number, window in enumerate(windows):
        progress(way, number, len(windows))
        # The first scored token needs the logits of the one before it, which must not come from the cache.
        context = token_ids[window.start : window.scored_from - 1]
        if context:
            engine.score(context)
        scores, cached_tokens = engine.score(token_ids[window.start : window.end])
        cached += cached_tokens
        scored += (scores[position - window.start] for position in range(window.scored_from, window.end))
    progress(way, len(windows), len(windows))
    return Score.of(way, scored, cached_tokens=cached)


def score_with_reference(
    reference: ReferenceModel,
    token_ids: Sequence[TokenId],
    windows: Sequence[Window],
    *,
    progress: Progress,
    way: str = "transformers",
) -> Score:
    tokens: list[ScoredToken] = []
    for number, window in enumerate(windows):
        progress(way, number, len(windows))
        scored = token_ids[window.scored_from : window.end]
        logits_TV = reference.logits(token_ids[window.start : window.end - 1], last=len(scored))
        tokens += score_tokens(logits_TV, scored)
    progress(way, len(windows), len(windows))
    return Score.of(way, tokens)
