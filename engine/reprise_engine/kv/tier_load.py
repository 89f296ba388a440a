"""What comes up from the tiers for one request. Written by Tiering and TierLoads alone."""

from __future__ import annotations

from dataclasses import dataclass, field

from reprise_engine.cache_report import Tier
from reprise_engine.step import SlotId
from reprise_engine.tiers.host import TierBlock


@dataclass(slots=True, eq=False, kw_only=True)
class TierLoad:
    """The blocks that come up for one request, in the order of their chain.

    0 ≤ loaded ≤ issued ≤ len(slots) ≤ len(blocks): committed, in a Step, with a slot held for them, found at all.
    """

    blocks: list[TierBlock]
    first: int
    """Place of blocks[0] in the request's page table."""
    progress: float
    """When it last got on, seconds of time.monotonic()."""
    slots: list[SlotId] = field(default_factory=list)
    tiers: list[Tier] = field(default_factory=list)
    """Where each of `slots` has its block from."""
    issued: int = 0
    loaded: int = 0

    @property
    def done(self) -> bool:
        return self.loaded == len(self.blocks)

    def count(self, tier: Tier) -> int:
        """Blocks that were loaded from there."""
        return self.tiers[: self.loaded].count(tier)
