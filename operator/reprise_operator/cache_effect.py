"""Whether the prefix cache saves work, and if not, why: the reasons of the condition PrefixCacheEffective, which are
also those of each pod in status.prefixCache.replicas. Informational: nothing waits for them. Pure.

The condition is read from the figures as they are written, so that both agree, and it changes no more often than they.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any

from reprise_operator.conditions import PREFIX_CACHE_EFFECTIVE, Condition, Status
from reprise_operator.exposition import SHORTER_THAN_BLOCK
from reprise_operator.hitrate import HitFigures


class Effect(StrEnum):
    """What the cache did for the prompts of the window, or why that is not known."""

    DISABLED = "Disabled"
    METRICS_UNAVAILABLE = "MetricsUnavailable"
    NO_TRAFFIC = "NoTraffic"
    PROMPTS_SHORTER_THAN_BLOCK = "PromptsShorterThanBlock"
    ZERO_HITS = "ZeroHits"
    EFFECTIVE = "Effective"


_STATUS: Mapping[Effect, Status] = {
    Effect.DISABLED: "False",
    Effect.METRICS_UNAVAILABLE: "Unknown",
    Effect.NO_TRAFFIC: "Unknown",
    Effect.PROMPTS_SHORTER_THAN_BLOCK: "False",
    Effect.ZERO_HITS: "False",
    Effect.EFFECTIVE: "True",
}

MISS_REASONS: Mapping[str, str] = {
    "caching_off": "SkippedByRequest",
    "no_room": "NoRoom",
    "evicted": "Evicted",
    "other_salt": "OtherSalt",
    SHORTER_THAN_BLOCK: "ShorterThanBlock",
    "diverged": "Diverged",
    "not_seen": "NotSeen",
}
"""The engine's label → status.prefixCache.missReason. A label that is not known here is not repeated."""

_WHY = {
    "SkippedByRequest": "most requests ask not to be served from it.",
    "NoRoom": "the KV cache has no free block to copy into; raise spec.memory.utilization or spec.replicas.",
    "Evicted": "most of what prompts repeat was evicted before; raise spec.memory.utilization or spec.replicas.",
    "OtherSalt": "most prompts are cached, but under another salt, which keeps tenants apart.",
    "ShorterThanBlock": "most prompts are shorter than a block.",
    "Diverged": "most prompts part from the cached ones early; what they share must come first in them.",
    "NotSeen": "most prompts begin like none before them; what they share must come first in them.",
}
_UNKNOWN_WHY = "the prompts share no beginning that is long enough, or it was evicted."
_MAX_NAMED = 3


def effect_of(figures: HitFigures) -> Effect:
    """The effect on the traffic that was counted."""
    return _effect(figures.percent, MISS_REASONS.get(figures.main_miss or ""))


def written_effect(figures: Mapping[str, Any]) -> Effect:
    """The same of a written status.prefixCache, as far as the sums tell; whether they are known it does not say."""
    return _effect(figures.get("hitRatePercent"), figures.get("missReason"))


def _effect(percent: float | None, miss: str | None) -> Effect:
    if percent is None:
        return Effect.NO_TRAFFIC
    if percent > 0:  # as it is shown: what rounds to 0 % is no effect
        return Effect.EFFECTIVE
    return Effect.PROMPTS_SHORTER_THAN_BLOCK if miss == MISS_REASONS[SHORTER_THAN_BLOCK] else Effect.ZERO_HITS


def prefix_cache_condition(
    figures: Mapping[str, Any], *, serving: bool, wanted: bool | None, block_size: int | None
) -> Condition:
    """PrefixCacheEffective. `figures` is status.prefixCache as it is written, `serving` whether a pod is ready,
    `wanted` whether the spec asks for caching (None where the spec cannot be read), `block_size` the engine's own."""
    replicas: Sequence[Mapping[str, Any]] = figures.get("replicas") or ()
    silent = [pod for pod in replicas if pod.get("reason") == Effect.METRICS_UNAVAILABLE]
    enabled = figures.get("enabled")
    told = written_effect(figures)
    if not serving:
        if wanted is False:
            return _condition(Effect.DISABLED, "spec.prefixCaching.enabled is false; no pod is ready.")
        return _condition(Effect.METRICS_UNAVAILABLE, "No pod is ready, so none reports its prefix cache.")
    if enabled is False:
        return _condition(Effect.DISABLED, _disabled(replicas, wanted=wanted) + _silence(silent, replicas))
    if told is Effect.NO_TRAFFIC and len(silent) == len(replicas):
        return _condition(Effect.METRICS_UNAVAILABLE, f"No ready pod reports its prefix cache{_details(silent)}.")
    message = {
        Effect.NO_TRAFFIC: "No prompt was served within the window.",
        Effect.EFFECTIVE: "Prompt tokens are served from the prefix cache; see status.prefixCache.",
        Effect.PROMPTS_SHORTER_THAN_BLOCK: _short(block_size),
        Effect.ZERO_HITS: _zero(figures, pods=len(replicas)),
    }[told]
    if wanted is False and enabled:
        message += " spec.prefixCaching.enabled is false, and yet the pods report that they cache prefixes."
    return _condition(told, message + _silence(silent, replicas))


def _condition(effect: Effect, message: str) -> Condition:
    return Condition(type=PREFIX_CACHE_EFFECTIVE, status=_STATUS[effect], reason=effect.value, message=message)


def _disabled(replicas: Sequence[Mapping[str, Any]], *, wanted: bool | None) -> str:
    off = [pod for pod in replicas if pod.get("enabled") is False]
    if off and len(off) < len(replicas):
        message = f"Prefix caching is off in {len(off)} of {len(replicas)} pods: {_names(off)}."
    else:
        message = "Prefix caching is off."
    if wanted:
        message += " The spec asks for it; see the pods' logs for why they do without."
    elif wanted is False:
        message += " spec.prefixCaching.enabled is false."
    return message


def _short(block_size: int | None) -> str:
    block = "a block" if block_size is None else f"a block of {block_size} tokens"
    return f"Most prompts are shorter than {block}, too short for anything of them to be found in the cache."


def _zero(figures: Mapping[str, Any], *, pods: int) -> str:
    found = "Hardly any prompt token was" if figures.get("hitTokens") else "No prompt token was"
    miss = figures.get("missReason")
    message = f"{found} found in the cache: {_WHY.get(miss or '', _UNKNOWN_WHY)}"
    if pods > 1 and miss in (None, "NotSeen"):
        message += " Prompts that belong together may also go to different pods; see spec.service.sessionAffinity."
    return message


def _silence(silent: Sequence[Mapping[str, Any]], replicas: Sequence[Mapping[str, Any]]) -> str:
    if not silent:
        return ""
    return f" {len(silent)} of {len(replicas)} pods report nothing{_details(silent)}."


def _details(silent: Sequence[Mapping[str, Any]]) -> str:
    """The first faults, each with its pod: `: qwen-a (…), qwen-b (…) and 3 more`."""
    if not silent:
        return ""
    told = ", ".join(f"{pod.get('pod')} ({pod.get('message', 'no figures')})" for pod in silent[:_MAX_NAMED])
    return f": {told}" + (f" and {len(silent) - _MAX_NAMED} more" if len(silent) > _MAX_NAMED else "")


def _names(pods: Sequence[Mapping[str, Any]]) -> str:
    told = ", ".join(str(pod.get("pod")) for pod in pods[:_MAX_NAMED])
    return told + (f" and {len(pods) - _MAX_NAMED} more" if len(pods) > _MAX_NAMED else "")
