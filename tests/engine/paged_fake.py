"""A runner without a model whose output depends on every slot of the KV pool it reads.

The "KV" of position p is a number made of the KV of position p - 1, *read through the block table*, and the token at p:
like real KV it depends on the whole prefix. The next token is made of the KV of all positions. So a wrong block, a
stale one, a missing copy or a slot written twice changes the output, and `expected_output` says what it must be.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import count

from reprise_engine.config import SchedulerConfig
from reprise_engine.kv.hashing import BlockHasher, sha256_block_hash
from reprise_engine.kv.tiering import Tiering
from reprise_engine.loop import EngineCore, KVEventSink
from reprise_engine.request import (
    EngineRequest,
    FinishReason,
    RequestId,
    RequestOutput,
    SamplingParams,
    TokenId,
    TokenLogprobs,
)
from reprise_engine.scheduler import Scheduler
from reprise_engine.step import BlockId, ScheduledRequest, SlotId, Step, StepResult
from reprise_engine.tiers.disk_tier import DiskCounters, DiskDone
from reprise_engine.tiers.host import HostSlots, TierBlock
from reprise_engine.tiers.keys import BlockKey

MODULUS = 1_000_003
VOCABULARY = 50


def kv_value(previous: int, token: TokenId, position: int) -> int:
    return (previous * 31 + token * 7 + position + 1) % MODULUS


def kv_values(tokens: Sequence[TokenId]) -> list[int]:
    values: list[int] = []
    for position, token in enumerate(tokens):
        values.append(kv_value(values[-1] if values else 0, token, position))
    return values


def next_token(values: Sequence[int], forbidden: Sequence[TokenId] = ()) -> TokenId:
    token = sum(value * (position + 1) for position, value in enumerate(values)) % VOCABULARY
    while token in forbidden:
        token = (token + 1) % VOCABULARY
    return token


def expected_output(
    request: EngineRequest,
) -> tuple[list[TokenId], FinishReason]:
    """What a request must generate, by the definition alone: no blocks, no batches."""
    tokens = list(request.prompt_token_ids)
    sampling = request.sampling
    assert sampling.max_tokens is not None
    stops = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else set(request.eos_token_ids))
    output: list[TokenId] = []
    while True:
        forbidden = stops.copy() if len(output) < sampling.min_tokens else set()
        forbidden |= {word[-1] for word in sampling.bad_words_token_ids if (*output, word[-1])[-len(word) :] == word}
        token = next_token(kv_values(tokens), sorted(forbidden))
        output.append(token)
        tokens.append(token)
        if token in stops:
            return output, FinishReason.STOP
        if len(output) == sampling.max_tokens:
            return output, FinishReason.LENGTH


Content = tuple[int | None, ...]
"""Of a block, in whatever tier."""


class PagedFakeRunner:
    """Keeps one number a slot; None where nothing was ever written. `host` is the memory of the host tier."""

    def __init__(self, *, num_blocks: int, block_size: int, num_slots: int = 0) -> None:
        self.block_size = block_size
        self.pool: list[list[int | None]] = [[None] * block_size for _ in range(num_blocks)]
        self.host: list[Content] = [()] * num_slots
        self.transfer_seconds = 0.0
        """What it says that a store or a load takes."""
        self.steps: list[Step] = []

    def read(self, table: Sequence[BlockId], length: int) -> list[int]:
        values = []
        for position in range(length):
            value = self.pool[table[position // self.block_size]][position % self.block_size]
            assert value is not None, f"position {position} was never computed"
            values.append(value)
        return values

    def run(self, step: Step) -> StepResult:
        self.steps.append(step)
        for store in step.stores:
            self.host[store.slot] = tuple(self.pool[store.source])
        for load in step.loads:
            self.pool[load.target] = list(self.host[load.slot])
        for copy in step.copies:
            self.pool[copy.target] = list(self.pool[copy.source])
        written: set[tuple[BlockId, int]] = set()
        for part in step.requests:
            assert part.token_ids, "a request is in the step without a token"
            previous = self.read(part.block_table, part.start)[-1] if part.start else 0
            for position, token in enumerate(part.token_ids, part.start):
                slot = (part.block_table[position // self.block_size], position % self.block_size)
                assert slot not in written, f"{slot} is written by two requests of one step"
                written.add(slot)
                previous = kv_value(previous, token, position)
                self.pool[slot[0]][slot[1]] = previous
        sampled = {
            part.request_id: next_token(
                self.read(part.block_table, part.start + len(part.token_ids)), part.forbidden_token_ids
            )
            for part in step.requests
            if part.samples
        }
        scores = {part.request_id: self._scores(part) for part in step.requests if part.scored}
        seconds = self.transfer_seconds * (len(step.stores) + len(step.loads))
        return StepResult(step_id=step.step_id, sampled=sampled, prompt_logprobs=scores, transfer_seconds=seconds)

    def _scores(self, part: ScheduledRequest) -> tuple[TokenLogprobs, ...]:
        """The "log-probability" of a token is the KV of the position before it."""
        first = part.start + part.scored_from
        values = self.read(part.block_table, first + len(part.scored))[first:]
        return tuple(
            TokenLogprobs(token_id=token, logprob=-float(value), rank=1)
            for token, value in zip(part.scored, values, strict=True)
        )


@dataclass(slots=True, eq=False)
class FakeDisk:
    """A DiskTier whose every operation ends when the test says so, well or not; the records outlive an engine."""

    records: dict[BlockKey, tuple[TierBlock, Content]] = field(default_factory=dict)
    host: list[Content] = field(default_factory=list)
    """The runner's."""
    pending: list[tuple[DiskDone, TierBlock, Content]] = field(default_factory=list)
    """What was asked for and has not ended; of a write, with what the slot held then."""
    done: list[DiskDone] = field(default_factory=list)
    capacity: int = 1_000
    instant: bool = True
    """Operations end at once."""
    broken: bool = False
    """Operations that end by themselves fail."""
    failures: int = 0

    def __contains__(self, key: BlockKey) -> bool:
        return key in self.records

    def touch(self, keys: Sequence[BlockKey]) -> None:
        for key in keys:
            if key in self.records:
                self.records[key] = self.records.pop(key)

    def read(self, slot: SlotId, block: TierBlock) -> None:
        self._ask(DiskDone(slot, is_read=True, good=True), block, ())

    def write(self, slot: SlotId, block: TierBlock) -> None:
        self._ask(DiskDone(slot, is_read=False, good=True), block, self.host[slot])

    def _ask(self, done: DiskDone, block: TierBlock, content: Content) -> None:
        self.pending.append((done, block, content))
        if self.instant:
            self.end(0, good=not self.broken)

    def end(self, place: int, *, good: bool = True) -> None:
        """The operation at this place of `pending` ends; where it fails its record is dropped, its slot torn."""
        done, block, content = self.pending.pop(place)
        if done.is_read:
            known, content = self.records.get(block.key, (None, ()))
            good = good and known == block
            self.host[done.slot] = content if good else (-1,) * len(content)
            if not good:
                self.records.pop(block.key, None)
        else:
            assert self.host[done.slot] == content, "a slot was rewritten while it was being written to the disk"
            if good:
                while len(self.records) >= self.capacity:
                    del self.records[next(iter(self.records))]
                self.records[block.key] = block, content
        self.failures += not good
        self.done.append(replace(done, good=good))

    def completed(self) -> list[DiskDone]:
        ended, self.done = self.done, []
        return ended

    def wait(self, seconds: float) -> None:
        """Nothing ends by waiting."""

    def hurry(self, seconds: float) -> None:
        """There are no others."""

    def clear(self) -> int:
        for done, _, _ in [one for one in self.pending if not one[0].is_read]:
            self.done.append(replace(done, good=False))
        self.pending = [one for one in self.pending if one[0].is_read]
        cleared = len(self.records)
        self.records.clear()
        return cleared

    def counters(self) -> DiskCounters:
        return DiskCounters(records=len(self.records), failures=self.failures)

    def close(self, seconds: float) -> None:
        self.pending.clear()


class World:
    """A scheduler with a fake runner behind it, checked after every step."""

    def __init__(
        self,
        *,
        num_blocks: int = 16,
        block_size: int = 4,
        enable_prefix_caching: bool = True,
        max_num_seqs: int = 8,
        max_num_batched_tokens: int = 64,
        enable_chunked_prefill: bool = True,
        max_model_len: int = 64,
        pin_budget: int = 0,
        host_slots: int = 0,
        disk: FakeDisk | None = None,
        keeps_evicted: bool = True,
        slow_transfers: bool = False,
        hasher: BlockHasher = sha256_block_hash,
        record_kv_events: bool = False,
        kv_events: KVEventSink | None = None,
    ) -> None:
        """`host_slots` above 0 make a host tier; without `keeps_evicted` they only pass blocks to `disk` and back.

        With `slow_transfers` a step beside others moves one block.
        """
        self.disk = disk
        tiering = None
        if host_slots:
            tiering = Tiering(
                HostSlots(host_slots),
                disk,
                keeps_evicted=keeps_evicted,
                block_size=block_size,
                bytes_per_block=block_size * 8,
                names_are_keys=hasher is sha256_block_hash,
            )
        config = SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            enable_chunked_prefill=enable_chunked_prefill,
        )
        self.max_num_batched_tokens = max_num_batched_tokens
        self.scheduler = Scheduler(
            config,
            num_blocks=num_blocks,
            block_size=block_size,
            enable_prefix_caching=enable_prefix_caching,
            max_model_len=max_model_len,
            hasher=hasher,
            pin_budget=pin_budget,
            tiering=tiering,
            record_kv_events=record_kv_events or kv_events is not None,
        )
        self.runner = PagedFakeRunner(num_blocks=num_blocks, block_size=block_size, num_slots=host_slots)
        self.runner.transfer_seconds = 0.2 if slow_transfers else 0.0
        if disk is not None:
            disk.host = self.runner.host
        self.core = EngineCore(self.scheduler, self.runner, clock=lambda: self.now, kv_events=kv_events)
        self.now = 100.0
        self.outputs: dict[RequestId, list[RequestOutput]] = {}
        self.requests: dict[RequestId, EngineRequest] = {}
        self._ids = count()

    def add(
        self,
        prompt: Sequence[TokenId],
        *,
        max_tokens: int = 1,
        salt: str | None = None,
        priority: int = 0,
        eos: Sequence[TokenId] = (),
        sampling: SamplingParams | None = None,
        pin: str | None = None,
        isolated: bool = False,
    ) -> RequestId:
        request = EngineRequest(
            request_id=RequestId(f"r{next(self._ids)}"),
            prompt_token_ids=tuple(prompt),
            sampling=sampling or SamplingParams(max_tokens=max_tokens),
            cache_salt=salt,
            isolated=isolated,
            pin=pin,
            priority=priority,
            eos_token_ids=tuple(eos),
            arrival_time=self.now,
        )
        self.scheduler.add(request)
        self.requests[request.request_id] = request
        self.outputs[request.request_id] = []
        return request.request_id

    def schedule(self) -> Step | None:
        step = self.scheduler.schedule(self.now)
        self.scheduler.check_invariants()
        if step is not None:
            self._check_step(step)
        return step

    def commit(self, step: Step) -> tuple[RequestOutput, ...]:
        self.now += 1.0
        outputs = self.scheduler.commit(step, self.runner.run(step), self.now)
        self.scheduler.check_invariants()
        for output in outputs:
            self.outputs[output.request_id].append(output)
        return outputs

    def step(self) -> Step:
        step = self.schedule()
        assert step is not None, "there was nothing to do"
        self.commit(step)
        return step

    def drain(self, limit: int = 5_000) -> int:
        """Runs until there is no work; returns the steps taken. An engine that never ends fails here.

        The disk ends what it was told to do, well.
        """
        for taken in range(limit):
            if not self.scheduler.has_work():
                return taken
            step = self.schedule()
            if step is not None:
                self.commit(step)
            else:
                assert self.disk is not None, "there was nothing to do"
                assert self.disk.pending or self.disk.done, "there was nothing to do, and nothing to wait for"
                while self.disk.pending:
                    self.disk.end(0)
        raise AssertionError(f"still at work after {limit} steps")

    def settle(self, limit: int = 5_000) -> None:
        """Carries down all that is to go to the disk."""
        for _ in range(limit):
            if not self.scheduler.has_background_work():
                return
            step = self.schedule()
            if step is not None:
                self.commit(step)
            while self.disk is not None and self.disk.pending:
                self.disk.end(0)
        raise AssertionError(f"still carrying blocks down after {limit} steps")

    def run(
        self, prompt: Sequence[TokenId], *, max_tokens: int = 1, salt: str | None = None, isolated: bool = False
    ) -> RequestId:
        request_id = self.add(prompt, max_tokens=max_tokens, salt=salt, isolated=isolated)
        self.drain()
        return request_id

    def tokens(self, request_id: RequestId) -> list[TokenId]:
        return [token for output in self.outputs[request_id] for token in output.new_token_ids]

    def cached(self, request_id: RequestId) -> int:
        return self.outputs[request_id][0].cached_tokens

    def check_finished(self, request_id: RequestId) -> None:
        """The whole output of a finished request, and its accounting, are what they must be."""
        expected, reason = expected_output(self.requests[request_id])
        outputs = self.outputs[request_id]
        assert self.tokens(request_id) == expected
        prompt = self.requests[request_id].prompt_token_ids
        scores = [(score.token_id, score.logprob) for output in outputs for score in output.prompt_logprobs]
        if self.requests[request_id].sampling.prompt_logprobs is None:
            assert scores == []
        else:
            assert scores == [(token, -value) for token, value in zip(prompt[1:], kv_values(prompt), strict=False)]
        assert [output.finish_reason for output in outputs] == [None] * (len(outputs) - 1) + [reason]
        prompt_length = len(self.requests[request_id].prompt_token_ids)
        assert {output.prompt_tokens for output in outputs} == {prompt_length}
        assert len({output.cached_tokens for output in outputs}) == 1
        assert 0 <= outputs[0].cached_tokens <= prompt_length - 1

    def _check_step(self, step: Step) -> None:
        assert step.num_tokens <= self.max_num_batched_tokens
        size = self.scheduler.kv.block_size
        for part in step.requests:
            end = part.start + len(part.token_ids)
            assert len(part.block_table) * size >= end
            for position in range(part.start, end):
                block = part.block_table[position // size]
                assert self.scheduler.kv.index.node(block) is None, f"block {block} is shared, and would be rewritten"
        for load in step.loads:
            assert self.scheduler.kv.index.node(load.target) is None, f"block {load.target} is shared, and loaded into"
            assert self.scheduler.kv.pool.references(load.target) == 1
        for copy in step.copies:
            assert self.scheduler.kv.pool.references(copy.source) >= 1
