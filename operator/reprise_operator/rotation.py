"""Looks after the Secrets and ConfigMaps that services refer to: each by name, at most once a minute however many
services share it, and only keyed hashes of what was read are kept. What they are for, says references.py."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from reprise_operator.api import ClusterError, Fault
from reprise_operator.references import ObjectRef, ObservedReference, Reference, ReferenceKind

INTERVAL_SECONDS = 60.0
FORGET_SECONDS = 3600.0
MIN_KEY_BYTES = 16


class Contents(Protocol):
    """The part of cluster.py that is needed."""

    async def contents(self, kind: ReferenceKind, namespace: str, name: str) -> Mapping[str, bytes] | None:
        """Key → value; None where there is no such object. Raises ClusterError."""


class ReferenceKey:
    """The key of the hashes."""

    def __init__(self, key: bytes) -> None:
        if len(key) < MIN_KEY_BYTES:
            raise ValueError(f"the key has {len(key)} bytes; it needs at least {MIN_KEY_BYTES}")
        self._key = key
        self.name = self._mac(b"name")[:8]

    @classmethod
    def random(cls) -> ReferenceKey:
        """For a process that was given none: what it hashes, only itself can compare."""
        return cls(secrets.token_bytes(32))

    def fingerprint(self, namespace: str, reference: ObjectRef, key: str, value: bytes) -> str:
        """Of one value: equal values of two objects, or of two keys, are not seen to be equal."""
        parts = (namespace.encode(), reference.kind.encode(), reference.name.encode(), key.encode(), value)
        return self._mac(b"value", *parts)[:32]

    def _mac(self, *parts: bytes) -> str:
        framed = b"".join(len(part).to_bytes(8, "big") + part for part in parts)
        return hmac.new(self._key, framed, hashlib.sha256).hexdigest()


@dataclass(slots=True, kw_only=True)
class _Known:
    """What is remembered of one object."""

    read_at: float
    used_at: float
    seen: ObservedReference | None
    """None: we may not read it."""
    first: dict[str, str]
    """Key → the fingerprint this process saw first."""


class ReferenceReader:
    """Shared by all services of the process. An object that was not there is asked for at each call: its creation is
    what a service waits for."""

    def __init__(
        self,
        key: ReferenceKey | None = None,
        *,
        interval: float = INTERVAL_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._key = key or ReferenceKey.random()
        self._interval = interval
        self._clock = clock
        self._known: dict[tuple[str, ObjectRef], _Known] = {}
        self._reading: dict[tuple[str, ObjectRef], asyncio.Lock] = {}
        self._swept_at = clock()

    async def read(
        self, contents: Contents, namespace: str, references: Iterable[Reference]
    ) -> dict[ObjectRef, ObservedReference]:
        """What is known of the objects, read anew where that is older than a minute. One we may not read is left out.

        Raises ClusterError.
        """
        objects = [reference.object for reference in references]
        self._forget()
        results = await asyncio.gather(
            *(self._observe(contents, namespace, item) for item in objects), return_exceptions=True
        )
        found: dict[ObjectRef, ObservedReference] = {}
        for item, result in zip(objects, results, strict=True):
            if isinstance(result, BaseException):
                raise result
            if result is not None:
                found[item] = result
        return found

    async def _observe(self, contents: Contents, namespace: str, item: ObjectRef) -> ObservedReference | None:
        place = (namespace, item)
        async with self._reading.setdefault(place, asyncio.Lock()):  # two services at once: one request
            known, now = self._known.get(place), self._clock()
            absent = known is not None and known.seen is not None and not known.seen.present
            if known is not None and not absent and now - known.read_at < self._interval:
                known.used_at = now
                return known.seen
            try:
                values = await contents.contents(item.kind, namespace, item.name)
            except ClusterError as error:
                if error.fault is not Fault.FORBIDDEN:
                    raise
                self._known[place] = _Known(read_at=now, used_at=now, seen=None, first={})
                return None
            first = known.first if known is not None else {}
            seen = self._seen(namespace, item, values, first)
            self._known[place] = _Known(read_at=now, used_at=now, seen=seen, first=first)
            return seen

    def _seen(
        self, namespace: str, item: ObjectRef, values: Mapping[str, bytes] | None, first: dict[str, str]
    ) -> ObservedReference:
        if values is None:
            return ObservedReference(present=False, key_name=self._key.name)
        prints = {key: self._key.fingerprint(namespace, item, key, value) for key, value in values.items()}
        for key, value in prints.items():
            first.setdefault(key, value)
        changed = frozenset(key for key, value in prints.items() if first[key] != value)
        return ObservedReference(present=True, fingerprints=prints, changed=changed, key_name=self._key.name)

    def _forget(self) -> None:
        """What no service has asked for in an hour."""
        now = self._clock()
        if now - self._swept_at < self._interval:
            return
        self._swept_at = now
        for place in [place for place, known in self._known.items() if now - known.used_at > FORGET_SECONDS]:
            del self._known[place]
            if not self._reading[place].locked():
                del self._reading[place]
