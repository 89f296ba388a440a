"""What `spec.accelerator.profile` may say, and what each device plugin calls its devices.

Names of resources, node labels and runtime classes are those of MindCluster's device plugin, Huawei Cloud's CCE add-on
and HAMi. `spec.accelerator.resourceName` and `runtimeClassName` override them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

DEFAULT_PROFILE = "ascend910"
CPU_PROFILE = "cpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """One kind of device.

    `resource` None means no device at all. `minimum` is the least a device plugin hands out: an A3 card is two devices.
    """

    resource: str | None
    chip: Literal["910", "310P"] | None = None
    """The family of the chip, None on a CPU."""
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
    memory_mib: tuple[int, ...] = ()
    """Memory of one device, where its plugin hands out parts of it: HAMi's resources NAME-memory (MiB), NAME-core.
    Several, ascending, where cards of several sizes go by one name; a part that fits the smallest is taken for its."""
    volcano_label: tuple[str, str] | None = None
    """Of pods that Volcano places: by it MindCluster's plugin knows the kind of server."""
    volcano_policy: str | None = None
    """By it the plugin knows which chips of a server go together, where no node selector names the server."""

    @property
    def is_npu(self) -> bool:
        return self.resource is not None


_TYPE = "accelerator-type"
_A2_NODES = (_TYPE, ("module-910b-8", "module-910b-16", "card-910b-2", "card-910b-infer"))
_A3_NODES = (_TYPE, ("module-a3-16", "module-a3-8", "module-a3-16-super-pod", "module-a3-8-super-pod"))
_A2_AND_A3 = ("ring-controller.atlas", "ascend-910b")
"""A3 servers go by the same name."""


def _a2(resource: str, **more: Any) -> Profile:
    return Profile(resource=resource, chip="910", **more)


def _a3(resource: str, **more: Any) -> Profile:
    return Profile(resource=resource, chip="910", minimum=2, image_suffix="-a3", **more)


def _310p(resource: str, **more: Any) -> Profile:
    return Profile(resource=resource, chip="310P", image_suffix="-310p", dtype="float16", eager=True, **more)


PROFILES: Mapping[str, Profile] = MappingProxyType(
    {
        CPU_PROFILE: Profile(resource=None),
        # MindCluster
        "ascend910": _a2("huawei.com/Ascend910"),
        "ascend910b": _a2(
            "huawei.com/Ascend910", node_label=_A2_NODES, volcano_label=_A2_AND_A3, volcano_policy="chip8-node8"
        ),
        "ascend910c": _a3(
            "huawei.com/Ascend910", node_label=_A3_NODES, volcano_label=_A2_AND_A3, volcano_policy="chip2-node16"
        ),
        "ascend310p": _310p("huawei.com/Ascend310P"),
        # Huawei Cloud CCE
        "cce-ascend910": _a2("huawei.com/ascend-1980"),
        "cce-ascend910b": _a2("huawei.com/ascend-1980"),
        "cce-ascend910c": _a3("huawei.com/ascend-1980"),
        "cce-ascend310p": _310p("huawei.com/ascend-310"),
        # HAMi
        "hami-ascend910b2": _a2("huawei.com/Ascend910B2", runtime_class="ascend", memory_mib=(65_536,)),
        "hami-ascend910b3": _a2("huawei.com/Ascend910B3", runtime_class="ascend", memory_mib=(65_536,)),
        "hami-ascend910b4": _a2("huawei.com/Ascend910B4", runtime_class="ascend", memory_mib=(32_768, 65_536)),
        "hami-ascend910c": _a3("huawei.com/Ascend910C", runtime_class="ascend", memory_mib=(65_536,)),
        "hami-ascend310p": _310p("huawei.com/Ascend310P", runtime_class="ascend", memory_mib=(21_527,)),
    }
)
