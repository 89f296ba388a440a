"""Parts of NPUs by HAMi: `huawei.com/Ascend910B3-memory: 16384` (MiB) in spec.runtime.resources. Pure.

There are two ways to them (HAMi, pkg/device/ascend/device.go, 4707fb02; ascend-device-plugin, docs/hami.md, ed35e1c):

- by template, of one device: the driver makes a virtual device of the size that fits;
- by the annotation `huawei.com/vnpu-mode: hami-core`: a library in the container keeps to the sum of all its devices.

--gpu-memory-utilization is a share of what the engine takes for all of a device, so it must be at most the part over
the whole. A virtual device may say that it has no more than its part; as nobody has seen that, the automatic share is
the lower one there too, and the user's own is let through.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from reprise_operator.children.accelerator import device_count, profile_of, resource_name
from reprise_operator.children.memory import MemoryPlan
from reprise_operator.children.profiles import Profile
from reprise_operator.quantity import whole
from reprise_operator.resource import InferenceService, SpecError

MEMORY_SUFFIX = "-memory"
CORE_SUFFIX = "-core"
MODE_ANNOTATION = "huawei.com/vnpu-mode"
SOFT_MODE = "hami-core"


def memory_share(service: InferenceService) -> float | None:
    """The part of the devices' memory that was asked for, as a share of all; None for whole devices."""
    asked, sizes = _asked(service), profile_of(service).memory_mib
    if asked is None or not sizes:
        return None
    part, devices = whole(asked), _devices(service)
    return math.floor(part / (devices * _device(part / devices, sizes)) * 10_000) / 10_000


def within_slice(memory: MemoryPlan, service: InferenceService) -> MemoryPlan:
    """The automatic utilization, lowered to the part of the devices that the pod gets."""
    share = memory_share(service)
    if share is None or memory.requested is not None or memory.effective <= share:
        return memory
    of = "a device" if _devices(service) == 1 else f"{_devices(service)} devices"
    reason = f"automatic: {resource_name(service)}{MEMORY_SUFFIX} is {_asked(service)} MiB, {share:.0%} of {of}"
    return replace(memory, effective=share, reason=reason)


def check_slice(service: InferenceService, profile: Profile) -> None:
    """Raises SpecError for a part that is none, that HAMi refuses, or a share of the memory above it."""
    if not profile.memory_mib:
        return
    _check_cores(service)
    asked, where = _asked(service), f"spec.runtime.resources {resource_name(service)}{MEMORY_SUFFIX}"
    if asked is None:
        return
    try:
        part = whole(asked)
    except ValueError as error:
        raise SpecError("InvalidSpec", f"{where}: {error}; it is a number of MiB.") from None
    devices, largest = _devices(service), profile.memory_mib[-1]
    if not 0 < part <= devices * largest:
        have = f"the device has {largest}" if devices == 1 else f"the {devices} devices have {devices * largest}"
        raise SpecError(
            "InvalidSpec",
            f"{where} is {asked} MiB; {have} MiB. Ask for a part of that, or leave it out for whole devices.",
        )
    if not is_soft(service) and device_count(service) > 1 and part not in profile.memory_mib:
        raise SpecError(
            "InvalidSpec",
            f"{where} is {asked} MiB, and the pod gets {device_count(service)} devices, of which HAMi makes no parts "
            f"by template: {_ANNOTATE} for a sum over them, or leave it out for whole devices.",
        )
    whole_mib = devices * _device(part / devices, profile.memory_mib)
    share, requested = memory_share(service), service.spec.memory.utilization
    if is_soft(service) and share is not None and requested is not None and requested > share:
        raise SpecError(
            "InvalidSpec",
            f"spec.memory.utilization is {requested:g}, a share of whole devices, but {where} is {part} of "
            f"{whole_mib} MiB: set it to at most {share:g}, or leave it out.",
        )


_ANNOTATE = f"set {MODE_ANNOTATION}: {SOFT_MODE} in spec.podTemplate.metadata.annotations"


def is_soft(service: InferenceService) -> bool:
    """Whether a library in the container keeps it to its part."""
    return service.spec.pod_template.metadata.annotations.get(MODE_ANNOTATION) == SOFT_MODE


def _check_cores(service: InferenceService) -> None:
    name = f"{resource_name(service)}{CORE_SUFFIX}"
    resources = service.spec.runtime.resources
    if (name in resources.limits or name in resources.requests) and not is_soft(service):
        raise SpecError(
            "InvalidSpec",
            f"spec.runtime.resources has {name}, which HAMi takes in one mode only: {_ANNOTATE}, or leave it out, as a "
            "part by template has the cores of its template.",
        )


def _devices(service: InferenceService) -> int:
    """How many of them the part is of."""
    return device_count(service) if is_soft(service) else 1


def _device(part: float, sizes: Sequence[int]) -> int:
    """Memory of the smallest device that has such a part."""
    return next((size for size in sizes if size >= part), sizes[-1])


def _asked(service: InferenceService) -> str | int | float | None:
    name = f"{resource_name(service)}{MEMORY_SUFFIX}"
    resources = service.spec.runtime.resources
    return resources.limits.get(name, resources.requests.get(name))
