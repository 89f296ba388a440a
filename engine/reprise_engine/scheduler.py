"""Which tokens the next step computes. There are no phases: "tokens computed" chases "tokens known".

    known = prompt + output          computed = tokens whose KV is in the request's blocks
    0 ≤ computed < known             the step that makes up for the difference samples the next token

Order is by rank: lower `priority` first, then earlier arrival. Running requests are never more than what one step can
give a token each. Blocks for all known tokens are allocated at admission, so only generation asks for more; when there
are none left, the running request of the last rank is preempted: it gives up its blocks (what was computed stays in
the prefix index) and waits in its old place. The first in rank is never preempted and fits the pool alone, so it ends,
and so does everybody after it.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable

from reprise_engine.cache_accounting import CacheAccounting
from reprise_engine.cache_report import PrefixCacheReport, TierStats
from reprise_engine.config import SchedulerConfig
from reprise_engine.errors import ConfigError, NotFinite, RequestError
from reprise_engine.kv.hashing import BlockHasher, sha256_block_hash
from reprise_engine.kv.manager import KVCacheManager
from reprise_engine.kv.sequence import NextBlock
from reprise_engine.kv.tiering import Tiering
from reprise_engine.messages import SchedulerStats
from reprise_engine.request import (
    EngineRequest,
    FinishReason,
    RequestId,
    RequestOutput,
    TokenId,
    TokenLogprobs,
)
from reprise_engine.request_limits import check_prompt, checked_max_tokens
from reprise_engine.request_state import Rank, RequestState, output_of, rank_of, remove
from reprise_engine.step import ScheduledRequest, Step, StepResult
from reprise_engine.step_builder import StepBuilder
from reprise_engine.tier_loads import TierLoads


class Scheduler:
    """Turns requests into Steps and StepResults into outputs; owns every request and, through `kv`, every block.

    One step at a time: schedule() → (the runner) → commit(). Requests may be added and aborted in between.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        num_blocks: int,
        block_size: int,
        enable_prefix_caching: bool,
        max_model_len: int,
        hasher: BlockHasher = sha256_block_hash,
        pin_budget: int = 0,
        tiering: Tiering | None = None,
        record_kv_events: bool = False,
    ) -> None:
        budget = config.batched_tokens(max_model_len=max_model_len)
        if not config.enable_chunked_prefill and budget < max_model_len:
            raise ConfigError(
                f"--max-num-batched-tokens is {budget}; without chunked prefill a prompt is "
                f"computed in one step, so it must be at least max_model_len ({max_model_len})."
            )
        self.kv = KVCacheManager(
            num_blocks=num_blocks,
            block_size=block_size,
            enable_prefix_caching=enable_prefix_caching,
            hasher=hasher,
            pin_budget=pin_budget,
            tiering=tiering,
            record_events=record_kv_events,
        )
        self._budget = budget
        self._chunked = config.enable_chunked_prefill
        # Every running request gets at least one token a step, or the last in rank would starve.
        self._max_running = min(config.max_num_seqs, budget)
        self._max_model_len = max_model_len
        self._states: dict[RequestId, RequestState] = {}
        self._waiting: list[RequestState] = []  # both by rank
        self._running: list[RequestState] = []
        self._added = 0
        self._steps = 0
        self._in_flight: Step | None = None
        self._books = CacheAccounting(self.kv, () if tiering is None else tiering.tiers)
        self._tiers = None if tiering is None else TierLoads(self.kv, tiering, self._books)
        self._preemptions = 0

    # --- requests come and go

    def add(self, request: EngineRequest) -> None:
        """Queues a request.

        Raises ContextLengthExceeded where prompt + max_tokens fit neither max_model_len nor the whole KV pool, and
        RequestError for an empty prompt, a token id out of range, max_tokens below 1, or an id that is in use.
        """
        prompt = request.prompt_token_ids
        check_prompt(request)
        if request.request_id in self._states:
            raise RequestError(f"request_id {request.request_id!r} is in use; ids must be unique.", param="request_id")
        max_tokens = checked_max_tokens(
            request, max_model_len=self._max_model_len, room=self.kv.num_blocks * self.kv.block_size
        )
        sampling = request.sampling
        self._added += 1
        state = RequestState(
            request_id=request.request_id,
            rank=(request.priority, request.arrival_time, self._added),
            sampling=sampling,
            eos_token_ids=frozenset(() if sampling.ignore_eos else request.eos_token_ids),
            prompt_length=len(prompt),
            max_tokens=max_tokens,
            tokens=list(prompt),
            blocks=self.kv.sequence(cache_salt=request.cache_salt, skip_reading=not sampling.reads_prefix_cache),
            pin=request.pin,
            explain_cache=request.explain_cache,
            isolated=request.isolated,
            arrival=request.arrival_time,
        )
        self._states[request.request_id] = state
        insort(self._waiting, state, key=rank_of)

    def abort(self, request_ids: Iterable[RequestId]) -> tuple[RequestOutput, ...]:
        """Ends requests at once; ids that are unknown, finished or aborted already are ignored.

        Returns their last outputs (FinishReason.ABORT). Nothing more will come for these ids; the blocks of one whose
        step is running are given back at that step's commit.
        """
        in_flight = {part.request_id for part in self._in_flight.requests} if self._in_flight else set()
        if self._tiers is not None:
            in_flight.update(state.request_id for state in self._tiers.in_flight)
        outputs = []
        for request_id in request_ids:
            state = self._states.get(request_id)
            if state is None or state.aborted:
                continue
            if request_id in in_flight:
                state.aborted = True
            else:
                self._drop(state)
            outputs.append(output_of(state, finish_reason=FinishReason.ABORT))
        return tuple(outputs)

    def abort_all(self) -> tuple[RequestOutput, ...]:
        """Ends every request."""
        return self.abort(tuple(self._states))

    def has_work(self) -> bool:
        """Whether schedule() has, or a running step leaves, something to do."""
        return bool(self._states)

    def has_background_work(self) -> bool:
        """Whether blocks are on their way to the disk: steps without requests carry them."""
        return self._tiers is not None and self._tiers.tiering.has_work

    def wait(self, seconds: float) -> None:
        """Where schedule() had nothing to do: until the disk has done something, at most so long."""
        if self._tiers is not None:
            self._tiers.tiering.wait(seconds)

    def hurry(self, seconds: float) -> None:
        """The engine ends: other processes that use the tiers' disk are waited for at most so long."""
        if self._tiers is not None:
            self._tiers.tiering.hurry(seconds)

    def close(self, seconds: float) -> None:
        """Ends the threads of the tiers; what they were told to write is written, as far as the time goes."""
        if self._tiers is not None:
            self._tiers.tiering.close(seconds)

    def stats(self) -> SchedulerStats:
        loading = 0 if self._tiers is None else sum(1 for state in self._running if state.load is not None)
        return SchedulerStats(
            num_running=len(self._running) - loading,
            num_waiting=len(self._waiting) + loading,
            kv_cache_usage=self.kv.usage,
            num_cached_blocks=len(self.kv.index),
            prefix_cache_queries=self._books.queries,
            prefix_cache_hits=self._books.hits,
            prefix_cache_misses=self._books.misses,
            num_preemptions=self._preemptions,
            num_evicted_blocks=self.kv.num_evicted_blocks,
            num_pinned_blocks=self.kv.pins.num_blocks,
            tiers=self._tier_stats(),
        )

    def _tier_stats(self) -> tuple[TierStats, ...]:
        return () if self._tiers is None else self._books.complete(self._tiers.tiering.stats())

    def reset_prefix_cache(self, *, include_pins: bool = False) -> tuple[bool, int]:
        """Forgets all cached blocks that no request uses; pinned ones only with `include_pins`.

        Returns (success, freed blocks); success is False where requests hold blocks, which then stay cached.
        """
        return self.kv.reset(include_pins=include_pins)

    def reset_tiers(self) -> tuple[int, int | None]:
        """Forgets what is in the tiers; what a request is loading already reaches it. Returns as `Tiering.clear`."""
        return (0, 0) if self._tiers is None else self._tiers.tiering.clear()

    def unpin(self, name: str) -> bool:
        """What the pin held stays cached, as anything else does. False where there is no such pin."""
        return self.kv.pins.unpin(name)

    def inspect_prefix_cache(self) -> PrefixCacheReport:
        """What is in the cache, and what the last requests found in it. O(blocks): for people, not for every step."""
        return self._books.report(self._tier_stats())

    def check_invariants(self) -> None:
        """Raises AssertionError where requests, page tables, pool and index contradict each other. For tests."""
        self.kv.check_invariants(state.blocks for state in self._states.values())
        ranks = [rank_of(state) for state in self._running]
        assert ranks == sorted(ranks), "the running requests are not in order"
        assert [rank_of(s) for s in self._waiting] == sorted(map(rank_of, self._waiting)), "the queue is not in order"
        assert len(self._running) + len(self._waiting) == len(self._states), "a request is in no queue, or in two"
        for state in self._waiting:
            assert not state.blocks.blocks, f"{state.request_id} waits, yet holds blocks"
            assert not state.computed, f"{state.request_id} waits, yet {state.computed} of its tokens count as computed"
            assert state.load is None, f"{state.request_id} waits, yet loads"
        if self._tiers is not None:
            self._tiers.tiering.check_invariants(state.load for state in self._running if state.load is not None)
        for state in self._running:
            assert state.pending > 0, f"{state.request_id} runs, yet all its tokens are computed"

    # --- one step

    def schedule(self, now: float) -> Step | None:
        """The next step; None where there is nothing to do, or nothing but to wait(). `now` is time.monotonic().

        Raises RuntimeError while the step before is not committed.
        """
        if self._in_flight is not None:
            raise RuntimeError(f"step {self._in_flight.step_id} is not committed yet")
        self._make_room()
        builder = StepBuilder(self._budget)
        running = self._running if self._tiers is None else self._tiers.ready(self._running, now)
        decoding = [state for state in running if state.pending == 1]
        prefilling = [state for state in running if state.pending > 1]
        if self._chunked:
            for state in decoding:
                builder.take(state, now)
            for state in prefilling:
                self._admit(builder, now, before=state.rank)
                builder.take(state, now)
            self._admit(builder, now)
        else:
            # Whole prompts first: behind the decoding ones, a prompt as long as the budget would never fit.
            for state in prefilling:  # what a load has left of them
                if state.pending <= builder.left:
                    builder.take(state, now)
            self._admit(builder, now)
            for state in decoding:
                builder.take(state, now)
        if self._tiers is not None:
            self._tiers.collect(self._running, builder, now)
        self._in_flight = builder.step(self._steps + 1)
        self._steps += self._in_flight is not None
        return self._in_flight

    def commit(self, step: Step, result: StepResult, now: float) -> tuple[RequestOutput, ...]:
        """Takes in what the runner made of `step`, the one that schedule() returned last.

        Only now do the blocks it filled enter the prefix index. Returns an output for every request that got a token.
        Raises RuntimeError where step and result are not those awaited.
        """
        if step is not self._in_flight or result.step_id != step.step_id:
            raise RuntimeError(f"commit of step {step.step_id} with the result of step {result.step_id}: not awaited")
        self._in_flight = None
        outputs: list[RequestOutput] = []
        for state in () if self._tiers is None else self._tiers.commit(step, result, now):
            if state.aborted:
                self._drop(state)
        for part in step.requests:
            state = self._states[part.request_id]
            error = result.errors.get(part.request_id)
            if not isinstance(error, NotFinite):  # or whoever has the same prefix would read it
                state.computed += len(part.token_ids)
                self.kv.commit(state.blocks, state.tokens, state.computed)
            if state.aborted:
                self._drop(state)
            elif error is not None:
                self._drop(state)
                outputs.append(RequestOutput(request_id=part.request_id, error=error))
            else:
                outputs += self._take(state, part, result, now)
        return tuple(outputs)

    def _take(self, state: RequestState, part: ScheduledRequest, result: StepResult, now: float) -> list[RequestOutput]:
        """What a step brought a request: log-probabilities of its prompt, a token, or nothing to tell."""
        outputs: list[RequestOutput] = []
        if part.scored:
            state.prompt_scored += len(part.scored)
            scores = result.prompt_logprobs[part.request_id]
            outputs.append(output_of(state, prompt_logprobs=scores, finish_reason=None))
        if part.samples:
            token = result.sampled[part.request_id]
            outputs.append(self._append(state, token, result.logprobs.get(part.request_id), now))
        return outputs

    def discard(self, step: Step) -> None:
        """Forgets `step`, whose run failed, and its requests; what it may have written never enters the index."""
        if step is not self._in_flight:
            raise RuntimeError(f"discard of step {step.step_id}: not awaited")
        self._in_flight = None
        lost = [self._states[part.request_id] for part in step.requests]
        if self._tiers is not None:
            lost += self._tiers.discard()
        for state in lost:
            self._drop(state)

    def _make_room(self) -> None:
        """Gives every running request blocks for its known tokens, preempting from the end where there are none."""
        running = self._running
        block_size = self.kv.block_size
        position = 0
        while position < len(running):
            state = running[position]
            position += 1
            if len(state.tokens) <= len(state.blocks.blocks) * block_size:
                continue
            while not self.kv.extend(state.blocks, len(state.tokens)):
                last = running[-1]
                self._preempt(last)
                if last is state:
                    break

    def _admit(self, builder: StepBuilder, now: float, *, before: Rank | None = None) -> None:
        """Moves waiting requests to the running ones, in rank order, while tokens, seats and blocks suffice.

        `before` leaves out those that do not come before this rank.
        """
        if not self._waiting or (before is not None and self._waiting[0].rank >= before):
            return
        being_computed: dict[NextBlock, Rank] = {}
        for state in self._running:
            if (block := self.kv.next_block(state.blocks)) is not None:
                being_computed.setdefault(block, state.rank)
        waiting, skipped = self._waiting, 0
        # Not more are skipped than could run: looking further would make a step's cost grow with the queue.
        while (
            skipped < min(len(waiting), self._max_running) and len(self._running) < self._max_running and builder.left
        ):
            state = waiting[skipped]
            if before is not None and state.rank >= before:
                return
            match = self.kv.lookup(state.blocks, state.tokens)
            block = self.kv.next_block(state.blocks, match)
            if block is not None and being_computed.setdefault(block, state.rank) < state.rank:
                # One that goes before it is computing just this block: when that is committed, it is a hit.
                skipped += 1
                continue
            fitting = self.kv.fitting(match, len(state.tokens))
            if fitting is None:
                return
            if self._tiers is not None and (below := self._tiers.probe(state, match)):
                # It goes on with whole blocks where the copy would have gone on inside one.
                fitting = match.without_copy()
                self._tiers.begin(state, below, fitting, now)
            elif not self._chunked and len(state.tokens) - fitting.num_tokens > builder.left:
                return
            if state.load is None:
                self._books.admitted(state, match, fitting)
            copies = self.kv.admit(state.blocks, fitting, len(state.tokens))
            assert copies is not None, "a match that fits was refused"
            del waiting[skipped]
            insort(self._running, state, key=rank_of)
            builder.copies += copies
            state.computed = fitting.num_tokens
            if state.load is None:
                builder.take(state, now)

    def _append(self, state: RequestState, token: TokenId, logprobs: TokenLogprobs | None, now: float) -> RequestOutput:
        """Adds a sampled token, and ends the request where that was the last."""
        # A grammar may leave nothing but the end, whatever min_tokens says.
        may_stop = state.may_stop or state.sampling.structured is not None
        stops = may_stop and (token in state.eos_token_ids or token in state.sampling.stop_token_ids)
        state.tokens.append(token)
        state.last_token = now
        if state.first_token is None:
            state.first_token = now
        finish_reason = None
        if stops:
            finish_reason = FinishReason.STOP
        elif state.output_length >= state.max_tokens:
            finish_reason = FinishReason.LENGTH
        pinned = None
        if finish_reason is not None:
            self._drop(state)
            if state.pin is not None:
                pinned = self.kv.pin(state.pin, state.blocks, state.tokens[: state.computed])
        return output_of(
            state,
            new_token_ids=(token,),
            new_logprobs=() if logprobs is None else (logprobs,),
            finish_reason=finish_reason,
            stop_token_id=token if stops else None,
            pinned=pinned,
        )

    def _preempt(self, state: RequestState) -> None:
        if self._tiers is not None:
            self._tiers.cancel(state)
        self.kv.release(state.blocks, state.tokens, state.computed)
        state.computed = 0
        self._preemptions += 1
        remove(self._running, state)
        insort(self._waiting, state, key=rank_of)

    def _drop(self, state: RequestState) -> None:
        """Forgets a request; its blocks are free, or cached."""
        if self._tiers is not None:
            self._tiers.cancel(state)
        self.kv.release(state.blocks, state.tokens, state.computed)
        del self._states[state.request_id]
        if not remove(self._running, state):
            remove(self._waiting, state)
