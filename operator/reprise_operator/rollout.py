"""(Plan, Observed) → actions. Pure: decides, while cluster.py executes.

Level-triggered: the answer depends on what is, not on what happened. An Apply names every child that should be; whether
it has to be sent, cluster.py knows, which has the API server's last answer (applied.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from reprise_operator.naming import OWNER_UID_LABEL
from reprise_operator.observed import Observed, ObservedChild
from reprise_operator.plan import Manifest, Plan


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class ChildKey:
    """Which child; the namespace is the owner's."""

    kind: str
    name: str

    def __str__(self) -> str:
        return f"{self.kind}/{self.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Apply:
    """Server-side apply `manifest`.

    `present` None: it does not exist; apply with force off. Else it is ours: send its UID and force on, so that a field
    of ours that somebody else took over comes back. Nothing is sent where it already is as the manifest says.
    """

    key: ChildKey
    manifest: Manifest
    present: ObservedChild | None

    @property
    def uid(self) -> str | None:
        return None if self.present is None else self.present.uid


@dataclass(frozen=True, slots=True, kw_only=True)
class Delete:
    """Delete a child of ours that the Plan does not name; its UID is the precondition."""

    key: ChildKey
    child: ObservedChild


Action = Apply | Delete


@dataclass(frozen=True, slots=True, kw_only=True)
class NameTaken:
    """An object of a child's name exists and is not ours: it is never taken over."""

    key: ChildKey

    @property
    def message(self) -> str:
        return (
            f"{self.key} exists and does not belong to this InferenceService. It is left alone: delete or rename it, "
            "or give the InferenceService another name."
        )


def key_of(manifest: Manifest) -> ChildKey:
    """The key of a manifest."""
    return ChildKey(kind=manifest["kind"], name=manifest["metadata"]["name"])


def decide(plan: Plan, observed: Observed) -> tuple[Action, ...]:
    """What to do now, in order.

    A child that is being deleted is waited for, one whose name is taken is left alone (see `conflicts`), and one of
    ours that the Plan does not name is deleted.
    """
    actions: list[Action] = []
    planned = {key_of(manifest): manifest for manifest in plan.children}
    for key, manifest in planned.items():
        child = find_child(observed, key)
        if child is None or (is_ours(plan, child) and not child.terminating):
            actions.append(Apply(key=key, manifest=manifest, present=child))
    for child in observed.children:
        key = ChildKey(kind=child.kind, name=child.name)
        if child.owned and not child.terminating and key not in planned:
            actions.append(Delete(key=key, child=child))
    return tuple(actions)


def conflicts(plan: Plan, observed: Observed) -> tuple[NameTaken, ...]:
    """Children whose name belongs to somebody else."""
    keys = (key_of(manifest) for manifest in plan.children)
    found = ((key, find_child(observed, key)) for key in keys)
    return tuple(NameTaken(key=key) for key, child in found if child is not None and not is_ours(plan, child))


def find_child(observed: Observed, key: ChildKey) -> ObservedChild | None:
    """The observed child of that key."""
    return next((child for child in observed.children if (child.kind, child.name) == (key.kind, key.name)), None)


def is_ours(plan: Plan, child: ObservedChild) -> bool:
    """Ours by owner UID; or by our label, if somebody took the owner reference away and nobody else controls it."""
    if child.owned:
        return True
    metadata = child.body.get("metadata", {})
    controlled = any(owner.get("controller") for owner in metadata.get("ownerReferences") or ())
    labelled = (metadata.get("labels") or {}).get(OWNER_UID_LABEL) == plan.identity.uid
    return labelled and not controlled
