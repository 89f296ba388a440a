"""Objects in memory, each change numbered, remembered and handed to whoever watches."""

from __future__ import annotations

import asyncio
import copy
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from .builtins import Resource
from .errors import Json

HISTORY = 4000
"""Changes that are remembered for each kind."""
Filter = Callable[[Json], bool]


@dataclass(frozen=True, slots=True)
class Change:
    """`old` and `new` are the object before and after; a deletion has its last state in `old`, with the new version."""

    version: int
    old: Json | None
    new: Json | None

    def event(self, wanted: Filter) -> Json | None:
        """As a watch that sees only wanted objects sees it: an object that stops being wanted is deleted."""
        before = self.old is not None and wanted(self.old)
        after = self.new is not None and wanted(self.new)
        if after:
            return {"type": "MODIFIED" if before else "ADDED", "object": self.new}
        if not before or self.old is None:
            return None
        last = {**self.old, "metadata": {**self.old["metadata"], "resourceVersion": str(self.version)}}
        return {"type": "DELETED", "object": last}


@dataclass
class _Kind:
    objects: dict[tuple[str, str], Json] = field(default_factory=dict)
    history: deque[Change] = field(default_factory=lambda: deque(maxlen=HISTORY))
    watchers: set[asyncio.Queue[Change]] = field(default_factory=set)


class Store:
    """Everything is synchronous, so what a request does between two awaits is atomic. Stored objects never change."""

    def __init__(self) -> None:
        self.version = 1
        self._kinds: dict[tuple[str, str], _Kind] = {}

    def _kind(self, resource: Resource) -> _Kind:
        return self._kinds.setdefault((resource.group, resource.plural), _Kind())

    def get(self, resource: Resource, namespace: str, name: str) -> Json | None:
        """A copy, or None."""
        return copy.deepcopy(self._kind(resource).objects.get((namespace, name)))

    def list(self, resource: Resource, namespace: str | None) -> list[Json]:
        """By namespace and name; not copies, so only to be read."""
        objects = sorted(self._kind(resource).objects.items())
        return [item for (where, _), item in objects if namespace is None or where == namespace]

    def put(self, resource: Resource, item: Json) -> Json:
        """Stores the object under a new version, which is set in it; returns a copy."""
        key = (item["metadata"].get("namespace", ""), item["metadata"]["name"])
        self.version += 1
        item["metadata"]["resourceVersion"] = str(self.version)
        kind = self._kind(resource)
        self._publish(kind, Change(self.version, kind.objects.get(key), item))
        kind.objects[key] = item
        return copy.deepcopy(item)

    def delete(self, resource: Resource, namespace: str, name: str) -> None:
        kind = self._kind(resource)
        self.version += 1
        self._publish(kind, Change(self.version, kind.objects.pop((namespace, name)), None))

    @staticmethod
    def _publish(kind: _Kind, change: Change) -> None:
        kind.history.append(change)
        for watcher in kind.watchers:
            watcher.put_nowait(change)

    def oldest(self, resource: Resource) -> int:
        """The oldest version a watch of this kind can start after."""
        history = self._kind(resource).history
        return max(resource.since, history[0].version - 1 if len(history) == HISTORY else 0)

    def watch(self, resource: Resource, after: int) -> asyncio.Queue[Change]:
        """A queue that holds the remembered changes after a version and gets every later one; give it to `unwatch`."""
        kind = self._kind(resource)
        queue: asyncio.Queue[Change] = asyncio.Queue()
        for change in kind.history:
            if change.version > after:
                queue.put_nowait(change)
        kind.watchers.add(queue)
        return queue

    def unwatch(self, resource: Resource, queue: asyncio.Queue[Change]) -> None:
        self._kind(resource).watchers.discard(queue)
