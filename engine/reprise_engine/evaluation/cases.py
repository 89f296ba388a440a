"""What is asked: conversations of token ids, from a file or the built-in ones. Free of torch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reprise_engine.errors import ConfigError
from reprise_engine.request import TokenId
from reprise_engine.text import ChatTemplateError, Tokenizer

_SYSTEM = (
    "You answer the telephone of a small public library. It is open from nine to seven, on Saturdays from ten to four, "
    "and closed on Sundays and holidays. A card costs nothing for children and eight a year for everybody else. Books "
    "may be kept for four weeks, films for one; both may be renewed twice unless somebody waits for them. The reading "
    "room on the second floor has forty seats and needs no card. Answer in one or two sentences.\n\n"
)
_QUESTIONS = (
    "Caller: May I bring my daughter's book back on Sunday?\nLibrary:",
    "Caller: How much is a card for my son, who is nine?\nLibrary:",
    "Caller: Can I keep a film for a month?\nLibrary:",
    "Caller: Is there a place to sit and read without a card?\nLibrary:",
)
_CONVERSATIONS = (
    (
        "Caller: Until when are you open today?\nLibrary:",
        "\nCaller: And at the weekend?\nLibrary:",
        "\nCaller: Thanks.\n",
    ),
    ("Caller: I have lost my card.\nLibrary:", "\nCaller: What does a new one cost?\nLibrary:", "\nCaller: Bye.\n"),
)
_ALONE = "Once upon a time, in a town between two rivers, there lived a clockmaker who had never been late."


@dataclass(frozen=True, slots=True)
class Case:
    """A conversation: the prompt of a turn is all turns before, with their answers, and its own tokens."""

    name: str
    turns: tuple[tuple[TokenId, ...], ...]

    def longest(self, max_tokens: int) -> int:
        """Tokens of the last turn's prompt and its answer."""
        return sum(map(len, self.turns)) + max_tokens * len(self.turns)


def built_in_cases(tokenizer: Tokenizer) -> list[Case]:
    """Prompts under one system prompt, conversations under it, and one prompt that shares nothing."""
    cases = [
        Case(f"shared prefix {number}", (tokenizer.encode(_SYSTEM + question),))
        for number, question in enumerate(_QUESTIONS, start=1)
    ]
    for number, (first, *later) in enumerate(_CONVERSATIONS, start=1):
        turns = [tokenizer.encode(_SYSTEM + first)]
        turns += [tokenizer.encode(text, add_special_tokens=False) for text in later]
        cases.append(Case(f"conversation {number}", tuple(turns)))
    return [*cases, Case("alone", (tokenizer.encode(_ALONE),))]


def read_cases(path: Path, tokenizer: Tokenizer) -> list[Case]:
    """A prompt a line; in a *.jsonl an object a line with `prompt` (text or token ids), `messages`, or `turns` (texts
    of one conversation, each put behind the answer before it). Raises ConfigError with the line's number.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--prompts: cannot read {path}: {error}") from error
    cases = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        if path.suffix != ".jsonl":
            cases.append(Case(f"line {number}", (tokenizer.encode(line),)))
            continue
        try:
            turns = _turns(json.loads(line), tokenizer)
        except (ValueError, ChatTemplateError) as error:
            raise ConfigError(f"--prompts: line {number} of {path}: {error}") from error
        cases.append(Case(f"line {number}", turns))
    if not cases:
        raise ConfigError(f"--prompts: {path} has no prompts.")
    if not all(turn for case in cases for turn in case.turns):
        raise ConfigError(f"--prompts: {path} has a prompt without a token.")
    return cases


def _turns(entry: Any, tokenizer: Tokenizer) -> tuple[tuple[TokenId, ...], ...]:
    if not isinstance(entry, Mapping) or len(entry.keys() & {"prompt", "messages", "turns"}) != 1 or len(entry) != 1:
        raise ValueError("it must be an object with one of prompt, messages, turns, and nothing else")
    [(name, value)] = entry.items()
    if name == "messages":
        return (tokenizer.encode(tokenizer.render_chat(value), add_special_tokens=False),)
    if name == "turns":
        if not isinstance(value, list) or not value or not all(isinstance(text, str) for text in value):
            raise ValueError("turns must be a list of texts")
        return tuple(tokenizer.encode(text, add_special_tokens=not number) for number, text in enumerate(value))
    if isinstance(value, str):
        return (tokenizer.encode(value),)
    return (_token_ids(value),)


def _token_ids(value: Any) -> tuple[TokenId, ...]:
    if isinstance(value, Sequence) and all(type(token) is int and token >= 0 for token in value):
        return tuple(value)
    raise ValueError("prompt must be a text or a list of token ids")
