"""One workload takes over from another: a StatefulSet from a Deployment, or back, or one with other volumes. Pure.

The kind of a workload and a StatefulSet's volumes cannot change in place. So the new one is made beside the old one,
under the same Service, and the old one gives up a pod for each that serves in the new one. Where devices are scarce,
and a pod of the new one finds none, the old one gives up one pod ahead, as a rollout with maxSurge 0 does.

A StatefulSet replaces its pods one by one, and waits for each. A pod that can never become ready would be waited for
for ever, though its template has been put right since; so the operator deletes it.
"""

from __future__ import annotations

from dataclasses import dataclass

from reprise_operator.observed import Observed, ObservedPod
from reprise_operator.plan import Plan
from reprise_operator.replicas import wanted_replicas
from reprise_operator.rollout import ChildKey, Delete
from reprise_operator.workloads import counts, predecessors, workload_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """Take pods from a workload that another one takes over from."""

    key: ChildKey
    uid: str
    replicas: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DeletePod:
    """Delete a pod that serves nobody and holds up a rollout."""

    name: str
    uid: str


def hand_over(plan: Plan, observed: Observed) -> tuple[Delete | Scale, ...]:
    """Which predecessors give up pods now, and which are done with."""
    successor = workload_of(plan, observed)
    before = [child for child in predecessors(plan, observed) if not child.terminating]
    if not before or successor is None or not successor.owned or successor.terminating:
        return ()
    figures = counts(successor)
    if not figures.seen:
        return ()
    ahead = 1 if any(_lacks_room(pod) for pod in _current(observed)) else 0
    allowed = max(0, wanted_replicas(plan, successor) - figures.available - ahead)
    actions: list[Delete | Scale] = []
    for child in before:
        has = int(child.body["spec"].get("replicas", 1))
        keeps = min(has, allowed)
        allowed -= keeps
        key = ChildKey(kind=child.kind, name=child.name)
        if keeps == 0:
            actions.append(Delete(key=key, api_version=child.api_version, uid=child.uid))
        elif keeps < has:
            actions.append(Scale(key=key, uid=child.uid, replicas=keeps))
    return tuple(actions)


def unblock(plan: Plan, observed: Observed) -> tuple[DeletePod, ...]:
    """Pods of an older template of the StatefulSet that do not serve and never did, or have crashed.

    They would be replaced anyway, and until they are, a StatefulSet replaces no other. One that is only too busy for
    its probe is left to the controller.
    """
    workload = workload_of(plan, observed)
    if workload is None or workload.kind != "StatefulSet" or observed.template_hash is None:
        return ()
    prefix = f"{workload.name}-"
    return tuple(
        DeletePod(name=pod.name, uid=pod.uid)
        for pod in observed.pods
        if (pod.template_hash or "").startswith(prefix)
        and pod.template_hash != observed.template_hash
        and not pod.ready
        and not pod.terminating
        and (pod.failures or not pod.started)
    )


def _current(observed: Observed) -> tuple[ObservedPod, ...]:
    if observed.template_hash is None:
        return ()
    return tuple(pod for pod in observed.pods if pod.template_hash == observed.template_hash and not pod.terminating)


def _lacks_room(pod: ObservedPod) -> bool:
    """Whether no node has a free device (or CPU, or memory) for it: another one's end may help. A missing volume or a
    wrong label is not cured by that. The scheduler and Volcano both say "Insufficient NAME"."""
    return not pod.scheduled and "insufficient" in (pod.unschedulable_message or "").lower()
