"""Messages between the API process and the engine process: plain frozen dataclasses, pickled over one pipe."""

from __future__ import annotations

from dataclasses import dataclass, field

from reprise_engine.cache_report import MissReason, PrefixCacheReport, TierStats
from reprise_engine.config import EngineConfig, ResolvedConfig
from reprise_engine.errors import DeviceError, OutOfMemory
from reprise_engine.request import EngineRequest, RequestId, RequestOutput

DEFAULT_BUILDER = "reprise_engine.core:build_process_core"

# --- API process → engine process


@dataclass(frozen=True, slots=True)
class Start:
    """The first message: what to load, and the function (`module:name`) that does. `log_level` is logging's."""

    config: EngineConfig
    builder: str = DEFAULT_BUILDER
    log_level: int = 20


@dataclass(frozen=True, slots=True)
class Submit:
    requests: tuple[EngineRequest, ...]


@dataclass(frozen=True, slots=True)
class Abort:
    request_ids: tuple[RequestId, ...]


@dataclass(frozen=True, slots=True)
class ResetPrefixCache:
    """Answered by a PrefixCacheReset with the same token."""

    token: int
    include_pins: bool = False


@dataclass(frozen=True, slots=True)
class Unpin:
    """Answered by an Unpinned with the same token."""

    token: int
    name: str


@dataclass(frozen=True, slots=True)
class InspectPrefixCache:
    """Answered by a PrefixCacheInspected with the same token."""

    token: int


@dataclass(frozen=True, slots=True)
class Shutdown:
    pass


ToEngine = Start | Submit | Abort | ResetPrefixCache | InspectPrefixCache | Unpin | Shutdown

# --- engine process → API process


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """Shown while starting: `stage` is a short phrase, `fraction` from 0 to 1 where it is known."""

    stage: str
    fraction: float | None = None


@dataclass(frozen=True, slots=True)
class Ready:
    config: ResolvedConfig


@dataclass(frozen=True, slots=True)
class StartupFailed:
    error: Exception


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerStats:
    """Gauges are of now; counters count since the start of the engine process, in tokens where not said otherwise.

    prefix_cache_queries / hits: prompt tokens looked up / found, once a request, at its first admission.
    """

    num_running: int = 0
    num_waiting: int = 0
    kv_cache_usage: float = 0.0
    """Share of blocks referenced by requests or pins, 0 to 1; cached but unreferenced blocks count as free."""
    num_cached_blocks: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    prefix_cache_misses: tuple[int, ...] = (0,) * len(MissReason)
    """Requests whose match ended before the end of the prompt, by reason, in the order of MissReason."""
    num_preemptions: int = 0
    num_evicted_blocks: int = 0
    num_pinned_blocks: int = 0
    tiers: tuple[TierStats, ...] = ()
    """Below the pool, the fastest first."""
    num_kv_events_published: int = 0
    num_kv_events_dropped: int = 0


@dataclass(frozen=True, slots=True)
class Outputs:
    outputs: tuple[RequestOutput, ...]
    stats: SchedulerStats


@dataclass(frozen=True, slots=True)
class PrefixCacheReset:
    """`success` is False when blocks were still in use (those stay cached)."""

    token: int
    success: bool
    freed_blocks: int
    freed_host_blocks: int = 0
    freed_disk_blocks: int | None = 0
    """None where deleting them still goes on."""

    def as_json(self) -> dict[str, object]:
        return {
            "success": self.success,
            "freed_blocks": self.freed_blocks,
            "freed_host_blocks": self.freed_host_blocks,
            "freed_disk_blocks": self.freed_disk_blocks,
        }


@dataclass(frozen=True, slots=True)
class Unpinned:
    """`found` is False where there was no such pin."""

    token: int
    found: bool


@dataclass(frozen=True, slots=True)
class PrefixCacheInspected:
    token: int
    report: PrefixCacheReport


@dataclass(frozen=True, slots=True)
class Died:
    """The engine process hit an error it cannot go on from; the pipe closes after this."""

    message: str
    details: str = field(default="")
    cause: OutOfMemory | DeviceError | None = None
    """Where the error is one that the operator, or a person, can do something about."""


FromEngine = LoadProgress | Ready | StartupFailed | Outputs | PrefixCacheReset | PrefixCacheInspected | Unpinned | Died
