"""Log-probabilities in the shapes of chat completions and of completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from reprise_engine.request import TokenId, TokenLogprobs
from reprise_engine.text import Tokenizer

_LOWEST = -9999.0
"""Stands for minus infinity, which JSON cannot spell; vLLM's number."""


def _finite(logprob: float) -> float:
    return max(logprob, _LOWEST)


def chat_logprobs(tokenizer: Tokenizer, entries: Sequence[TokenLogprobs], *, top: int) -> dict[str, Any]:
    """`top` alternatives a token, as asked."""

    def one(token_id: TokenId, logprob: float) -> dict[str, Any]:
        return {
            "token": tokenizer.token_text(token_id),
            "logprob": _finite(logprob),
            "bytes": list(tokenizer.token_bytes(token_id)),
        }

    content = [
        one(entry.token_id, entry.logprob)
        | {"top_logprobs": [one(token_id, logprob) for token_id, logprob in entry.top[:top]]}
        for entry in entries
    ]
    return {"content": content, "refusal": None}


class CompletionLogprobs:
    """Of one choice. `text_offset` counts the characters of the tokens before it, in the choice's text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._offset = 0

    def push(self, entries: Sequence[TokenLogprobs], *, top: int) -> dict[str, Any]:
        """The entries of one delta."""
        text = self._tokenizer.token_text
        tokens = [text(entry.token_id) for entry in entries]
        offsets = []
        for token in tokens:
            offsets.append(self._offset)
            self._offset += len(token)
        return {
            "tokens": tokens,
            "token_logprobs": [_finite(entry.logprob) for entry in entries],
            "top_logprobs": [
                # The chosen token is among them even when it is not among the likeliest.
                {
                    text(token_id): _finite(logprob)
                    for token_id, logprob in (*entry.top[:top], (entry.token_id, entry.logprob))
                }
                for entry in entries
            ]
            if top
            else None,
            "text_offset": offsets,
        }


def join_completion_logprobs(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One object of a whole choice."""
    tops = [part["top_logprobs"] for part in parts]
    return {
        "tokens": [token for part in parts for token in part["tokens"]],
        "token_logprobs": [logprob for part in parts for logprob in part["token_logprobs"]],
        "top_logprobs": None if None in tops else [entry for top in tops for entry in top],
        "text_offset": [offset for part in parts for offset in part["text_offset"]],
    }
