"""Log-probabilities of given tokens. R rows, V the vocabulary."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from reprise_engine.request import TokenId, TokenLogprobs


def token_logprobs(logits_RV: torch.Tensor, tokens: Sequence[TokenId], *, num_top: int) -> list[TokenLogprobs]:
    """Of tokens[r] under row r (float32), with the `num_top` likeliest ones beside it. Natural logarithms."""
    normaliser_R = logits_RV.logsumexp(dim=-1)
    chosen_R = logits_RV.gather(1, torch.tensor(tokens, device=logits_RV.device).unsqueeze(1)).squeeze(1)
    ranks = ((logits_RV > chosen_R.unsqueeze(1)).sum(dim=-1) + 1).tolist()
    logprobs = (chosen_R - normaliser_R).tolist()
    tops: list[tuple[tuple[TokenId, float], ...]] = [()] * len(tokens)
    if num_top > 0:
        values_RK, tokens_RK = logits_RV.topk(min(num_top, logits_RV.shape[-1]), dim=-1)
        values_RK = values_RK - normaliser_R.unsqueeze(1)
        tops = [tuple(zip(*row, strict=True)) for row in zip(tokens_RK.tolist(), values_RK.tolist(), strict=True)]
    return [
        TokenLogprobs(token_id=token, logprob=logprob, rank=rank, top=top)
        for token, logprob, rank, top in zip(tokens, logprobs, ranks, tops, strict=True)
    ]
