"""Parts of an NPU by HAMi: `huawei.com/Ascend910B3-memory: 16384` (MiB) in spec.runtime.resources. Pure.

The device plugin hands out a part of the device's memory, while --gpu-memory-utilization is a share of all of it. So
the share must be at most the part over the whole.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from reprise_operator.children.accelerator import profile_of, resource_name
from reprise_operator.children.memory import MemoryPlan
from reprise_operator.children.profiles import Profile
from reprise_operator.quantity import whole
from reprise_operator.resource import InferenceService, SpecError

MEMORY_SUFFIX = "-memory"
CORE_SUFFIX = "-core"


def memory_share(service: InferenceService) -> float | None:
    """The part of the device's memory that was asked for, as a share of all; None for the whole device."""
    asked, sizes = _asked(service), profile_of(service).memory_mib
    if asked is None or not sizes:
        return None
    return math.floor(whole(asked) / _device(whole(asked), sizes) * 10_000) / 10_000


def within_slice(memory: MemoryPlan, service: InferenceService) -> MemoryPlan:
    """The automatic utilization, lowered to the part of the device that the pod gets."""
    share = memory_share(service)
    if share is None or memory.effective <= share:
        return memory
    reason = f"automatic: {resource_name(service)}{MEMORY_SUFFIX} is {_asked(service)} MiB, {share:.0%} of a device"
    return replace(memory, effective=share, reason=reason)


def check_slice(service: InferenceService, profile: Profile) -> None:
    """Raises SpecError for a part that is none, or a share of the memory above it."""
    asked, where = _asked(service), f"spec.runtime.resources {resource_name(service)}{MEMORY_SUFFIX}"
    if asked is None or not profile.memory_mib:
        return
    try:
        part = whole(asked)
    except ValueError as error:
        raise SpecError("InvalidSpec", f"{where}: {error}; it is a number of MiB.") from None
    if not 0 < part <= profile.memory_mib[-1]:
        raise SpecError(
            "InvalidSpec",
            f"{where} is {asked} MiB; the device has {profile.memory_mib[-1]} MiB. Ask for a part of that, or leave it "
            "out for the whole device.",
        )
    share, requested = memory_share(service), service.spec.memory.utilization
    if share is not None and requested is not None and requested > share:
        raise SpecError(
            "InvalidSpec",
            f"spec.memory.utilization is {requested:g}, a share of the whole device, but {where} is {part} of "
            f"{_device(part, profile.memory_mib)} MiB: set it to at most {share:g}, or leave it out.",
        )


def _device(part: int, sizes: Sequence[int]) -> int:
    """Memory of the smallest device that has such a part."""
    return next((size for size in sizes if size >= part), sizes[-1])


def _asked(service: InferenceService) -> str | int | float | None:
    name = f"{resource_name(service)}{MEMORY_SUFFIX}"
    resources = service.spec.runtime.resources
    return resources.limits.get(name, resources.requests.get(name))
