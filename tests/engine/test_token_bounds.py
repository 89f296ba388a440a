"""Texts that are far too long are told by a part of them, and never one that fits."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import models, normalizers, pre_tokenizers, trainers

from reprise_engine.request import TokenId
from reprise_engine.text import Tokenizer
from reprise_engine.text.token_bounds import TokenBounds, token_bounds
from tests.support.engine_server import RunningServer, fake_options, running_server

QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3 = QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
QWEN35 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEXT = (
    "the cat's 12345 hats aaaa aaaa \t\n  \n\n !? éa\u0301 日本語 the hat a cat's hat!\n\n    return the.hats(12)  "
    * 30
)


def trained(
    pre_tokenizer: pre_tokenizers.PreTokenizer,
    *,
    normalizer: normalizers.Normalizer | None = None,
    without: str = "",
) -> Tokenizer:
    """`without`: characters of the byte-level alphabet that have no token."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizer
    if normalizer is not None:
        backend.normalizer = normalizer
    alphabet = sorted(set(pre_tokenizers.ByteLevel.alphabet()) - set(without))
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, special_tokens=["<|im_end|>"])
    backend.train_from_iterator([TEXT * 30], trainer)
    return Tokenizer(backend, special_tokens={}, chat_template=None)


def split(pattern: str) -> pre_tokenizers.PreTokenizer:
    parts = [pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated"), pre_tokenizers.ByteLevel(use_regex=False)]
    return pre_tokenizers.Sequence(parts)


def sentencepiece() -> Tokenizer:
    """As Llama 2's: no words, blanks as ▁, all else in bytes."""
    words = ["▁", "t", "h", "e", "a", "th", "▁th", "▁the", "▁▁", "▁▁▁▁"]
    merges = [("t", "h"), ("▁", "th"), ("▁th", "e"), ("▁", "▁"), ("▁▁", "▁▁")]
    vocabulary = {word: number for number, word in enumerate(words)}
    vocabulary |= {f"<0x{byte:02X}>": len(words) + byte for byte in range(256)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges, byte_fallback=True, unk_token="<0x00>"))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return Tokenizer(backend, special_tokens={}, chat_template=None)


def digits() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel()])


EOT, FIRST_OF_EMOJI = "\u0104", "ð"
"""0x04 and 0xf0, which the text above has none of, as the alphabet writes them."""
TOKENIZERS: dict[str, Callable[[], Tokenizer]] = {
    "gpt2": lambda: trained(pre_tokenizers.ByteLevel(add_prefix_space=False)),
    "incomplete": lambda: trained(pre_tokenizers.ByteLevel(add_prefix_space=False), without=EOT + FIRST_OF_EMOJI),
    "smollm": lambda: trained(digits()),
    "qwen2": lambda: trained(split(QWEN2), normalizer=normalizers.NFC()),
    "qwen3.5": lambda: trained(split(QWEN35), normalizer=normalizers.NFC()),
    "llama3": lambda: trained(split(LLAMA3)),
    "llama2": sentencepiece,
}
MADE = {name: make() for name, make in TOKENIZERS.items()}
PIECES = [
    "the",
    " the",
    "a",
    "aaaa",
    " ",
    "  ",
    "\n",
    "\n\n",
    "1",
    "123",
    "'s",
    "!?",
    "é",
    "a\u0301",
    "\u0301",
    "日本",
    "😀",
]
PIECES += ["cat", "hats", "<|im_end|>", "Ａ", "\ufb01", "\u1f82", "x ", "\x04"]


def bounds_of(tokenizer: Tokenizer) -> TokenBounds:
    return token_bounds(tokenizer._backend)


@pytest.mark.parametrize("name", MADE)
@settings(max_examples=150, deadline=None)
@given(st.lists(st.sampled_from(PIECES), max_size=60).map("".join), st.data())
def test_a_bound_is_never_more_than_there_is(name: str, text: str, data: st.DataObject) -> None:
    tokenizer = MADE[name]
    bounds = bounds_of(tokenizer)
    assert bounds.cuts
    assert bounds.longest is not None
    tokens = tokenizer.encode(text, add_special_tokens=False)
    assert bounds.at_least(text) <= len(tokens)
    front = bounds.front(text, data.draw(st.integers(0, len(text))))
    if front is not None:
        ahead = tokenizer.encode(front, add_special_tokens=False)
        assert tokens[: len(ahead)] == ahead
    limit = data.draw(st.integers(1, 40))
    assert tokenizer.at_least(text, limit) <= len(tokens)


class Watched(Tokenizer):
    """Remembers how many characters were encoded."""

    characters = 0

    def encode(self, text: str, *, add_special_tokens: bool = True) -> tuple[TokenId, ...]:
        self.characters += len(text)
        return super().encode(text, add_special_tokens=add_special_tokens)


@pytest.mark.parametrize("name", MADE)
@pytest.mark.parametrize("text", ["the cat ", "a", " ", "日本語 the "])
def test_long_texts_are_told_by_a_part_of_them(name: str, text: str) -> None:
    tokenizer = Watched(MADE[name]._backend, special_tokens={}, chat_template=None)
    for times in (1_000, 10_000, 100_000):
        told = tokenizer.at_least(text * times, 100)
        if told >= 100:
            break
    assert 100 <= told <= len(MADE[name].encode(text * times))
    assert tokenizer.characters <= 2400, "three times the 800 that may be 100 tokens"
    assert tokenizer.at_least("the cat " * 90, 100) == 0, "short enough to be encoded as a whole"


def changed(change: Callable[[tokenizers.Tokenizer], None], name: str = "gpt2") -> TokenBounds:
    tokenizer = TOKENIZERS[name]()
    change(tokenizer._backend)
    return bounds_of(tokenizer)


def test_what_is_not_known_bounds_nothing() -> None:
    nothing = TokenBounds(longest=None, cuts=False)

    def drops_blanks(backend: tokenizers.Tokenizer) -> None:
        backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), backend.pre_tokenizer])

    def looks_ahead(backend: tokenizers.Tokenizer) -> None:
        backend.pre_tokenizer = split(r"\p{L}(?=.*!)|\p{L}+")

    def shortens(backend: tokenizers.Tokenizer) -> None:
        backend.normalizer = normalizers.Replace("the", "e")

    def drops_out(backend: tokenizers.Tokenizer) -> None:
        backend.model.dropout = 0.5

    for change in (drops_blanks, looks_ahead, shortens, drops_out):
        assert changed(change) == nothing, change
    unknown = tokenizers.Tokenizer(models.WordLevel({"the": 0, "[UNK]": 1}, unk_token="[UNK]"))
    assert token_bounds(unknown) == nothing
    letters = tokenizers.Tokenizer(models.BPE(vocab={"a": 0, "<unk>": 1}, merges=[], unk_token="<unk>", fuse_unk=True))
    assert token_bounds(letters) == nothing


def test_tokens_that_reach_further_than_their_own_text() -> None:
    def takes_blanks(backend: tokenizers.Tokenizer) -> None:
        backend.add_tokens([tokenizers.AddedToken("<mask>", lstrip=True)])

    def two_words(backend: tokenizers.Tokenizer) -> None:
        backend.add_tokens(["the end"])

    assert changed(takes_blanks).longest is None
    assert changed(takes_blanks).cuts
    assert changed(two_words).longest is not None
    assert not changed(two_words).cuts


# --- over HTTP


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with running_server(fake_options(tmp_path_factory.mktemp("model"))) as running:
        yield running


WORDS = "the cat sat " * 690_000
"""8 MiB."""


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": WORDS}),
        ("/v1/completions", {"prompt": ["fits", WORDS]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": WORDS}]}),
        ("/v1/responses", {"input": WORDS}),
    ],
    ids=["completions", "several", "chat", "responses"],
)
def test_a_text_that_is_far_too_long_is_not_encoded(server: RunningServer, path: str, body: dict[str, Any]) -> None:
    """One token a byte, the longest has four: so it is told by a quarter at most, in a message that is true."""
    answer = server.client.post(path, json=body)
    error = answer.json()["error"]
    told = re.fullmatch(
        r"The prompt has at least (\d+) tokens, but this model's maximum context length is 200 tokens, and at least "
        r"one is generated. Shorten the prompt.",
        error["message"],
    )
    assert answer.status_code == 400
    assert told is not None, error["message"]
    assert 200 <= int(told[1]) <= len(WORDS)
    assert (error["param"], error["code"]) == ("input" if "input" in body else "prompt", "context_length_exceeded")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": WORDS[:10_000], "truncate_prompt_tokens": 5, "max_tokens": 1}),
        (
            "/v1/chat/completions",
            {
                "messages": [{"role": "user", "content": WORDS[:10_000]}],
                "truncate_prompt_tokens": 5,
                "max_tokens": 1,
                "return_token_ids": True,
            },
        ),
    ],
    ids=["completions", "chat"],
)
def test_a_text_of_which_the_end_is_wanted_may_be_long(server: RunningServer, path: str, body: dict[str, Any]) -> None:
    answer = server.client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["prompt_tokens"] == 5


def test_tokenize_takes_what_the_model_does_not(server: RunningServer) -> None:
    assert server.client.post("/tokenize", json={"prompt": WORDS[:10_000]}).json()["count"] == 10_000
    chat = {"messages": [{"role": "user", "content": WORDS[:10_000]}]}
    assert server.client.post("/tokenize", json=chat).json()["count"] == 10_004
