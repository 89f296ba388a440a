"""What enters and leaves the prefix index, for consumers outside that follow it: routers above all.

Only full blocks have names, so only they make events; tails come and go unseen. The events of one step, applied in
order to the set before it, give the set after it. Plain values: how they are written is `kv_events/wire.py`'s business.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from reprise_engine.kv.hashing import Adapter, ExtraKeys, keys_of_block
from reprise_engine.kv.prefix_index import Node
from reprise_engine.step import BlockHash

MEDIUM_DEVICE = "GPU"
"""What vLLM calls the device's memory, whatever device it is. Routers know this word, and score by it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockStored:
    """A run of blocks, each the parent of the next, can be reused from now on."""

    hashes: tuple[BlockHash, ...]
    parent: BlockHash | None
    """Of the first of them; None where it is the first block of its sequence."""
    tokens: bytes
    """Of all of them, encoded as TokenBytes."""
    block_size: int
    extra_keys: tuple[ExtraKeys, ...]
    """What went into each block's hash."""
    medium: str = MEDIUM_DEVICE

    @property
    def adapter(self) -> str | None:
        return next((key.name for key in self.extra_keys[0] if isinstance(key, Adapter)), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockRemoved:
    """These blocks are there no more; children before their parents."""

    hashes: tuple[BlockHash, ...]
    medium: str = MEDIUM_DEVICE


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """Nothing is there any more, in any medium."""


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared


class EventLog:
    """Collects the events of a step. What follows one another is one event: runs of a chain, and removals."""

    def __init__(self, *, block_size: int, medium: str = MEDIUM_DEVICE) -> None:
        self._block_size = block_size
        self._medium = medium
        self._events: list[KVEvent] = []
        # What may still grow; of the two the run comes first, since a store behind a removal begins anew.
        self._run: list[Node] = []
        self._removed: list[BlockHash] = []

    def stored(self, node: Node) -> None:
        """A full block entered the index."""
        if self._removed or (self._run and self._run[-1] is not node.parent):
            self._close()
        self._run.append(node)

    def removed(self, node: Node) -> None:
        """A node left the index; of a tail nobody was told."""
        if node.block_hash is not None:
            self._removed.append(node.block_hash)

    def reset(self, gone: Iterable[Node | None], *, all_gone: bool) -> None:
        """`gone` left the index together, leaves first. `all_gone`: nothing is left in it."""
        if all_gone:
            self._close()
            self._events.append(AllBlocksCleared())
            return
        for node in gone:
            assert node is not None, "a cached block is not in the index"
            self.removed(node)

    def take(self) -> list[KVEvent]:
        """The events since the last call."""
        self._close()
        events, self._events = self._events, []
        return events

    def _close(self) -> None:
        if self._run:
            self._events.append(_stored_event(self._run, block_size=self._block_size, medium=self._medium))
            self._run = []
        if self._removed:
            self._events.append(BlockRemoved(hashes=tuple(self._removed), medium=self._medium))
            self._removed = []


def _stored_event(run: list[Node], *, block_size: int, medium: str) -> BlockStored:
    parent = run[0].parent
    return BlockStored(
        hashes=tuple(node.block_hash for node in run if node.block_hash is not None),
        parent=None if parent is None else parent.block_hash,
        tokens=b"".join(node.tokens for node in run),
        block_size=block_size,
        extra_keys=tuple(keys_of_block(node.extra_keys, first=node.parent is None) for node in run),
        medium=medium,
    )


@dataclass(frozen=True, slots=True)
class _Block:
    parent: BlockHash | None
    tokens: bytes
    block_size: int
    extra_keys: ExtraKeys


class CachedBlocks:
    """The set that a consumer has after some events: what it keeps of each block is enough to tell another one."""

    def __init__(self) -> None:
        self._blocks: dict[tuple[str, BlockHash], _Block] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    def apply(self, events: Iterable[KVEvent]) -> None:
        blocks = self._blocks
        for event in events:
            match event:
                case BlockStored():
                    width = len(event.tokens) // len(event.hashes)
                    parent = event.parent
                    for i, block_hash in enumerate(event.hashes):
                        tokens = event.tokens[i * width : (i + 1) * width]
                        blocks[event.medium, block_hash] = _Block(parent, tokens, event.block_size, event.extra_keys[i])
                        parent = block_hash
                case BlockRemoved():
                    for block_hash in event.hashes:
                        blocks.pop((event.medium, block_hash), None)
                case AllBlocksCleared():
                    blocks.clear()

    def events(self) -> list[KVEvent]:
        """By which a consumer comes to this set, whatever it had before; parents before their children."""
        events: list[KVEvent] = [AllBlocksCleared()]
        run: list[tuple[BlockHash, _Block]] = []
        place: tuple[str, int] | None = None
        for (medium, block_hash), block in self._blocks.items():
            if run and (place != (medium, block.block_size) or block.parent != run[-1][0]):
                events.append(_rejoined(run, medium=place[0] if place else MEDIUM_DEVICE))
                run = []
            place = (medium, block.block_size)
            run.append((block_hash, block))
        if run and place is not None:
            events.append(_rejoined(run, medium=place[0]))
        return events


def _rejoined(run: list[tuple[BlockHash, _Block]], *, medium: str) -> BlockStored:
    return BlockStored(
        hashes=tuple(block_hash for block_hash, _ in run),
        parent=run[0][1].parent,
        tokens=b"".join(block.tokens for _, block in run),
        block_size=run[0][1].block_size,
        extra_keys=tuple(block.extra_keys for _, block in run),
        medium=medium,
    )
