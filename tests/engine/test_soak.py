"""A long random soak on tiny pools, checked after every step: longer lives than hypothesis has the patience for.

Its seeds are fixed, so a failure can be repeated; `REPRISE_SOAK_STEPS` makes it as long as one likes.
"""

from __future__ import annotations

import os
import random
from typing import Any

import pytest

from reprise_engine.kv.pins import pin_budget_blocks
from reprise_engine.request import RequestId, SamplingParams
from tests.engine.paged_fake import World

STEPS = int(os.environ.get("REPRISE_SOAK_STEPS", "1500"))


_MOST_WAITING = 24
"""However long it lives, its end is a few hundred steps away."""


class Soak:
    """Clients that submit, leave, come back with the next turn, and an operator that resets the cache."""

    def __init__(self, seed: int, **world: Any) -> None:
        self.random = random.Random(seed)
        num_blocks, block_size = self.random.randint(6, 24), self.random.choice([1, 2, 3, 4, 8])
        self.room = min(48, num_blocks * block_size) * 3 // 4
        self.world = World(
            num_blocks=num_blocks,
            block_size=block_size,
            pin_budget=pin_budget_blocks(0.5, num_blocks=num_blocks, block_size=block_size, max_model_len=self.room),
            max_num_batched_tokens=self.random.choice([3, 8, 64]),
            max_num_seqs=self.random.randint(1, 6),
            max_model_len=48,
            **world,
        )
        self.conversations: list[tuple[int, ...]] = [(1, 2, 3), (1, 2, 4, 4, 4), (9,)]
        self.running: set[RequestId] = set()
        self.finished = 0
        self.aborted = 0
        self.pinned = 0

    def live(self, steps: int) -> None:
        for _ in range(steps):
            self.act()
            if self.world.scheduler.has_work():
                step = self.world.schedule()
                assert step is not None
                if self.random.random() < 0.1:
                    self.abort()
                self.world.commit(step)
                self.collect()
        self.world.drain()
        self.collect()

    def act(self) -> None:
        roll = self.random.random()
        if roll < 0.45:
            self.submit()
        elif roll < 0.50:
            self.abort()
        elif roll < 0.51:
            self.world.scheduler.reset_prefix_cache(include_pins=self.random.random() < 0.3)
        elif roll < 0.53:
            self.world.scheduler.unpin(self.random.choice("pqr"))
        self.world.scheduler.check_invariants()

    def submit(self) -> None:
        if len(self.running) >= _MOST_WAITING:
            return
        history = self.random.choice(self.conversations)
        prompt = history[: self.random.randint(1, len(history))] if self.random.random() < 0.3 else history
        prompt += tuple(self.random.randrange(12) for _ in range(self.random.randint(1, 5)))
        max_tokens = self.random.randint(1, 10)
        if len(prompt) + max_tokens > self.room:
            self.conversations = [(1, 2, 3), (self.random.randrange(12),)]
            return
        sampling = SamplingParams(max_tokens=max_tokens, skip_reading_prefix_cache=self.random.random() < 0.05)
        salt = self.random.choice([None, None, "a"])
        priority = self.random.choice([0, 0, 0, 1, -1])
        pin = self.random.choice("pqr") if self.random.random() < 0.08 else None
        self.running.add(self.world.add(prompt, sampling=sampling, salt=salt, priority=priority, pin=pin))

    def abort(self) -> None:
        if self.running:
            request_id = self.random.choice(sorted(self.running))
            self.running.discard(request_id)
            self.aborted += len(self.world.scheduler.abort([request_id]))

    def collect(self) -> None:
        for request_id in sorted(self.running):
            outputs = self.world.outputs[request_id]
            if outputs and outputs[-1].finished:
                self.running.discard(request_id)
                self.world.check_finished(request_id)
                self.finished += 1
                self.pinned += outputs[-1].pinned is not None and outputs[-1].pinned.blocks > 0
                whole = (*self.world.requests[request_id].prompt_token_ids, *self.world.tokens(request_id))
                self.conversations = [*self.conversations[-8:], whole]


@pytest.mark.parametrize("seed", range(6))
def test_a_long_life_on_a_tiny_pool(seed: int) -> None:
    soak = Soak(seed)
    soak.live(STEPS)
    assert soak.pinned > 0
    assert soak.world.scheduler.reset_prefix_cache(include_pins=True)[0]
    stats = soak.world.scheduler.stats()
    assert not soak.running
    assert soak.finished > STEPS / 50
    assert soak.aborted > 0
    assert stats.prefix_cache_hits > 0
    assert stats.num_evicted_blocks > 0
    assert (stats.num_running, stats.num_waiting, stats.kv_cache_usage) == (0, 0, 0.0)
    success, freed = soak.world.scheduler.reset_prefix_cache()
    assert (success, freed) == (True, 0)
    assert stats.num_cached_blocks == 0
    soak.world.scheduler.check_invariants()
