"""The tiers below the pool, as stories of a few blocks: what goes down, what comes up, and who waits for it."""

from __future__ import annotations

from itertools import count

from reprise_engine.cache_report import Tier
from reprise_engine.kv.hash_algorithms import xxhash_block_hash
from reprise_engine.loop import EngineCore
from reprise_engine.request import RequestId, SamplingParams
from reprise_engine.step import BlockId, BlockLoad, ScheduledRequest, SlotId, Step, StepResult
from reprise_engine.tier_loads import TransferBudget
from tests.engine.paged_fake import FakeDisk, World

FIRST = tuple(range(1, 13))  # three blocks of four
OTHER = tuple(range(20, 39))  # five, the last one unfinished: a whole pool


def tiered(*, num_blocks: int = 5, host_slots: int = 16, **options: object) -> World:
    return World(num_blocks=num_blocks, host_slots=host_slots, **options)  # type: ignore[arg-type]


def below(world: World, request_id: str) -> dict[str, int]:
    """Of the prompt's cached tokens, how many each tier gave."""
    explanation = next(one for name, one in world.scheduler.inspect_prefix_cache().recent if name == request_id)
    return {tier.value: tokens for tier, tokens in explanation.tier_tokens}


def after_a_restart() -> tuple[World, FakeDisk]:
    """A new world, and its disk: it has FIRST, and reads when it is told to."""
    disk = FakeDisk()
    before = tiered(disk=disk)
    before.run(FIRST)
    before.settle()
    slow = FakeDisk(records=disk.records, instant=False)
    return tiered(disk=slow), slow


def test_an_evicted_prefix_comes_up_from_host_memory() -> None:
    world = tiered()
    world.run(FIRST)
    world.run(OTHER)
    assert len(world.scheduler.kv.index) == 5
    again = world.run((*FIRST, 13, 14))
    world.check_finished(again)
    assert world.cached(again) == 12
    assert below(world, again) == {"host": 12}
    [host] = world.scheduler.stats().tiers
    assert (host.tier, host.hit_tokens, host.query_tokens) == (Tier.HOST, 12, 12 + 19 + 14)


def test_a_whole_prompt_comes_up_but_for_its_last_token() -> None:
    world = tiered()
    first = world.run(FIRST)
    world.run(OTHER)
    again = world.run(FIRST)
    world.check_finished(again)
    assert world.tokens(again) == world.tokens(first)
    assert (world.cached(again), below(world, again)) == (11, {"host": 11})


def test_a_prefix_survives_on_the_disk() -> None:
    disk = FakeDisk()
    before = tiered(disk=disk, host_slots=2, keeps_evicted=False)
    first = before.run(FIRST, max_tokens=5)
    before.settle()
    # The last token was not computed: 16 of 17 are four whole blocks, the answer's among them.
    assert len(disk.records) == 4
    world = tiered(disk=FakeDisk(records=disk.records), host_slots=2, keeps_evicted=False)
    answer = tuple(before.tokens(first))
    again = world.run((*FIRST, *answer))
    world.check_finished(again)
    assert (world.cached(again), below(world, again)) == (16, {"host": 0, "disk": 16})
    assert world.run((*FIRST, *answer[:2], 40), salt="other")
    assert world.cached(world.run(FIRST, salt="another")) == 0


def test_what_the_pool_serves_does_not_grow_old_on_the_disk() -> None:
    disk = FakeDisk(capacity=6)
    world = tiered(disk=disk, num_blocks=32)
    for prompt in (FIRST, tuple(range(50, 62)), (*FIRST, 13), tuple(range(70, 82))):
        world.run(prompt)
        world.settle()
    assert len(disk.records) == 6
    restarted = tiered(disk=FakeDisk(records=disk.records), num_blocks=32)
    again = restarted.run((*FIRST, 13))
    assert below(restarted, again) == {"host": 0, "disk": 12}
    assert restarted.cached(restarted.run(tuple(range(50, 62)))) == 0


def test_a_chain_on_the_disk_loses_its_end_first() -> None:
    disk = FakeDisk(capacity=6)
    world = tiered(disk=disk, num_blocks=32)
    for prompt in (FIRST, tuple(range(50, 62)), (*FIRST, 13), (*range(50, 62), 62), (80, 81, 82, 83)):
        world.run(prompt)
        world.settle()
    restarted = tiered(disk=FakeDisk(records=disk.records), num_blocks=32)
    assert below(restarted, restarted.run((*FIRST, 13))) == {"host": 0, "disk": 8}


def test_others_run_while_a_load_waits_for_the_disk_and_twins_wait_for_it() -> None:
    disk = FakeDisk()
    before = tiered(disk=disk)
    before.run(FIRST)
    before.settle()
    slow = FakeDisk(records=disk.records, instant=False)
    world = tiered(disk=slow, num_blocks=16)
    loading = world.add((*FIRST, 13))
    twin = world.add((*FIRST, 14))
    other = world.add((30, 31, 32), max_tokens=4)
    step = world.step()
    assert {part.request_id for part in step.requests} == {other}
    stats = world.scheduler.stats()
    assert (stats.num_running, stats.num_waiting) == (1, 2)
    world.step()
    slow.end(0)
    assert len(world.step().loads) == 1
    while slow.pending:
        slow.end(0)
    world.drain()
    for request_id in (loading, twin, other):
        world.check_finished(request_id)
    assert (world.cached(loading), world.cached(twin)) == (12, 12)
    assert (below(world, loading), below(world, twin)) == ({"host": 0, "disk": 12}, {"host": 0, "disk": 0})


def test_a_damaged_record_ends_the_load_and_the_rest_is_computed() -> None:
    world, slow = after_a_restart()
    again = world.add((*FIRST, 13))
    assert world.schedule() is None
    assert len(slow.pending) == 3
    slow.end(0)
    slow.end(0, good=False)
    slow.end(0)
    world.drain()
    world.check_finished(again)
    assert (world.cached(again), below(world, again)) == (4, {"host": 0, "disk": 4})


def test_an_abort_while_loading_gives_everything_back() -> None:
    world, slow = after_a_restart()
    request_id = world.add((*FIRST, 13))
    assert world.schedule() is None
    assert len(world.scheduler.abort([request_id])) == 1
    world.scheduler.check_invariants()
    assert not world.scheduler.has_work()
    assert world.scheduler.kv.pool.num_active == 0
    while slow.pending:
        slow.end(0)
    assert world.schedule() is None
    world.scheduler.check_invariants()
    assert world.scheduler.kv.tiering is not None
    assert world.scheduler.kv.tiering.slots.num_idle == 16


def test_a_disk_that_hangs_is_waited_for_only_so_long() -> None:
    disk = FakeDisk()
    before = tiered(disk=disk)
    before.run(FIRST)
    before.settle()
    world = tiered(disk=FakeDisk(records=disk.records, instant=False))
    request_id = world.add((*FIRST, 13))
    assert world.schedule() is None
    world.now += 11
    step = world.schedule()
    assert step is not None
    assert step.num_tokens == 13
    world.commit(step)
    world.check_finished(request_id)
    assert world.cached(request_id) == 0


def test_names_of_another_algorithm_are_no_keys() -> None:
    disk = FakeDisk()
    before = tiered(disk=disk, hasher=xxhash_block_hash)
    before.run(FIRST, salt="s")
    before.settle()
    assert {len(key) for key in disk.records} == {32}
    world = tiered(disk=FakeDisk(records=disk.records))
    assert world.cached(world.run((*FIRST, 13), salt="s")) == 12


def test_a_reset_forgets_the_tiers_and_says_how_much() -> None:
    disk = FakeDisk()
    world = tiered(disk=disk)
    world.run(FIRST)
    world.run(OTHER)
    world.settle()
    assert world.scheduler.reset_prefix_cache() == (True, 5)
    host, on_disk = world.scheduler.reset_tiers()
    assert (host, on_disk) == (7, 7)
    world.scheduler.check_invariants()
    assert world.cached(world.run((*FIRST, 13))) == 0


def test_a_step_that_fails_leaves_no_slot_behind() -> None:
    world = tiered()
    world.run(FIRST)
    world.run(OTHER)
    world.add((*FIRST, 13))
    step = world.schedule()
    assert step is not None
    assert step.loads
    world.scheduler.discard(step)
    world.scheduler.check_invariants()
    assert not world.scheduler.has_work()
    assert world.cached(world.run((*FIRST, 13))) == 12


def test_a_flush_ends_requests_and_carries_everything_down() -> None:
    disk = FakeDisk()
    world = tiered(disk=disk, host_slots=2, keeps_evicted=False)
    world.run(FIRST)
    world.add((30, 31), max_tokens=9)
    assert world.core.flush(60.0)
    assert not world.scheduler.has_work()
    assert len(disk.records) == 3


def test_a_flush_gives_a_hanging_disk_only_so_long() -> None:
    ticks = count()
    world = tiered(disk=FakeDisk(instant=False))
    core = EngineCore(world.scheduler, world.runner, clock=lambda: float(next(ticks)))
    world.run(FIRST)
    assert not core.flush(20.0)
    assert next(ticks) < 60


def test_new_blocks_are_written_without_a_request_and_twice_by_nobody() -> None:
    disk = FakeDisk(instant=False)
    world = tiered(disk=disk, host_slots=8)
    world.run(FIRST)
    assert world.scheduler.has_background_work()
    world.settle()
    assert [done.slot for done, _, _ in disk.pending] == []
    assert len(disk.records) == 3
    [_, on_disk] = world.scheduler.stats().tiers
    assert on_disk.stores == 3
    world.run(FIRST)
    world.settle()
    [_, on_disk] = world.scheduler.stats().tiers
    assert on_disk.stores == 3


def test_a_disk_that_does_not_keep_up_shows_in_its_failures() -> None:
    disk = FakeDisk(instant=False)
    world = tiered(host_slots=4, disk=disk, keeps_evicted=False)

    def failures() -> dict[Tier, int]:
        return {one.tier: one.failures for one in world.scheduler.stats().tiers}

    world.run(FIRST)  # three blocks, of which two may be on their way at once
    for _ in range(5):
        if (step := world.schedule()) is not None:
            world.commit(step)
    assert len(disk.pending) == 2
    assert failures() == {Tier.HOST: 0, Tier.DISK: 0}
    world.scheduler.check_invariants()
    other = world.add(OTHER)  # evicts all three; the third one was never written
    step = world.schedule()
    assert step is not None
    world.commit(step)
    assert failures() == {Tier.HOST: 0, Tier.DISK: 1}
    world.drain()
    world.check_finished(other)


def test_a_store_is_put_off_until_its_block_is_written() -> None:
    world = tiered(num_blocks=6, slow_transfers=True, max_num_batched_tokens=4)
    world.run(FIRST)
    world.add((30, 31), max_tokens=10)
    world.step()
    waiting = world.add(OTHER[:12])
    step = world.step()
    # Three blocks were evicted at once; the chunk writes to one of them, and to one that was free.
    assert len(step.stores) == 1
    world.drain()
    world.check_finished(waiting)
    [host] = world.scheduler.stats().tiers
    assert host.stores >= 2


def test_loads_beside_others_are_sliced() -> None:
    world = tiered(num_blocks=20, slow_transfers=True, host_slots=64)
    world.run(tuple(range(1, 41)))
    world.run(tuple(range(50, 99)))
    world.run(tuple(range(150, 199)))
    other = world.add((30, 31), max_tokens=20)
    world.step()
    loading = world.add((*range(1, 41), 99))
    slices: list[int] = []
    while world.scheduler.stats().num_waiting or len(slices) < 2:
        step = world.step()
        assert any(part.request_id == other for part in step.requests)
        slices.append(len(step.loads))
    assert max(slices) == 1
    world.drain()
    world.check_finished(other)
    world.check_finished(loading)
    assert world.cached(loading) == 4 * sum(slices)


def test_what_a_reset_forgot_is_not_written_under_its_name() -> None:
    disk = FakeDisk(instant=False)
    world = tiered(disk=disk, host_slots=2, keeps_evicted=False)
    world.run(FIRST)
    assert world.scheduler.has_background_work()
    assert world.scheduler.reset_prefix_cache()[0]
    world.run(OTHER)
    world.settle()
    for block, content in disk.records.values():
        assert block.tokens[0] >= OTHER[0], f"{content} was written as what was forgotten"


def test_a_load_that_waits_for_its_turn_is_not_given_up() -> None:
    world = tiered(num_blocks=40, slow_transfers=True, host_slots=64)
    chains = [(start, *range(100, 113)) for start in range(4)]
    for chain in chains:
        world.run(chain)
    for start in (200, 300, 400, 500):
        world.run(range(start, start + 45))
    other = world.add((30, 31), max_tokens=40)
    world.step()
    loading = [world.add((*chain, 9)) for chain in chains]
    for _ in range(3):
        world.step()
        world.now += 9.0
    world.drain()
    for request_id in (other, *loading):
        world.check_finished(request_id)
    assert [world.cached(request_id) for request_id in loading] == [12] * 4


def moved(*, loads: int, transfer_seconds: float, computes: bool = True) -> tuple[Step, StepResult]:
    part = ScheduledRequest(
        request_id=RequestId("r"), token_ids=(1,), start=0, block_table=(), samples=True, sampling=SamplingParams()
    )
    step = Step(
        step_id=1,
        requests=(part,) if computes else (),
        loads=tuple(BlockLoad(SlotId(i), BlockId(i)) for i in range(loads)),
    )
    return step, StepResult(step_id=1, sampled={}, transfer_seconds=transfer_seconds)


def test_a_step_moves_a_share_of_its_time_and_alone_all_that_an_abort_may_wait_for() -> None:
    budget = TransferBudget(bytes_per_block=2**20)
    assert budget.blocks(alone=True) == 64
    for _ in range(40):
        # Of 212 ms, 10 ms were 20 blocks: as many are a twentieth of the rest.
        budget.observe(*moved(loads=20, transfer_seconds=0.01), 0.212)
    assert budget.blocks(alone=False) == 20
    assert budget.blocks(alone=True) == 64
    # A long prefill does not make the next token late, and a step without a forward says nothing of one.
    budget.observe(*moved(loads=0, transfer_seconds=0.0), 8.0)
    budget.observe(*moved(loads=20, transfer_seconds=0.01, computes=False), 0.01)
    assert budget.blocks(alone=False) == 20
    budget.observe(*moved(loads=0, transfer_seconds=0.0), 0.0001)
    assert budget.blocks(alone=False) == 1


def test_transfers_that_take_no_time_are_not_limited_by_it() -> None:
    budget = TransferBudget(bytes_per_block=2**20)
    for _ in range(5_000):
        budget.observe(*moved(loads=1, transfer_seconds=0.0), 1.0)
    assert budget.blocks(alone=False) == 64


def test_a_store_that_failed_is_not_written_to_the_disk() -> None:
    disk = FakeDisk(instant=False)
    world = tiered(disk=disk)
    world.run(FIRST)
    world.add((30, 31))
    step = world.schedule()
    assert step is not None
    assert step.stores
    world.scheduler.discard(step)
    world.scheduler.check_invariants()
    world.settle()
    assert not disk.pending
    assert len(disk.records) == 3 - len(step.stores)


def test_what_leaves_the_pool_again_is_not_stored_again() -> None:
    world = tiered(host_slots=8)
    world.run(FIRST)
    world.run(OTHER)  # FIRST is in host memory
    world.run((*FIRST, 13))  # three of OTHER's four whole blocks too
    [before] = world.scheduler.stats().tiers
    assert before.blocks == 6
    world.run(range(60, 79))  # FIRST leaves the pool again, and the fourth
    [after] = world.scheduler.stats().tiers
    assert (after.stores, after.blocks) == (before.stores + 1, 7)
    world.run(range(80, 99))  # four more come down: one is free, three of OTHER's go
    assert world.cached(world.run((*FIRST, 13))) == 12
    assert world.cached(world.run(OTHER)) < 16
