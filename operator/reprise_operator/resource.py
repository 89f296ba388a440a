"""One parsed InferenceService: which object it is, its spec (spec_types.py), and where its model comes from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NewType

from reprise_operator.spec_types import PersistenceSpec, Spec, WarmupSpec

UID = NewType("UID", str)


class SpecError(Exception):
    """The spec cannot be honoured: `reason` is that of the Stalled condition, `message` says what to do."""

    def __init__(self, reason: Literal["NotSupported", "InvalidSpec"], message: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Which object this is, and which revision of its spec."""

    name: str
    namespace: str
    uid: UID
    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HostPathModel:
    """`hostpath:///path`: a folder or a .gguf file on the node."""

    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimModel:
    """`pvc://claim/path`: a folder or a .gguf file on a volume. `path` is relative and may be empty."""

    claim: str
    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchedModel:
    """`hf://org/name`, `modelscope://org/name`, `s3://bucket/path`: fetched onto a volume before the engine starts."""

    scheme: Literal["hf", "modelscope", "s3"]
    location: str
    """What follows the scheme, without a revision and without a slash at its end."""
    revision: str | None = None

    @property
    def uri(self) -> str:
        return f"{self.scheme}://{self.location}"


ModelSource = HostPathModel | ClaimModel | FetchedModel


@dataclass(frozen=True, slots=True, kw_only=True)
class InferenceService:
    """One parsed InferenceService."""

    identity: Identity
    spec: Spec
    source: ModelSource

    @property
    def prefix_caching(self) -> bool:
        """Whether the engine is told to cache prefixes: unset means on."""
        return self.spec.prefix_caching.enabled is not False

    @property
    def persistence(self) -> PersistenceSpec | None:
        """The volume for blocks that outlive a pod. It stays while caching is switched off."""
        return self.spec.prefix_caching.persistence

    @property
    def has_own_volumes(self) -> bool:
        """Whether each pod has a volume of its own, so that the pods are those of a StatefulSet."""
        return self.persistence is not None and self.persistence.size is not None

    @property
    def warmup(self) -> WarmupSpec | None:
        """The warm-up, None where there is none or nothing is cached."""
        return self.spec.prefix_caching.warmup if self.prefix_caching else None

    @property
    def served_name(self) -> str:
        """The model name clients send; the resource's own name where the spec gives none."""
        return self.spec.model.served_name or self.identity.name
