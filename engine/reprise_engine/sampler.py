"""Choosing the next token of every sampling request of a step. Stateless: the draw depends on (seed, position) only.

Order, as in vLLM: a grammar's mask on the logits themselves, so that log-probabilities are of what it allows; then
allowed tokens, forbidden tokens, biases and penalties; then temperature, min-p, top-k, top-p; then the draw.
R rows (requests), V the vocabulary, W words of 32 bits.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from reprise_engine.request import TokenId, TokenLogprobs
from reprise_engine.step import ScheduledRequest
from reprise_engine.token_logprobs import token_logprobs

# Below this a temperature is greedy: dividing by it would overflow float32.
_MIN_TEMPERATURE = 1e-5
# Scores are drawn from within ± this: divided by the least temperature they still fit float32.
_LARGEST_SCORE = 1e30
# Rows drawn at once: bounds the sorted copies and the float64 sums.
_CHUNK_ROWS = 16


@dataclass(frozen=True, slots=True)
class Choice:
    """The chosen token, and its log-probabilities where the request asked for them."""

    token_id: TokenId
    logprobs: TokenLogprobs | None = None


def sample(logits_RV: torch.Tensor, rows: Sequence[ScheduledRequest], *, engine_seed: int) -> list[Choice]:
    """One choice a row of `logits_RV` (float32, not modified). A request without a seed draws from one derived of
    `engine_seed` and its id."""
    scores_RV = _adjust(logits_RV, rows)
    tokens = scores_RV.argmax(dim=-1).tolist()
    random_rows = [row for row, request in enumerate(rows) if request.sampling.temperature >= _MIN_TEMPERATURE]
    for start in range(0, len(random_rows), _CHUNK_ROWS):
        chunk = random_rows[start : start + _CHUNK_ROWS]
        drawn = _draw(scores_RV[chunk], [rows[row] for row in chunk], engine_seed)
        for row, token in zip(chunk, drawn, strict=True):
            tokens[row] = token
    return [
        Choice(token, _logprobs(logits_RV[row : row + 1], token, request.sampling.logprobs))
        for row, (token, request) in enumerate(zip(tokens, rows, strict=True))
    ]


def uniform(seed: str, position: int) -> float:
    """A number in [0, 1) with 53 random bits, the same on every device for the same seed and position."""
    digest = hashlib.blake2b(f"{seed}\0{position}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest) >> 11) * 2.0**-53


def mask_logits(logits_RV: torch.Tensor, rows: Sequence[int], words_MW: npt.NDArray[np.uint32]) -> None:
    """In place: row `rows[m]` keeps the tokens whose bit is set in `words_MW[m]`, the lowest bit first."""
    for row, words_W in zip(rows, words_MW, strict=True):
        bits_V = np.unpackbits(words_W.view(np.uint8), bitorder="little", count=logits_RV.shape[1])
        logits_RV[row].masked_fill_(torch.from_numpy(bits_V == 0).to(logits_RV.device), -math.inf)


def _adjust(logits_RV: torch.Tensor, rows: Sequence[ScheduledRequest]) -> torch.Tensor:
    """Applies what changes single tokens; the logits themselves are returned where nothing does."""
    if not any(
        request.forbidden_token_ids
        or request.sampling.needs_history
        or request.sampling.logit_bias
        or request.sampling.allowed_token_ids
        for request in rows
    ):
        return logits_RV
    scores_RV = logits_RV.clone()
    for row, request in enumerate(rows):
        allowed = request.sampling.allowed_token_ids
        if allowed is not None:
            _keep_some(scores_RV[row], list(allowed))
    _forbid(scores_RV, rows)
    _bias(scores_RV, rows)
    for row, request in enumerate(rows):
        if request.sampling.needs_history:
            _penalise(scores_RV[row], request)
    return scores_RV


def _keep_some(scores_V: torch.Tensor, allowed: list[TokenId]) -> None:
    """In place. Where the grammar of the row has none of them, the grammar stands."""
    kept = scores_V[allowed]
    if kept.amax() > -math.inf:
        scores_V.fill_(-math.inf)
        scores_V[allowed] = kept


def _forbid(scores_RV: torch.Tensor, rows: Sequence[ScheduledRequest]) -> None:
    """In place. A row that nothing would be left of stays as it is: a text has to go on somehow, or to end."""
    at = [(row, token) for row, request in enumerate(rows) for token in request.forbidden_token_ids]
    if not at:
        return
    row_N, token_N = torch.tensor(at, device=scores_RV.device).unbind(1)
    before_N = scores_RV[row_N, token_N]
    scores_RV[row_N, token_N] = -math.inf
    lost_N = scores_RV.amax(dim=-1)[row_N] == -math.inf
    if lost_N.any():
        scores_RV[row_N[lost_N], token_N[lost_N]] = before_N[lost_N]


def _bias(scores_RV: torch.Tensor, rows: Sequence[ScheduledRequest]) -> None:
    """In place."""
    at = [(row, token) for row, request in enumerate(rows) for token in request.sampling.logit_bias or ()]
    if not at:
        return
    biases = [bias for request in rows for bias in (request.sampling.logit_bias or {}).values()]
    row_N, token_N = torch.tensor(at, device=scores_RV.device).unbind(1)
    scores_RV[row_N, token_N] += torch.tensor(biases, dtype=scores_RV.dtype, device=scores_RV.device)


def _penalise(scores_V: torch.Tensor, request: ScheduledRequest) -> None:
    """In place. Repetition counts prompt and output (Keskar et al. 2019, CTRL); presence and frequency the output
    only, as in OpenAI's API."""
    if request.history is None:
        raise ValueError(f"request {request.request_id} has a penalty, but its step carries no history")
    sampling = request.sampling
    device = scores_V.device
    if sampling.repetition_penalty != 1.0 and request.history:
        seen = torch.tensor(sorted(set(request.history)), device=device)
        values = scores_V[seen]
        scores_V[seen] = torch.where(
            values > 0, values / sampling.repetition_penalty, values * sampling.repetition_penalty
        )
    output = request.history[request.prompt_length :]
    if output and (sampling.presence_penalty != 0.0 or sampling.frequency_penalty != 0.0):
        # On the host, which has the tokens: a 310P has no operator for it (ops-nn, docs/aclnnUnique2.md, e5c3fa9).
        token, count = torch.unique(torch.tensor(output), return_counts=True)
        count = count.to(scores_V.dtype).to(device)
        scores_V[token.to(device)] -= sampling.presence_penalty + sampling.frequency_penalty * count


def _draw(scores_RV: torch.Tensor, rows: Sequence[ScheduledRequest], engine_seed: int) -> list[TokenId]:
    """`scores_RV` is overwritten: a large tensor that is made anew costs a page fault for each 4 KiB."""
    params = [request.sampling for request in rows]
    # An extreme penalty overflows, and min_tokens may forbid every token: without a finite score in each row the
    # softmax would be NaN, the draw no token of the vocabulary, and one request would end the engine.
    scores_RV.nan_to_num_(nan=-_LARGEST_SCORE).clamp_(-_LARGEST_SCORE, _LARGEST_SCORE)
    scores_RV /= _column(scores_RV, [p.temperature for p in params])
    if any(p.min_p > 0.0 for p in params):
        # p >= min_p * p_max, in logarithms.
        floor = scores_RV.amax(dim=-1, keepdim=True) + _column(
            scores_RV, [math.log(p.min_p) if p.min_p > 0.0 else -math.inf for p in params]
        )
        scores_RV.masked_fill_(scores_RV < floor, -math.inf)
    if any(p.top_k > 0 or p.top_p < 1.0 for p in params):
        _filter_top(scores_RV, top_k=[p.top_k for p in params], top_p=[p.top_p for p in params])

    # The inverse of the cumulative distribution, in token order; float64 so that 150,000 terms sum to 1.
    cumulative_RV = scores_RV.softmax(dim=-1).cpu().double().cumsum_(dim=-1)
    seeds = [
        f"{engine_seed}/{request.request_id}" if request.sampling.seed is None else str(request.sampling.seed)
        for request in rows
    ]
    draws = torch.tensor(
        [[uniform(seed, request.output_index)] for seed, request in zip(seeds, rows, strict=True)],
        dtype=torch.float64,
    )
    total = cumulative_RV[:, -1:]
    target = torch.minimum(draws * total, torch.nextafter(total, torch.zeros_like(total)))
    # right=True: the first token whose cumulative probability exceeds the target, so its own is above 0.
    tokens: list[TokenId] = torch.searchsorted(cumulative_RV, target, right=True).squeeze(1).tolist()
    return tokens


def _filter_top(scores_RV: torch.Tensor, *, top_k: list[int], top_p: list[float]) -> None:
    """In place. Keeps the top_k likeliest tokens (and ties with the last), then the fewest whose probability reaches
    top_p."""
    vocab_size = scores_RV.shape[-1]
    kept = [min(k, vocab_size) if k > 0 else vocab_size for k in top_k]
    # Sorting is only as wide as the widest top_k.
    sorted_scores, sorted_tokens = scores_RV.topk(max(kept), dim=-1)
    kth = sorted_scores.gather(1, torch.tensor([[k - 1] for k in kept], device=scores_RV.device))
    scores_RV.masked_fill_(scores_RV < kth, -math.inf)
    if all(p >= 1.0 for p in top_p):
        return
    probabilities = sorted_scores.masked_fill_(sorted_scores < kth, -math.inf).softmax(dim=-1)
    before = probabilities.cumsum(dim=-1).sub_(probabilities)
    dropped = before >= _column(scores_RV, [p if p < 1.0 else math.inf for p in top_p])
    dropped[:, 0] = False
    scores_RV.masked_fill_(torch.zeros_like(scores_RV, dtype=torch.bool).scatter_(1, sorted_tokens, dropped), -math.inf)


def _logprobs(logits_1V: torch.Tensor, token: TokenId, num_top: int | None) -> TokenLogprobs | None:
    return None if num_top is None else token_logprobs(logits_1V, [token], num_top=num_top)[0]


def _column(like: torch.Tensor, values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device).unsqueeze(1)
