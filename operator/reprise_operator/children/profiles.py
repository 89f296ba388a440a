"""What `spec.accelerator.profile` may say, and what each device plugin calls its devices.

Names of resources, node labels and runtime classes are those of MindCluster's device plugin, Huawei Cloud's CCE add-on
and HAMi. `spec.accelerator.resourceName` and `runtimeClassName` override them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

DEFAULT_PROFILE = "ascend910"
CPU_PROFILE = "cpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """One kind of device.

    `resource` None means no device at all. `minimum` is the least a device plugin hands out: an A3 card is two devices.
    """

    resource: str | None
    minimum: int = 1
    runtime_class: str | None = None
    node_label: tuple[str, tuple[str, ...]] | None = None
    """(label, values) the node must have, where the resource alone does not tell the chips apart."""
    image_suffix: str = ""
    """Of the vllm-ascend image's tag."""
    dtype: Literal["float16"] | None = None
    """The one dtype the chip computes in, where there is only one."""
    eager: bool = False
    """No graph capture."""

    @property
    def is_npu(self) -> bool:
        return self.resource is not None


_TYPE = "accelerator-type"

PROFILES: Mapping[str, Profile] = MappingProxyType(
    {
        CPU_PROFILE: Profile(resource=None),
        "ascend910": Profile(resource="huawei.com/Ascend910"),
        "ascend910b": Profile(
            resource="huawei.com/Ascend910", node_label=(_TYPE, ("module-910b-8", "module-910b-16", "card-910b-2"))
        ),
        "ascend910c": Profile(
            resource="huawei.com/Ascend910",
            minimum=2,
            node_label=(_TYPE, ("module-a3-16", "module-a3-8", "module-a3-16-super-pod", "module-a3-8-super-pod")),
            image_suffix="-a3",
        ),
        "ascend310p": Profile(resource="huawei.com/Ascend310P", image_suffix="-310p", dtype="float16", eager=True),
        "cce-ascend910": Profile(resource="huawei.com/ascend-1980"),
        "cce-ascend310p": Profile(resource="huawei.com/ascend-310", image_suffix="-310p", dtype="float16", eager=True),
        "hami-ascend910b2": Profile(resource="huawei.com/Ascend910B2", runtime_class="ascend"),
        "hami-ascend910b3": Profile(resource="huawei.com/Ascend910B3", runtime_class="ascend"),
        "hami-ascend910b4": Profile(resource="huawei.com/Ascend910B4", runtime_class="ascend"),
        "hami-ascend910c": Profile(
            resource="huawei.com/Ascend910C", minimum=2, runtime_class="ascend", image_suffix="-a3"
        ),
        "hami-ascend310p": Profile(
            resource="huawei.com/Ascend310P", runtime_class="ascend", image_suffix="-310p", dtype="float16", eager=True
        ),
    }
)
