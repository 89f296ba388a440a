"""Does the watch still deliver? A process that answers its probe may have a watch that died in silence.

Each read of an InferenceService is compared with what the watch last delivered for it. A newer version that the watch
does not deliver within a while proves the watch dead, without a write and without waiting for luck. Pure: times are
passed in.
"""

from __future__ import annotations

from collections.abc import Hashable

DEAD_AFTER_SECONDS = 120.0


class WatchHealth:
    def __init__(self) -> None:
        self._delivered: dict[Hashable, int] = {}
        self._missing: dict[Hashable, tuple[int, float]] = {}

    def delivered(self, key: Hashable, resource_version: str | None) -> None:
        """The watch brought an event of `key`."""
        version = _version(resource_version)
        if version is None:
            return
        self._delivered[key] = version
        missing = self._missing.get(key)
        if missing is not None and missing[0] <= version:
            del self._missing[key]

    def read(self, key: Hashable, resource_version: str | None, *, now: float) -> None:
        """A GET or LIST returned this version of `key`."""
        version = _version(resource_version)
        if version is None or version <= self._delivered.get(key, -1):
            return
        if key not in self._missing:
            self._missing[key] = (version, now)

    def forget(self, key: Hashable) -> None:
        """`key` is gone."""
        self._delivered.pop(key, None)
        self._missing.pop(key, None)

    def behind(self, now: float) -> float:
        """For how many seconds the watch has owed the oldest event it did not deliver; 0 when it owes none."""
        return max((now - since for _, since in self._missing.values()), default=0.0)

    def is_dead(self, now: float) -> bool:
        return self.behind(now) > DEAD_AFTER_SECONDS


def _version(text: str | None) -> int | None:
    # Resource versions are comparable as whole numbers (KEP-5504); what is none of these is not judged.
    return int(text) if text is not None and text.isdecimal() else None
