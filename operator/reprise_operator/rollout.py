"""(Plan, Observed, what was applied) → actions. Pure: decides, while executor.py executes."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from reprise_operator.naming import OWNER_UID_LABEL, digest
from reprise_operator.observed import Observed, ObservedChild
from reprise_operator.plan import Manifest, Plan
from reprise_operator.replicas import replicas_of, unplanned_autoscalers, with_replicas
from reprise_operator.settings import GROUP, KIND
from reprise_operator.workloads import is_workload


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class ChildKey:
    """Which child: the namespace is the owner's."""

    kind: str
    name: str

    def __str__(self) -> str:
        return f"{self.kind}/{self.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Applied:
    """The API server's answer to our last apply of one child, kept in memory (service_memory.py).

    While the child still looks like that answer and the manifest is the same, applying again would change nothing.
    After an operator restart there is none, and each child is applied once.
    """

    manifest_digest: str
    uid: str
    fingerprint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Apply:
    """Server-side apply `manifest`.

    `uid` None: it does not exist yet; apply with force off. Else it is ours: send metadata.uid and force on, so that a
    field of ours that somebody else took over comes back.
    """

    key: ChildKey
    manifest: Manifest
    uid: str | None
    hand_over: int | None = None
    """Number of pods that another field manager of ours applies first, as the manifest leaves it out (replicas.py)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Delete:
    """Delete a child of ours that the Plan does not name; `uid` is the precondition."""

    key: ChildKey
    api_version: str
    uid: str


Action = Apply | Delete


@dataclass(frozen=True, slots=True, kw_only=True)
class NameTaken:
    """An object of a child's name exists and is not ours: it is never taken over."""

    key: ChildKey
    leaving: bool = False
    """It is left of an InferenceService of this name that was deleted: the garbage collector is about to take it."""

    @property
    def message(self) -> str:
        if self.leaving:
            return f"{self.key} is left of the InferenceService that had this name before, and is waited for to go."
        return (
            f"{self.key} exists and does not belong to this InferenceService. "
            "It is left alone; delete or rename it, or give the InferenceService another name."
        )


def key_of(manifest: Manifest) -> ChildKey:
    """The key of a manifest."""
    return ChildKey(kind=manifest["kind"], name=manifest["metadata"]["name"])


def applied(manifest: Manifest, answer: Mapping[str, Any]) -> Applied:
    """What to remember of the API server's `answer` to an apply of `manifest`."""
    return Applied(
        manifest_digest=digest(manifest),
        uid=answer["metadata"]["uid"],
        fingerprint=fingerprint(manifest, answer),
    )


def fingerprint(manifest: Manifest, body: Mapping[str, Any]) -> str:
    """Digest of all in `body` that an edit of our fields would change.

    The spec's part is metadata.generation; a kind without generations gives whole what we set beside the metadata (a
    Service its spec, a ConfigMap its data). Of the metadata only what we set counts: controllers write annotations of
    their own.
    """
    ours, theirs = manifest["metadata"], body["metadata"]
    generation = theirs.get("generation")
    return digest(
        {
            "content": generation or {key: body.get(key) for key in manifest if key != "metadata"},
            "labels": {key: theirs.get("labels", {}).get(key) for key in ours.get("labels", {})},
            "annotations": {key: theirs.get("annotations", {}).get(key) for key in ours.get("annotations", {})},
            "owners": theirs.get("ownerReferences", []),
        }
    )


def conflicts(plan: Plan, observed: Observed) -> tuple[NameTaken, ...]:
    """Children whose name belongs to somebody else."""
    keys = (key_of(manifest) for manifest in plan.children)
    found = ((key, find_child(observed, key)) for key in keys)
    return tuple(
        NameTaken(key=key, leaving=_is_of_namesake(plan, child))
        for key, child in found
        if child is not None and not _is_ours(plan, child)
    )


def decide(plan: Plan, observed: Observed, *, applied: Mapping[ChildKey, Applied] | None = None) -> tuple[Action, ...]:
    """What to do now: nothing where the children are as they should be.

    Level-triggered: the answer depends on what is, not on what happened. A child that is being deleted is waited for,
    one whose name is taken is left alone (`conflicts` says so) by those of ours, too, that would act on it by its name,
    and one of ours that the Plan does not name is deleted; a workload only as the pods of its successor come up
    (handover.py).
    """
    known = applied or {}
    foreign = {conflict.key for conflict in conflicts(plan, observed)}
    planned = {key_of(made): made for made in plan.children if not _acts_on(plan, made, foreign)}
    actions: list[Action] = []
    for key, made in planned.items():
        child, manifest, hand_over = find_child(observed, key), made, None
        if made is plan.autoscaler and unplanned_autoscalers(plan, observed):
            continue  # two autoscalers of one workload write in turns: the old one is deleted and seen gone first
        if made is plan.workload:
            replicas = replicas_of(plan, child, observed)
            manifest, hand_over = with_replicas(made, replicas.claimed), replicas.hand_over
        if child is None:
            actions.append(Apply(key=key, manifest=manifest, uid=None))
        elif not child.terminating and _is_ours(plan, child) and not _is_current(manifest, child, known.get(key)):
            actions.append(Apply(key=key, manifest=manifest, uid=child.uid, hand_over=hand_over))
    for child in observed.children:
        key = ChildKey(kind=child.kind, name=child.name)
        if child.owned and not child.terminating and key not in planned and not is_workload(child):
            actions.append(Delete(key=key, api_version=child.api_version, uid=child.uid))
    return tuple(actions)


def _acts_on(plan: Plan, manifest: Manifest, foreign: Collection[ChildKey]) -> bool:
    """Whether a child would do to somebody else's object what it is there to do to ours: scale it, or send it our
    clients' requests."""
    if manifest is plan.autoscaler:
        return key_of(plan.workload) in foreign
    gateway = plan.gateway
    if gateway is None or manifest is not gateway.route:
        return False
    return gateway.pool is None and key_of(plan.network_service) in foreign


def find_child(observed: Observed, key: ChildKey) -> ObservedChild | None:
    """The observed child of that key."""
    return next((child for child in observed.children if (child.kind, child.name) == (key.kind, key.name)), None)


def _is_ours(plan: Plan, child: ObservedChild) -> bool:
    """Ours by owner UID; or by our label, if somebody took the owner reference away and nobody else controls it."""
    if child.owned:
        return True
    metadata = child.body.get("metadata", {})
    controlled = any(owner.get("controller") for owner in metadata.get("ownerReferences") or ())
    labelled = (metadata.get("labels") or {}).get(OWNER_UID_LABEL) == plan.identity.uid
    return labelled and not controlled


def _is_of_namesake(plan: Plan, child: ObservedChild) -> bool:
    """Whether it belongs to an InferenceService that had our name before us."""
    owners = child.body.get("metadata", {}).get("ownerReferences") or ()
    return any(
        owner.get("controller")
        and (owner.get("kind"), owner.get("name")) == (KIND, plan.identity.name)
        and str(owner.get("apiVersion", "")).startswith(f"{GROUP}/")
        for owner in owners
    )


def _is_current(manifest: Manifest, child: ObservedChild, record: Applied | None) -> bool:
    return (
        record is not None
        and record.uid == child.uid
        and record.manifest_digest == digest(manifest)
        and record.fingerprint == fingerprint(manifest, child.body)
    )
