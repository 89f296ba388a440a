"""The invariants of pool, index, pins and page tables together. For tests."""

from __future__ import annotations

from collections.abc import Iterable

from reprise_engine.kv.block_pool import BlockPool, BlockState
from reprise_engine.kv.pins import Pins
from reprise_engine.kv.prefix_index import PrefixIndex
from reprise_engine.kv.sequence import SequenceBlocks
from reprise_engine.step import BlockId


def check_books(
    sequences: Iterable[SequenceBlocks], *, pool: BlockPool, index: PrefixIndex, pins: Pins, block_size: int
) -> None:
    """Raises AssertionError where pool, index and page tables contradict each other. `sequences`: all there are."""
    pool.check_invariants()
    index.check_invariants()
    expected = [0] * pool.num_blocks
    for sequence in sequences:
        assert sequence.table == tuple(sequence.blocks), "a page table was not made anew"
        assert len(set(sequence.blocks)) == len(sequence.blocks), "a sequence has a block twice"
        for block in sequence.blocks:
            expected[block] += 1
        if sequence.copy_source is not None:
            expected[sequence.copy_source] += 1
        _check_chain(sequence, pool=pool, index=index, block_size=block_size)
    for block, count in pins.references():
        expected[block] += count
        assert index.node(block) is not None, f"block {block} is pinned, yet not in the index"
    assert pins.num_blocks <= pins.budget, "more is pinned than the budget allows"
    for i, count in enumerate(expected):
        references = pool.references(BlockId(i))
        assert references == count, f"block {i}: {references} references, but {count} sequences and pins have it"
    _check_index(pool=pool, index=index, block_size=block_size)


def _check_chain(sequence: SequenceBlocks, *, pool: BlockPool, index: PrefixIndex, block_size: int) -> None:
    tip = sequence.tip
    for i in reversed(range(sequence.indexed)):
        assert tip is not None, f"the chain of a sequence ends {i + 1} blocks too early"
        assert tip.block == sequence.blocks[i], f"block {sequence.blocks[i]} is in the table, {tip.block} in the tree"
        assert tip.tokens == sequence.keys[i], f"block {tip.block} holds other tokens than the sequence"
        assert index.node(tip.block) is tip, f"block {tip.block} left the index while in use"
        assert tip.num_tokens == block_size, f"a sequence refers to the tail {tip.block}"
        tip = tip.parent
    assert tip is None, "the chain of a sequence does not start at the root"
    for block in sequence.blocks[sequence.indexed :]:
        assert index.node(block) is None, f"block {block} is written to, yet it is in the index"
        assert pool.references(block) == 1, f"block {block} is written to, yet it is shared"


def _check_index(*, pool: BlockPool, index: PrefixIndex, block_size: int) -> None:
    place = {block: i for i, block in enumerate(pool.eviction_order())}
    for node in index:
        assert node.num_tokens == block_size or node.block_hash is None, f"block {node.block} is not full"
        assert pool.state(node.block) is not BlockState.FREE, f"block {node.block} is free, yet in the index"
        if node.parent is not None and node.block in place:
            parent = node.parent.block
            assert place.get(parent, pool.num_blocks) > place[node.block], f"block {parent} goes before its child"
        if node.parent is not None and node.block not in place:
            assert node.parent.block not in place, f"block {node.parent.block} may be evicted before its child in use"
    assert all(index.node(block) is not None for block in place), "a cached block is not in the index"
