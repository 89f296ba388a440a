"""What the engine tells of its prefix cache: why a request was not served from it, and what is in it.

Plain frozen data that crosses the process boundary; made by `kv/misses.py` and the scheduler.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class MissReason(Enum):
    """Why the match ended where it did; the value is the label of the metric. Looked for in this order."""

    CACHING_OFF = "caching_off"
    """The prefix cache is off, or the request asked to skip it."""
    NO_ROOM = "no_room"
    """A part of a block matched, but the pool had no block left to copy it into."""
    EVICTED = "evicted"
    """What comes next was cached, and its block has been given to something else."""
    OTHER_SALT = "other_salt"
    """It is cached under another salt. Not told, nor counted, where salts keep API keys apart."""
    SHORTER_THAN_BLOCK = "shorter_than_block"
    """The prompt is shorter than a block: it is cached by a request that has ended, not by one that runs."""
    DIVERGED = "diverged"
    """What is cached goes another way from this token on."""
    NOT_SEEN = "not_seen"
    """Nothing cached goes on from here."""


class Tier(Enum):
    """Where the cache keeps blocks besides the pool; the value is the label of the metrics."""

    HOST = "host"
    DISK = "disk"


@dataclass(frozen=True, slots=True, kw_only=True)
class TierStats:
    """Of one tier. Blocks, bytes and capacity are of now, the rest counts since the start of the engine."""

    tier: Tier
    blocks: int = 0
    used_bytes: int = 0
    capacity_bytes: int = 0
    query_tokens: int = 0
    """Prompt tokens that no faster tier had, once a request."""
    hit_tokens: int = 0
    """Those of them that came from here."""
    stores: int = 0
    """Blocks that came down to here."""
    evictions: int = 0
    failures: int = 0
    """Blocks that could not come down, or not up again."""

    def as_json(self) -> dict[str, object]:
        return {
            "blocks": self.blocks,
            "used_bytes": self.used_bytes,
            "capacity_bytes": self.capacity_bytes,
            "query_tokens": self.query_tokens,
            "hit_tokens": self.hit_tokens,
            "stores": self.stores,
            "evictions": self.evictions,
            "failures": self.failures,
        }


_MESSAGES = {
    None: "All of the prompt was cached but its last token, which is always computed.",
    MissReason.CACHING_OFF: "Prefix caching is off, for the server or for this request.",
    MissReason.NO_ROOM: "More was cached, inside a block, but the KV cache had no free block to copy it into.",
    MissReason.EVICTED: "The tokens from {end} on were cached once, but their block was evicted to make room.",
    MissReason.OTHER_SALT: "The prompt is cached, but under another salt.",
    MissReason.SHORTER_THAN_BLOCK: "The prompt is shorter than a block, and no request that ended began like it.",
    MissReason.DIVERGED: "What is cached goes another way from token {end} on.",
    MissReason.NOT_SEEN: "Nothing in the cache goes on at token {end}: it is new.",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheExplanation:
    """Of one request, at its first admission. `reason` is None where no more could have been reused."""

    prompt_tokens: int
    cached_tokens: int
    """Also the position of the first token that was not reused, from 0."""
    reason: MissReason | None
    tier_tokens: tuple[tuple[Tier, int], ...] = ()
    """How many of the cached tokens each tier below the pool gave; empty where there are none."""

    @property
    def message(self) -> str:
        return _MESSAGES[self.reason].format(end=self.cached_tokens)

    def as_json(self) -> dict[str, object]:
        explained: dict[str, object] = {
            "reason": None if self.reason is None else self.reason.value,
            "ended_at_token": self.cached_tokens,
            "message": self.message,
        }
        if self.tier_tokens:
            below = {tier.value: tokens for tier, tokens in self.tier_tokens}
            explained["tiers"] = {"device": self.cached_tokens - sum(below.values())} | below
        return explained


@dataclass(frozen=True, slots=True, kw_only=True)
class PinnedPrefix:
    """What of a prefix is pinned; less than all of it where the budget was used up."""

    name: str
    tokens: int
    blocks: int

    def as_json(self) -> dict[str, object]:
        return {"name": self.name, "tokens": self.tokens, "blocks": self.blocks}


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixCacheReport:
    """The state of the cache, in blocks where not said otherwise."""

    block_size: int
    """In tokens."""
    num_blocks: int
    active_blocks: int
    """Referenced: by requests, or pinned."""
    cached_blocks: int
    """In the index: `active_blocks` among them, unfinished blocks too."""
    unfinished_blocks: int
    pinned_blocks: int
    pin_budget_blocks: int
    """As many may be pinned."""
    pins: tuple[PinnedPrefix, ...]
    salts: int
    """Different salts, none being one of them."""
    evicted_blocks: int
    """Since the start."""
    query_tokens: int
    hit_tokens: int
    misses: tuple[tuple[MissReason, int], ...]
    """Requests by reason, since the start."""
    recent: tuple[tuple[str, CacheExplanation], ...]
    """The last requests that were admitted, by their ids, the latest last."""
    tiers: tuple[TierStats, ...] = ()

    def as_json(self) -> dict[str, object]:
        return {
            "block_size": self.block_size,
            "num_blocks": self.num_blocks,
            "active_blocks": self.active_blocks,
            "cached_blocks": self.cached_blocks,
            "unfinished_blocks": self.unfinished_blocks,
            "pinned_blocks": self.pinned_blocks,
            "pin_budget_blocks": self.pin_budget_blocks,
            "pins": [pin.as_json() for pin in self.pins],
            "salts": self.salts,
            "evicted_blocks": self.evicted_blocks,
            "query_tokens": self.query_tokens,
            "hit_tokens": self.hit_tokens,
            "misses": {reason.value: count for reason, count in self.misses},
            "tiers": {tier.tier.value: tier.as_json() for tier in self.tiers},
            "recent": [
                {"request": request_id, "prompt_tokens": one.prompt_tokens, "cached_tokens": one.cached_tokens}
                | one.as_json()
                for request_id, one in self.recent
            ],
        }
