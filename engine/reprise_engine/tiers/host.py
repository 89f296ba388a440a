"""Which block's KV is in which slot of host memory: the books of the host tier. The runner has the bytes.

State of a slot:
    FREE      its content is worthless
    FILLING   a Step stores a block into it, or the disk reads one into it; nobody reads it
    READY     it holds the whole KV of a known block
    FAILED    what was to come did not; free once nobody holds it

A slot that somebody holds (fills, loads, writes to the disk) is never given away. Of the others the least recently used
goes first, after those that are kept only because nobody needed their room (`cold`): what is in a faster and in a
slower tier as well.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from enum import Enum

from reprise_engine.step import SlotId
from reprise_engine.tiers.keys import BlockKey


@dataclass(frozen=True, slots=True)
class TierBlock:
    """A full block as the tiers know it. `tokens` are its own, 4 bytes each; `parent` stands for all before it."""

    key: BlockKey
    parent: BlockKey | None
    tokens: bytes


class SlotState(Enum):
    FILLING = "filling"
    READY = "ready"
    FAILED = "failed"


@dataclass(slots=True, eq=False)
class _Slot:
    block: TierBlock
    state: SlotState = SlotState.FILLING
    holds: int = 1
    cold: bool = False
    forgotten: bool = False
    """Not to be found any more: dropped once nobody holds it."""


class HostSlots:
    """The books of `num_slots` slots. Every operation is O(1)."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.evictions = 0
        """Blocks that made room for others."""
        self._slots: dict[SlotId, _Slot] = {}
        self._by_key: dict[BlockKey, SlotId] = {}
        # A stack: slots whose pages were touched are taken again first, so memory grows only as needed.
        self._free = [SlotId(i) for i in reversed(range(num_slots))]
        self._idle: OrderedDict[SlotId, None] = OrderedDict()

    def __len__(self) -> int:
        """Blocks that are held or on their way."""
        return len(self._by_key)

    @property
    def num_idle(self) -> int:
        return len(self._free) + len(self._idle)

    def state(self, slot: SlotId) -> SlotState:
        return self._slots[slot].state

    def block(self, slot: SlotId) -> TierBlock:
        return self._slots[slot].block

    def num_holds(self, slot: SlotId) -> int:
        return self._slots[slot].holds

    def is_known(self, slot: SlotId) -> bool:
        """Whether its block can be found: not after clear()."""
        return not self._slots[slot].forgotten

    def find(self, block: TierBlock) -> SlotId | None:
        """The slot that holds exactly this block, or into which it is on its way."""
        slot = self._by_key.get(block.key)
        # The key is a cryptographic hash; what is served rests on the tokens all the same.
        return slot if slot is not None and self._slots[slot].block == block else None

    def take(self, block: TierBlock) -> SlotId | None:
        """A slot to fill with `block`, FILLING and held; None where every slot is held, or `block` has one already."""
        if block.key in self._by_key:
            return None
        if self._free:
            slot = self._free.pop()
        elif self._idle:
            slot, _ = self._idle.popitem(last=False)
            del self._by_key[self._slots.pop(slot).block.key]
            self.evictions += 1
        else:
            return None
        self._slots[slot] = _Slot(block)
        self._by_key[block.key] = slot
        return slot

    def filled(self, slot: SlotId, *, good: bool) -> None:
        """The filling of `slot` has ended, and with it its hold."""
        entry = self._slots[slot]
        assert entry.state is SlotState.FILLING, f"slot {slot} is {entry.state}, it was not being filled"
        entry.state = SlotState.READY if good else SlotState.FAILED
        if not good and not entry.forgotten:
            entry.forgotten = True
            del self._by_key[entry.block.key]
        self.release(slot)

    def hold(self, slot: SlotId) -> None:
        """Keeps `slot` as it is until it is released."""
        self._slots[slot].holds += 1
        self._idle.pop(slot, None)

    def release(self, slot: SlotId) -> None:
        entry = self._slots[slot]
        assert entry.holds > 0, f"slot {slot} was released more often than it was held"
        entry.holds -= 1
        if entry.holds:
            return
        if entry.forgotten:
            del self._slots[slot]
            self._free.append(slot)
            return
        self._idle[slot] = None
        if entry.cold:
            self._idle.move_to_end(slot, last=False)

    def mark_cold(self, slot: SlotId) -> None:
        """Others are kept rather than this one."""
        self._slots[slot].cold = True
        if slot in self._idle:
            self._idle.move_to_end(slot, last=False)

    def touch(self, slot: SlotId) -> None:
        """Used just now."""
        self._slots[slot].cold = False
        if slot in self._idle:
            self._idle.move_to_end(slot)

    def clear(self) -> int:
        """Forgets all blocks; slots that are held are free when they are released. Returns how many were forgotten."""
        forgotten = len(self._by_key)
        for slot in self._by_key.values():
            if slot in self._idle:
                del self._slots[slot]
                self._free.append(slot)
            else:
                self._slots[slot].forgotten = True
        self._by_key.clear()
        self._idle.clear()
        return forgotten

    def all_holds(self) -> dict[SlotId, int]:
        """Of every slot that is held, by how many. For checks."""
        return {slot: entry.holds for slot, entry in self._slots.items() if entry.holds}

    def check_invariants(self) -> None:
        """Raises AssertionError where the books do not balance."""
        free = set(self._free)
        assert len(free) == len(self._free), "a slot is free twice"
        assert not free & set(self._slots), "a free slot holds a block"
        assert len(free) + len(self._slots) == self.num_slots, "a slot got lost"
        idle = {slot for slot, entry in self._slots.items() if not entry.holds}
        assert idle == set(self._idle), "the slots that may be given away are miscounted"
        known = {entry.block.key: slot for slot, entry in self._slots.items() if not entry.forgotten}
        assert known == self._by_key, "a block is not found, or found in a wrong slot"
        for slot, entry in self._slots.items():
            assert entry.state is SlotState.READY or entry.holds, f"slot {slot} is {entry.state}, yet nobody holds it"
