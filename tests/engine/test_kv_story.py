"""One story of a small cache, told in block ids: six blocks of four tokens, one request after the other."""

from __future__ import annotations

from reprise_engine.kv.block_pool import BlockState
from reprise_engine.step import BlockCopy, BlockId, Step
from tests.engine.paged_fake import World

SYSTEM = [1, 2, 3, 4, 5, 6, 7, 8]  # two blocks


def table(step: Step) -> list[int]:
    (part,) = step.requests
    return list(part.block_table)


def states(world: World) -> str:
    return "".join(world.scheduler.kv.pool.state(BlockId(i)).value[0] for i in range(6))  # free, active, cached


def test_the_life_of_a_small_cache() -> None:
    world = World(num_blocks=6, block_size=4)
    pool = world.scheduler.kv.pool
    assert states(world) == "ffffff"

    # The first request computes everything: two full blocks and a part of a third.
    a = world.add([*SYSTEM, 9, 10])
    step = world.step()
    assert table(step) == [0, 1, 2]
    assert (step.requests[0].start, len(step.requests[0].token_ids)) == (0, 10)
    assert world.cached(a) == 0
    assert states(world) == "ccffff"  # the unfinished block is not kept

    # The second has another question under the same system prompt: it computes only that.
    b = world.add([*SYSTEM, 11, 12, 13], max_tokens=3)
    step = world.step()
    assert table(step) == [0, 1, 2]
    assert (step.requests[0].start, len(step.requests[0].token_ids)) == (8, 3)
    assert states(world) == "aaafff"
    world.step()  # fills block 2: prompt and generated tokens alike
    assert states(world) == "aaafff"
    assert table(world.step()) == [0, 1, 2, 3]
    assert world.cached(b) == 8
    assert states(world) == "cccfff"

    # The next turn of that conversation finds its own answer again.
    first_turn = [*SYSTEM, 11, 12, 13, *world.tokens(b)[:1]]
    c = world.add([*first_turn, 20])
    step = world.step()
    assert table(step) == [0, 1, 2, 3]
    assert (step.requests[0].start, step.requests[0].token_ids) == (12, (20,))
    assert world.cached(c) == 12

    # The same prompt, whole blocks only: the last token is computed again, in a copy of the last block.
    d = world.add(first_turn)
    copying = world.schedule()
    assert copying is not None
    assert copying.copies == (BlockCopy(source=BlockId(2), target=BlockId(3)),)
    assert table(copying) == [0, 1, 3]
    assert (copying.requests[0].start, len(copying.requests[0].token_ids)) == (11, 1)
    assert pool.references(BlockId(2)) == 1
    world.commit(copying)
    assert world.cached(d) == 11
    assert states(world) == "cccfff"  # the copy was a duplicate, and is free again

    # Another salt shares nothing.
    e = world.add([*SYSTEM, 9], salt="tenant")
    step = world.step()
    assert table(step) == [3, 4, 5]
    assert world.cached(e) == 0
    assert states(world) == "cccccf"
    assert pool.eviction_order() == (2, 1, 0, 4, 3)  # leaves first, and least recently used

    # A foreign prompt of four blocks takes the free block, then evicts: 2, 1, 0, in this order.
    f = world.add([30] * 13)
    assert table(world.step()) == [5, 2, 1, 0]
    assert world.scheduler.stats().num_evicted_blocks == 3
    assert pool.state(BlockId(0)) is BlockState.FREE
    assert pool.eviction_order() == (4, 3, 1, 2, 5)

    # So the system prompt is gone for those without salt, and still there for the tenant.
    g = world.add([*SYSTEM, 9], salt="tenant")
    assert table(world.step())[:2] == [3, 4]
    assert world.cached(g) == 8
    h = world.run([*SYSTEM, 9])
    assert world.cached(h) == 0

    for request_id in (a, b, c, d, e, f, g, h):
        world.check_finished(request_id)
    assert world.scheduler.stats().kv_cache_usage == 0.0
