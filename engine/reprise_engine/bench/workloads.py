"""What is sent: conversations of token ids, drawn from a seed. Pure; the same arguments always give the same tokens.

A request that stands alone is a conversation of one turn. Conversations start with different tokens, and so do the
requests behind a shared prefix: a cache that works to the token finds exactly what is meant to be shared, no more.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from reprise_engine.errors import ConfigError

WorkloadName = Literal["shared-prefix", "multi-turn", "random"]
WORKLOADS: tuple[WorkloadName, ...] = get_args(WorkloadName)

COMMON_TOKEN_IDS = range(1_000, 10_000)
"""Ordinary tokens in every vocabulary of today's language models; special ones are below or above."""

_FEWEST_IDS = 16


@dataclass(frozen=True, slots=True)
class Turn:
    """What the user adds, and how many tokens are generated for it."""

    token_ids: tuple[int, ...]
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Conversation:
    """The prompt of a turn is all turns before it, each with its generated answer, and its own tokens."""

    turns: tuple[Turn, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """`settings` is what it was made of, for the record."""

    name: WorkloadName
    conversations: tuple[Conversation, ...]
    settings: dict[str, object] = field(default_factory=dict)

    @property
    def num_requests(self) -> int:
        return sum(len(conversation.turns) for conversation in self.conversations)


def make_workload(
    name: WorkloadName,
    *,
    num_prompts: int,
    input_len: int,
    output_len: int,
    prefix_len: int = 0,
    num_prefixes: int = 1,
    turns: int = 1,
    range_ratio: float = 0.0,
    seed: int = 0,
    token_ids: Sequence[int] = COMMON_TOKEN_IDS,
) -> Workload:
    """Lengths are in tokens. Raises ConfigError for a value out of range.

    shared-prefix   `num_prompts` requests, each one of `num_prefixes` prefixes of `prefix_len` in turn, then
                    `input_len` tokens of its own
    multi-turn      `num_prompts` conversations of `turns`; each turn adds `input_len` tokens; all begin with the same
                    `prefix_len` tokens, the system prompt
    random          `num_prompts` requests of `input_len` tokens that share nothing

    `range_ratio` r draws each input and output length from length x (1 - r) to length x (1 + r); prefixes stay exact.
    """
    if name not in WORKLOADS:
        raise ConfigError(f"--workload is {name!r}; it must be one of {', '.join(WORKLOADS)}.")
    _at_least(1, num_prompts=num_prompts, input_len=input_len, output_len=output_len)
    _at_least(1, num_prefixes=num_prefixes, turns=turns)
    _at_least(1 if name == "shared-prefix" else 0, prefix_len=prefix_len)
    if name == "random" and prefix_len:
        raise ConfigError(f"--prefix-len is {prefix_len}, but random shares nothing; take shared-prefix.")
    if name != "multi-turn" and turns != 1:
        raise ConfigError(f"--turns is {turns}, but {name} has one turn; take multi-turn.")
    if name != "shared-prefix" and num_prefixes != 1:
        raise ConfigError(f"--num-prefixes is {num_prefixes}; only shared-prefix has several.")
    if not 0 <= range_ratio < 1:
        raise ConfigError(f"--range-ratio is {range_ratio}; it must be at least 0 and below 1.")
    if len(token_ids) < _FEWEST_IDS:
        raise ConfigError(f"There are {len(token_ids)} token ids to draw prompts from; {_FEWEST_IDS} are needed.")
    draw = _generator(f"{name} {seed}")
    drawn = token_ids[:-1]  # the last one is `reserved_id`
    firsts = _distinct(draw, drawn)

    def tokens(length: int) -> tuple[int, ...]:
        return (next(firsts), *draw.choices(drawn, k=length - 1)) if length else ()

    def near(length: int) -> int:
        return max(1, round(length * draw.uniform(1 - range_ratio, 1 + range_ratio))) if range_ratio else length

    prefixes = [tokens(prefix_len) for _ in range(num_prefixes)] if name != "random" else [()]
    conversations = []
    for index in range(num_prompts):
        prefix = prefixes[index % len(prefixes)]
        conversations.append(
            Conversation(
                tuple(
                    Turn((prefix if turn == 0 else ()) + tokens(near(input_len)), near(output_len))
                    for turn in range(turns)
                )
            )
        )
    settings: dict[str, object] = {
        "num_prompts": num_prompts,
        "input_len": input_len,
        "output_len": output_len,
        "range_ratio": range_ratio,
        "seed": seed,
    }
    if name != "random":
        settings |= {"prefix_len": prefix_len, "num_prefixes": num_prefixes}
    if name == "multi-turn":
        settings["turns"] = turns
    return Workload(name=name, conversations=tuple(conversations), settings=settings)


def reserved_id(token_ids: Sequence[int]) -> int:
    """No prompt of a workload that is drawn from these ids holds it; probes and warm-up begin with it."""
    return token_ids[-1]


def warm_up_turns(workload: Workload, count: int, *, token_ids: Sequence[int] = COMMON_TOKEN_IDS) -> list[Turn]:
    """Requests of the workload's first shape that share nothing with it: they heat the server, not its cache."""
    first = workload.conversations[0].turns[0]
    draw = _generator("warm-up")
    return [
        Turn((reserved_id(token_ids), *draw.choices(token_ids, k=len(first.token_ids) - 1)), first.output_tokens)
        for _ in range(count)
    ]


def poisson_schedule(count: int, *, rate: float, seed: int) -> list[float]:
    """Seconds from the start at which each of `count` conversations is due: gaps are exponential with mean 1 / rate."""
    draw = _generator(f"schedule {seed}")
    due, times = 0.0, []
    for _ in range(count):
        times.append(due)
        due += draw.expovariate(rate)
    return times


def _generator(seed: str) -> random.Random:
    return random.Random(seed)  # noqa: S311  (reproducible on purpose; nothing is kept secret by it)


def _distinct(draw: random.Random, token_ids: Sequence[int]) -> Iterator[int]:
    """All tokens in a random order, again and again: none twice before all were there."""
    while True:
        yield from draw.sample(token_ids, len(token_ids))


def _at_least(least: int, **values: int) -> None:
    for name, value in values.items():
        if value < least:
            raise ConfigError(f"--{name.replace('_', '-')} is {value}; it must be at least {least}.")
