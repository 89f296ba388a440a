"""What this process remembers of services between passes: it only saves work, or holds the moving window of the hit
rate. A new process starts without it and comes to the same end; what must outlive one is in status."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from reprise_operator.cluster import Key
from reprise_operator.hitrate import HitRateWindow
from reprise_operator.kinds import ResourceType
from reprise_operator.rollout import Applied, ChildKey


@dataclass(slots=True, kw_only=True)
class ServiceMemory:
    """What is remembered of one service."""

    uid: str
    window: HitRateWindow
    applied: dict[ChildKey, Applied] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    """"Kind/name" → why the API server refused the last apply."""
    pods: frozenset[str] = frozenset()
    """UIDs of those that were there in the last pass."""
    asks: frozenset[ResourceType] = frozenset()
    """The optional kinds the last Plan asked for."""
    ignored_replicas: int | None = None
    """spec.replicas of the last pass, where an autoscaler decided instead."""


class ServiceMemories:
    """Those of all services."""

    def __init__(self) -> None:
        self._memories: dict[Key, ServiceMemory] = {}

    def __len__(self) -> int:
        return len(self._memories)

    def of(self, key: Key, uid: str) -> ServiceMemory | None:
        """None of a service that is new, or that only has the name of one that was here before."""
        memory = self._memories.get(key)
        return None if memory is None or memory.uid != uid else memory

    def put(self, key: Key, memory: ServiceMemory) -> None:
        """From now on `memory` is that of the service."""
        self._memories[key] = memory

    def drop(self, key: Key) -> ServiceMemory | None:
        """Forgets the service. Returns what was remembered of it."""
        return self._memories.pop(key, None)

    def clear(self) -> None:
        """Forgets all of them, as a restart does."""
        self._memories.clear()

    def asking_for(self, kinds: Collection[ResourceType]) -> tuple[Key, ...]:
        """The services whose last Plan asked for one of the optional `kinds`."""
        return tuple(key for key, memory in self._memories.items() if not memory.asks.isdisjoint(kinds))
