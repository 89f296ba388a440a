"""What rank 0 and the others say to each other, pickled over a socket each: plain frozen dataclasses, free of torch.

rank 0                     the others
Join                    →
                        ←  Loaded      weights are there
Meet                    →              all meet (group.py)
                        ←  Sized       what the memory looks like
Allocate                →
                        ←  Allocated
Step, Step, …           →              nothing comes back, but the sums of group.py
(the end of the socket) →              end
                        ←  Failed      at any time
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from reprise_engine.config import EngineConfig
from reprise_engine.memory import MemoryFacts
from reprise_engine.parallel.shard import Place
from reprise_engine.request import SamplingParams
from reprise_engine.step import ScheduledRequest, Step


@dataclass(frozen=True, slots=True, kw_only=True)
class Join:
    """The first message. `meeting_point` is a path, see group.py; `log_level` is logging's."""

    config: EngineConfig
    place: Place
    meeting_point: str
    log_level: int
    slots: int | None
    """The inherited descriptor of the tiers' memory (slots.py); None without tiers."""


@dataclass(frozen=True, slots=True)
class Loaded:
    pass


@dataclass(frozen=True, slots=True)
class Meet:
    pass


@dataclass(frozen=True, slots=True)
class Sized:
    facts: MemoryFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocate:
    """Blocks of the pool, and slots of host memory: the same numbers on every rank."""

    num_blocks: int
    num_slots: int


@dataclass(frozen=True, slots=True)
class Allocated:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """The last message. With `lost_others` the error is that of a sum that another rank did not come to."""

    error: Exception
    lost_others: bool


_UNSAID = SamplingParams()


def for_others(step: Step) -> Step:
    """What ranks without logits need of a step: tokens, places and blocks. Nothing is sampled or scored."""
    return replace(step, requests=tuple(_for_others(request) for request in step.requests))


def _for_others(request: ScheduledRequest) -> ScheduledRequest:
    return ScheduledRequest(
        request_id=request.request_id,
        token_ids=request.token_ids,
        start=request.start,
        block_table=request.block_table,
        samples=False,
        sampling=_UNSAID,
    )
