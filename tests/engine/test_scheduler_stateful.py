"""Everything at once, on pools so small that everything happens: the outputs never change, the books always balance."""

from __future__ import annotations

import struct

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
from reprise_engine.kv.pins import pin_budget_blocks
from reprise_engine.kv.prefix_index import Node
from reprise_engine.request import RequestId, SamplingParams
from reprise_engine.step import Step
from tests.engine.paged_fake import World

# Few tokens and prompts made of repeated pieces: prefixes are shared, diverge inside blocks, and come back.
PIECES = st.sampled_from([(1,), (2,), (1, 2), (1, 1, 1), (1, 2, 3, 4), (5, 6, 7, 8, 9)])
PROMPTS = st.lists(PIECES, min_size=1, max_size=6).map(lambda pieces: sum(pieces, ()))
SAMPLINGS = st.builds(
    SamplingParams,
    max_tokens=st.integers(1, 12),
    min_tokens=st.integers(0, 3),
    stop_token_ids=st.sampled_from([(), (3,), (3, 10, 20, 30, 40)]),
    skip_reading_prefix_cache=st.sampled_from([False, False, False, True]),
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
    )
    def start(
        self, num_blocks: int, block_size: int, caching: bool, chunked: bool, budget: int, seats: int, pins: int
    ) -> None:
        self.world = World(
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
        self.step = self.world.schedule()
        assert (self.step is not None) == self.world.scheduler.has_work(), "there is work, but the step is empty"

    @precondition(lambda self: self.step is not None)
    @rule()
    def commit(self) -> None:
        assert self.step is not None
        outputs = self.world.commit(self.step)
        self.step = None
        assert not {output.request_id for output in outputs} & self.aborted, "an aborted request got a token"

    @precondition(lambda self: self.step is None)
    @rule(steps=st.integers(1, 8))
    def run(self, steps: int) -> None:
        for _ in range(steps):
            if self.world.scheduler.has_work():
                self.world.step()

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
            if request.sampling.skip_reading_prefix_cache or not world.scheduler.kv.enable_prefix_caching:
                assert cached == 0
            else:
                queries += len(request.prompt_token_ids)
                hits += cached
        stats = world.scheduler.stats()
        if not self.aborted:
            assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (queries, hits)
        assert (stats.num_running, stats.num_waiting) == (0, 0)
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


def test_random_lives_of_a_scheduler() -> None:
    run_state_machine_as_test(
        SchedulerMachine,
        settings=settings(
            max_examples=150, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
        ),
    )
