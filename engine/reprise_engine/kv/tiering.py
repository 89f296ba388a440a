"""What goes down from the pool to host memory and disk, and what comes up again: policy, no bytes and no I/O.

    pool ── evicted ──▶ host slot            kept there, least recently used out first (`tiers/host.py`)
    pool ── new block ─▶ host slot ─▶ disk   write-behind, as slots and the writer allow; nothing ever waits for it
    disk ─▶ host slot ─▶ pool                read in the background, loaded by a Step

Every way leads through a slot of host memory; without --prefix-cache-host-memory there are a few, to pass blocks
through. Between pool and slots only a Step copies (`BlockStore`, `BlockLoad`), between slots and disk only the threads
behind `DiskTier`. All books are kept in the engine's thread: what the threads have done is taken in by `poll`.

An evicted block's content stays where it is until its room is written anew. Its store is put off until then (it is
`due`), so a request that takes over many blocks at once costs the others no long step.

A request's load (`TierLoad`) holds slots in the order of its chain, so whichever slots are scarce, the first held one
can always be used. The blocks it loads into are the request's own: nobody can match them before they are committed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from itertools import islice

from reprise_engine.cache_report import Tier, TierStats
from reprise_engine.kv.hashing import ExtraKeys, TokenBytes, sha256_block_hash
from reprise_engine.kv.prefix_index import Node
from reprise_engine.kv.sequence import Match, SequenceBlocks
from reprise_engine.kv.tier_load import TierLoad
from reprise_engine.step import BlockHash, BlockId, BlockStore, SlotId
from reprise_engine.tiers.disk_tier import DiskTier
from reprise_engine.tiers.host import HostSlots, SlotState, TierBlock
from reprise_engine.tiers.keys import BlockKey

LOAD_PATIENCE = 10.0
"""Seconds without progress after which a load is given up, and the request computes: a disk that hangs."""
_READ_AHEAD_BYTES = 64 * 2**20
"""A load holds, or waits for: what an abort leaves for nothing, and what another load waits behind."""
_MOST_LOOKED_AT = 256
"""New blocks looked at a step, most of which may be on the disk already."""


def block_key(parent: BlockKey | None, tokens: TokenBytes, extra_keys: ExtraKeys) -> BlockKey:
    """The tiers' name of a block below `parent`; `extra_keys` are its sequence's."""
    if parent is None:
        return BlockKey(sha256_block_hash(None, tokens, extra_keys))
    return BlockKey(sha256_block_hash(BlockHash(parent), tokens, ()))


class Tiering:
    """The policy. `keeps_evicted`: there is a host tier; else the slots only pass blocks to the disk and back."""

    def __init__(
        self,
        slots: HostSlots,
        disk: DiskTier | None,
        *,
        keeps_evicted: bool,
        block_size: int,
        bytes_per_block: int,
        names_are_keys: bool = True,
    ) -> None:
        self.slots = slots
        self.disk = disk
        self.bytes_per_block = bytes_per_block
        self._keeps_evicted = keeps_evicted
        self._block_size = block_size
        self._names_are_keys = names_are_keys
        self._due: dict[BlockId, SlotId] = {}
        """Evicted blocks whose room was not written yet, and where their content goes."""
        self._new: dict[BlockId, Node] = {}
        """Full blocks in the index that the disk may not have, the oldest first."""
        self._stores: tuple[BlockStore, ...] = ()
        """Of the step that runs."""
        self._to_write: set[SlotId] = set()
        """Go on to the disk once they are filled."""
        self._reading: set[SlotId] = set()
        self._writing: set[SlotId] = set()
        self._most_writing = max(1, slots.num_slots // 2)
        self._window = max(4, _READ_AHEAD_BYTES // bytes_per_block)
        self._stored = 0
        self._written = 0
        self._dropped = 0
        self._unwritten = 0  # left the pool before the disk's writer came to them

    # --- told by the manager

    def entered(self, node: Node) -> None:
        """A full block entered the index."""
        if self.disk is not None:
            self._new[node.block] = node

    def evicted(self, node: Node) -> None:
        """A block left the index to make room; its content is still there."""
        if node.block_hash is None:
            return
        is_new = self._new.pop(node.block, None) is not None
        block = self.block_of(node)
        slot = self.slots.find(block)
        missing_on_disk = is_new and self.disk is not None and block.key not in self.disk
        wanted_by_disk = missing_on_disk and self._may_write
        self._unwritten += missing_on_disk and not wanted_by_disk
        if slot is not None:
            self.slots.touch(slot)
            if self.disk is not None and wanted_by_disk and self._is_writable(slot):
                self._write(self.disk, slot)
            return
        if not self._keeps_evicted and not wanted_by_disk:
            return
        slot = self.slots.take(block)
        if slot is None:
            self._dropped += 1
            return
        self._due[node.block] = slot
        if wanted_by_disk:
            self._to_write.add(slot)

    def used(self, tip: Node) -> None:
        """A sequence that ends, or gives up its blocks, used the chain that ends in `tip`.

        What the pool serves is never read from the disk, and would grow old there. The chain's beginning is worth
        most: it is used last, so it leaves last.
        """
        if self.disk is None:
            return
        keys: list[BlockKey] = []
        node: Node | None = tip
        while node is not None:
            keys.append(self._key(node))
            node = node.parent
        self.disk.touch(keys)

    def forgotten(self, blocks: Iterable[BlockId]) -> None:
        """Blocks left the index by a reset: their content is nobody's any more."""
        for block in blocks:
            self._new.pop(block, None)

    def block_of(self, node: Node) -> TierBlock:
        """The tiers' name of a full block that is, or just was, in the index."""
        return TierBlock(self._key(node), None if node.parent is None else self._key(node.parent), node.tokens)

    def _key(self, node: Node) -> BlockKey:
        if self._names_are_keys:
            assert node.block_hash is not None, "a tail has no key"
            return BlockKey(node.block_hash)
        unnamed: list[Node] = []
        at: Node | None = node
        while at is not None and at.tier_key is None:
            unnamed.append(at)
            at = at.parent
        for one in reversed(unnamed):
            one.tier_key = block_key(None if one.parent is None else one.parent.tier_key, one.tokens, one.extra_keys)
        assert node.tier_key is not None
        return node.tier_key

    # --- what comes up

    def probe(self, sequence: SequenceBlocks, match: Match, num_tokens: int) -> list[TierBlock]:
        """The blocks that go on where `match` ends and are in a tier, without a gap; none where that gains nothing.

        The last one of num_tokens - 1 reusable tokens may be reused in part. Changes nothing.
        """
        if not sequence.reads_cache:
            return []
        found: list[TierBlock] = []
        parent = self._key(match.shared[-1]) if match.shared else None
        for tokens in sequence.keys[len(match.shared) :]:
            key = block_key(parent, tokens, sequence.extra_keys)
            block = TierBlock(key, parent, tokens)
            if self.slots.find(block) is None and (self.disk is None or key not in self.disk):
                break
            found.append(block)
            parent = key
        gained = min(len(found) * self._block_size, num_tokens - 1 - len(match.shared) * self._block_size)
        return found if gained > match.source_tokens else []

    def begin(self, blocks: list[TierBlock], *, first: int, now: float) -> TierLoad:
        """Holds what is in host memory and asks the disk for the rest, as far as slots go."""
        load = TierLoad(blocks=blocks, first=first, progress=now)
        # The chain's beginning is worth most: it is used last, so it leaves last.
        for block in reversed(blocks):
            if (slot := self.slots.find(block)) is not None:
                self.slots.touch(slot)
        self._acquire(load)
        return load

    def advance(self, load: TierLoad, now: float) -> None:
        """Asks for what comes next; ends the load where it cannot go on. To be called until it is done."""
        self._acquire(load)
        if self.next_slot(load) is not None:
            load.progress = now  # whatever it waits for, it is not the disk
        for i in range(load.issued, len(load.slots)):
            if self.slots.state(load.slots[i]) is SlotState.FAILED:
                self._truncate(load, i)
                break
        if now - load.progress > LOAD_PATIENCE:
            self._truncate(load, load.issued)

    def next_slot(self, load: TierLoad) -> SlotId | None:
        """The slot to load next, where its block has arrived."""
        if load.issued == len(load.slots):
            return None
        slot = load.slots[load.issued]
        return slot if self.slots.state(slot) is SlotState.READY else None

    def loaded(self, load: TierLoad, now: float) -> None:
        """The step that loaded what was issued is committed."""
        for slot in load.slots[load.loaded : load.issued]:
            self.slots.release(slot)
        load.loaded = load.issued
        load.progress = now

    def cancel(self, load: TierLoad) -> None:
        """Gives up what is not loaded; what was read on its account may serve somebody else."""
        load.issued = load.loaded
        self._truncate(load, load.loaded)

    def _acquire(self, load: TierLoad) -> None:
        while (place := len(load.slots)) < min(len(load.blocks), load.loaded + self._window):
            block = load.blocks[place]
            slot = self.slots.find(block)
            if slot is not None:
                tier = Tier.DISK if slot in self._reading else Tier.HOST
                self.slots.hold(slot)
            elif self.disk is not None and block.key in self.disk:
                slot, tier = self.slots.take(block), Tier.DISK
                if slot is None:
                    return  # all are held; some will be released
                self.slots.hold(slot)
                if not self._keeps_evicted:
                    self.slots.mark_cold(slot)
                self._reading.add(slot)
                self.disk.read(slot, block)
            else:
                del load.blocks[place:]  # it was there a moment ago
                return
            load.slots.append(slot)
            load.tiers.append(tier)

    def _truncate(self, load: TierLoad, count: int) -> None:
        """Leaves the load its first `count` blocks."""
        for slot in load.slots[count:]:
            self.slots.release(slot)
        del load.blocks[count:], load.slots[count:], load.tiers[count:]

    # --- what goes down

    @property
    def has_work(self) -> bool:
        """Whether blocks are on their way down, with or without requests."""
        return bool(self._new or self._to_write or self._writing)

    @property
    def has_due(self) -> bool:
        """Whether stores are put off until their blocks are written."""
        return bool(self._due)

    @property
    def _may_write(self) -> bool:
        """Slots are left to other uses, to reads above all."""
        return len(self._writing) + len(self._to_write) < self._most_writing

    def collect_stores(self, written: Collection[BlockId], *, budget: int) -> tuple[BlockStore, ...]:
        """The stores of a step that writes to the blocks `written`; those that can wait, within `budget` blocks."""
        stores: list[BlockStore] = []
        for block, slot in list(self._due.items()):
            # Somebody may wait for it to come up again.
            if block in written or budget > len(stores) or self.slots.num_holds(slot) > 1:
                stores.append(BlockStore(block, slot))
                del self._due[block]
        if self.disk is not None:
            self._collect_new(self.disk, stores, budget)
        self._stores = tuple(stores)
        return self._stores

    def _collect_new(self, disk: DiskTier, stores: list[BlockStore], budget: int) -> None:
        for block_id, node in list(islice(self._new.items(), _MOST_LOOKED_AT)):
            if not self._may_write:
                return
            block = self.block_of(node)
            slot = None
            if block.key not in disk:
                slot = self.slots.find(block)
                if slot is None:
                    if len(stores) >= budget:
                        return
                    slot = self.slots.take(block)
                    if slot is None:
                        return
                    self.slots.mark_cold(slot)
                    self._to_write.add(slot)
                    stores.append(BlockStore(block_id, slot))
                elif self._is_writable(slot):
                    self._write(disk, slot)
            del self._new[block_id]

    def committed(self, *, good: bool = True) -> None:
        """The step of the last collect_stores has run, or failed."""
        for store in self._stores:
            slot = store.slot
            if slot in self._to_write:
                self._to_write.discard(slot)
                if good and self.disk is not None and self.slots.is_known(slot):
                    self._write(self.disk, slot)
            self.slots.filled(slot, good=good)
        if good:
            self._stored += len(self._stores)
        self._stores = ()

    def _is_writable(self, slot: SlotId) -> bool:
        return self.slots.state(slot) is SlotState.READY and slot not in self._writing

    def _write(self, disk: DiskTier, slot: SlotId) -> None:
        self.slots.hold(slot)
        self._writing.add(slot)
        disk.write(slot, self.slots.block(slot))

    # --- the rest

    def poll(self) -> None:
        """Takes in what the disk has done."""
        if self.disk is None or not (self._reading or self._writing):
            return
        for done in self.disk.completed():
            if done.is_read:
                self._reading.remove(done.slot)
                self.slots.filled(done.slot, good=done.good)
            else:
                self._writing.remove(done.slot)
                self._written += done.good
                self.slots.release(done.slot)

    def wait(self, seconds: float) -> None:
        """Until the disk has done something, at most so long; not at all where it has nothing to do."""
        if self.disk is not None and (self._reading or self._writing):
            self.disk.wait(seconds)

    def clear(self) -> tuple[int, int | None]:
        """Forgets all; returns the blocks that were in host memory, and those deleted from the disk, None where that
        still goes on."""
        for slot in self._due.values():
            self._to_write.discard(slot)
            self.slots.filled(slot, good=False)
        self._due.clear()
        self._new.clear()
        forgotten = self.slots.clear()
        return forgotten, 0 if self.disk is None else self.disk.clear()

    @property
    def tiers(self) -> tuple[Tier, ...]:
        """Those there are, the fastest first. The slots are one also where they only pass blocks through."""
        return (Tier.HOST,) if self.disk is None else (Tier.HOST, Tier.DISK)

    def hurry(self, seconds: float) -> None:
        """The engine ends: other processes that use the disk are waited for at most so long."""
        if self.disk is not None:
            self.disk.hurry(seconds)

    def close(self, seconds: float) -> None:
        """Ends the disk's threads, after they have written what they were told to, as far as the time goes."""
        if self.disk is not None:
            self.disk.close(seconds)

    def stats(self) -> tuple[TierStats, ...]:
        """Of each tier there is; queries and hits are the scheduler's to count."""
        size = self.bytes_per_block
        tiers = [
            TierStats(
                tier=Tier.HOST,
                blocks=len(self.slots),
                used_bytes=len(self.slots) * size,
                capacity_bytes=self.slots.num_slots * size,
                stores=self._stored,
                evictions=self.slots.evictions,
                failures=self._dropped,
            )
        ]
        if self.disk is not None:
            disk = self.disk.counters()
            tiers.append(
                TierStats(
                    tier=Tier.DISK,
                    blocks=disk.records,
                    used_bytes=disk.size,
                    capacity_bytes=disk.capacity,
                    stores=self._written,
                    evictions=disk.evictions,
                    failures=disk.failures + self._unwritten,
                )
            )
        return tuple(tiers)

    def check_invariants(self, loads: Iterable[TierLoad]) -> None:
        """Raises AssertionError where the books do not balance. `loads`: all there are."""
        self.slots.check_invariants()
        holds: dict[SlotId, int] = {}
        filling = [*self._due.values(), *(store.slot for store in self._stores), *self._reading]
        held = [slot for load in loads for slot in load.slots[load.loaded :]]
        for slot in (*filling, *self._writing, *held):
            holds[slot] = holds.get(slot, 0) + 1
        assert holds == self.slots.all_holds(), "a slot is held by nobody, or given away while held"
        for slot in filling:
            assert self.slots.state(slot) is SlotState.FILLING, f"slot {slot} is being filled, yet not FILLING"
        assert self._to_write <= set(filling), "a slot waits to be filled by nobody"
