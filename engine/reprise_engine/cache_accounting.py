"""The scheduler's books on the prefix cache: what was looked up and found, and why not more."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import replace

from reprise_engine.cache_report import CacheExplanation, MissReason, PrefixCacheReport, Tier, TierStats
from reprise_engine.kv.manager import KVCacheManager
from reprise_engine.kv.sequence import Match
from reprise_engine.request import RequestId
from reprise_engine.request_state import RequestState

_RECENT = 128
_PLACES = {reason: i for i, reason in enumerate(MissReason)}


class CacheAccounting:
    """Counts a request once, at its first admission, whatever becomes of it later."""

    def __init__(self, kv: KVCacheManager, tiers: tuple[Tier, ...] = ()) -> None:
        """`tiers`: those there are below the pool, the fastest first."""
        self._kv = kv
        self._tiers = tiers
        self.tier_queries = dict.fromkeys(tiers, 0)
        """Prompt tokens that no faster tier had."""
        self.tier_hits = dict.fromkeys(tiers, 0)
        self.queries = 0
        """Prompt tokens looked up."""
        self.hits = 0
        """Those of them that were found."""
        self.misses: tuple[int, ...] = (0,) * len(_PLACES)
        """Requests by reason, in the order of MissReason."""
        self.recent: deque[tuple[RequestId, CacheExplanation]] = deque(maxlen=_RECENT)

    def admitted(
        self, state: RequestState, match: Match, used: Match, *, from_tiers: Mapping[Tier, int] | None = None
    ) -> None:
        """`match` is what the lookup found, `used` what of it had room, `from_tiers` what of it was loaded."""
        if state.explanation is not None:
            return
        if state.blocks.reads_cache:
            self.queries += state.prompt_length
            self.hits += used.num_tokens
            self._count_tiers(state.prompt_length, used.num_tokens, from_tiers or {})
        reason = self._kv.why_no_more(state.blocks, state.tokens, match, used, other_salts=not state.isolated)
        if reason is not None:
            i = _PLACES[reason]
            self.misses = (*self.misses[:i], self.misses[i] + 1, *self.misses[i + 1 :])
        state.explanation = CacheExplanation(
            prompt_tokens=state.prompt_length,
            cached_tokens=used.num_tokens,
            reason=reason,
            tier_tokens=tuple((tier, (from_tiers or {}).get(tier, 0)) for tier in self._tiers),
        )
        self.recent.append((state.request_id, state.explanation))

    def complete(self, tiers: Iterable[TierStats]) -> tuple[TierStats, ...]:
        """The tiers' own figures, and what these books know of them."""
        return tuple(
            replace(one, query_tokens=self.tier_queries[one.tier], hit_tokens=self.tier_hits[one.tier]) for one in tiers
        )

    def report(self, tiers: tuple[TierStats, ...]) -> PrefixCacheReport:
        """What is in the cache, and what the last requests found in it; `tiers` are complete figures. O(blocks)."""
        kv = self._kv
        return PrefixCacheReport(
            block_size=kv.block_size,
            num_blocks=kv.num_blocks,
            active_blocks=kv.pool.num_active,
            cached_blocks=len(kv.index),
            unfinished_blocks=kv.index.num_tails,
            pinned_blocks=kv.pins.num_blocks,
            pin_budget_blocks=kv.pins.budget,
            pins=kv.pins.report(),
            salts=kv.index.num_roots,
            evicted_blocks=kv.num_evicted_blocks,
            query_tokens=self.queries,
            hit_tokens=self.hits,
            misses=tuple(zip(MissReason, self.misses, strict=True)),
            recent=tuple(self.recent),
            tiers=tiers,
        )

    def _count_tiers(self, prompt_length: int, cached: int, from_tiers: Mapping[Tier, int]) -> None:
        looked_up = prompt_length - (cached - sum(from_tiers.values()))
        for tier in self._tiers:
            self.tier_queries[tier] += looked_up
            self.tier_hits[tier] += from_tiers.get(tier, 0)
            looked_up -= from_tiers.get(tier, 0)
