"""One row on one running server, with the client of `reprise bench`: the same requests for everybody, as token ids."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.rows import RowName, Scale
from benchmarks.servers import SERVED_NAME
from reprise_engine.bench.result import RequestRecord, Result
from reprise_engine.bench.run import Load, run
from reprise_engine.bench.workloads import COMMON_TOKEN_IDS, Conversation, Turn, Workload
from reprise_engine.errors import ConfigError


class MeasureError(Exception):
    """The server did not do what the row asks for; the message says what it did."""


@dataclass(frozen=True, slots=True)
class Sample:
    """`value` is in the row's unit; `cached` are the tokens the server says it reused, where the row is about that.
    `note` is what else a reader should know of it."""

    value: float
    cached: int | None = None
    note: str | None = None


def measure(
    row: RowName, url: str, scale: Scale, *, samples: int, seed: str, number: int = 0, primed: bool = False
) -> list[Sample]:
    """`seed` and `number` choose the tokens, `seed` alone a prefix that is to be cached: a server's cache has nothing
    of one call for another one with a different seed. `primed` leaves out the request that fills the cache first: a
    call with this seed has done that, or there is none. Raises MeasureError."""
    tokens = Tokens(f"{row} {seed} {number}")
    if row == "decode":
        prompts = [Turn(tokens(scale.decode_prompt), scale.decode_output) for _ in range(samples)]
        return [Sample(_tokens_a_second(record)) for record in _send(prompts, url).records]
    if row == "cold-ttft":
        prompts = [Turn(tokens(scale.shared + scale.own), 1) for _ in range(samples)]
        return [Sample(_ttft(record)) for record in _send(prompts, url).records]
    if row in ("warm-ttft", "restart-ttft"):
        shared = Tokens(f"{row} {seed}")(scale.shared)
        # All in one conversation of the client: a request in between could cost a server of one slot its cache.
        prompts = [Turn(shared + tokens(scale.own), 1) for _ in range(samples + (not primed))]
        records = _send(prompts, url).records[-samples:]
        return [Sample(_ttft(record), record.cached_tokens) for record in records]
    if row == "throughput":
        shared = tokens(scale.batch_shared)
        prompts = [Turn(shared + tokens(scale.batch_own), scale.batch_output) for _ in range(scale.requests)]
        result = _send(prompts, url, concurrency=scale.concurrency)
        return [Sample(sum(record.output_tokens for record in result.records) / result.duration)]
    if row == "conversation":
        turns = tuple(Turn(tokens(scale.turn_input), scale.turn_output) for _ in range(scale.turns))
        return [Sample(sum(_ttft(record) for record in _send_conversation(turns, url).records))]
    raise ValueError(f"{row} is not measured on a server")


class Tokens:
    """Draws prompts: the same seed, the same tokens."""

    def __init__(self, seed: str) -> None:
        self._draw = random.Random(seed)

    def __call__(self, count: int) -> tuple[int, ...]:
        return tuple(self._draw.choices(COMMON_TOKEN_IDS, k=count))


def _send(prompts: Sequence[Turn], url: str, *, concurrency: int = 1) -> Result:
    workload = Workload(name="random", conversations=tuple(Conversation((prompt,)) for prompt in prompts))
    return _run(workload, url, concurrency)


def _send_conversation(turns: tuple[Turn, ...], url: str) -> Result:
    return _run(Workload(name="multi-turn", conversations=(Conversation(turns),)), url, 1)


def _run(workload: Workload, url: str, concurrency: int) -> Result:
    try:
        result = asyncio.run(run(workload, url, SERVED_NAME, load=Load(concurrency=concurrency)))
    except ConfigError as error:
        raise MeasureError(str(error)) from error
    for record in result.records:
        if record.error is not None:
            raise MeasureError(f"a request failed: {record.error.label}: {record.error.message}")
        wanted = workload.conversations[record.conversation].turns[record.turn].output_tokens
        if record.output_tokens != wanted:
            raise MeasureError(f"an answer has {record.output_tokens} tokens instead of {wanted}")
    return result


def _ttft(record: RequestRecord) -> float:
    if record.ttft is None:
        raise MeasureError("an answer has no token that could be timed")
    return record.ttft


def _tokens_a_second(record: RequestRecord) -> float:
    if record.tpot is None:
        raise MeasureError("an answer has fewer than two tokens that could be timed")
    return 1 / record.tpot
