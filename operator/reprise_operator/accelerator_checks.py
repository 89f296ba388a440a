"""What `spec.accelerator` says together with the rest of the spec: refused where it cannot be honoured. Pure."""

from __future__ import annotations

import re

from pydantic.alias_generators import to_camel

from reprise_operator.children.accelerator import is_virtual, resource_name
from reprise_operator.children.profiles import CPU_PROFILE, PROFILES, Profile
from reprise_operator.children.slices import CORE_SUFFIX, MEMORY_SUFFIX, check_slice
from reprise_operator.resource import InferenceService, SpecError
from reprise_operator.spec_types import Runtime

VENDOR = "huawei.com/"
_FOREIGN = ("nvidia.com/", "amd.com/", "gpu.intel.com/", "google.com/", "cambricon.com/", "hygon.com/")
"""Devices of other vendors, which neither runtime can use."""
_FAMILIES = (
    ("310P", re.compile(r"^huawei\.com/(Ascend310P|ascend-310\b)")),
    ("310", re.compile(r"^huawei\.com/Ascend310(?!P)")),
    ("910", re.compile(r"^huawei\.com/(Ascend910|ascend-1980)")),
)
"""What the name of a resource tells of the chip. huawei.com/npu tells nothing."""


def check_accelerator(service: InferenceService) -> None:
    """Raises SpecError with the field, the value and what to do."""
    profile = PROFILES.get(service.spec.accelerator.profile)
    if profile is None:
        raise _invalid(
            f"spec.accelerator.profile is {service.spec.accelerator.profile!r}; it must be one of "
            f"{', '.join(PROFILES)}."
        )
    if not profile.is_npu:
        _check_cpu(service)
        return
    _check_resource(service, profile)
    _check_resources(service, profile)
    _check_count(service, profile)
    _check_dtype(service, profile)
    check_slice(service, profile)


def _check_cpu(service: InferenceService) -> None:
    accelerator = service.spec.accelerator
    if service.spec.runtime.name is Runtime.VLLM_ASCEND:
        raise _invalid(f"spec.accelerator.profile is {CPU_PROFILE}; the vllm-ascend runtime needs an NPU profile.")
    given = accelerator.model_fields_set & {"count", "resource_name", "driver"}
    if given:
        fields = ", ".join(f"spec.accelerator.{to_camel(name)}" for name in sorted(given))
        raise _invalid(f"spec.accelerator.profile is {CPU_PROFILE}, which has no device: remove {fields}.")
    devices = sorted(name for name in _asked(service) if name.startswith(VENDOR))
    if devices:
        raise _invalid(
            f"spec.accelerator.profile is {CPU_PROFILE}, but spec.runtime.resources asks for {devices[0]}, which the "
            "engine would hold and not use: choose the profile of that device, or remove it."
        )


def _check_resource(service: InferenceService, profile: Profile) -> None:
    name = service.spec.accelerator.resource_name
    if name is None:
        return
    if name.startswith(_FOREIGN):
        raise _invalid(
            f"spec.accelerator.resourceName is {name}, which is no Ascend NPU; the engines compute on Ascend NPUs and, "
            f"with profile {CPU_PROFILE}, on CPUs."
        )
    family = next((family for family, pattern in _FAMILIES if pattern.match(name)), None)
    if family is not None and family != profile.chip:
        raise _invalid(
            f"spec.accelerator.resourceName is {name}, a {family}, and spec.accelerator.profile is "
            f"{service.spec.accelerator.profile}, whose image, dtype and nodes are those of a {profile.chip}: choose a "
            f"profile of that chip ({', '.join(_profiles_of(family)) or 'there is none'}), or leave resourceName out."
        )
    if is_virtual(name) and (service.spec.accelerator.count or 1) > 1:
        raise _invalid(
            f"spec.accelerator.resourceName is {name}, a part of a chip, and count is "
            f"{service.spec.accelerator.count}: parts cannot compute together. Set count to 1, or ask for whole chips."
        )


def _check_resources(service: InferenceService, profile: Profile) -> None:
    ours = resource_name(service)
    for name in sorted(_asked(service)):
        slices = bool(profile.memory_mib) and name in (f"{ours}{MEMORY_SUFFIX}", f"{ours}{CORE_SUFFIX}")
        if name == ours:
            raise _invalid(
                f"spec.runtime.resources names {name}, which spec.accelerator sets: use spec.accelerator.count."
            )
        if name.startswith(VENDOR) and not slices:
            raise _invalid(
                f"spec.runtime.resources asks for {name} beside {ours}, the device of profile "
                f"{service.spec.accelerator.profile}: use spec.accelerator.resourceName, or choose its profile."
            )


def _check_count(service: InferenceService, profile: Profile) -> None:
    count = service.spec.accelerator.count
    if count is None or is_virtual(service.spec.accelerator.resource_name):
        return
    if count % profile.minimum:
        raise _invalid(
            f"spec.accelerator.count is {count}; a card of profile {service.spec.accelerator.profile} is "
            f"{profile.minimum} devices, which are handed out together: set a multiple of {profile.minimum}."
        )


def _check_dtype(service: InferenceService, profile: Profile) -> None:
    dtype = service.spec.model.dtype
    if profile.dtype is not None and dtype not in (None, "auto", profile.dtype):
        raise _invalid(
            f"spec.model.dtype is {dtype}; a {profile.chip} computes in {profile.dtype} only. Set that, or leave it "
            "out."
        )


def _profiles_of(chip: str) -> list[str]:
    return [name for name, profile in PROFILES.items() if profile.chip == chip]


def _asked(service: InferenceService) -> set[str]:
    resources = service.spec.runtime.resources
    return {*resources.requests, *resources.limits}


def _invalid(message: str) -> SpecError:
    return SpecError("InvalidSpec", message)
