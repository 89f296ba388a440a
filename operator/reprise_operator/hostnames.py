"""Who has which host name at which gateway. Pure: bodies are passed in, nothing is asked of anybody.

A gateway that is given one host name by two routes sends all requests to one of them and says nothing to the other. So
the older service has the name, and the younger one, which then gets no route, says who has it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from reprise_operator.spec_types import GatewaySpec, ParentRef

Name = tuple[str, str]
"""Namespace and name of an InferenceService."""

ANY_HOST = "*"
"""A route without host names is for all of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """The host names one service wants. `created_at` is metadata.creationTimestamp, which sorts as text."""

    owner: Name
    created_at: str
    hostnames: frozenset[str]
    parents: tuple[ParentRef, ...]
    """With their namespace filled in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostnameTaken:
    """An older service has `hostname` at a gateway of this one's."""

    hostname: str
    parent: str
    owner: Name

    @property
    def message(self) -> str:
        namespace, name = self.owner
        what = "every host name" if self.hostname == ANY_HOST else self.hostname
        return (
            f"spec.gateway.hostnames: {what} at {self.parent} belongs to InferenceService {namespace}/{name}, which is "
            "older. This one has no route; its pods and its Service go on. Choose another host name or another "
            "gateway, or remove it from the other."
        )


def claim_of(metadata: Mapping[str, Any], gateway: GatewaySpec | None) -> Claim | None:
    """The claim of a service with this metadata; None when it wants no route."""
    if gateway is None or not gateway.parent_refs:
        return None
    namespace = metadata["namespace"]
    return Claim(
        owner=(namespace, metadata["name"]),
        created_at=metadata.get("creationTimestamp", ""),
        hostnames=frozenset(gateway.hostnames) or frozenset({ANY_HOST}),
        parents=tuple(
            parent.model_copy(update={"namespace": parent.namespace or namespace}) for parent in gateway.parent_refs
        ),
    )


class Hostnames:
    """The claims of all services that are known."""

    def __init__(self) -> None:
        self._claims: dict[Name, Claim] = {}
        self._by_hostname: dict[str, set[Name]] = {}

    def put(self, owner: Name, claim: Claim | None) -> frozenset[Name]:
        """Notes the claim of `owner`, or that it has none (any more). Returns the others whom the change may concern:
        those who want a host name that was claimed or released."""
        before = self._claims.pop(owner, None)
        if before == claim:
            if claim is not None:
                self._claims[owner] = claim
            return frozenset()
        for hostname in before.hostnames if before else ():
            self._by_hostname[hostname].discard(owner)
            if not self._by_hostname[hostname]:
                del self._by_hostname[hostname]
        concerned = self._rivals((before.hostnames if before else frozenset()) | (claim.hostnames if claim else set()))
        if claim is not None:
            self._claims[owner] = claim
            for hostname in claim.hostnames:
                self._by_hostname.setdefault(hostname, set()).add(owner)
        return concerned - {owner}

    def taken(self, owner: Name) -> HostnameTaken | None:
        """The first host name of `owner` that an older service has, and who that is."""
        claim = self._claims.get(owner)
        if claim is None:
            return None
        for hostname in sorted(claim.hostnames):
            rivals = (self._claims[rival] for rival in self._by_hostname[hostname] if rival != owner)
            for rival in sorted(rivals, key=_age):
                parent = _shared_parent(claim, rival)
                if parent is not None and _age(rival) < _age(claim):
                    return HostnameTaken(hostname=hostname, parent=parent, owner=rival.owner)
        return None

    def _rivals(self, hostnames: Iterable[str]) -> frozenset[Name]:
        return frozenset(owner for hostname in hostnames for owner in self._by_hostname.get(hostname, ()))


def _age(claim: Claim) -> tuple[str, Name]:
    return claim.created_at, claim.owner


def _shared_parent(one: Claim, other: Claim) -> str | None:
    """A gateway, or a listener of one, at which both want to be."""
    for mine in one.parents:
        for theirs in other.parents:
            if _same_place(mine, theirs):
                return f"{mine.kind} {mine.namespace}/{mine.name}"
    return None


def _same_place(one: ParentRef, other: ParentRef) -> bool:
    if (one.group, one.kind, one.namespace, one.name) != (other.group, other.kind, other.namespace, other.name):
        return False
    # One that names no listener, or no port, is at all of them.
    return _overlap(one.section_name, other.section_name) and _overlap(one.port, other.port)


def _overlap(one: str | int | None, other: str | int | None) -> bool:
    return one is None or other is None or one == other
