"""One story of a small cache, told in block ids: six blocks of four tokens, one request after the other."""

from __future__ import annotations

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
    assert states(world) == "cccfff"  # the unfinished block is kept too, as a tail

    # The second has another question under the same system prompt: it computes only that.
    b = world.add([*SYSTEM, 11, 12, 13], max_tokens=3)
    step = world.step()
    assert table(step) == [0, 1, 3]
    assert (step.requests[0].start, len(step.requests[0].token_ids)) == (8, 3)
    assert states(world) == "aacaff"
    world.step()  # fills block 3: prompt and generated tokens alike
    assert states(world) == "aacaff"
    assert table(world.step()) == [0, 1, 3, 4]
    assert world.cached(b) == 8
    assert states(world) == "cccccf"
    assert pool.eviction_order() == (2, 4, 3, 1, 0)  # leaves first, and least recently used

    # The next turn of that conversation finds its own answer again, to the last token that was computed.
    first_turn = [*SYSTEM, 11, 12, 13, *world.tokens(b)]
    c = world.add([*first_turn, 20])
    copying = world.schedule()
    assert copying is not None
    assert copying.copies == (BlockCopy(source=BlockId(4), target=BlockId(5)),)
    assert table(copying) == [0, 1, 3, 5]
    assert (copying.requests[0].start, copying.requests[0].token_ids) == (13, (first_turn[13], 20))
    assert pool.references(BlockId(4)) == 1
    world.commit(copying)
    assert world.cached(c) == 13
    assert states(world) == "ccccfc"  # the longer tail serves whatever the shorter one did: that one is free again

    # Whole blocks only: the last token is computed again, in a copy of the last block.
    d = world.add(first_turn[:12])
    copying = world.schedule()
    assert copying is not None
    assert copying.copies == (BlockCopy(source=BlockId(3), target=BlockId(4)),)
    assert table(copying) == [0, 1, 4]
    assert (copying.requests[0].start, len(copying.requests[0].token_ids)) == (11, 1)
    world.commit(copying)
    assert world.cached(d) == 11
    assert states(world) == "ccccfc"  # the copy was a duplicate, and is free again

    # A prompt that is no longer than a block and goes another way inside it computes from there on.
    e = world.add([1, 2, 3, 9])
    copying = world.schedule()
    assert copying is not None
    assert copying.copies == (BlockCopy(source=BlockId(0), target=BlockId(4)),)
    assert (copying.requests[0].start, copying.requests[0].token_ids) == (3, (9,))
    world.commit(copying)
    assert world.cached(e) == 3
    assert states(world) == "cccccc"
    assert pool.eviction_order() == (2, 5, 3, 1, 0, 4)

    # Another salt shares nothing. There is no free block left: the oldest tails go, then a leaf.
    f = world.add([*SYSTEM, 9], salt="tenant")
    assert table(world.step()) == [2, 5, 3]
    assert world.cached(f) == 0
    assert world.scheduler.stats().num_evicted_blocks == 3
    assert pool.eviction_order() == (1, 0, 4, 3, 5, 2)

    # A foreign prompt of four blocks evicts the system prompt of those without salt, and its fork.
    g = world.add([30] * 13)
    assert table(world.step()) == [1, 0, 4, 3]
    assert world.scheduler.stats().num_evicted_blocks == 7
    assert pool.eviction_order() == (5, 2, 3, 4, 0, 1)

    # The tenant's is still there, but for the tail; there is no room for more.
    h = world.add([*SYSTEM, 9], salt="tenant")
    assert table(world.step()) == [2, 5, 3]
    assert world.cached(h) == 8
    i = world.run([*SYSTEM, 9])
    assert world.cached(i) == 0

    for request_id in (a, b, c, d, e, f, g, h, i):
        world.check_finished(request_id)
    assert world.scheduler.stats().kv_cache_usage == 0.0
