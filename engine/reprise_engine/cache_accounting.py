"""The scheduler's books on the prefix cache: what was looked up and found, and why not more."""

from __future__ import annotations

from collections import deque

from reprise_engine.cache_report import CacheExplanation, MissReason
from reprise_engine.kv.manager import KVCacheManager
from reprise_engine.kv.sequence import Match
from reprise_engine.request import RequestId
from reprise_engine.request_state import RequestState

_RECENT = 128
_PLACES = {reason: i for i, reason in enumerate(MissReason)}


class CacheAccounting:
    """Counts a request once, at its first admission, whatever becomes of it later."""

    def __init__(self, kv: KVCacheManager) -> None:
        self._kv = kv
        self.queries = 0
        """Prompt tokens looked up."""
        self.hits = 0
        """Those of them that were found."""
        self.misses: tuple[int, ...] = (0,) * len(_PLACES)
        """Requests by reason, in the order of MissReason."""
        self.recent: deque[tuple[RequestId, CacheExplanation]] = deque(maxlen=_RECENT)

    def admitted(self, state: RequestState, match: Match, used: Match) -> None:
        """`match` is what the lookup found, `used` what of it there was room for."""
        if state.explanation is not None:
            return
        if state.blocks.reads_cache:
            self.queries += state.prompt_length
            self.hits += used.num_tokens
        reason = self._kv.why_no_more(state.blocks, state.tokens, match, used)
        if reason is not None:
            i = _PLACES[reason]
            self.misses = (*self.misses[:i], self.misses[i] + 1, *self.misses[i + 1 :])
        state.explanation = CacheExplanation(
            prompt_tokens=state.prompt_length, cached_tokens=used.num_tokens, reason=reason
        )
        self.recent.append((state.request_id, state.explanation))
