"""One workload takes over from another: a StatefulSet from a Deployment, or back, or one with other volumes. Pure.

The kind of a workload and a StatefulSet's volumes cannot change in place. So the new one is made beside the old one,
under the same Service, and the old one gives up a pod for each that serves in the new one. Where devices are scarce,
and a pod of the new one finds none, the old one gives up one pod ahead, as a rollout with maxSurge 0 does.

A StatefulSet replaces no pod by itself (OnDelete). Those of an older template go one at a time, each when all the
others serve; broken ones go first, and at once, since nobody is served by them.
"""

from __future__ import annotations

from dataclasses import dataclass

from reprise_operator.observed import Observed, ObservedPod
from reprise_operator.plan import Plan
from reprise_operator.readiness import missing_for_pods
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
    """Delete a pod of an older template; `broken`: it served nobody."""

    name: str
    uid: str
    broken: bool


def hand_over(plan: Plan, observed: Observed) -> tuple[Delete | Scale, ...]:
    """Which predecessors give up pods now, and which are done with."""
    successor = workload_of(plan, observed)
    before = [child for child in predecessors(plan, observed) if not child.terminating]
    if not before or successor is None or not successor.owned or successor.terminating:
        return ()
    figures = counts(successor)
    if not figures.seen:
        return ()
    lacks_room = any(_lacks_room(pod) for pod in observed.current_pods)
    # A device does not help a pod that cannot be started on it.
    ahead = 1 if lacks_room and missing_for_pods(plan, observed) is None else 0
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


def replace_pods(plan: Plan, observed: Observed) -> tuple[DeletePod, ...]:
    """Pods of the StatefulSet that are of an older template and go now; the controller makes them anew.

    A pod that is only too busy for its probe is not broken, and while there is one, no other one goes. None goes while
    its successor could not be started.
    """
    workload = workload_of(plan, observed)
    if workload is None or workload.kind != "StatefulSet" or observed.template_hash is None:
        return ()
    if missing_for_pods(plan, observed) is not None:
        return ()
    ours = [pod for pod in observed.pods if (pod.template_hash or "").startswith(f"{workload.name}-")]
    old = [pod for pod in ours if pod.template_hash != observed.template_hash and not pod.terminating]
    broken = [pod for pod in old if not pod.ready and (pod.failures or not pod.started)]
    if broken:
        return tuple(DeletePod(name=pod.name, uid=pod.uid, broken=True) for pod in broken)
    all_serve = len(ours) >= wanted_replicas(plan, workload) and all(pod.ready and not pod.terminating for pod in ours)
    if not old or not all_serve:
        return ()
    last = max(old, key=lambda pod: (len(pod.name), pod.name))
    return (DeletePod(name=last.name, uid=last.uid, broken=False),)


def _lacks_room(pod: ObservedPod) -> bool:
    """Whether no node has a free device (or CPU, or memory) for it: another one's end may help. A missing volume or a
    wrong label is not cured by that. The scheduler and Volcano both say "Insufficient NAME"."""
    return not pod.scheduled and "insufficient" in (pod.unschedulable_message or "").lower()
