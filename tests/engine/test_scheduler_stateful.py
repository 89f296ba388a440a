"""Everything at once, on pools so small that everything happens: the outputs never change, the books always balance."""

from __future__ import annotations

import struct
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from reprise_engine.errors import ContextLengthExceeded
from reprise_engine.kv.hash_algorithms import xxhash_block_hash
from reprise_engine.kv.hashing import BlockHasher, sha256_block_hash
from reprise_engine.kv.pins import pin_budget_blocks
from reprise_engine.kv.prefix_index import Node
from reprise_engine.request import RequestId, SamplingParams
from reprise_engine.step import Step
from tests.engine.paged_fake import FakeDisk, World

# Few tokens and prompts made of repeated pieces: prefixes are shared, diverge inside blocks, and come back.
PIECES = st.sampled_from([(1,), (2,), (1, 2), (1, 1, 1), (1, 2, 3, 4), (5, 6, 7, 8, 9)])
PROMPTS = st.lists(PIECES, min_size=1, max_size=6).map(lambda pieces: sum(pieces, ()))
SAMPLINGS = st.builds(
    lambda lengths, **others: SamplingParams(max_tokens=max(lengths), min_tokens=min(3, *lengths), **others),
    lengths=st.tuples(st.integers(0, 3), st.integers(1, 12)),
    stop_token_ids=st.sampled_from([(), (3,), (3, 10, 20, 30, 40)]),
    skip_reading_prefix_cache=st.sampled_from([False, False, False, True]),
    prompt_logprobs=st.sampled_from([None, None, None, 0]),
    bad_words_token_ids=st.sampled_from([(), (), ((3,), (1, 2))]),
)


def prefix(node: Node) -> tuple[int, ...]:
    """All tokens from the root to the end of this node."""
    before = () if node.parent is None else prefix(node.parent)
    return before + struct.unpack(f"<{node.num_tokens}I", node.tokens)


def common(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


class SchedulerMachine(RuleBasedStateMachine):
    world: World
    step: Step | None = None
    aborted: set[RequestId]
    longest: int
    preemptions = 0

    @initialize(
        num_blocks=st.integers(3, 14),
        block_size=st.integers(1, 5),
        caching=st.sampled_from([True, True, True, False]),
        chunked=st.booleans(),
        budget=st.integers(1, 24),
        seats=st.integers(1, 6),
        pins=st.integers(0, 5),
        host_slots=st.sampled_from([0, 1, 2, 3, 5, 40]),
        disk=st.booleans(),
        keeps_evicted=st.booleans(),
        slow_transfers=st.booleans(),
        algorithm=st.sampled_from([sha256_block_hash, sha256_block_hash, xxhash_block_hash]),
    )
    def start(
        self,
        num_blocks: int,
        block_size: int,
        caching: bool,
        chunked: bool,
        budget: int,
        seats: int,
        pins: int,
        host_slots: int,
        disk: bool,
        keeps_evicted: bool,
        slow_transfers: bool,
        algorithm: BlockHasher,
    ) -> None:
        if not caching:
            host_slots = 0
        self.world = World(
            host_slots=host_slots,
            disk=FakeDisk(instant=False, capacity=9) if host_slots and disk else None,
            keeps_evicted=keeps_evicted or not disk,
            slow_transfers=slow_transfers,
            hasher=algorithm,
            num_blocks=num_blocks,
            block_size=block_size,
            enable_prefix_caching=caching,
            enable_chunked_prefill=chunked,
            max_num_batched_tokens=budget if chunked else 40 + budget,
            max_num_seqs=seats,
            max_model_len=40,
            pin_budget=pin_budget_blocks(pins, num_blocks=num_blocks, block_size=block_size, max_model_len=24),
        )
        # Whatever is pinned, a sequence of this many tokens fits.
        self.longest = min(40, 24 if pins else 40, num_blocks * block_size)
        self.aborted = set()

    @rule(
        prompt=PROMPTS,
        sampling=SAMPLINGS,
        salt=st.sampled_from([None, None, "a", "b"]),
        priority=st.integers(-1, 1),
        eos=st.sampled_from([(), (7,)]),
        pin=st.sampled_from([None, None, None, "p", "q"]),
    )
    def add(
        self,
        prompt: tuple[int, ...],
        sampling: SamplingParams,
        salt: str | None,
        priority: int,
        eos: tuple[int, ...],
        pin: str | None,
    ) -> None:
        assert sampling.max_tokens is not None
        world = self.world
        room = world.scheduler.kv.num_blocks * world.scheduler.kv.block_size
        if len(prompt) + sampling.max_tokens > min(room, 40):
            with pytest.raises(ContextLengthExceeded):
                world.add(prompt, sampling=sampling, salt=salt, priority=priority, eos=eos)
        elif len(prompt) + sampling.max_tokens <= self.longest:
            world.add(prompt, sampling=sampling, salt=salt, priority=priority, eos=eos, pin=pin)

    @precondition(lambda self: self.step is None)
    @rule()
    def schedule(self) -> None:
        world = self.world
        self.step = world.schedule()
        if self.step is None and world.scheduler.has_work():
            assert world.disk is not None, "there is work, but the step is empty"
            assert world.disk.pending, "nothing is done, and nothing is waited for"
            assert any(done.is_read for done, _, _ in world.disk.pending), "a request waits for writes"
        elif self.step is not None and not world.scheduler.has_work():
            assert not self.step.requests
            assert self.step.stores, "there is no work, but the step is not empty"

    @precondition(lambda self: self.step is not None)
    @rule()
    def commit(self) -> None:
        assert self.step is not None
        outputs = self.world.commit(self.step)
        self.step = None
        assert not {output.request_id for output in outputs} & self.aborted, "an aborted request got a token"

    @rule(data=st.data(), more=PROMPTS)
    def come_back(self, data: st.DataObject, more: tuple[int, ...]) -> None:
        """The next turn of a conversation, or the same one again."""
        world = self.world
        if not world.requests:
            return
        request_id = data.draw(st.sampled_from(sorted(world.requests)))
        before = world.requests[request_id]
        prompt = (*before.prompt_token_ids, *world.tokens(request_id), *more)[: self.longest - 1]
        world.add(prompt, max_tokens=min(5, self.longest - len(prompt)), salt=before.cache_salt)

    @precondition(lambda self: self.step is None)
    @rule(steps=st.integers(1, 8), ends=st.booleans())
    def run(self, steps: int, ends: bool) -> None:
        """With `ends` the disk keeps up."""
        for _ in range(steps):
            if ends and self.world.disk is not None and self.world.disk.pending:
                self.world.disk.end(0)
            step = self.world.schedule()
            if step is not None:
                self.world.commit(step)

    @rule(data=st.data(), good=st.sampled_from([True, True, True, False]), count=st.integers(1, 6))
    def disk_ends(self, data: st.DataObject, good: bool, count: int) -> None:
        """In any order, while a step runs and between steps."""
        disk = self.world.disk
        if disk is not None:
            for _ in range(min(count, len(disk.pending))):
                disk.end(data.draw(st.integers(0, len(disk.pending) - 1)), good=good)

    @precondition(lambda self: self.step is not None)
    @rule(unlucky=st.sampled_from([False, False, False, True]))
    def fail(self, unlucky: bool) -> None:
        """The runner raised: its requests end, and nothing of theirs is ever served."""
        if not unlucky:
            return
        assert self.step is not None
        scheduler = self.world.scheduler
        before = set(scheduler._states)
        scheduler.discard(self.step)
        self.aborted |= before - set(scheduler._states)
        self.step = None

    @rule()
    def reset_tiers(self) -> None:
        scheduler, disk = self.world.scheduler, self.world.disk
        stored = 0 if disk is None else len(disk.records)
        assert scheduler.reset_tiers()[1] == stored

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        unfinished = [
            request_id
            for request_id, outputs in self.world.outputs.items()
            if request_id not in self.aborted and not (outputs and outputs[-1].finished)
        ]
        if unfinished:
            request_id = data.draw(st.sampled_from(unfinished))
            assert len(self.world.scheduler.abort([request_id])) == 1
            self.aborted.add(request_id)

    @rule(include_pins=st.booleans())
    def reset(self, include_pins: bool) -> None:
        scheduler = self.world.scheduler
        before = scheduler.stats()
        success, freed = scheduler.reset_prefix_cache(include_pins=include_pins)
        after = scheduler.stats()
        assert freed == before.num_cached_blocks - after.num_cached_blocks
        assert after.num_pinned_blocks == (0 if include_pins else before.num_pinned_blocks)
        assert success == (scheduler.kv.pool.num_active == after.num_pinned_blocks and not after.num_running)
        assert not success or after.num_cached_blocks == after.num_pinned_blocks

    @rule(name=st.sampled_from(["p", "q"]))
    def unpin(self, name: str) -> None:
        scheduler = self.world.scheduler
        known = {pin.name for pin in scheduler.inspect_prefix_cache().pins}
        assert scheduler.unpin(name) == (name in known)

    @invariant()
    def pins_stay(self) -> None:
        """What is pinned is found, whatever else happened."""
        if hasattr(self, "world"):
            pins = self.world.scheduler.kv.pins
            assert pins.num_blocks <= pins.budget
            assert sum(pin.blocks for pin in pins.report()) >= pins.num_blocks

    @rule(prompt=PROMPTS, salt=st.sampled_from([None, "a", "b"]))
    def look(self, prompt: tuple[int, ...], salt: str | None) -> None:
        """A lookup finds as much as a comparison with every prefix in the index, token by token."""
        kv = self.world.scheduler.kv
        extra_keys = () if salt is None else (salt,)
        best = max((common(prompt, prefix(node)) for node in kv.index if node.extra_keys == extra_keys), default=0)
        found = kv.lookup(kv.sequence(cache_salt=salt), prompt).num_tokens
        assert found == min(best, len(prompt) - 1)

    @invariant()
    def books_balance(self) -> None:
        if hasattr(self, "world"):
            self.world.scheduler.check_invariants()

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        world = self.world
        if self.step is not None:
            world.commit(self.step)
        world.drain()
        queries = hits = 0
        for request_id, request in world.requests.items():
            if request_id in self.aborted:
                continue
            world.check_finished(request_id)
            cached = world.cached(request_id)
            if not request.sampling.reads_prefix_cache or not world.scheduler.kv.enable_prefix_caching:
                assert cached == 0
            else:
                queries += len(request.prompt_token_ids)
                hits += cached
        stats = world.scheduler.stats()
        if not self.aborted:
            assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (queries, hits)
        assert (stats.num_running, stats.num_waiting) == (0, 0)
        self.check_tiers(queries, hits)
        assert world.scheduler.kv.pool.num_active == stats.num_pinned_blocks
        world.scheduler.check_invariants()
        assert world.scheduler.reset_prefix_cache() == (True, stats.num_cached_blocks - stats.num_pinned_blocks)
        for name in ("p", "q"):
            world.scheduler.unpin(name)
        world.scheduler.check_invariants()
        stats = world.scheduler.stats()
        assert (stats.num_pinned_blocks, stats.kv_cache_usage) == (0, 0.0)
        assert world.scheduler.reset_prefix_cache() == (True, stats.num_cached_blocks)
        assert len(world.scheduler.kv.index) == 0

    def check_tiers(self, queries: int, hits: int) -> None:
        """All is at rest: what the tiers gave is part of the hits, and no slot is held."""
        world = self.world
        tiering = world.scheduler.kv.tiering
        if tiering is None:
            return
        world.settle()
        tiers = world.scheduler.stats().tiers
        if not self.aborted:
            assert sum(tier.hit_tokens for tier in tiers) <= hits
            assert all(tier.hit_tokens <= tier.query_tokens <= queries for tier in tiers)
            # The next one is asked for what the first did not have.
            assert all(slow.query_tokens == fast.query_tokens - fast.hit_tokens for fast, slow in pairwise(tiers))
        tiering.poll()
        world.scheduler.reset_tiers()
        tiering.poll()
        assert tiering.slots.num_idle == tiering.slots.num_slots
        assert len(tiering.slots) == 0


def test_random_lives_of_a_scheduler() -> None:
    run_state_machine_as_test(
        SchedulerMachine,
        settings=settings(
            max_examples=150, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
        ),
    )
