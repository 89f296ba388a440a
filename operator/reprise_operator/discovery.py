"""Which optional kinds there are, and whether what is ours of them is still as it was: by polling.

An optional kind is another project's CRD. kopf's watch of a kind that is not there at the start never begins in
namespaced mode, and one whose CRD is deleted fails for ever. So once a minute each kind is listed, metadata only, our
objects only, over the namespaces we serve. This one request answers three questions: does the kind exist (404), may we
use it (403: the chart's values say which permissions it gives), and did somebody delete or change an object of ours,
which elsewhere a watch would tell. Any other failure is no answer: what was known stays.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from types import MappingProxyType
from typing import Any

from reprise_operator.api import ClusterError, Fault
from reprise_operator.cluster import Cluster, Key
from reprise_operator.kinds import OPTIONAL_TYPES, ResourceType
from reprise_operator.naming import PLAN_HASH_ANNOTATION, digest
from reprise_operator.settings import GROUP, KIND

logger = logging.getLogger(__name__)

FIRST_ATTEMPTS = 5
FIRST_RETRY_SECONDS = 1.0


class Presence(Enum):
    """What the last answer said of a kind."""

    UNKNOWN = "unknown"
    """There was none yet. Treated like ABSENT: nothing is applied, and nothing deleted."""
    ABSENT = "not installed"
    FORBIDDEN = "installed or not, the operator may not use it"
    SERVED = "served"


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """One object of ours, as far as a poll looks at it."""

    owner: Key
    owner_uid: str
    uid: str
    mark: str
    """Digest of what an edit of it would change. Its status is not part: that is the other project's to write."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Poll:
    """What is known of one kind. `traces` has our objects by (namespace, name)."""

    presence: Presence = Presence.UNKNOWN
    traces: Mapping[tuple[str, str], Trace] = field(default_factory=lambda: MappingProxyType({}))
    owners: frozenset[str] = frozenset()
    """The UIDs of those who own one of them."""


def traces(bodies: Iterable[Mapping[str, Any]]) -> Mapping[tuple[str, str], Trace]:
    """Objects as listed → traces of those that an InferenceService controls."""
    found = {}
    for body in bodies:
        metadata = body["metadata"]
        for owner in metadata.get("ownerReferences") or ():
            if not (owner.get("kind") == KIND and str(owner.get("apiVersion", "")).startswith(f"{GROUP}/")):
                continue
            found[metadata["namespace"], metadata["name"]] = Trace(
                owner=Key(metadata["namespace"], owner["name"]),
                owner_uid=owner["uid"],
                uid=metadata["uid"],
                mark=digest(
                    {
                        "generation": metadata.get("generation"),
                        "labels": metadata.get("labels"),
                        "owners": metadata["ownerReferences"],
                        "plan": (metadata.get("annotations") or {}).get(PLAN_HASH_ANNOTATION),
                    }
                ),
            )
    return MappingProxyType(found)


def touched(before: Poll, after: Poll) -> frozenset[Key]:
    """The services of whose objects one appeared, went or was changed between two polls of a kind."""
    if before.presence is not Presence.SERVED or after.presence is not Presence.SERVED:
        return frozenset()  # the kind itself came or went, which concerns everybody who asks for it
    names = {*before.traces, *after.traces}
    pairs = ((before.traces.get(name), after.traces.get(name)) for name in names)
    return frozenset(trace.owner for pair in pairs if pair[0] != pair[1] for trace in pair if trace is not None)


class OptionalKinds:
    """The last answers, and the loop that renews them."""

    def __init__(
        self,
        cluster: Cluster,
        *,
        namespace: str | None,
        period: float,
        kinds: tuple[ResourceType, ...] = OPTIONAL_TYPES,
    ) -> None:
        """`namespace` None polls all namespaces; `period` is in seconds."""
        self._cluster = cluster
        self._namespace = namespace
        self._period = period
        self._polls = {kind: Poll() for kind in kinds}
        self._doubt = asyncio.Event()

    @property
    def available(self) -> frozenset[ResourceType]:
        """The kinds that can be used now: what the Plan is given."""
        return frozenset(kind for kind, poll in self._polls.items() if poll.presence is Presence.SERVED)

    def presence(self, kind: ResourceType) -> Presence:
        return self._polls[kind].presence

    def held_by(self, owner_uid: str) -> frozenset[ResourceType]:
        """The kinds of which the owner had an object at the last poll."""
        return frozenset(kind for kind, poll in self._polls.items() if owner_uid in poll.owners)

    def applied(self, kind: ResourceType, body: Mapping[str, Any]) -> None:
        """An object of ours was written: should it be gone by the next poll, that is news."""
        poll = self._polls.get(kind)
        if poll is not None and poll.presence is Presence.SERVED:
            self._polls[kind] = replace(poll, traces=MappingProxyType({**poll.traces, **traces([body])}))

    def look_again(self) -> None:
        """Polls at once: an object of a kind that was there could not be applied, as if the kind had gone."""
        self._doubt.set()

    async def first(self) -> None:
        """Polls until each kind has an answer, or the API server was asked often enough: before any service is looked
        at, so that a restart does not see kinds vanish that are there."""
        for attempt in range(FIRST_ATTEMPTS):
            if attempt:
                await asyncio.sleep(FIRST_RETRY_SECONDS)
            await self.poll()
            if all(poll.presence is not Presence.UNKNOWN for poll in self._polls.values()):
                return

    async def poll(self) -> tuple[frozenset[ResourceType], frozenset[Key]]:
        """One round. Returns the kinds that came or went, and the services whose objects were touched."""
        changed: set[ResourceType] = set()
        woken: set[Key] = set()
        for kind, before in list(self._polls.items()):
            after = await self._ask(kind, before)
            self._polls[kind] = after
            if after.presence is not before.presence:
                self._tell(kind, before.presence, after.presence)
                changed.add(kind)
            woken |= touched(before, after)
        return frozenset(changed), frozenset(woken)

    async def run(
        self, *, wake: Callable[[Key, float], None], concerned: Callable[[Collection[ResourceType]], Collection[Key]]
    ) -> None:
        """Polls each period until cancelled. `wake` is given a key and after how many seconds it is due; `concerned`
        names the services that ask for one of some kinds, there or not."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._period * (0.9 + 0.1 * random.random())):  # noqa: S311 - spreads load
                    await self._doubt.wait()
            self._doubt.clear()
            changed, woken = await self.poll()
            for key in woken:
                wake(key, 0.0)
            for key in concerned(changed) if changed else ():
                wake(key, random.random() * self._period / 10)  # noqa: S311 - the same

    async def _ask(self, kind: ResourceType, before: Poll) -> Poll:
        try:
            bodies = await self._cluster.list_marked(kind, self._namespace)
        except ClusterError as error:
            if error.fault is Fault.NOT_FOUND:
                return Poll(presence=Presence.ABSENT)
            if error.status == 403:
                return Poll(presence=Presence.FORBIDDEN)
            logger.warning("%s is %s as before: %s", kind.kind, before.presence.value, error.message)
            return before
        found = traces(bodies)
        owners = frozenset(trace.owner_uid for trace in found.values())
        return Poll(presence=Presence.SERVED, traces=found, owners=owners)

    def _tell(self, kind: ResourceType, before: Presence, after: Presence) -> None:
        if before is Presence.UNKNOWN and after is Presence.ABSENT:
            return  # the usual thing, and nothing to do
        level = logging.WARNING if after is Presence.FORBIDDEN else logging.INFO
        logger.log(level, "%s (%s): %s", kind.kind, kind.api_version, after.value)
