"""What a pass has read may serve the next pass, until an event says otherwise: then a service that idles costs the API
server nothing, however often its engines' figures are looked at.

A memo holds the answers of one pass to its reads of watched kinds. It is kept only where nothing was written and no
event came meanwhile, it is dropped by any event of the service, its children or its pods, and it grows no older than
`max_age`, so what a dead watch does not tell of is read all the same. Kinds without a watch are always asked for.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from reprise_operator.kinds import CONFIG_MAPS, INFERENCE_SERVICES, REPLICA_SETS, WATCHED_TYPES, ResourceType
from reprise_operator.naming import MANAGED_BY

_REMEMBERED = frozenset((*WATCHED_TYPES, REPLICA_SETS))
"""ReplicaSets have no watch of their own: the Deployment's status changes with them."""


def is_watched(resource: ResourceType, body: Mapping[str, Any] | None) -> bool:
    """Whether an event would tell of its change: the watches bring services, and of the rest what carries our label.
    What has a name that we want and is somebody else's goes without a word."""
    if body is None or resource == INFERENCE_SERVICES:
        return True
    labels: Mapping[str, str] = body["metadata"].get("labels") or {}
    return MANAGED_BY.items() <= labels.items()


@dataclass(slots=True)
class Memo:
    """The reads of one pass, by what was asked. Times by the clock of `Recall`."""

    at: float
    answers: dict[Hashable, Any] = field(default_factory=dict)
    spoiled: bool = False
    """Something was written, or an event came."""

    def answers_about(self, resource: ResourceType, *, by_name: bool = False) -> dict[Hashable, Any] | None:
        """Where answers about that kind are kept; None for kinds that are always read.

        `by_name`: one object, which may be a user's. Users' ConfigMaps are read, and the watch brings ours only.
        """
        if resource not in _REMEMBERED or (by_name and resource == CONFIG_MAPS):
            return None
        return self.answers

    def spoil(self) -> None:
        """What was read is no longer how things are: it serves the present pass, and no other."""
        self.spoiled = True


class Recall:
    """The memos of all services. `clock` gives seconds and must not jump."""

    def __init__(self, *, max_age: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_age = max_age
        self._clock = clock
        self._kept: dict[Hashable, Memo] = {}
        self._open: dict[Hashable, Memo] = {}

    @contextlib.contextmanager
    def passing(self, key: Hashable) -> Iterator[Memo]:
        """One pass over `key`, with the memo for its reads (`Cluster.remembering`). An error drops the memo."""
        now = self._clock()
        memo = self._kept.pop(key, None)
        if memo is None or now - memo.at > self._max_age:
            memo = Memo(at=now)
        self._open[key] = memo
        try:
            yield memo
        finally:
            del self._open[key]
        if not memo.spoiled:
            self._kept[key] = memo

    def spoil(self, key: Hashable) -> None:
        """Something of `key` has changed, or is to be read anew."""
        self._kept.pop(key, None)
        if key in self._open:
            self._open[key].spoil()
