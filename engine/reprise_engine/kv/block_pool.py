"""Which block is free, which is in use and by how many, which may be evicted next. Knows nothing of tokens.

State of a block:
    FREE     nobody refers to it and its content is worthless
    ACTIVE   one or more sequences (or a copy under way) refer to it; it may be in the prefix index as well
    CACHED   in the prefix index, nobody refers to it: kept until its room is needed

    FREE ── allocate ──▶ ACTIVE ◀── acquire ── CACHED
      ▲                   │    │                  ▲ │
      └── release ────────┘    └── release ───────┘ └── allocate (evicts), drop_cached ──▶ …
        (not in the index)       (in the index)
                                   forget: CACHED ──▶ FREE
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from enum import Enum

from reprise_engine.step import BlockId


class BlockState(Enum):
    FREE = "free"
    ACTIVE = "active"
    CACHED = "cached"


class BlockPool:
    """Reference counts and eviction order of `num_blocks` blocks. Every operation is O(1) a block.

    Leaves go first: sequences refer to whole chains from the root, and `release` takes a chain from its end, so an
    unreferenced block always stands behind all its descendants in the eviction order.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._references = [0] * num_blocks
        self._indexed = bytearray(num_blocks)
        # A stack: the block freed last is the warmest in the processor's caches. Low ids come out first at the start.
        self._free = [BlockId(i) for i in reversed(range(num_blocks))]
        # CPython's OrderedDict is a doubly linked list in C: removal from the middle is O(1), and ten times as fast as
        # the same list in Python. Least recently used first.
        self._cached: OrderedDict[BlockId, None] = OrderedDict()

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` can hand out, evicting where it must."""
        return len(self._free) + len(self._cached)

    @property
    def num_active(self) -> int:
        return self.num_blocks - self.num_available

    def references(self, block: BlockId) -> int:
        return self._references[block]

    def state(self, block: BlockId) -> BlockState:
        if self._references[block]:
            return BlockState.ACTIVE
        return BlockState.CACHED if self._indexed[block] else BlockState.FREE

    def allocate(self, count: int) -> tuple[list[BlockId], list[BlockId]]:
        """Hands out `count` blocks with one reference each.

        Returns (blocks, evicted): those of them that held cached content, least recently used and leaves first. The
        caller takes these out of the prefix index before it does anything else.
        Raises RuntimeError when fewer are available: ask `num_available` first.
        """
        if count > self.num_available:
            raise RuntimeError(f"{count} blocks asked for, {self.num_available} of {self.num_blocks} available")
        blocks: list[BlockId] = []
        if from_free := min(count, len(self._free)):
            blocks = self._free[: -from_free - 1 : -1]
            del self._free[-from_free:]
        evicted = [self._cached.popitem(last=False)[0] for _ in range(count - from_free)]
        for block in evicted:
            self._indexed[block] = 0
        blocks += evicted
        for block in blocks:
            self._references[block] = 1
        return blocks, evicted

    def acquire(self, blocks: Iterable[BlockId]) -> None:
        """Adds a reference to each of `blocks`, all of them ACTIVE or CACHED."""
        references = self._references
        for block in blocks:
            if not references[block]:
                del self._cached[block]
            references[block] += 1

    def release(self, blocks: Sequence[BlockId]) -> None:
        """Takes a reference from each of `blocks`, a chain from its root on; the end of the chain goes first."""
        references, indexed = self._references, self._indexed
        for block in reversed(blocks):
            left = references[block] - 1
            if left > 0:
                references[block] = left
            elif left < 0:
                raise RuntimeError(f"block {block} was released more often than it was acquired")
            else:
                references[block] = 0
                if indexed[block]:
                    self._cached[block] = None
                else:
                    self._free.append(block)

    def mark_indexed(self, block: BlockId) -> None:
        """From now on the content of this ACTIVE block is in the prefix index."""
        self._indexed[block] = 1

    def forget(self, block: BlockId) -> None:
        """The content of `block` left the prefix index: it is free, or will be when its last reference goes."""
        self._indexed[block] = 0
        if not self._references[block]:
            del self._cached[block]
            self._free.append(block)

    def drop_cached(self) -> list[BlockId]:
        """Frees every CACHED block and returns them, leaves first."""
        dropped = list(self._cached)
        self._cached.clear()
        for block in dropped:
            self._indexed[block] = 0
        self._free.extend(dropped)
        return dropped

    def eviction_order(self) -> tuple[BlockId, ...]:
        """The CACHED blocks, the next to be evicted first. For tests and reports."""
        return tuple(self._cached)

    def check_invariants(self) -> None:
        """Raises AssertionError where the books do not balance."""
        free, cached = set(self._free), set(self._cached)
        assert len(free) == len(self._free), "a block is free twice"
        assert not free & cached, f"blocks both free and cached: {free & cached}"
        for i in range(self.num_blocks):
            block = BlockId(i)
            assert self._references[i] >= 0, f"block {i} has {self._references[i]} references"
            expected = BlockState.FREE if block in free else BlockState.CACHED if block in cached else BlockState.ACTIVE
            assert self.state(block) is expected, (
                f"block {i} is listed as {expected}, its counts say {self.state(block)}"
            )
