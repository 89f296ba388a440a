"""Prompts of text with an exact number of tokens, and which token ids prompts may be drawn from."""

from __future__ import annotations

import re
from collections.abc import Sequence

from reprise_engine.errors import ConfigError
from reprise_engine.text import Tokenizer

_FEWEST_WORDS = 16


class PromptText:
    """Token ids ↔ text, for prompts drawn from `word_ids`."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def decode(self, token_ids: Sequence[int]) -> str:
        """Begins with a space, whether or not this tokenizer drops it: parts can be put one behind the other."""
        text = self._tokenizer.decode(token_ids)
        return text if text.startswith(" ") else " " + text


def ordinary_ids(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Every token that stands for text: the special ones have none when they are skipped."""
    return tuple(token_id for token_id in range(tokenizer.vocab_size) if tokenizer.decode([token_id]))


def word_ids(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Tokens that are a space and a word: texts made of them come back as the same tokens when they are encoded.

    Raises ConfigError for a vocabulary without such words.
    """
    words = []
    for token_id in range(tokenizer.vocab_size):
        # Between two others, since some tokenizers drop a space at the start.
        if re.fullmatch(r" [A-Za-z]{2,}", tokenizer.token_text(token_id)):
            words.append(token_id)
    sample = words[:: max(1, len(words) // 256)]
    text = tokenizer.decode(sample)
    if len(words) < _FEWEST_WORDS or list(tokenizer.encode(text, add_special_tokens=False)) != sample:
        raise ConfigError(
            "--prompt-format is text, but this tokenizer has no words of one token that come back as they are: no "
            "prompt of an exact number of tokens can be made. Use --prompt-format token-ids."
        )
    return tuple(words)
