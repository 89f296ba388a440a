"""Banned words as token ids."""

from __future__ import annotations

from collections.abc import Sequence

from reprise_engine.request import TokenId
from reprise_engine.text.tokenizer import Tokenizer


def bad_word_tokens(tokenizer: Tokenizer, words: Sequence[str]) -> tuple[tuple[TokenId, ...], ...]:
    """Of each word, the tokens it has at the start of a text and those after a space.

    As vLLM does, but also where the two have different numbers of tokens, or the same first one: a word that is banned
    should not come.
    """
    found: dict[tuple[TokenId, ...], None] = {}
    for word in words:
        bare = word.lstrip() or word
        for text in (bare, " " + bare):
            tokens = tokenizer.encode(text, add_special_tokens=False)
            if tokens:
                found[tokens] = None
    return tuple(found)
