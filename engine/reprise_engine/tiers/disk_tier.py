"""The disk tier as the policy sees it: what is asked for is done in the background, and told later."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from reprise_engine.step import SlotId
from reprise_engine.tiers.host import TierBlock
from reprise_engine.tiers.keys import BlockKey


@dataclass(frozen=True, slots=True)
class DiskDone:
    """A read into, or a write from, `slot` has ended; `good` if it did what it should."""

    slot: SlotId
    is_read: bool
    good: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskCounters:
    """Of this process, since its start; `records`, `size` and `capacity` (bytes) are of the whole folder, now."""

    records: int = 0
    size: int = 0
    capacity: int = 0
    evictions: int = 0
    failures: int = 0


class DiskTier(Protocol):
    """The disk as the policy sees it: every call returns at once, what was asked for is done in the background."""

    def __contains__(self, key: BlockKey) -> bool:
        """Whether the block is likely to be there; a read has the last word."""
        ...

    def touch(self, keys: Sequence[BlockKey]) -> None:
        """These were used just now, wherever they were read from, the last key last; others are evicted before."""
        ...

    def read(self, slot: SlotId, block: TierBlock) -> None: ...

    def write(self, slot: SlotId, block: TierBlock) -> None: ...

    def completed(self) -> list[DiskDone]:
        """What has ended since the last call, in any order."""
        ...

    def wait(self, seconds: float) -> None:
        """Until something has ended that completed() has not told, at most so long."""
        ...

    def clear(self) -> int | None:
        """Forgets all blocks, those waiting to be written too; returns how many it deleted from the disk, None where
        that is not known yet: it goes on, or failed."""
        ...

    def counters(self) -> DiskCounters: ...

    def hurry(self, seconds: float) -> None:
        """The engine ends: from now on other processes are waited for at most so long, all in all."""
        ...

    def close(self, seconds: float) -> None:
        """Writes what it was told to write, for at most so long."""
        ...
