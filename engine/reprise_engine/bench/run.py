"""A workload against a server, at a concurrency or a rate.

    result = await run(make_workload("shared-prefix", num_prompts=32, prefix_len=1024, input_len=32, output_len=64),
                       "http://127.0.0.1:8000", load=Load(concurrency=8))

With a rate the conversations start when they are due, whatever the server does; latencies are measured from then, too,
so that a server (or this client) that is late cannot hide it ("coordinated omission").
"""

from __future__ import annotations

import asyncio
import math
import platform
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version

from reprise_engine.bench.client import Answer, Client, ClientOptions, counted
from reprise_engine.bench.result import ClientLoad, RequestRecord, Result
from reprise_engine.bench.statistics import percentile
from reprise_engine.bench.workloads import (
    COMMON_TOKEN_IDS,
    Conversation,
    Workload,
    poisson_schedule,
    reserved_id,
    warm_up_turns,
)
from reprise_engine.errors import ConfigError
from reprise_engine.version import __version__

_LAG_PERIOD = 0.01

Progress = Callable[[RequestRecord], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """`rate` is conversations started a second, inf as soon as one may; `concurrency` bounds those under way."""

    concurrency: int | None = None
    rate: float = math.inf
    seed: int = 0
    num_warmups: int = 0
    reset_prefix_cache: bool = False

    def __post_init__(self) -> None:
        if self.concurrency is not None and self.concurrency < 1:
            raise ConfigError(f"--concurrency is {self.concurrency}; it must be at least 1.")
        if not self.rate > 0:
            raise ConfigError(f"--rate is {self.rate}; it must be above 0, or inf.")
        if self.num_warmups < 0:
            raise ConfigError(f"--warmup is {self.num_warmups}; it must be at least 0.")


async def run(
    workload: Workload,
    base_url: str,
    model: str | None = None,
    *,
    load: Load | None = None,
    options: ClientOptions | None = None,
    token_ids: Sequence[int] = COMMON_TOKEN_IDS,
    label: str = "",
    engine_flags: Sequence[str] | None = None,
    progress: Progress = lambda _record: None,
) -> Result:
    """Sends the workload and measures it; `model` None takes the server's first. `progress` hears of every request.

    `token_ids` are what the workload was drawn from, for warm-up. Raises ConfigError where the server cannot be
    measured at all; what befalls single requests is in their records.
    """
    load = load or Load()
    async with Client(base_url, model, options) as client:
        server = await client.connect(probe_token_id=reserved_id(token_ids))
        if workload.name == "multi-turn" and client.options.text is None and not client.returns_token_ids:
            raise ConfigError(
                f"{client.base_url} does not return the ids of the tokens it generates, so a conversation cannot go on "
                "in token ids; use --prompt-format text with --tokenizer FOLDER."
            )
        for turn in warm_up_turns(workload, load.num_warmups, token_ids=token_ids):
            await client.complete(client.body(turn.token_ids, output_tokens=turn.output_tokens))
        if load.reset_prefix_cache:
            await client.reset_prefix_cache()
        before = await client.counters()
        started = datetime.now(UTC).isoformat(timespec="milliseconds")
        drive = _Drive(client, workload, load, progress)
        records, duration, client_load = await drive.run()
        counters = counted(before, await client.counters())
    return Result(
        label=label,
        workload=workload.name,
        settings=workload.settings
        | {
            "num_requests": workload.num_requests,
            "concurrency": load.concurrency,
            "rate": None if math.isinf(load.rate) else load.rate,
            "schedule_seed": load.seed,
            "num_warmups": load.num_warmups,
            "reset_prefix_cache": load.reset_prefix_cache,
            "api": client.options.api,
            "prompt_format": "token-ids" if client.options.text is None else "text",
            "returns_token_ids": client.returns_token_ids,
            "temperature": client.options.temperature,
            "ignore_eos": client.options.ignore_eos,
            "extra_body": dict(client.options.extra_body),
        },
        server=server,
        started=started,
        duration=duration,
        records=tuple(sorted(records, key=lambda record: record.index)),
        client=client_load,
        counters=counters,
        engine_flags=None if engine_flags is None else tuple(engine_flags),
        versions={
            "reprise": __version__,
            "python": platform.python_version(),
            "aiohttp": version("aiohttp"),
            "platform": platform.platform(),
        },
    )


class _Drive:
    """The requests of one run."""

    def __init__(self, client: Client, workload: Workload, load: Load, progress: Progress) -> None:
        self._client = client
        self._workload = workload
        self._load = load
        self._progress = progress
        self._records: list[RequestRecord] = []
        self._start = 0.0
        conversations = workload.conversations
        self._first_index = [0]
        for conversation in conversations[:-1]:
            self._first_index.append(self._first_index[-1] + len(conversation.turns))
        # Serialised before the clock runs: long prompts take milliseconds that belong to no server.
        self._first_bodies = [
            client.body(conversation.turns[0].token_ids, output_tokens=conversation.turns[0].output_tokens)
            for conversation in conversations
        ]

    async def run(self) -> tuple[list[RequestRecord], float, ClientLoad]:
        lags: list[float] = []
        cpu = time.process_time()
        self._start = time.perf_counter()
        watching = asyncio.create_task(_watch_lag(lags))
        try:
            async with asyncio.TaskGroup() as group:
                if math.isinf(self._load.rate):
                    self._closed_loop(group)
                else:
                    self._open_loop(group)
        finally:
            watching.cancel()
            with suppress(asyncio.CancelledError):
                await watching
        duration = max((record.finished_at for record in self._records), default=0.0)
        elapsed = time.perf_counter() - self._start
        lags = sorted(lags) or [0.0]
        return (
            self._records,
            duration,
            ClientLoad(
                loop_lag_p99=percentile(lags, 99),
                loop_lag_max=lags[-1],
                cpu_share=(time.process_time() - cpu) / elapsed if elapsed > 0 else 0.0,
            ),
        )

    def _closed_loop(self, group: asyncio.TaskGroup) -> None:
        """`concurrency` users: each begins its next conversation when its last one has ended."""
        waiting = iter(range(len(self._workload.conversations)))

        async def user() -> None:
            for number in waiting:
                await self._converse(number, due=time.perf_counter() - self._start)

        for _ in range(min(self._load.concurrency or self._workload.num_requests, len(self._workload.conversations))):
            group.create_task(user())

    def _open_loop(self, group: asyncio.TaskGroup) -> None:
        gate = asyncio.Semaphore(self._load.concurrency or len(self._workload.conversations))

        async def arrive(number: int, due: float) -> None:
            await asyncio.sleep(max(0.0, due - (time.perf_counter() - self._start)))
            async with gate:
                await self._converse(number, due=due)

        schedule = poisson_schedule(len(self._workload.conversations), rate=self._load.rate, seed=self._load.seed)
        for number, due in enumerate(schedule):
            group.create_task(arrive(number, due))

    async def _converse(self, number: int, *, due: float) -> None:
        conversation = self._workload.conversations[number]
        history = _History(self._client)
        for turn_number, turn in enumerate(conversation.turns):
            history.user(turn.token_ids)
            body = history.body(turn.output_tokens) if turn_number else self._first_bodies[number]
            answer = await self._client.complete(body)
            record = self._record(number, turn_number, history.num_tokens, due, answer)
            self._records.append(record)
            self._progress(record)
            if answer.error is not None:
                self._skip(conversation, number, turn_number + 1, answer)
                return
            history.answer(answer)
            due = record.finished_at

    def _record(self, number: int, turn: int, sent_tokens: int, due: float, answer: Answer) -> RequestRecord:
        return RequestRecord(
            index=self._first_index[number] + turn,
            conversation=number,
            turn=turn,
            sent_prompt_tokens=sent_tokens,
            scheduled_at=due,
            sent_at=answer.sent_at - self._start,
            finished_at=answer.finished_at - self._start,
            chunk_times=tuple(at - self._start for at in answer.chunk_times),
            prompt_tokens=answer.prompt_tokens,
            cached_tokens=answer.cached_tokens,
            output_tokens=answer.output_tokens,
            counted_by=answer.counted_by,
            finish_reason=answer.finish_reason,
            error=answer.error,
        )

    def _skip(self, conversation: Conversation, number: int, first: int, answer: Answer) -> None:
        """Turns behind a failed one were never sent; they count as failed the same way."""
        for turn in range(first, len(conversation.turns)):
            at = answer.finished_at - self._start
            record = RequestRecord(
                index=self._first_index[number] + turn,
                conversation=number,
                turn=turn,
                sent_prompt_tokens=0,
                scheduled_at=at,
                sent_at=at,
                finished_at=at,
                error=answer.error,
            )
            self._records.append(record)
            self._progress(record)


class _History:
    """What a conversation's next prompt begins with, in the form this client sends."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._text = client.options.text
        self._token_ids: list[int] = []
        self._parts: list[str] = []
        self._messages: list[dict[str, str]] = []
        self.num_tokens = 0

    def user(self, token_ids: Sequence[int]) -> None:
        self.num_tokens += len(token_ids)
        if self._text is None:
            self._token_ids += token_ids
        else:
            text = self._text.decode(token_ids)
            self._parts.append(text)
            self._messages.append({"role": "user", "content": text})

    def answer(self, answer: Answer) -> None:
        self.num_tokens += answer.output_tokens
        text = "".join(answer.text)
        if self._text is None:
            self._token_ids += answer.token_ids
        else:
            self._parts.append(text)
            self._messages.append({"role": "assistant", "content": text})

    def body(self, output_tokens: int) -> bytes:
        if self._text is None:
            return self._client.body(tuple(self._token_ids), output_tokens=output_tokens)
        if self._client.options.api == "chat":
            return self._client.body(self._messages, output_tokens=output_tokens)
        return self._client.body("".join(self._parts), output_tokens=output_tokens)


async def _watch_lag(lags: list[float]) -> None:
    while True:
        asked = time.perf_counter()
        await asyncio.sleep(_LAG_PERIOD)
        lags.append(time.perf_counter() - asked - _LAG_PERIOD)
