from __future__ import annotations

import pytest

from reprise_engine.kv.block_pool import BlockPool, BlockState
from reprise_engine.step import BlockId


def ids(*blocks: int) -> list[BlockId]:
    return [BlockId(block) for block in blocks]


def cached_pool() -> BlockPool:
    """Four blocks: 0 and 1 are a cached chain, 2 and 3 free."""
    pool = BlockPool(4)
    blocks, _ = pool.allocate(2)
    for block in blocks:
        pool.mark_indexed(block)
    pool.release(blocks)
    return pool


def test_blocks_are_handed_out_in_order_and_the_last_freed_first() -> None:
    pool = BlockPool(4)
    assert pool.allocate(3) == (ids(0, 1, 2), [])
    pool.release(ids(0, 1))
    assert pool.allocate(3) == (ids(0, 1, 3), [])
    assert pool.num_available == 0


def test_free_blocks_go_before_cached_ones_and_leaves_before_their_parents() -> None:
    pool = cached_pool()
    assert pool.eviction_order() == (1, 0)
    assert pool.allocate(3) == (ids(2, 3, 1), ids(1))
    assert pool.state(BlockId(0)) is BlockState.CACHED
    assert pool.allocate(1) == (ids(0), ids(0))
    pool.check_invariants()


def test_a_block_in_use_is_never_evicted() -> None:
    pool = cached_pool()
    pool.acquire(ids(0, 1))
    assert pool.num_available == 2
    with pytest.raises(RuntimeError, match="3 blocks asked for, 2 of 4 available"):
        pool.allocate(3)
    assert pool.allocate(2) == (ids(2, 3), [])
    pool.check_invariants()


def test_a_block_stays_active_until_its_last_reference_goes() -> None:
    pool = cached_pool()
    pool.acquire(ids(0))
    pool.acquire(ids(0))
    pool.release(ids(0))
    assert pool.state(BlockId(0)) is BlockState.ACTIVE
    pool.release(ids(0))
    assert pool.state(BlockId(0)) is BlockState.CACHED
    assert pool.eviction_order() == (1, 0)


def test_a_block_released_too_often_is_an_error() -> None:
    pool = cached_pool()
    with pytest.raises(RuntimeError, match="block 3 was released more often"):
        pool.release(ids(3))


def test_an_evicted_block_is_free_once_released() -> None:
    pool = cached_pool()
    blocks, evicted = pool.allocate(4)
    assert evicted == ids(1, 0)
    pool.release(blocks)
    assert {pool.state(block) for block in blocks} == {BlockState.FREE}
    assert pool.eviction_order() == ()


def test_dropping_the_cached_blocks_frees_them_leaves_first() -> None:
    pool = cached_pool()
    assert pool.drop_cached() == ids(1, 0)
    assert pool.state(BlockId(0)) is BlockState.FREE
    assert pool.num_active == 0
    assert pool.allocate(4)[1] == []
    pool.check_invariants()
