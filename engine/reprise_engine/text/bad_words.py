"""Banned words as token ids, as vLLM makes them."""

from __future__ import annotations

from collections.abc import Sequence

from reprise_engine.request import TokenId
from reprise_engine.text.tokenizer import Tokenizer


def bad_word_tokens(tokenizer: Tokenizer, words: Sequence[str]) -> tuple[tuple[TokenId, ...], ...]:
    """Of each word, the tokens it has at the start of a text and, where these are as many and begin with another one,
    those after a space."""
    found: list[tuple[TokenId, ...]] = []
    for word in words:
        bare = word.lstrip() or word
        plain = tokenizer.encode(bare, add_special_tokens=False)
        spaced = tokenizer.encode(" " + bare, add_special_tokens=False)
        if plain:
            found.append(plain)
        if spaced and spaced[:1] != plain[:1] and len(spaced) == len(plain):
            found.append(spaced)
    return tuple(found)
