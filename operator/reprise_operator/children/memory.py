"""Which share of the device's memory the engine is told to use: --gpu-memory-utilization. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from reprise_operator.resource import InferenceService

PLAIN_UTILIZATION = 0.90
LONG_UTILIZATION = 0.85
LOWERED_ABOVE = 32_768
LOWEST_FROM = 65_536


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """`requested` is what the spec says, None for automatic; `effective` is what the engine is told."""

    requested: float | None
    effective: float
    reason: str
    """For people: why this value."""


def plan_memory(service: InferenceService) -> MemoryPlan:
    """The spec's own value, else the automatic rule.

    Prefix caching needs more memory beside the cache the longer the context is: the vendor advises 0.85 at 64k. So 0.90
    up to 32k, falling linearly to 0.85 at 64k, and 0.90 without prefix caching.
    """
    requested = service.spec.memory.utilization
    if requested is not None:
        return MemoryPlan(requested=requested, effective=requested, reason="requested by spec.memory.utilization")
    length = service.spec.model.max_model_len
    if not service.prefix_caching:
        return MemoryPlan(requested=None, effective=PLAIN_UTILIZATION, reason="automatic: prefix caching is off")
    if length is None or length <= LOWERED_ABOVE:
        return MemoryPlan(
            requested=None, effective=PLAIN_UTILIZATION, reason="automatic: maxModelLen is unset or at most 32768"
        )
    share = min(1.0, (length - LOWERED_ABOVE) / (LOWEST_FROM - LOWERED_ABOVE))
    effective = round(PLAIN_UTILIZATION - share * (PLAIN_UTILIZATION - LONG_UTILIZATION), 4)
    return MemoryPlan(
        requested=None,
        effective=effective,
        reason=f"automatic: lowered for prefix caching with maxModelLen {length}",
    )
