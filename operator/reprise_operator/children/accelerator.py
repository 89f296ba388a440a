"""What a pod needs to get its NPUs: resources, driver, node, runtime class. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from reprise_operator.children.profiles import PROFILES, Profile
from reprise_operator.resource import InferenceService
from reprise_operator.spec_types import DriverMode

HWHIAIUSER_GROUP = 1000
"""Group of /dev/davinci* on a node with the Ascend driver; a container without CAP_DAC_OVERRIDE must be in it."""

# (volume name, path, type). The type makes the kubelet refuse a node without the driver instead of creating the path.
_DRIVER_PATHS = (
    ("ascend-driver", "/usr/local/Ascend/driver", "Directory"),
    ("ascend-dcmi", "/usr/local/dcmi", "Directory"),
    ("ascend-npu-smi", "/usr/local/bin/npu-smi", "File"),
    ("ascend-install-info", "/etc/ascend_install.info", "File"),
)


VOLCANO = "volcano"
_POLICY = "huawei.com/schedule_policy"
_SUPER_POD = "sp-block"
_SERVER_LABEL = "accelerator-type"
_VIRTUAL = re.compile(r"^huawei\.com/Ascend(910|310P)-\d+c(\.[a-z0-9.]+)?$")


def profile_of(service: InferenceService) -> Profile:
    """The profile the spec names; the schema admits no other."""
    return PROFILES[service.spec.accelerator.profile]


def resource_name(service: InferenceService) -> str | None:
    """Extended resource of the devices; None on a CPU."""
    profile = profile_of(service)
    return (service.spec.accelerator.resource_name or profile.resource) if profile.is_npu else None


def is_virtual(resource: str | None) -> bool:
    """Whether the resource is a part of a chip by MindCluster's device plugin, such as huawei.com/Ascend910-16c."""
    return bool(_VIRTUAL.match(resource or ""))


def device_count(service: InferenceService) -> int:
    """Devices of one pod, which compute together; 0 on a CPU."""
    profile = profile_of(service)
    if not profile.is_npu:
        return 0
    least = 1 if is_virtual(service.spec.accelerator.resource_name) else profile.minimum
    return service.spec.accelerator.count or least


def container_resources(service: InferenceService) -> dict[str, dict[str, Any]]:
    """Requests and limits: the user's, and the devices with requests = limits as every device plugin wants."""
    asked = service.spec.runtime.resources
    requests, limits = dict(asked.requests), dict(asked.limits)
    name = resource_name(service)
    if name is not None:
        requests[name] = limits[name] = str(device_count(service))
    return {key: value for key, value in (("requests", requests), ("limits", limits)) if value}


def runtime_class_name(service: InferenceService) -> str | None:
    """The user's runtime class, else the profile's."""
    return service.spec.accelerator.runtime_class_name or profile_of(service).runtime_class


def mounts_driver(service: InferenceService) -> bool:
    """Whether the driver is mounted from the node. `auto`: unless a runtime class is there to inject it."""
    if not profile_of(service).is_npu:
        return False
    mode = service.spec.accelerator.driver
    return mode is DriverMode.HOST_PATH or (mode is DriverMode.AUTO and runtime_class_name(service) is None)


def driver_volumes(service: InferenceService) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(volumes, mounts) of the driver, read-only."""
    if not mounts_driver(service):
        return [], []
    volumes = [{"name": name, "hostPath": {"path": path, "type": kind}} for name, path, kind in _DRIVER_PATHS]
    mounts = [{"name": name, "mountPath": path, "readOnly": True} for name, path, _ in _DRIVER_PATHS]
    return volumes, mounts


def scheduler_labels(service: InferenceService) -> dict[str, str]:
    """Labels of pods that Volcano places. What else it is told (fault-scheduling, queues) is the user's to say."""
    label = profile_of(service).volcano_label
    if label is None or service.spec.pod_template.scheduler_name != VOLCANO:
        return {}
    return {label[0]: label[1]}


def scheduler_annotations(service: InferenceService) -> dict[str, str]:
    """Annotations of pods that Volcano places. MindCluster's plugin looks at a node selector, and not at the affinity
    that a profile has; where it finds neither that nor these, it takes the chips for those of a 910A, of which a server
    has eight: on an A3's sixteen no pod is placed (mind-cluster, ascend-for-volcano, internal/npu/factory.go,
    get910CardHandlerName; base/node.go, GetUsableTopFromNode, 22bb3d98)."""
    policy, user = profile_of(service).volcano_policy, service.spec.pod_template
    if policy is None or user.scheduler_name != VOLCANO or is_virtual(resource_name(service)):
        return {}
    if _SERVER_LABEL in user.node_selector or _SUPER_POD in user.metadata.annotations:
        return {}
    return {_POLICY: policy}


def accelerator_env(service: InferenceService) -> list[dict[str, Any]]:
    """Environment of torch_npu: segments that grow keep a long-running engine from fragmenting its memory; a 310P has
    none."""
    profile = profile_of(service)
    if not profile.is_npu or profile.chip == "310P":
        return []
    return [{"name": "PYTORCH_NPU_ALLOC_CONF", "value": "expandable_segments:True"}]


def with_node_affinity(affinity: Mapping[str, Any], profile: Profile) -> dict[str, Any]:
    """The user's affinity, narrowed to the profile's nodes.

    Node selector terms are alternatives, so the profile's requirement is added to each of them.
    """
    if profile.node_label is None:
        return dict(affinity)
    label, values = profile.node_label
    ours = {"key": label, "operator": "In", "values": list(values)}
    node: Mapping[str, Any] = affinity.get("nodeAffinity") or {}
    required: Mapping[str, Any] = node.get("requiredDuringSchedulingIgnoredDuringExecution") or {}
    terms: Sequence[Mapping[str, Any]] = required.get("nodeSelectorTerms") or [{}]
    narrowed = [{**term, "matchExpressions": [*(term.get("matchExpressions") or []), ours]} for term in terms]
    return {
        **affinity,
        "nodeAffinity": {
            **node,
            "requiredDuringSchedulingIgnoredDuringExecution": {**required, "nodeSelectorTerms": narrowed},
        },
    }
