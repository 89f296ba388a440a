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
from reprise_engine.cache_report import MissReason, PinnedPrefix, PrefixCacheReport
from reprise_engine.config import SchedulerConfig
from reprise_engine.errors import ConfigError, ContextLengthExceeded, RequestError
from reprise_engine.kv.hashing import MAX_TOKEN_ID, BlockHasher, sha256_block_hash
from reprise_engine.kv.manager import KVCacheManager
from reprise_engine.kv.sequence import NextBlock
from reprise_engine.messages import SchedulerStats
from reprise_engine.request import (
    EngineRequest,
    FinishReason,
    RequestId,
    RequestOutput,
    RequestTimes,
    TokenId,
    TokenLogprobs,
)
from reprise_engine.request_state import Rank, RequestState, rank_of, remove
from reprise_engine.step import Step, StepResult
from reprise_engine.step_builder import StepBuilder


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
        self._books = CacheAccounting(self.kv)
        self._preemptions = 0

    # --- requests come and go

    def add(self, request: EngineRequest) -> None:
        """Queues a request.

        Raises ContextLengthExceeded where prompt + max_tokens fit neither max_model_len nor the whole KV pool, and
        RequestError for an empty prompt, a token id out of range, max_tokens below 1, or an id that is in use.
        """
        prompt = request.prompt_token_ids
        if not prompt:
            raise RequestError("The prompt is empty; at least one token is needed.", param="prompt")
        if min(prompt) < 0 or max(prompt) > MAX_TOKEN_ID:
            raise RequestError("The prompt holds a token id that is not in any vocabulary.", param="prompt")
        if request.request_id in self._states:
            raise RequestError(f"request_id {request.request_id!r} is in use; ids must be unique.", param="request_id")
        max_tokens = self._checked_max_tokens(request)
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
            blocks=self.kv.sequence(cache_salt=request.cache_salt, skip_reading=sampling.skip_reading_prefix_cache),
            pin=request.pin,
            explain_cache=request.explain_cache,
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
        outputs = []
        for request_id in request_ids:
            state = self._states.get(request_id)
            if state is None or state.aborted:
                continue
            if request_id in in_flight:
                state.aborted = True
            else:
                self._drop(state)
            outputs.append(self._output(state, finish_reason=FinishReason.ABORT))
        return tuple(outputs)

    def has_work(self) -> bool:
        """Whether schedule() has, or a running step leaves, something to do."""
        return bool(self._states)

    def stats(self) -> SchedulerStats:
        return SchedulerStats(
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            kv_cache_usage=self.kv.usage,
            num_cached_blocks=len(self.kv.index),
            prefix_cache_queries=self._books.queries,
            prefix_cache_hits=self._books.hits,
            prefix_cache_misses=self._books.misses,
            num_preemptions=self._preemptions,
            num_evicted_blocks=self.kv.num_evicted_blocks,
            num_pinned_blocks=self.kv.pins.num_blocks,
        )

    def reset_prefix_cache(self, *, include_pins: bool = False) -> tuple[bool, int]:
        """Forgets all cached blocks that no request uses; pinned ones only with `include_pins`.

        Returns (success, freed blocks); success is False where requests hold blocks, which then stay cached.
        """
        return self.kv.reset(include_pins=include_pins)

    def unpin(self, name: str) -> bool:
        """What the pin held stays cached, as anything else does. False where there is no such pin."""
        return self.kv.pins.unpin(name)

    def inspect_prefix_cache(self) -> PrefixCacheReport:
        """What is in the cache, and what the last requests found in it. O(blocks): for people, not for every step."""
        kv, books = self.kv, self._books
        return PrefixCacheReport(
            block_size=kv.block_size,
            num_blocks=kv.num_blocks,
            active_blocks=kv.pool.num_active,
            cached_blocks=len(kv.index),
            unfinished_blocks=kv.index.num_tails,
            pinned_blocks=kv.pins.num_blocks,
            pin_budget_blocks=kv.pins.budget,
            pins=kv.pins.report(),
            salts=kv.index.num_roots,
            evicted_blocks=kv.num_evicted_blocks,
            query_tokens=books.queries,
            hit_tokens=books.hits,
            misses=tuple(zip(MissReason, books.misses, strict=True)),
            recent=tuple(books.recent),
        )

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
        for state in self._running:
            assert state.pending > 0, f"{state.request_id} runs, yet all its tokens are computed"

    # --- one step

    def schedule(self, now: float) -> Step | None:
        """The next step, or None where there is no work. `now` is time.monotonic().

        Raises RuntimeError while the step before is not committed.
        """
        if self._in_flight is not None:
            raise RuntimeError(f"step {self._in_flight.step_id} is not committed yet")
        self._make_room()
        builder = StepBuilder(self._budget)
        decoding = [state for state in self._running if state.pending == 1]
        if self._chunked:
            prefilling = [state for state in self._running if state.pending > 1]
            for state in decoding:
                builder.take(state, now)
            for state in prefilling:
                self._admit(builder, now, before=state.rank)
                builder.take(state, now)
            self._admit(builder, now)
        else:
            # Whole prompts first: behind the decoding ones, a prompt as long as the budget would never fit.
            self._admit(builder, now)
            for state in decoding:
                builder.take(state, now)
        if not builder.parts:
            return None
        self._steps += 1
        self._in_flight = Step(step_id=self._steps, requests=tuple(builder.parts), copies=tuple(builder.copies))
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
        for part in step.requests:
            state = self._states[part.request_id]
            state.computed += len(part.token_ids)
            self.kv.commit(state.blocks, state.tokens, state.computed)
            if state.aborted:
                self._drop(state)
            elif part.samples:
                token = result.sampled[part.request_id]
                outputs.append(self._append(state, token, result.logprobs.get(part.request_id), now))
        return tuple(outputs)

    def discard(self, step: Step) -> None:
        """Forgets `step`, whose run failed, and its requests; what it may have written never enters the index."""
        if step is not self._in_flight:
            raise RuntimeError(f"discard of step {step.step_id}: not awaited")
        self._in_flight = None
        for part in step.requests:
            self._drop(self._states[part.request_id])

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
            if fitting is None or (not self._chunked and len(state.tokens) - fitting.num_tokens > builder.left):
                return
            copies = self.kv.admit(state.blocks, fitting, len(state.tokens))
            assert copies is not None, "a match that fits was refused"
            del waiting[skipped]
            insort(self._running, state, key=rank_of)
            builder.copies += copies
            state.computed = fitting.num_tokens
            self._books.admitted(state, match, fitting)
            builder.take(state, now)

    def _append(self, state: RequestState, token: TokenId, logprobs: TokenLogprobs | None, now: float) -> RequestOutput:
        """Adds a sampled token, and ends the request where that was the last."""
        stops = state.may_stop and (token in state.eos_token_ids or token in state.sampling.stop_token_ids)
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
        return self._output(
            state,
            new_token_ids=(token,),
            new_logprobs=() if logprobs is None else (logprobs,),
            finish_reason=finish_reason,
            stop_token_id=token if stops else None,
            pinned=pinned,
        )

    def _preempt(self, state: RequestState) -> None:
        self.kv.release(state.blocks, state.tokens, state.computed)
        state.computed = 0
        self._preemptions += 1
        remove(self._running, state)
        insort(self._waiting, state, key=rank_of)

    def _drop(self, state: RequestState) -> None:
        """Forgets a request; its blocks are free, or cached."""
        self.kv.release(state.blocks, state.tokens, state.computed)
        del self._states[state.request_id]
        if not remove(self._running, state):
            remove(self._waiting, state)

    def _checked_max_tokens(self, request: EngineRequest) -> int:
        prompt_length = len(request.prompt_token_ids)
        asked = request.sampling.max_tokens
        if asked is not None and asked < 1:
            raise RequestError(f"max_tokens is {asked}; it must be at least 1.", param="max_tokens")
        room = self.kv.num_blocks * self.kv.block_size
        # At least one token is generated, also where the prompt leaves no room: that is the error below.
        max_tokens = max(1, min(self._max_model_len, room) - prompt_length) if asked is None else asked
        total = prompt_length + max_tokens
        if total > self._max_model_len:
            raise ContextLengthExceeded(
                f"The prompt has {prompt_length} tokens and max_tokens is {max_tokens}, {total} together; the model's "
                f"context length is {self._max_model_len}. Shorten the prompt or lower max_tokens.",
                param="max_tokens" if prompt_length < self._max_model_len else "prompt",
                code="context_length_exceeded",
            )
        if total > room:
            raise ContextLengthExceeded(
                f"The prompt has {prompt_length} tokens and max_tokens is {max_tokens}, {total} together; the whole KV "
                f"cache holds {room}. Shorten the prompt, lower max_tokens, or raise --gpu-memory-utilization.",
                param="max_tokens" if prompt_length < room else "prompt",
                code="context_length_exceeded",
            )
        return max_tokens

    @staticmethod
    def _output(
        state: RequestState,
        *,
        new_token_ids: tuple[TokenId, ...] = (),
        new_logprobs: tuple[TokenLogprobs, ...] = (),
        finish_reason: FinishReason | None,
        stop_token_id: TokenId | None = None,
        pinned: PinnedPrefix | None = None,
    ) -> RequestOutput:
        return RequestOutput(
            request_id=state.request_id,
            new_token_ids=new_token_ids,
            new_logprobs=new_logprobs,
            finish_reason=finish_reason,
            stop_token_id=stop_token_id,
            prompt_tokens=state.prompt_length,
            cached_tokens=state.cached_tokens,
            cache_explanation=state.explanation if state.explain_cache else None,
            pinned=pinned,
            times=RequestTimes(
                arrival=state.arrival,
                first_scheduled=state.first_scheduled,
                first_token=state.first_token,
                last_token=state.last_token,
            ),
        )
