"""How many pods a change may add and take at a time. Pure.

NPUs are scarce: a surge pod would often wait for a device for ever, so by default a pod goes before its successor
comes. Where free devices are seen (devices.py), the successor comes first. A CPU has room for one more. But nowhere may
a pod wait for a volume that only one node can mount, and that the pod it would replace holds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from reprise_operator.children.accelerator import profile_of
from reprise_operator.resource import InferenceService

Share = int | str
"""A number of pods, or a percentage of the replicas such as "25%"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """maxSurge and maxUnavailable of a Deployment's rolling update."""

    surge: Share
    unavailable: Share

    def manifest(self) -> dict[str, Share]:
        return {"maxSurge": self.surge, "maxUnavailable": self.unavailable}

    def least_available(self, replicas: int) -> int:
        """Pods that the Deployment controller keeps available through a change, if they are at its beginning."""
        unavailable = resolve(self.unavailable, replicas, up=False)
        if unavailable == 0 and resolve(self.surge, replicas, up=True) == 0:
            unavailable = 1  # as the controller does: it would never go on
        return max(0, replicas - unavailable)


def fewest_replicas(service: InferenceService) -> int:
    """Pods there are at least while the service runs: an autoscaler may take it down to its lower bound at any time."""
    scaling = service.spec.autoscaling
    return service.spec.replicas if scaling is None else max(1, scaling.min_replicas)


def default_strategy(service: InferenceService) -> Strategy:
    """What is done where no free devices are seen."""
    asked, replicas = service.spec.rollout, fewest_replicas(service)
    if holds_volume(service):
        return Strategy(surge=0, unavailable=_kept(asked.max_unavailable, replicas, default=1))
    if profile_of(service).is_npu:
        if is_zero(asked.max_unavailable):
            return Strategy(surge=_limit(service), unavailable=0)
        return Strategy(surge=0, unavailable=_kept(asked.max_unavailable, replicas, default=1))
    surge = 1 if asked.max_surge is None else asked.max_surge
    return Strategy(surge=surge, unavailable=_kept(asked.max_unavailable, replicas, default=1 if is_zero(surge) else 0))


def surge_strategy(service: InferenceService, replicas: int, *, free: int, broken: int) -> Strategy | None:
    """What is done on an NPU while there are devices for `free` more pods; None where that changes nothing.

    The `broken` pods, those that do not serve, need not be waited for: they go first.
    """
    surge = min(resolve(_limit(service), replicas, up=True), free)
    if not may_surge(service) or surge < 1:
        return None
    return Strategy(surge=surge, unavailable=_kept(service.spec.rollout.max_unavailable, replicas, default=broken))


def holds_volume(service: InferenceService) -> bool:
    """Whether a pod must go before its successor can have its volume: then none is ever added."""
    return service.persistence is not None and not service.persistence.is_shared


def needs_free_devices(service: InferenceService) -> bool:
    """Whether a change has to wait for free devices, since no pod may go before its successor serves."""
    return profile_of(service).is_npu and not holds_volume(service) and is_zero(service.spec.rollout.max_unavailable)


def may_surge(service: InferenceService) -> bool:
    """Whether free devices make a difference."""
    return profile_of(service).is_npu and not holds_volume(service) and not is_zero(service.spec.rollout.max_surge)


def is_zero(share: Share | None) -> bool:
    """Whether the share is given, and nothing."""
    return share is not None and int(str(share).rstrip("%")) == 0


def resolve(share: Share, replicas: int, *, up: bool) -> int:
    """Pods that `share` means; a percentage is rounded up or down as the Deployment controller does."""
    if isinstance(share, int):
        return share
    exact = int(share.rstrip("%")) * replicas / 100
    return math.ceil(exact) if up else math.floor(exact)


def _limit(service: InferenceService) -> Share:
    surge = service.spec.rollout.max_surge
    return 1 if surge is None else surge


def _kept(asked: Share | None, replicas: int, *, default: int) -> Share:
    """`asked`, but never every pod of several: a bad change must not take the last one that serves."""
    share = default if asked is None else asked
    if isinstance(share, int):
        return min(share, max(1, replicas - 1))
    return share if int(share.rstrip("%")) < 100 else "99%"
