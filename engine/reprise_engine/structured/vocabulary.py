"""The vocabulary as llguidance wants it."""

from __future__ import annotations

from collections.abc import Sequence

import llguidance

from reprise_engine.errors import RequestError
from reprise_engine.request import TokenId
from reprise_engine.text import Tokenizer


def grammar_tokenizer(
    tokenizer: Tokenizer, *, vocab_size: int, eos_token_ids: Sequence[TokenId]
) -> llguidance.LLTokenizer:
    """`vocab_size` is the model's, often more than the tokenizer's; `eos_token_ids`: those that end a text.

    Takes about a second for 150,000 tokens. Raises RequestError where no token ends a text: it could never end.
    """
    ends = list(eos_token_ids)
    if not ends and tokenizer.eos_token_id is not None:
        ends = [tokenizer.eos_token_id]
    if not ends:
        raise RequestError("Structured output needs a model with an end-of-sequence token; this one has none.")
    try:
        return llguidance.LLTokenizer(
            tokenizer.serialized(), n_vocab=max(vocab_size, tokenizer.vocab_size), eos_token=ends
        )
    except ValueError as error:
        raise RequestError(f"Structured output is not supported with this model's tokenizer: {error}") from error
