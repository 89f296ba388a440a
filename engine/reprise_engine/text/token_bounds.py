"""At least so many tokens: how a text that is far too long is told apart without encoding all of it.

Two bounds, each proved from the tokenizer's own parts and unknown where a part is not known:

- No token covers more characters than the longest one has: byte pairs only ever join what is there. Normal forms may
  write up to four characters as one (Unicode, UAX #15), so they count as a quarter.
- Cut between a letter and a blank, what is in front has the tokens that it has by itself, as long as no token has a
  letter and a blank behind it, and the parts in front of the model decide on no letter by what is behind that blank.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import tokenizers

from reprise_engine.text.byte_level import BYTE_LEVEL

_QUARTER = 4
_NORMAL_FORMS = frozenset({"NFC", "NFD", "NFKC", "NFKD"})
_BLANKS = " Ġ▁"
"""A blank as it is, byte-level, and as SentencePiece writes it."""
_LETTER_AND_BLANK = re.compile(rf"[A-Za-z][{_BLANKS}]")
_CUT = re.compile(r"[A-Za-z](?= )")


def _words(*, letters: str = r"\p{L}", not_these: str = r"\p{L}\p{N}", numbers: str = r"\p{N}") -> str:
    return (
        rf"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?{letters}+|{numbers}| ?[^\s{not_these}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


_PATTERNS = frozenset(
    {
        _words(),  # Qwen2, Qwen3
        _words(letters=r"[\p{L}\p{M}]", not_these=r"\p{L}\p{M}\p{N}"),  # Qwen3.5
        _words(numbers=r"\p{N}{1,3}"),  # Llama 3
        r"\p{N}",
        r"\p{N}{1,3}",
    }
)
"""None of them joins a letter and a blank behind it, or looks further than the end of blanks. GPT-2's, which is
ByteLevel's own, does neither."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBounds:
    """`longest`: characters that a token covers at most. `cuts`: whether a text may be cut in front of a blank.

    `unspelled`: bytes of UTF-8 that have no token; byte-level tokenizers drop them.
    """

    longest: int | None
    cuts: bool
    unspelled: bytes = b""

    def at_least(self, text: str) -> int:
        """Tokens that `text` has, or fewer, by its length alone."""
        if self.longest is None:
            return 0
        characters = len(text)
        if self.unspelled:
            content = text.encode()
            characters -= len(content) - len(content.translate(None, self.unspelled))
        return -(-characters // self.longest)

    def front(self, text: str, characters: int) -> str | None:
        """The front of `text`, at most so long, whose tokens are the first ones of the whole; None for no such cut."""
        if not self.cuts:
            return None
        cut = None
        window = characters
        while cut is None and window:
            # The last cut: a blank is usually near.
            window, before = max(0, window - 1024), window
            for cut in _CUT.finditer(text, window, before):  # noqa: B007  (the last one is wanted)
                pass
        return None if cut is None else text[: cut.end()]


def token_bounds(backend: tokenizers.Tokenizer) -> TokenBounds:
    """Takes as long as a look at every token does: some 0.1 s."""
    normalizers = _parts(backend.normalizer, "normalizers")
    pre_tokenizers = _parts(backend.pre_tokenizer, "pretokenizers")
    added = backend.get_added_tokens_decoder().values()
    vocabulary = backend.get_vocab(with_added_tokens=True)
    byte_level = any(part["type"] == "ByteLevel" for part in pre_tokenizers)
    if (
        not _is_plain_bpe(backend.model)
        or not (byte_level or _falls_back_to_bytes(backend.model, vocabulary))
        or not all(_keeps_length(part) for part in normalizers)
        or not all(_is_known(part) for part in pre_tokenizers)
    ):
        return TokenBounds(longest=None, cuts=False)
    unspelled = bytes(byte for character, byte in BYTE_LEVEL.items() if byte_level and character not in vocabulary)
    normal_forms = any(part["type"] in _NORMAL_FORMS for part in normalizers)
    # Tokens that take the blanks beside them may cover any number of those.
    unbounded = any(token.lstrip or token.rstrip for token in added) or (normal_forms and bool(unspelled))
    longest = max(map(len, vocabulary)) * (_QUARTER if normal_forms else 1)
    return TokenBounds(
        longest=None if unbounded else longest,
        cuts=not any(_LETTER_AND_BLANK.search(token) for token in vocabulary)
        and not any(chr(byte) == " " or chr(byte).isalpha() for byte in unspelled if byte < 128),
        unspelled=unspelled,
    )


def _parts(component: Any, name: str) -> list[Mapping[str, Any]]:
    """What a normalizer or pre-tokenizer is made of, in order."""
    if component is None:
        return []
    found: list[Mapping[str, Any]] = []
    waiting = [json.loads(component.__getstate__())]
    while waiting:
        part = waiting.pop()
        if part["type"] == "Sequence":
            waiting += reversed(part[name])
        else:
            found.append(part)
    return found


def _is_plain_bpe(model: Any) -> bool:
    return (
        isinstance(model, tokenizers.models.BPE)
        and not model.dropout
        and not model.continuing_subword_prefix
        and not model.end_of_word_suffix
    )


def _keeps_length(normalizer: Mapping[str, Any]) -> bool:
    """Whether it changes no text's length, but for normal forms and what it writes in front."""
    match normalizer:
        case {"type": "Prepend"}:
            return True
        case {"type": "Replace", "pattern": {"String": pattern}, "content": content}:
            return len(pattern) == len(content) == 1
        case {"type": kind}:
            return kind in _NORMAL_FORMS
    return False


def _is_known(pre_tokenizer: Mapping[str, Any]) -> bool:
    """Whether it only parts the text, and never in front of a blank by what is behind it."""
    match pre_tokenizer:
        case {"type": "Split", "behavior": "Removed"} | {"type": "Split", "invert": True}:
            return False
        case {"type": "Split", "pattern": {"Regex": pattern}}:
            return pattern in _PATTERNS
        case {"type": "Split", "pattern": {"String": pattern}}:
            return len(pattern) == 1
        case {"type": kind}:
            return kind in ("ByteLevel", "Digits", "Metaspace")
    return False


def _falls_back_to_bytes(model: Any, vocabulary: Mapping[str, int]) -> bool:
    """Whether no character is unknown: one token of those would cover any number of them."""
    return model.byte_fallback and all(f"<0x{byte:02X}>" in vocabulary for byte in range(256))
