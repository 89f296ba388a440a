"""Log-probabilities in the shapes of chat completions and of completions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from reprise_engine.request import TokenId, TokenLogprobs
from reprise_engine.text import IncrementalDetokenizer, Tokenizer

_LOWEST = -9999.0
"""Stands for minus infinity, which JSON cannot spell; vLLM's number."""


def _finite(logprob: float) -> float:
    return max(logprob, _LOWEST)


def token_names(tokenizer: Tokenizer, *, as_token_ids: bool) -> Callable[[TokenId], str]:
    """How tokens are written: their text or, told apart where texts are equal, "token_id:17" (vLLM's way)."""
    return (lambda token_id: f"token_id:{token_id}") if as_token_ids else tokenizer.token_text


def chat_logprobs(
    tokenizer: Tokenizer, entries: Sequence[TokenLogprobs], *, top: int, as_token_ids: bool = False
) -> dict[str, Any]:
    """`top` alternatives a token, as asked. The bytes are the token's, however it is written."""
    name = token_names(tokenizer, as_token_ids=as_token_ids)

    def one(token_id: TokenId, logprob: float) -> dict[str, Any]:
        return {
            "token": name(token_id),
            "logprob": _finite(logprob),
            "bytes": list(tokenizer.token_bytes(token_id)),
        }

    content = [
        one(entry.token_id, entry.logprob)
        | {"top_logprobs": [one(token_id, logprob) for token_id, logprob in entry.top[:top]]}
        for entry in entries
    ]
    return {"content": content, "refusal": None}


def prompt_logprobs(
    tokenizer: Tokenizer, scores: Sequence[TokenLogprobs], *, top: int
) -> list[dict[str, dict[str, Any]] | None]:
    """vLLM's shape: for each token of the prompt, None for the first, the token and the `top` likeliest ones by id."""
    texts: dict[TokenId, str] = {}

    def one(token_id: TokenId, logprob: float, rank: int) -> dict[str, Any]:
        if token_id not in texts:
            texts[token_id] = tokenizer.token_text(token_id)
        return {"logprob": _finite(logprob), "rank": rank, "decoded_token": texts[token_id]}

    shown: list[dict[str, dict[str, Any]] | None] = [None]
    for entry in scores:
        tokens = {str(entry.token_id): one(entry.token_id, entry.logprob, entry.rank)}
        for rank, (token_id, logprob) in enumerate(entry.top[:top], 1):
            tokens.setdefault(str(token_id), one(token_id, logprob, rank))
        shown.append(tokens)
    return shown


class CompletionLogprobs:
    """Of one choice. `text_offset` is where a token's text begins in the choice's; that of a token inside a character
    is where the character begins."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: Sequence[TokenId],
        *,
        top: int,
        as_token_ids: bool = False,
        skip_special_tokens: bool = True,
    ) -> None:
        """`prompt` is what stands before the generated tokens, whether it is echoed or not."""
        self._tokenizer = tokenizer
        self._prompt = prompt
        self._name = token_names(tokenizer, as_token_ids=as_token_ids)
        self._text = IncrementalDetokenizer(tokenizer, prompt, skip_special_tokens=skip_special_tokens)
        self._top = top
        self._offset = 0

    def push_prompt(self, scores: Sequence[TokenLogprobs], *, text: str) -> dict[str, Any]:
        """The entries of the prompt, echoed as `text`: nothing comes before its first token, so that has none.

        To be called before `push`. Special tokens have a text where they were written in the prompt.
        """
        written = self._tokenizer.decode(self._prompt, skip_special_tokens=False) == text
        detokenizer = IncrementalDetokenizer(self._tokenizer, skip_special_tokens=not written)
        first = {"token_logprobs": [None], "top_logprobs": [None] if self._top else None}
        parts = [self._tokens(self._prompt[:1], detokenizer) | first, self._entries(scores, detokenizer)]
        self._offset = len(text)
        return join_completion_logprobs(parts)

    def push(self, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """The entries of one delta."""
        return self._entries(entries, self._text)

    def _entries(self, entries: Sequence[TokenLogprobs], text: IncrementalDetokenizer) -> dict[str, Any]:
        return self._tokens([entry.token_id for entry in entries], text) | {
            "token_logprobs": [_finite(entry.logprob) for entry in entries],
            "top_logprobs": [
                # The chosen token is among them even when it is not among the likeliest.
                {
                    self._name(token_id): _finite(logprob)
                    for token_id, logprob in (*entry.top[: self._top], (entry.token_id, entry.logprob))
                }
                for entry in entries
            ]
            if self._top
            else None,
        }

    def _tokens(self, token_ids: Sequence[TokenId], text: IncrementalDetokenizer) -> dict[str, Any]:
        offsets = []
        for token_id in token_ids:
            offsets.append(self._offset)
            self._offset += len(text.push(token_id))
        return {"tokens": [self._name(token_id) for token_id in token_ids], "text_offset": offsets}


def join_completion_logprobs(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One object of a whole choice; an empty one of nothing."""
    if not parts:
        return {}
    tops = [part["top_logprobs"] for part in parts]
    return {
        "tokens": [token for part in parts for token in part["tokens"]],
        "token_logprobs": [logprob for part in parts for logprob in part["token_logprobs"]],
        "top_logprobs": None if None in tops else [entry for top in tops for entry in top],
        "text_offset": [offset for part in parts for offset in part["text_offset"]],
    }
