"""What the demo says, how long it takes, and how that is shown."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import openai
from openai.types.chat import ChatCompletionMessageParam
from rich.table import Table
from rich.text import Text

MODEL = "smollm2"
MAX_TOKENS = 24

_RULES = (
    "Answer in one short sentence.",
    "Be kind to the customer, and be exact about facts.",
    "If you do not know something, say so and offer to ask a colleague.",
    "Never promise a date that the order system does not show.",
    "Prices include value added tax; shipping inside the country is free above fifty.",
    "Returns are accepted within thirty days, unused and in their original packaging.",
    "A damaged parcel is photographed first, then replaced without further questions.",
    "Do not ask for passwords or card numbers, and do not repeat them if they are given.",
)
_SHELVES = (
    "garden tools", "desk lamps", "hiking boots", "cast iron pans", "wool blankets", "bicycle lights", "water bottles",
    "board games", "notebooks", "tea kettles", "rain jackets", "tool boxes", "camping stoves", "picture frames",
    "house plants", "headphones", "kitchen scales", "winter gloves", "door mats", "step ladders", "paint brushes",
)  # fmt: skip
SYSTEM_PROMPT = (
    "You are the assistant of a small shop for household and outdoor things. These are the rules of the house. "
    + " ".join(_RULES)
    + " This is what the shop sells, and what to know about each shelf. "
    + " ".join(
        f"Shelf {number} holds {name}: they are kept in aisle {number % 7 + 1}, the cheapest costs {7 + 3 * number}, "
        f"the best costs {29 + 11 * number}, a spare part for {name} can be ordered within "
        f"{number % 5 + 2} days, and questions about {name} that go beyond this are answered by the colleague at desk "
        f"{number % 4 + 1}."
        for number, name in enumerate(_SHELVES, start=1)
    )
)
"""About 1,600 tokens for SmolLM2; the demo shows the exact number as the first turn's prompt."""

CONVERSATIONS: tuple[tuple[str, ...], ...] = (
    ("Where do I find desk lamps?", "How much is the cheapest one?", "May I bring it back if I do not like it?"),
    ("Do you sell tea kettles?", "Which aisle are they in?"),
)
"""The turns of two customers; both conversations begin with the same system prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One turn: tokens of the prompt, those of them found in the cache, seconds to the first token and to the last."""

    conversation: int
    number: int
    prompt_tokens: int
    cached_tokens: int
    first_token_seconds: float
    total_seconds: float
    answer: str

    @property
    def computed_tokens(self) -> int:
        return self.prompt_tokens - self.cached_tokens


def ask(
    client: openai.OpenAI, messages: Sequence[ChatCompletionMessageParam], *, conversation: int, number: int
) -> Turn:
    """One streamed request, timed from here: what a user of the endpoint would feel."""
    began = time.perf_counter()
    first: float | None = None
    text, usage = "", None
    stream = client.chat.completions.create(
        model=MODEL,
        messages=list(messages),
        max_tokens=MAX_TOKENS,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in stream:
        if chunk.usage is not None:
            usage = chunk.usage
        if chunk.choices and chunk.choices[0].delta.content:
            first = first or time.perf_counter() - began
            text += chunk.choices[0].delta.content
    total = time.perf_counter() - began
    if usage is None or usage.prompt_tokens_details is None or usage.prompt_tokens_details.cached_tokens is None:
        raise RuntimeError("The endpoint reported no usage.prompt_tokens_details.cached_tokens.")
    return Turn(
        conversation=conversation,
        number=number,
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=usage.prompt_tokens_details.cached_tokens,
        first_token_seconds=total if first is None else first,
        total_seconds=total,
        answer=" ".join(text.split()),
    )


def new_table(title: str) -> Table:
    table = Table(title=title, title_justify="left")
    for heading in ("chat.turn", "prompt", "cached", "computed", "first token", "total"):
        table.add_column(heading, justify="right", no_wrap=True)
    # The one column that may shrink; its cells, not the column, are kept on one line.
    table.add_column("answer")
    return table


def add_row(table: Table, turn: Turn) -> None:
    table.add_row(
        f"{turn.conversation}.{turn.number}",
        f"{turn.prompt_tokens:,}",
        f"{turn.cached_tokens:,}",
        f"{turn.computed_tokens:,}",
        f"{turn.first_token_seconds:.2f} s",
        f"{turn.total_seconds:.2f} s",
        Text(turn.answer, no_wrap=True, overflow="ellipsis"),
    )


def comparison(cached: Sequence[Turn], uncached: Sequence[Turn]) -> Table:
    """The same turns side by side."""
    table = Table(title="The same turns, prefix caching on and off", title_justify="left")
    for heading in ("chat.turn", "first token: on", "off", "off ÷ on", "computed: on", "off"):
        table.add_column(heading, justify="right")
    for on, off in zip(cached, uncached, strict=True):
        table.add_row(
            f"{on.conversation}.{on.number}",
            f"{on.first_token_seconds:.2f} s",
            f"{off.first_token_seconds:.2f} s",
            f"{off.first_token_seconds / on.first_token_seconds:.1f}",
            f"{on.computed_tokens:,}",
            f"{off.computed_tokens:,}",
        )
    return table
