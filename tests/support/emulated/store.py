"""Objects in memory, each change numbered, remembered and handed to whoever watches."""

import asyncio
import copy
from collections import defaultdict, deque
from collections.abc import Callable
from typing import NamedTuple

from .builtins import Resource
from .errors import Json

HISTORY = 20_000  # changes that are remembered
Filter = Callable[[Json], bool]


class Change(NamedTuple):
    """`old` and `new` are the object before and after; a deletion has its last state in `old`, with the new version."""

    version: int
    resource: Resource
    old: Json | None
    new: Json | None

    def event(self, resource: Resource, wanted: Filter) -> Json | None:
        """As a watch of a kind that sees only wanted objects sees it: one that stops being wanted is deleted."""
        if self.resource.plural != resource.plural or self.resource.group != resource.group:
            return None
        before = self.old is not None and wanted(self.old)
        if self.new is not None and wanted(self.new):
            return {"type": "MODIFIED" if before else "ADDED", "object": self.new}
        gone = copy.deepcopy(self.old) or {"metadata": {}}
        gone["metadata"]["resourceVersion"] = str(self.version)
        return {"type": "DELETED", "object": gone} if before else None


class Store:
    """Everything is synchronous, so what a request does between two awaits is atomic. Stored objects never change."""

    def __init__(self) -> None:
        self.version = 1
        self._objects: defaultdict[tuple[str, str], dict[tuple[str, str], Json]] = defaultdict(dict)
        self._history: deque[Change] = deque(maxlen=HISTORY)
        self.watchers: set[asyncio.Queue[Change]] = set()

    def get(self, resource: Resource, namespace: str, name: str) -> Json | None:
        """A copy, or None."""
        return copy.deepcopy(self._objects[resource.group, resource.plural].get((namespace, name)))

    def list(self, resource: Resource, namespace: str) -> list[Json]:
        """Of one namespace, or all where it is empty, in order; not copies, so only to be read."""
        objects = sorted(self._objects[resource.group, resource.plural].items())
        return [item for (where, _), item in objects if namespace in ("", where)]

    def put(self, resource: Resource, item: Json) -> Json:
        """Stores the object under a new version, which is set in it; returns a copy."""
        key = (item["metadata"].get("namespace", ""), item["metadata"]["name"])
        item["metadata"]["resourceVersion"] = str(self.version + 1)
        self._publish(resource, self._objects[resource.group, resource.plural].get(key), item)
        self._objects[resource.group, resource.plural][key] = item
        return copy.deepcopy(item)

    def delete(self, resource: Resource, namespace: str, name: str) -> None:
        self._publish(resource, self._objects[resource.group, resource.plural].pop((namespace, name)), None)

    def _publish(self, resource: Resource, old: Json | None, new: Json | None) -> None:
        self.version += 1
        self._history.append(Change(self.version, resource, old, new))
        for watcher in self.watchers:
            watcher.put_nowait(self._history[-1])

    def oldest(self, resource: Resource) -> int:
        """The oldest version a watch of this kind can start after."""
        return max(resource.since, self._history[0].version - 1 if len(self._history) == HISTORY else 0)

    def watch(self, after: int) -> asyncio.Queue[Change]:
        """A queue with the remembered changes after a version and every later one, until it leaves `watchers`."""
        queue = asyncio.Queue[Change]()
        for change in self._history:
            if change.version > after:
                queue.put_nowait(change)
        self.watchers.add(queue)
        return queue
