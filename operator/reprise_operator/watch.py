"""Do the watches still deliver? A process that answers its probe may have a watch that died in silence.

kopf ends a stream that is silent for longer than the API server's bookmarks are apart, and goes on where it ended. What
that does not find is a stream that lives and does not deliver. So each read of an object that a watch should know is
compared with what the watch last delivered of it. A newer version that the watch does not deliver within a while
proves that watch dead, without a write and without waiting for luck.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from reprise_operator.kinds import CHILD_TYPES, INFERENCE_SERVICES, PODS, WATCH_PERMISSIONS, ResourceType
from reprise_operator.naming import MANAGED_BY_LABEL
from reprise_operator.newest import version_number
from reprise_operator.observed import ObservedChild
from reprise_operator.settings import FIELD_MANAGER

DEAD_AFTER_SECONDS = 120.0


_Place = tuple[str, Hashable]


class _Missing(NamedTuple):
    """A version that was read and not delivered, since when, and in which scope it was read."""

    version: int
    since: float
    scope: Hashable


class WatchHealth:
    """Of every watched kind. `clock` gives seconds and must not jump: patience is measured by it."""

    def __init__(self, *, dead_after: float = DEAD_AFTER_SECONDS, clock: Callable[[], float] = time.monotonic) -> None:
        self._dead_after = dead_after
        self._clock = clock
        self._delivered: dict[_Place, int] = {}
        self._missing: dict[_Place, _Missing] = {}

    def delivered(
        self, key: Hashable, resource_version: str | None, *, resource: ResourceType = INFERENCE_SERVICES
    ) -> None:
        """The watch of `resource` brought an event of object `key`."""
        version = version_number(resource_version)
        if version is None:
            return
        place = resource.plural, key
        self._delivered[place] = version
        missing = self._missing.get(place)
        if missing is not None and missing.version <= version:
            del self._missing[place]

    def read(
        self,
        key: Hashable,
        resource_version: str | None,
        *,
        resource: ResourceType = INFERENCE_SERVICES,
        scope: Hashable = None,
    ) -> None:
        """A GET or LIST returned this version of `key`, an object the watch selects. Kinds without a watch are not
        judged."""
        version = version_number(resource_version)
        place = resource.plural, key
        if version is None or version <= self._delivered.get(place, -1):
            return
        if place not in self._missing and (resource.group, resource.plural) in WATCH_PERMISSIONS:
            self._missing[place] = _Missing(version, self._clock(), scope)

    def read_all(self, scope: Hashable, found: Iterable[tuple[ResourceType, Hashable, str | None]]) -> None:
        """All that was found in `scope`: (resource, key, version) each. What was owed of an object that is not among
        them is owed no more: it is gone, and its end may have been delivered before that reading arrived."""
        present = set()
        for resource, key, version in found:
            self.read(key, version, resource=resource, scope=scope)
            present.add((resource.plural, key))
        for place in [place for place, owed in self._missing.items() if owed.scope == scope and place not in present]:
            del self._missing[place]

    def forget(self, key: Hashable, *, resource: ResourceType = INFERENCE_SERVICES) -> None:
        """`key` is gone."""
        self._delivered.pop((resource.plural, key), None)
        self._missing.pop((resource.plural, key), None)

    def behind(self, resource: ResourceType | None = None) -> float:
        """For how many seconds a watch (of `resource`, else any) has owed the oldest event it did not deliver; 0 when
        none is owed."""
        now = self._clock()
        owed = (
            now - missing.since
            for (plural, _), missing in self._missing.items()
            if resource is None or plural == resource.plural
        )
        return max(owed, default=0.0)

    def dead(self) -> str | None:
        """The plural of the kind whose watch is longest dead; None while all are taken to live."""
        now = self._clock()
        longest, plural = max(
            ((now - missing.since, plural) for (plural, _), missing in self._missing.items()), default=(0.0, "")
        )
        return plural if longest > self._dead_after else None


def watched_objects(
    children: Iterable[ObservedChild], pods: Iterable[Mapping[str, Any]]
) -> Iterator[tuple[ResourceType, Hashable, str | None]]:
    """For `read_all`: those of one service's objects that the watches select by our label."""
    by_kind = {resource.kind: resource for resource in CHILD_TYPES}
    for resource, body in (
        *((by_kind[child.kind], child.body) for child in children if child.kind in by_kind),
        *((PODS, pod) for pod in pods),
    ):
        metadata = body["metadata"]
        if (metadata.get("labels") or {}).get(MANAGED_BY_LABEL) == FIELD_MANAGER:
            yield resource, object_key(body), metadata.get("resourceVersion")


def object_key(body: Mapping[str, Any]) -> Hashable:
    """Which object of its kind a body is."""
    return body["metadata"]["namespace"], body["metadata"]["name"]
