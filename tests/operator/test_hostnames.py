"""Two services with one host name: the older has it, and both are looked at when that changes."""

from __future__ import annotations

from typing import Any

import pytest

from reprise_operator.hostnames import ANY_HOST, Claim, Hostnames, HostnameTaken, claim_of
from reprise_operator.spec import gateway_of

OLD, NEW = ("llm", "old"), ("llm", "new")
GATEWAY = {"name": "main"}


def claim(owner: tuple[str, str], gateway: dict[str, Any], created: str = "2026-01-01T00:00:00Z") -> Claim | None:
    metadata = {"namespace": owner[0], "name": owner[1], "creationTimestamp": created}
    return claim_of(metadata, gateway_of({"spec": {"gateway": gateway}}))


def hosts(*hostnames: str, parents: tuple[dict[str, Any], ...] = (GATEWAY,)) -> dict[str, Any]:
    return {"parentRefs": list(parents), "hostnames": list(hostnames)}


def both(
    old: dict[str, Any], new: dict[str, Any], *, new_owner: tuple[str, str] = NEW
) -> tuple[HostnameTaken | None, HostnameTaken | None]:
    """What each is told, the younger having been seen first."""
    known = Hostnames()
    known.put(new_owner, claim(new_owner, new, "2026-02-02T00:00:00Z"))
    known.put(OLD, claim(OLD, old, "2026-01-01T00:00:00Z"))
    return known.taken(OLD), known.taken(new_owner)


@pytest.mark.parametrize(
    ("old", "new", "hostname"),
    [
        (hosts("a.example"), hosts("a.example"), "a.example"),
        (hosts("a.example", "b.example"), hosts("c.example", "b.example"), "b.example"),
        (hosts(), hosts(), ANY_HOST),
        (hosts("a.example"), hosts("a.example", parents=({"name": "main", "sectionName": "https"},)), "a.example"),
        (hosts("a.example"), hosts("b.example"), None),
        (hosts("*.example"), hosts("a.example"), None),
        (hosts(), hosts("a.example"), None),
        (hosts("a.example"), hosts("a.example", parents=({"name": "inner"},)), None),
        (hosts("a.example"), hosts("a.example", parents=({"name": "main", "namespace": "infra"},)), None),
        (hosts("a.example"), hosts("a.example", parents=({"name": "main", "kind": "ListenerSet"},)), None),
        (
            hosts("a.example", parents=({"name": "main", "sectionName": "http"},)),
            hosts("a.example", parents=({"name": "main", "sectionName": "https"},)),
            None,
        ),
        (hosts("a.example"), hosts("a.example", parents=({"name": "x"}, {"name": "main", "port": 443})), "a.example"),
        (hosts("a.example"), {"endpointPicker": {"name": "p"}}, None),
    ],
    ids=[
        *("same", "one-of-two", "all-hosts", "a-listener", "different", "more-specific", "specific-beside-all"),
        *("other-gateway", "other-namespace", "other-kind", "two-listeners", "second-parent", "no-route"),
    ],
)
def test_the_older_has_it(old: dict[str, Any], new: dict[str, Any], hostname: str | None) -> None:
    told_old, told_new = both(old, new)
    assert told_old is None
    assert (told_new.hostname if told_new else None) == hostname
    if told_new is not None:
        assert told_new.owner == OLD
        assert "llm/old" in told_new.message
        assert "Gateway llm/main" in told_new.message


def test_a_parent_in_another_namespace_is_the_same_gateway_when_both_name_it() -> None:
    shared = hosts("a.example", parents=({"name": "main", "namespace": "infra"},))
    _, told = both(shared, shared, new_owner=("team-b", "new"))
    assert told is not None
    assert told.parent == "Gateway infra/main"


def test_of_two_of_the_same_second_the_name_decides() -> None:
    known = Hostnames()
    for owner in (("llm", "b"), ("llm", "a")):
        known.put(owner, claim(owner, hosts("a.example")))
    assert known.taken(("llm", "a")) is None
    assert known.taken(("llm", "b")) is not None


def test_whoever_is_concerned_is_woken() -> None:
    known = Hostnames()
    assert known.put(OLD, claim(OLD, hosts("a.example"))) == frozenset()
    assert known.put(NEW, claim(NEW, hosts("b.example"), "2026-02-02T00:00:00Z")) == frozenset()
    # The younger takes a second name: the older may have it already.
    moved = claim(NEW, hosts("a.example"), "2026-02-02T00:00:00Z")
    assert known.put(NEW, moved) == {OLD}
    assert known.put(NEW, moved) == frozenset(), "nothing new"
    assert known.taken(NEW) is not None
    # The older gives it up, and then is gone.
    assert known.put(OLD, claim(OLD, hosts("c.example"))) == {NEW}
    assert known.taken(NEW) is None
    assert known.put(OLD, None) == frozenset()
    assert known.put(NEW, None) == frozenset()
    assert known.taken(NEW) is None


def test_what_cannot_be_read_claims_nothing() -> None:
    assert claim(OLD, {"parentRefs": "main"}) is None
    assert claim_of({"namespace": "a", "name": "b"}, gateway_of({"spec": {}})) is None
