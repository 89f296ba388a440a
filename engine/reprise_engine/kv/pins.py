"""Prefixes that stay in the cache until they are unpinned, within a budget of blocks.

A pin holds a reference to each block of a chain from the root, as a sequence does: such blocks cannot be evicted, and
leaves still go first. What does not fit the budget is cached as anything else is, least recently used first out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from reprise_engine.cache_report import PinnedPrefix
from reprise_engine.kv.block_pool import BlockPool
from reprise_engine.kv.prefix_index import Node
from reprise_engine.step import BlockId


def pin_budget_blocks(budget: float | int, *, num_blocks: int, block_size: int, max_model_len: int) -> int:
    """`budget`, a share of the pool (float) or a number of blocks (int), in blocks.

    Never so many that a sequence of max_model_len tokens (or one that fills the pool, where that is smaller) would not
    fit beside them: every request that is accepted must end.
    """
    asked = int(budget * num_blocks) if isinstance(budget, float) else budget
    longest = min(-(-max_model_len // block_size), num_blocks)
    return min(asked, num_blocks - longest)


@dataclass(frozen=True, slots=True)
class _Pin:
    blocks: tuple[BlockId, ...]
    num_tokens: int


class Pins:
    """The pins, by name. `budget` counts different blocks: pins that share a prefix pay for it once."""

    def __init__(self, pool: BlockPool, *, budget: int) -> None:
        self.budget = budget
        self._pool = pool
        self._pins: dict[str, _Pin] = {}
        self._counts: dict[BlockId, int] = {}

    @property
    def num_blocks(self) -> int:
        return len(self._counts)

    def __contains__(self, block: BlockId) -> bool:
        return block in self._counts

    def count(self, block: BlockId) -> int:
        """References to `block` that are pins'."""
        return self._counts.get(block, 0)

    def pin(self, name: str, chain: Sequence[Node], *, last_tokens: int) -> PinnedPrefix:
        """Pins as much of `chain`, from the root on, as the budget allows; `name` pins nothing else any more.

        Of the last node `last_tokens` tokens are wanted.
        """
        self.unpin(name)
        blocks: list[BlockId] = []
        num_tokens = 0
        for node in chain:
            if node.block not in self._counts:
                if len(self._counts) >= self.budget:
                    break
                self._counts[node.block] = 0
            self._counts[node.block] += 1
            blocks.append(node.block)
            num_tokens += last_tokens if node is chain[-1] else node.num_tokens
        self._pool.acquire(blocks)
        if blocks:
            self._pins[name] = _Pin(tuple(blocks), num_tokens)
        return PinnedPrefix(name=name, tokens=num_tokens, blocks=len(blocks))

    def unpin(self, name: str) -> bool:
        """Its blocks stay cached. False where there is no such pin."""
        pin = self._pins.pop(name, None)
        if pin is None:
            return False
        for block in pin.blocks:
            self._counts[block] -= 1
            if not self._counts[block]:
                del self._counts[block]
        self._pool.release(pin.blocks)
        return True

    def unpin_all(self) -> int:
        """Returns the number of pins that there were."""
        names = list(self._pins)
        for name in names:
            self.unpin(name)
        return len(names)

    def report(self) -> tuple[PinnedPrefix, ...]:
        return tuple(
            PinnedPrefix(name=name, tokens=pin.num_tokens, blocks=len(pin.blocks)) for name, pin in self._pins.items()
        )

    def references(self) -> Iterable[tuple[BlockId, int]]:
        """Of every pinned block, how many references are pins'. For checks."""
        return self._counts.items()
