"""The books of the host tier: who is held, who goes first, and what is never mistaken for something else."""

from __future__ import annotations

import pytest

from reprise_engine.tiers.host import HostSlots, SlotState, TierBlock
from reprise_engine.tiers.keys import BlockKey


def block(number: int, *, tokens: bytes = b"", parent: int | None = None) -> TierBlock:
    above = None if parent is None else BlockKey(bytes([parent]) * 32)
    return TierBlock(BlockKey(bytes([number]) * 32), above, tokens or bytes([number]) * 8)


def fill(slots: HostSlots, *numbers: int) -> None:
    for number in numbers:
        slot = slots.take(block(number))
        assert slot is not None
        slots.filled(slot, good=True)
        slots.check_invariants()


def held(slots: HostSlots) -> set[int]:
    return {number for number in range(20) if slots.find(block(number)) is not None}


def test_the_least_recently_used_goes_first() -> None:
    slots = HostSlots(3)
    fill(slots, 1, 2, 3)
    found = slots.find(block(1))
    assert found is not None
    slots.touch(found)
    fill(slots, 4)
    assert held(slots) == {1, 3, 4}
    assert slots.evictions == 1


def test_a_cold_one_goes_before_the_others_until_it_is_used() -> None:
    slots = HostSlots(3)
    fill(slots, 1, 2, 3)
    found = slots.find(block(3))
    assert found is not None
    slots.mark_cold(found)
    slots.hold(found)
    slots.release(found)
    fill(slots, 4)
    assert held(slots) == {1, 2, 4}


def test_what_is_held_or_filled_is_not_given_away() -> None:
    slots = HostSlots(2)
    fill(slots, 1)
    first = slots.find(block(1))
    assert first is not None
    slots.hold(first)
    second = slots.take(block(2))
    assert second is not None
    assert slots.take(block(3)) is None
    assert slots.state(second) is SlotState.FILLING
    slots.filled(second, good=True)
    assert slots.take(block(3)) == second
    slots.release(first)
    slots.check_invariants()


def test_what_failed_is_not_found_and_free_when_nobody_holds_it() -> None:
    slots = HostSlots(1)
    slot = slots.take(block(1))
    assert slot is not None
    slots.hold(slot)
    slots.filled(slot, good=False)
    assert slots.find(block(1)) is None
    assert slots.state(slot) is SlotState.FAILED
    assert slots.take(block(1)) is None
    slots.release(slot)
    assert slots.take(block(1)) == slot
    slots.check_invariants()


@pytest.mark.parametrize("other", [block(1, tokens=b"another."), block(1, parent=7)])
def test_an_equal_key_alone_is_no_match(other: TierBlock) -> None:
    slots = HostSlots(2)
    fill(slots, 1)
    assert slots.find(other) is None
    assert slots.take(other) is None


def test_clear_forgets_what_is_held_too() -> None:
    slots = HostSlots(3)
    fill(slots, 1, 2)
    kept = slots.find(block(1))
    filling = slots.take(block(3))
    assert kept is not None
    assert filling is not None
    slots.hold(kept)
    assert slots.clear() == 3
    assert held(slots) == set()
    slots.check_invariants()
    slots.filled(filling, good=True)
    assert held(slots) == set()
    slots.release(kept)
    assert slots.num_idle == 3
    slots.check_invariants()
