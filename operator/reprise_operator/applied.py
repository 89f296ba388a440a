"""Which applies need not be sent. Pure.

A server-side apply that changes nothing is still a request the API server has to work through, so an object that holds
what our last apply of the same manifest was answered with is left alone. `generation` cannot decide that (a Service
has none, a label or annotation does not move it), hence the fields themselves are compared: those the manifest names,
as the server answered them and as they are now. That is also what finds drift: somebody else's edit of one of them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NewType

ManifestHash = NewType("ManifestHash", str)


def manifest_hash(manifest: Mapping[str, Any]) -> ManifestHash:
    return ManifestHash(hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest())


def same_fields(manifest: Any, answered: Any, present: Any) -> bool:
    """Whether `present` equals `answered` in every field that `manifest` names.

    Mappings are followed only where the manifest goes, so fields of other writers do not count. Lists are compared
    whole: their elements get defaults from the server, and pairing them up would need every list's merge key. A foreign
    element in one of our lists therefore costs one apply, whose answer then holds it too.
    """
    if isinstance(manifest, Mapping) and isinstance(answered, Mapping) and isinstance(present, Mapping):
        return all(same_fields(value, answered.get(key), present.get(key)) for key, value in manifest.items())
    return bool(answered == present)


@dataclass(frozen=True, slots=True)
class _Answer:
    manifest: ManifestHash
    body: Mapping[str, Any]


class AppliedAnswers:
    """The last answer of each apply of one InferenceService's children. Lost at a restart: one apply each."""

    def __init__(self) -> None:
        self._answers: dict[tuple[str, str], _Answer] = {}

    def record(self, manifest: Mapping[str, Any], answer: Mapping[str, Any]) -> None:
        self._answers[_identity(manifest)] = _Answer(manifest_hash(manifest), answer)

    def is_current(self, manifest: Mapping[str, Any], present: Mapping[str, Any]) -> bool:
        """Whether applying `manifest` to the object `present` would change nothing."""
        answer = self._answers.get(_identity(manifest))
        if answer is None or answer.manifest != manifest_hash(manifest):
            return False
        if answer.body["metadata"]["uid"] != present["metadata"]["uid"]:
            return False
        return same_fields(manifest, answer.body, present)


def _identity(manifest: Mapping[str, Any]) -> tuple[str, str]:
    return manifest["kind"], manifest["metadata"]["name"]
