"""The KV cache as the scheduler sees it: which blocks a sequence has, which prefix of it is computed already.

A sequence's blocks, as half-open intervals over `SequenceBlocks.blocks`:

    [0, indexed)              in the prefix index: shared, full, never written again
    [indexed, len(blocks))    its own: one reference, not in the index, written by its steps

Lifecycle of a sequence:
    1. sequence()   nothing is allocated yet
    2. lookup()     what the index has of its tokens; changes nothing, may be repeated at no cost to the accounting
    3. fitting()    as much of the match as the pool has room for; admit() refers to its blocks and allocates all
                    others that the known tokens need
    4. extend()     one block more, whenever generation reaches the end of the last one
    5. commit()     after each of its steps: blocks that the step filled enter the index
    6. release()    finished, aborted or preempted: what is in the index stays there, unreferenced, and so does the
                    computed part of an unfinished block, as a tail

Where a prompt goes another way inside a block, or ends or goes on where a tail does, the common part is used too: the
whole block is copied into one of the sequence's own, which writes from the first slot that differs. So shared slots
are never rewritten, and a copy is valid in every layout.

A block enters the index only in commit(), so nobody can match what is not computed. Where two sequences computed the
same block, commit() gives the second one the first one's block and frees the duplicate, after the page table has
changed. So a sequence refers to its whole chain in the index, and that is what makes leaves-first eviction O(1).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from reprise_engine.cache_report import MissReason, PinnedPrefix
from reprise_engine.kv.block_pool import BlockPool
from reprise_engine.kv.checks import check_books
from reprise_engine.kv.events import EventLog, KVEvent
from reprise_engine.kv.hashing import (
    TOKEN_BYTES,
    BlockHasher,
    encode_blocks,
    encode_tokens,
    extra_keys,
    sha256_block_hash,
)
from reprise_engine.kv.misses import EvictedBlocks, why_it_ended
from reprise_engine.kv.pins import Pins
from reprise_engine.kv.prefix_index import Node, PrefixIndex
from reprise_engine.kv.sequence import NO_MATCH, Match, NextBlock, SequenceBlocks
from reprise_engine.kv.tiering import Tiering
from reprise_engine.request import TokenId
from reprise_engine.step import BlockCopy, BlockId

_MOST_EVICTED = 16_384
"""Evicted blocks that are remembered, to tell "evicted" from "never seen": some megabytes."""


class KVCacheManager:
    """Allocates blocks to sequences and remembers prefixes. Holds ids only; the runner owns the tensors."""

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        enable_prefix_caching: bool,
        hasher: BlockHasher = sha256_block_hash,
        pin_budget: int = 0,
        tiering: Tiering | None = None,
        record_events: bool = False,
    ) -> None:
        self.block_size = block_size
        self.tiering = tiering
        self.enable_prefix_caching = enable_prefix_caching
        self.num_evicted_blocks = 0
        self._evicted = EvictedBlocks(min(4 * num_blocks, _MOST_EVICTED))
        self.pool = BlockPool(num_blocks)
        self.pins = Pins(self.pool, budget=pin_budget)
        self.index = PrefixIndex(hasher)
        self._events = EventLog(block_size=block_size) if record_events else None

    @property
    def num_blocks(self) -> int:
        return self.pool.num_blocks

    @property
    def usage(self) -> float:
        """Share of blocks that are referenced, by sequences or by pins, 0 to 1."""
        return self.pool.num_active / self.pool.num_blocks

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def sequence(
        self, *, cache_salt: str | None = None, adapter: str | None = None, skip_reading: bool = False
    ) -> SequenceBlocks:
        return SequenceBlocks(
            extra_keys=extra_keys(adapter=adapter, cache_salt=cache_salt),
            reads_cache=self.enable_prefix_caching and not skip_reading,
            indexing=self.enable_prefix_caching,
        )

    def lookup(self, sequence: SequenceBlocks, tokens: Sequence[TokenId]) -> Match:
        """The longest computed prefix of `tokens` (all that are known), at most len(tokens) - 1 long.

        One token at least is always left to compute, since the next one is sampled from its logits. So where all
        tokens are cached, the last block is the `source` of a copy into which that one token is computed again.
        """
        if not sequence.reads_cache:
            return NO_MATCH
        size, limit = self.block_size, len(tokens) - 1
        self._encode(sequence, tokens, len(tokens) // size)
        path = self.index.match(sequence.extra_keys, sequence.keys[: limit // size])
        num_tokens = len(path) * size
        rest = encode_tokens(tokens[num_tokens : min(num_tokens + size, limit)])
        source, common = self.index.nearest(path[-1] if path else None, sequence.extra_keys, rest)
        return Match(shared=tuple(path), source=source, source_tokens=common, num_tokens=num_tokens + common)

    def why_no_more(
        self, sequence: SequenceBlocks, tokens: Sequence[TokenId], match: Match, used: Match, *, other_salts: bool
    ) -> MissReason | None:
        """Why not all of `tokens` but the last was reused, `match` being what lookup found and `used` what fitted.

        None where it was. Without `other_salts` the answer is the same whatever is cached under those.
        To be asked before the sequence is admitted, whose blocks may evict what the match left, or once its load has
        ended; changes nothing.
        """
        if not sequence.reads_cache:
            return MissReason.CACHING_OFF
        if used.num_tokens == len(tokens) - 1:
            return None
        if used is not match:
            return MissReason.NO_ROOM
        start = len(match.shared) * self.block_size
        return why_it_ended(
            self.index,
            self._evicted,
            extra_keys=sequence.extra_keys,
            tip=match.shared[-1] if match.shared else None,
            source=match.source,
            source_tokens=match.source_tokens,
            rest=encode_tokens(tokens[start : start + self.block_size]),
            reusable_tokens=min(self.block_size, len(tokens) - 1 - start),
            block_bytes=self.block_size * TOKEN_BYTES,
            other_salts=other_salts,
        )

    def fitting(self, match: Match, num_tokens: int) -> Match | None:
        """`match`, without the copy where only that has no room; None where `num_tokens` tokens do not fit at all.

        A copy needs its source and its target at once. Without it no sequence needs more blocks than its own, so one
        that fits the pool is never kept out by what it would reuse.
        """
        if self._fits(match, num_tokens):
            return match
        if match.source is not None and self._fits(match := match.without_copy(), num_tokens):
            return match
        return None

    def admit(self, sequence: SequenceBlocks, match: Match, num_tokens: int) -> tuple[BlockCopy, ...] | None:
        """Refers to what matched and allocates the other blocks of the first `num_tokens` tokens.

        Returns the copies that its first step must make, or None where the blocks do not suffice: nothing has changed
        then. `match` is of a lookup since which nothing was allocated.
        """
        held = [node.block for node in match.shared]
        if match.source is not None:
            held.append(match.source.block)
        if not self._fits(match, num_tokens):
            return None
        own = self.blocks_for(num_tokens) - len(match.shared)
        self.pool.acquire(held)
        blocks = self._allocate(own)
        copies: tuple[BlockCopy, ...] = ()
        if match.source is not None:
            sequence.copy_source = held.pop()
            copies = (BlockCopy(source=sequence.copy_source, target=blocks[0]),)
        sequence.blocks = held + blocks
        sequence.table = tuple(sequence.blocks)
        sequence.indexed = len(match.shared)
        sequence.tip = match.shared[-1] if match.shared else None
        return copies

    def reused(self, sequence: SequenceBlocks, num_tokens: int) -> Match:
        """All that an admitted sequence reuses, where its first `num_tokens` tokens were loaded into its blocks.

        Nothing in the index goes on from there: what was missing in it had no children.
        """
        shared: list[Node] = []
        node = sequence.tip
        while node is not None:
            shared.append(node)
            node = node.parent
        return Match(shared=tuple(reversed(shared)), num_tokens=num_tokens)

    def next_block(self, sequence: SequenceBlocks, match: Match | None = None) -> NextBlock | None:
        """The first full block of known tokens that the sequence misses in the index.

        Without `match`, of an admitted sequence: the block that its commits will enter next, None where they will not.
        With it, of one that waits: the block that it would have to compute, None where it cannot share one.
        Two sequences with equal next blocks would compute the same.
        """
        if match is None:
            if not sequence.indexing or sequence.indexed >= len(sequence.keys):
                return None
            return sequence.tip, sequence.extra_keys, sequence.keys[sequence.indexed]
        matched = len(match.shared)
        if not sequence.reads_cache or matched >= len(sequence.keys):
            return None
        if match.source is not None and match.source.tokens == sequence.keys[matched]:
            return None  # it is in the index; only its last token is computed again
        return (match.shared[-1] if match.shared else None), sequence.extra_keys, sequence.keys[matched]

    def extend(self, sequence: SequenceBlocks, num_tokens: int) -> bool:
        """Allocates until the sequence has room for `num_tokens` tokens; False, and no change, where it cannot."""
        missing = self.blocks_for(num_tokens) - len(sequence.blocks)
        if missing <= 0:
            return True
        if missing > self.pool.num_available:
            return False
        sequence.blocks += self._allocate(missing)
        sequence.table = tuple(sequence.blocks)
        return True

    def commit(self, sequence: SequenceBlocks, tokens: Sequence[TokenId], num_computed: int) -> None:
        """Takes note that the KV of tokens[:num_computed] is in the sequence's blocks now."""
        full = num_computed // self.block_size
        if full > sequence.indexed and sequence.indexing:
            self._index(sequence, tokens, full)
        if sequence.copy_source is not None:
            self.pool.release((sequence.copy_source,))
            sequence.copy_source = None

    def release(self, sequence: SequenceBlocks, tokens: Sequence[TokenId] = (), num_computed: int = 0) -> None:
        """Gives up all blocks. The sequence is as new: it may be looked up and admitted again.

        The KV of tokens[:num_computed] is in its blocks: what of it fills no whole block stays in the index as a tail.
        """
        if sequence.copy_source is not None:
            # Its step did not end: nobody knows whether the copy was made.
            self.pool.release((sequence.copy_source,))
            sequence.copy_source = None
        elif sequence.indexing and num_computed > sequence.indexed * self.block_size:
            self._index_tail(sequence, tokens, num_computed)
        if self.tiering is not None and sequence.tip is not None:
            self.tiering.used(sequence.tip)
        self.pool.release(sequence.blocks)
        sequence.blocks = []
        sequence.table = ()
        sequence.indexed = 0
        sequence.tip = None
        sequence.indexing = self.enable_prefix_caching

    def pin(self, name: str, sequence: SequenceBlocks, tokens: Sequence[TokenId]) -> PinnedPrefix:
        """Pins what the index has of `tokens` under the sequence's salt, as far as the budget goes."""
        size = self.block_size
        chain = self.index.match(sequence.extra_keys, encode_blocks(tokens, size))
        rest = encode_tokens(tokens[len(chain) * size : (len(chain) + 1) * size])
        node, common = self.index.nearest(chain[-1] if chain else None, sequence.extra_keys, rest)
        if node is None:
            return self.pins.pin(name, chain, last_tokens=size)
        return self.pins.pin(name, [*chain, node], last_tokens=common)

    def reset(self, *, include_pins: bool = False) -> tuple[bool, int]:
        """Forgets every cached block that is neither in use nor, unless they are included, pinned.

        Returns (success, freed): success is False where sequences use blocks; these stay as they are.
        """
        if include_pins:
            self.pins.unpin_all()
        dropped = self.pool.drop_cached()
        gone = [self.index.node(block) for block in dropped] if self._events is not None else []
        self.index.remove_all(dropped)
        if self._events is not None:
            self._events.reset(gone, all_gone=not len(self.index))
        self._evicted.clear()
        if self.tiering is not None:
            self.tiering.forgotten(dropped)
        only_pinned = sum(1 for block, count in self.pins.references() if self.pool.references(block) == count)
        return self.pool.num_active == only_pinned, len(dropped)

    def take_events(self) -> list[KVEvent]:
        """What entered and left the index since the last call, in order; [] where events are not recorded."""
        return [] if self._events is None else self._events.take()

    def snapshot_events(self) -> list[KVEvent]:
        """Takes the events, and returns instead those by which a consumer who knows nothing comes to the same set."""
        assert self._events is not None, "events are not recorded"
        self._events.take()
        self._events.reset((), all_gone=True)
        for node in self.index:  # in the order of entry: parents before their children
            if node.block_hash is not None:
                self._events.stored(node)
        return self._events.take()

    def check_invariants(self, sequences: Iterable[SequenceBlocks]) -> None:
        """Raises AssertionError where pool, index and page tables contradict each other. `sequences`: all there are."""
        check_books(sequences, pool=self.pool, index=self.index, pins=self.pins, block_size=self.block_size)

    def _fits(self, match: Match, num_tokens: int) -> bool:
        held = len(match.shared) + (match.source is not None)
        free = self.pool.num_available - (self.blocks_for(num_tokens) - len(match.shared))
        if free >= held or free < 0:
            return free >= 0
        # Blocks of the match that nobody refers to count as available, but cannot be allocated as well.
        references = self.pool.references
        unreferenced = sum(1 for node in match.shared if not references(node.block))
        if match.source is not None and not references(match.source.block):
            unreferenced += 1
        return free >= unreferenced

    def _allocate(self, count: int) -> list[BlockId]:
        blocks, evicted = self.pool.allocate(count)
        for block in evicted:
            node = self.index.node(block)
            assert node is not None, f"block {block} is cached, yet not in the index"
            self._evicted.add(node)
            self.index.remove(block)
            if self.tiering is not None:
                self.tiering.evicted(node)
            if self._events is not None:
                self._events.removed(node)
        self.num_evicted_blocks += len(evicted)
        return blocks

    def _encode(self, sequence: SequenceBlocks, tokens: Sequence[TokenId], full: int) -> None:
        known = len(sequence.keys)
        if full > known:
            size = self.block_size
            sequence.keys += encode_blocks(tokens[known * size : full * size], size)

    def _index(self, sequence: SequenceBlocks, tokens: Sequence[TokenId], full: int) -> None:
        """Enters blocks [indexed, full), or takes over the blocks that are there already with the same content."""
        self._encode(sequence, tokens, full)
        # All names are local: a prompt enters hundreds of blocks, each in a microsecond or two.
        blocks, keys, extra_keys, tip = sequence.blocks, sequence.keys, sequence.extra_keys, sequence.tip
        duplicates: list[BlockId] = []
        insert, mark_indexed = self.index.insert, self.pool.mark_indexed
        tiering, events = self.tiering, self._events
        indexed = sequence.indexed
        for own, key in zip(blocks[indexed:full], keys[indexed:full], strict=True):
            node = insert(tip, extra_keys, key, own)
            if node.block == own:
                mark_indexed(own)
                if tip is None or tip.order is not None:  # else it has no sibling
                    self._drop_superseded(node)
                if tiering is not None:
                    tiering.entered(node)
                if events is not None:
                    events.stored(node)
            elif sequence.reads_cache:
                self.pool.acquire((node.block,))
                blocks[indexed] = node.block
                duplicates.append(own)
            else:
                sequence.indexing = False
                break
            tip = node
            indexed += 1
        sequence.tip, sequence.indexed = tip, indexed
        if duplicates:
            sequence.table = tuple(blocks)
            self.pool.release(duplicates)

    def _index_tail(self, sequence: SequenceBlocks, tokens: Sequence[TokenId], num_computed: int) -> None:
        start = sequence.indexed * self.block_size
        assert num_computed - start < self.block_size, "a full block was not committed"
        block = sequence.blocks[sequence.indexed]
        rest = encode_tokens(tokens[start:num_computed])
        node = self.index.insert_tail(sequence.tip, sequence.extra_keys, rest, block)
        if node is not None:
            self.pool.mark_indexed(block)
            self._drop_superseded(node)

    def _drop_superseded(self, node: Node) -> None:
        tail = self.index.superseded(node)
        if tail is not None and tail.block not in self.pins:
            self.index.remove(tail.block)
            self.pool.forget(tail.block)  # a copy of it under way keeps it to its end
