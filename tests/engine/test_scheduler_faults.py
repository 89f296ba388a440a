"""Faults that people reported in engines like this one, each as the behaviour that rules out its whole kind."""

from __future__ import annotations

import pytest

from reprise_engine.kv.block_pool import BlockState
from reprise_engine.step import BlockId
from tests.engine.paged_fake import World


def test_fault_1_a_block_handed_out_again_is_no_longer_found() -> None:
    world = World(num_blocks=4, block_size=4)
    world.run(range(8))
    world.run([20] * 13)  # needs all four blocks, so the first prompt's are handed out again
    assert world.scheduler.stats().num_evicted_blocks >= 1
    again = world.add(range(8), max_tokens=4)
    step = world.step()
    assert step.requests[0].start == 0
    world.drain()
    world.check_finished(again)


@pytest.mark.parametrize("blocks", [1, 2, 3])
@pytest.mark.parametrize("block_size", [1, 2, 4])
def test_fault_2_a_fully_cached_prompt_computes_its_last_token(blocks: int, block_size: int) -> None:
    world = World(block_size=block_size)
    prompt = list(range(blocks * block_size))
    cold = world.run(prompt, max_tokens=5)
    warm = world.run(prompt, max_tokens=5)
    assert world.cached(warm) == len(prompt) - 1
    assert world.tokens(warm) == world.tokens(cold)
    world.check_finished(warm)


def test_fault_2_the_copy_counts_as_a_block_and_shared_slots_are_not_rewritten() -> None:
    world = World(num_blocks=5, block_size=4)
    world.run(range(8))  # blocks 0 and 1 are cached
    blocking = world.add([30, 31, 32], max_tokens=5)
    world.step()
    first = world.add(range(8), max_tokens=4)
    second = world.add(range(8), max_tokens=4)
    step = world.schedule()
    assert step is not None
    # Two copies of block 1, into the two blocks that are left. Each request has one, and the source keeps its content.
    assert [(copy.source, copy.target) for copy in step.copies] == [(1, 3), (1, 4)]
    assert world.scheduler.kv.pool.num_available == 0
    before = list(world.runner.pool[1])
    world.commit(step)
    assert world.runner.pool[1] == before
    world.drain()
    for request_id in (blocking, first, second):
        world.check_finished(request_id)


def test_fault_3_a_duplicate_block_is_freed_after_the_page_table_has_left_it() -> None:
    world = World(max_num_batched_tokens=6, block_size=4)
    low = world.add([*range(8), 20], max_tokens=6, priority=1)
    world.step()  # six of its nine tokens: one block is in the index, the second is half computed
    high = world.add([*range(8), 21], max_tokens=6, priority=0)  # goes first, so it does not wait for the other
    tables = {part.request_id: part.block_table for part in world.step().requests}
    assert tables[low][0] == tables[high][0]
    assert tables[low][1] != tables[high][1], "both compute the second block"
    while not all(world.outputs.values()):
        world.step()
    tables = {part.request_id: part.block_table for part in world.step().requests}
    assert tables[low][:2] == tables[high][:2]
    own = set(tables[low][2:]) | set(tables[high][2:])
    pool = world.scheduler.kv.pool
    assert pool.num_active == 2 + len(own)
    assert pool.references(tables[low][1]) == 2
    world.drain()
    world.check_finished(low)
    world.check_finished(high)


def test_fault_4_shared_blocks_count_once() -> None:
    world = World(num_blocks=16, block_size=4)
    prefix = list(range(12))
    requests = [world.add([*prefix, 20 + i], max_tokens=3) for i in range(4)]
    world.step()
    world.step()
    pool = world.scheduler.kv.pool
    assert pool.references(BlockId(0)) == 4
    assert pool.num_active == 3 + 4  # ⌈12/4⌉ shared, one each of their own
    assert world.scheduler.stats().kv_cache_usage == 7 / 16
    world.drain()
    world.scheduler.check_invariants()  # the idle self-check
    assert pool.num_available == 16
    assert len(pool.eviction_order()) == world.scheduler.stats().num_cached_blocks == 3 + 4
    for request_id in requests:
        world.check_finished(request_id)


def test_fault_5_a_request_that_cannot_be_admitted_is_counted_once() -> None:
    world = World(num_blocks=8, block_size=4)
    world.run(range(8))
    blocking = world.add(range(20, 42), max_tokens=6)  # all that is left, and one more when it grows
    world.step()
    counted = world.scheduler.stats()
    waiting = world.add([*range(8), 9])
    for _ in range(3):
        world.step()
        stats = world.scheduler.stats()
        assert stats.num_waiting == 1
        assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (
            counted.prefix_cache_queries,
            counted.prefix_cache_hits,
        )
    world.drain()
    stats = world.scheduler.stats()
    assert stats.prefix_cache_queries == counted.prefix_cache_queries + 9
    assert stats.prefix_cache_hits == counted.prefix_cache_hits + world.cached(waiting)
    world.check_finished(blocking)


def test_fault_5_a_preempted_request_keeps_the_accounting_of_its_first_admission() -> None:
    world = World(num_blocks=6, block_size=4, max_num_seqs=2)
    first = world.add(range(8), max_tokens=12)
    second = world.add(range(20, 30), max_tokens=10)
    world.drain()
    stats = world.scheduler.stats()
    assert stats.num_preemptions >= 1
    resumed = [part.start for step in world.runner.steps for part in step.requests if part.request_id == second]
    assert resumed != sorted(resumed), "the preempted request was not computed again"
    assert min(resumed[1:]) > 0, "its cached blocks were not used when it came back"
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (18, 0)
    assert world.cached(second) == 0
    world.check_finished(first)
    world.check_finished(second)


def test_fault_6_hits_reach_the_counters() -> None:
    world = World()
    world.run(range(12))
    world.run([*range(12), 13])
    world.run(range(12))
    stats = world.scheduler.stats()
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (12 + 13 + 12, 0 + 12 + 11)


@pytest.mark.parametrize("chunked", [True, False])
@pytest.mark.parametrize("caching", [True, False])
def test_fault_10_prompts_near_the_size_of_the_pool_all_end(chunked: bool, caching: bool) -> None:
    world = World(
        num_blocks=8,
        block_size=4,
        enable_prefix_caching=caching,
        enable_chunked_prefill=chunked,
        max_num_batched_tokens=5 if chunked else 32,
        max_model_len=32,
    )
    requests = []
    for i in range(3):
        requests.append(world.add([i] * 30, max_tokens=2))  # all eight blocks
        requests.append(world.add([i, 40], max_tokens=20))
    # 3 × 30 prompt tokens in fives, 6 outputs, 3 × 20 more: far below that bound nothing can turn in circles.
    assert world.drain(limit=400) < 400
    for request_id in requests:
        world.check_finished(request_id)


def test_small_pools_preempt_and_evict_and_give_the_same_tokens() -> None:
    prompts = [[*range(6), i, *range(i)] for i in range(8)]

    def outputs(num_blocks: int, *, caching: bool) -> tuple[list[list[int]], World]:
        world = World(num_blocks=num_blocks, enable_prefix_caching=caching, max_num_batched_tokens=10)
        requests = [world.add(prompt, max_tokens=12) for prompt in prompts]
        world.drain()
        for request_id in requests:
            world.check_finished(request_id)
        return [world.tokens(request_id) for request_id in requests], world

    roomy, large = outputs(100, caching=True)
    assert (large.scheduler.stats().num_preemptions, large.scheduler.stats().num_evicted_blocks) == (0, 0)
    tight, small = outputs(8, caching=True)
    assert small.scheduler.stats().num_preemptions > 0
    assert small.scheduler.stats().num_evicted_blocks > 0
    off, without = outputs(8, caching=False)
    assert without.scheduler.stats().num_preemptions > 0
    assert roomy == tight == off


def test_preemption_takes_the_last_in_rank_and_it_returns_first() -> None:
    world = World(num_blocks=6, block_size=4)
    urgent = world.add(range(8), max_tokens=12, priority=0)
    middle = world.add(range(10, 17), max_tokens=8, priority=1)
    last = world.add(range(20, 27), max_tokens=8, priority=2)
    world.step()
    world.step()
    assert world.scheduler.stats().num_preemptions == 1
    assert {part.request_id for part in world.step().requests} == {urgent, middle}
    world.drain()
    for request_id in (urgent, middle, last):
        world.check_finished(request_id)
    assert all(world.scheduler.kv.pool.state(BlockId(i)) is not BlockState.ACTIVE for i in range(6))
