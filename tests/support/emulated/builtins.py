"""The built-in kinds: schemas derived from the models of the Kubernetes client, plus what those do not say."""

from __future__ import annotations

import base64
import binascii
import functools
import re
from dataclasses import dataclass, field
from typing import Any

from kubernetes.client import models

from .errors import Cause, Json, bad_request
from .schema import PRESERVE


@dataclass(frozen=True, kw_only=True)
class Resource:
    """One kind as it is served. `schema` is structural and knows metadata."""

    group: str
    version: str
    kind: str
    plural: str
    schema: Json
    namespaced: bool = True
    singular: str = ""
    short_names: tuple[str, ...] = ()
    categories: tuple[str, ...] = ()
    subresources: frozenset[str] = frozenset()
    scale_paths: Json = field(default_factory=dict)
    columns: tuple[Json, ...] = ()
    custom: bool = False
    generation: bool = False
    """Whether metadata.generation counts changes of anything but metadata and status."""
    seed: Json = field(default_factory=dict)
    """The structs a typed object always has: nobody owns them, only what is in them."""
    since: int = 0
    """Changes before this version cannot be watched."""

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version


MERGE_KEYS: dict[str, tuple[str, ...]] = {
    "V1PodSpec.containers": ("name",),
    "V1PodSpec.init_containers": ("name",),
    "V1PodSpec.volumes": ("name",),
    "V1PodSpec.image_pull_secrets": ("name",),
    "V1PodSpec.topology_spread_constraints": ("topologyKey", "whenUnsatisfiable"),
    "V1Container.env": ("name",),
    "V1Container.ports": ("containerPort", "protocol"),
    "V1Container.volume_mounts": ("mountPath",),
    "V1ServiceSpec.ports": ("port", "protocol"),
    "V1ObjectMeta.owner_references": ("uid",),
    "V1PodStatus.pod_ips": ("ip",),
}
"""List fields that are merged by key; the first is also the key of a strategic merge. Lists of conditions: by type."""
SETS = {"V1ObjectMeta.finalizers"}
QUANTITIES = {f"{m}ResourceRequirements.{f}" for m in ("V1", "V1Volume") for f in ("limits", "requests")}
ATOMIC = {
    "V1LabelSelector",
    "V1SecretKeySelector",
    "V1ConfigMapKeySelector",
    "V1ObjectFieldSelector",
    "V1ObjectReference",
}

_TEMPLATE = {"metadata": {}, "spec": {"containers": None}}
_PROBE = {"timeout_seconds": 1, "period_seconds": 10, "success_threshold": 1, "failure_threshold": 3}
DEFAULTS: dict[str, dict[str, Any]] = {
    "V1DeploymentSpec": {
        "replicas": 1,
        "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": "25%", "maxSurge": "25%"}},
        "revision_history_limit": 10,
        "progress_deadline_seconds": 600,
    },
    "V1ReplicaSetSpec": {"replicas": 1},
    "V1PodSpec": {
        "restart_policy": "Always",
        "termination_grace_period_seconds": 30,
        "dns_policy": "ClusterFirst",
        "security_context": {},
        "scheduler_name": "default-scheduler",
    },
    "V1Container": {
        "resources": {},
        "termination_message_path": "/dev/termination-log",
        "termination_message_policy": "File",
    },
    "V1ContainerPort": {"protocol": "TCP"},
    "V1Probe": _PROBE,
    "V1HTTPGetAction": {"scheme": "HTTP"},
    "V1ObjectFieldSelector": {"api_version": "v1"},
    "V1ConfigMapVolumeSource": {"default_mode": 420},
    "V1SecretVolumeSource": {"default_mode": 420},
    "V1HostPathVolumeSource": {"type": ""},
    "V1ServiceSpec": {"type": "ClusterIP", "session_affinity": "None", "internal_traffic_policy": "Cluster"},
    "V1ServicePort": {"protocol": "TCP"},
    "V1PersistentVolumeClaimSpec": {"volume_mode": "Filesystem"},
    "V1Secret": {"type": "Opaque"},
    "V1CustomResourceDefinitionSpec": {"conversion": {"strategy": "None"}},
    "V1PodCondition": {"last_probe_time": None, "last_transition_time": None},
    "V1ContainerStateRunning": {"started_at": None},
    "V1ContainerStatus": {"state": {}, "last_state": {}},
}
_SCALARS = {
    "str": "string",
    "int": "integer",
    "float": "number",
    "bool": "boolean",
    "datetime": "string",
    "bytes": "string",
}


@functools.cache
def model_schema(name: str) -> Json:
    """The structural schema of a type as the client knows it: `V1PodSpec`, `list[str]`, `dict(str, str)`, `object`."""
    if name in _SCALARS:
        return {"type": _SCALARS[name]}
    if inner := re.fullmatch(r"[Ll]ist\[(.*)]", name):
        return {"type": "array", "items": model_schema(inner[1])}
    if inner := re.fullmatch(r"[Dd]ict[(\[]str, (.*)[)\]]", name):
        return {"type": "object", "additionalProperties": model_schema(inner[1])}
    if name == "object":
        return {PRESERVE: True}
    model = getattr(models, name)
    properties: Json = {}
    schema: Json = {"type": "object", "properties": properties}
    defaults = DEFAULTS.get(name, {})
    for attribute, kind in model.openapi_types.items():
        if kind in ("V1JSONSchemaProps", "dict(str, V1JSONSchemaProps)"):
            kind = "object"  # recursive, and checked where definitions are registered
        found = dict(model_schema(kind))
        path, inner = f"{name}.{attribute}", re.fullmatch(r"[Ll]ist\[(.*Condition)]", kind)
        keys = ("type",) if inner else MERGE_KEYS.get(path)
        if keys:
            found |= {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": list(keys), "x-merge-key": keys[0]}
        if path in SETS:
            found["x-kubernetes-list-type"] = "set"
        if kind == "datetime" and name == "CoreV1Event":
            found["nullable"] = True
        if path in QUANTITIES:
            found["additionalProperties"] = {PRESERVE: True}
        if kind in ATOMIC or path == "V1ServiceSpec.selector":
            found["x-kubernetes-map-type"] = "atomic"
        if attribute in defaults:
            found["default"] = defaults[attribute]
            found["nullable"] = defaults[attribute] is None
        properties[model.attribute_map[attribute]] = found
    required = [model.attribute_map[each] for each, field_ in model.model_fields.items() if field_.is_required()]
    return {**schema, "required": required} if required else schema


OBJECT_META = model_schema("V1ObjectMeta")


def _builtin(model: str, plural: str, short: str = "", *, group: str = "", **more: Any) -> Resource:
    kind = re.sub(r"^(Core)?V\d", "", model)
    kept = {"generation": False, "subresources": frozenset({"status"}), "seed": {}, **more}
    kept["seed"] = {"metadata": {}, "spec": {}, "status": {}, **kept["seed"]}
    names = tuple(short.split(",")) if short else ()
    schema = model_schema(model)
    return Resource(
        group=group,
        version="v1",
        kind=kind,
        plural=plural,
        singular=kind.lower(),
        short_names=names,
        schema=schema,
        **kept,
    )


def builtin_resources() -> list[Resource]:
    scaled = {"subresources": frozenset({"status", "scale"}), "generation": True, "categories": ("all",)}
    bare: Any = {"subresources": frozenset()}
    cluster: Any = {"namespaced": False}
    paths = {"specReplicasPath": ".spec.replicas", "statusReplicasPath": ".status.replicas"}
    template = {"selector": None, "template": _TEMPLATE}
    return [
        _builtin("V1Namespace", "namespaces", "ns", **cluster),
        _builtin("V1Node", "nodes", "no", **cluster),
        _builtin("V1Pod", "pods", "po", generation=True, categories=("all",), seed={"spec": {"containers": None}}),
        _builtin("V1Service", "services", "svc", categories=("all",), seed={"status": {"loadBalancer": {}}}),
        _builtin("V1Secret", "secrets", **bare),
        _builtin("V1ConfigMap", "configmaps", "cm", **bare),
        _builtin("V1ServiceAccount", "serviceaccounts", "sa", **bare),
        _builtin("V1PersistentVolumeClaim", "persistentvolumeclaims", "pvc", seed={"spec": {"resources": {}}}),
        _builtin("CoreV1Event", "events", "ev", **bare, seed={"involvedObject": {}, "source": {}}),
        _builtin("V1Deployment", "deployments", "deploy", group="apps", **scaled, scale_paths=paths, seed={"spec": {**template, "strategy": {}}}),
        _builtin("V1ReplicaSet", "replicasets", "rs", group="apps", **scaled, scale_paths=paths, seed={"spec": template}),
        _builtin("V1Lease", "leases", group="coordination.k8s.io", **bare),
        _builtin("V1PodDisruptionBudget", "poddisruptionbudgets", "pdb", group="policy", generation=True),
        _builtin("V1ClusterRole", "clusterroles", group="rbac.authorization.k8s.io", **bare, **cluster),
        _builtin("V1ClusterRoleBinding", "clusterrolebindings", group="rbac.authorization.k8s.io", **bare, **cluster),
        _builtin("V1Role", "roles", group="rbac.authorization.k8s.io", **bare),
        _builtin("V1RoleBinding", "rolebindings", group="rbac.authorization.k8s.io", **bare),
        _builtin("V1CustomResourceDefinition", "customresourcedefinitions", "crd,crds", group="apiextensions.k8s.io", generation=True, **cluster, seed={"spec": {"names": {}}, "status": {"acceptedNames": {}, "conditions": None, "storedVersions": None}}),
    ]  # fmt: skip


def prepare(resource: Resource, new: Json, old: Json | None) -> None:
    """What the real server fills in on a write beyond plain defaults, in place. Raises 400 for what cannot be read."""
    spec = new.get("spec") or {}
    template = spec if resource.kind == "Pod" else spec.get("template", {}).get("spec", {})
    if resource.kind in ("Pod", "Deployment", "ReplicaSet"):
        for container in [*template.get("containers", []), *template.get("initContainers", [])]:
            image = container.get("image", "")
            latest = image.endswith(":latest") or ":" not in image.rsplit("/", 1)[-1]
            container.setdefault("imagePullPolicy", "Always" if latest else "IfNotPresent")
            limits = container.get("resources", {}).get("limits", {})
            for values in container.get("resources", {}).values():
                if isinstance(values, dict):
                    values.update({key: str(value) for key, value in values.items()})
            if resource.kind == "Pod" and limits:
                container["resources"]["requests"] = {**limits, **container["resources"].get("requests", {})}
    _PREPARE.get(resource.kind, lambda new, old: None)(new, old)


_addresses = iter(range(2, 65000))


def admit(resource: Resource, new: Json, old: Json | None) -> None:
    """What is filled in after field managers have been reckoned, so that nobody owns it; in place."""
    kind, spec = resource.kind, new.get("spec", {})
    if kind == "Pod" and old is None:
        spec |= {"priority": 0, "preemptionPolicy": "PreemptLowerPriority"}
        present = {toleration.get("key") for toleration in spec.get("tolerations", [])}
        for key in ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable"):
            if key not in present:
                toleration = {"key": key, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 300}
                spec["tolerations"] = [*spec.get("tolerations", []), toleration]
        asked = any(container.get("resources") for container in spec.get("containers", []))
        new["status"] = {"phase": "Pending", "qosClass": "Burstable" if asked else "BestEffort"}
    elif kind == "Service":
        if old is None and spec["type"] != "ExternalName":
            number = next(_addresses)
            spec.setdefault("clusterIP", f"10.96.{number // 250}.{number % 250 + 1}")
            spec |= {"clusterIPs": [spec["clusterIP"]], "ipFamilies": ["IPv4"], "ipFamilyPolicy": "SingleStack"}
        new.setdefault("status", {"loadBalancer": {}})
    elif kind == "Namespace" and old is None:
        new |= {"spec": {"finalizers": ["kubernetes"]}, "status": {"phase": "Active"}}
    elif kind == "PersistentVolumeClaim" and old is None:
        new["metadata"]["finalizers"] = ["kubernetes.io/pvc-protection"]
        new["status"] = {"phase": "Pending"}
    elif kind == "Event":
        empty: Json = {"firstTimestamp": None, "lastTimestamp": None, "eventTime": None}
        for key, value in {**empty, "reportingComponent": "", "reportingInstance": ""}.items():
            new.setdefault(key, value)
    elif kind in ("Deployment", "ReplicaSet"):
        new.setdefault("status", {"replicas": 0} if kind == "ReplicaSet" else {})


def _pod(new: Json, old: Json | None) -> None:
    new["spec"].setdefault("enableServiceLinks", True)
    if new.get("status", {}).get("podIP"):
        new["status"]["podIPs"] = [{"ip": new["status"]["podIP"]}]


def _service(new: Json, old: Json | None) -> None:
    for port in new["spec"].get("ports", []):
        port.setdefault("targetPort", port.get("port"))
    for key in ("clusterIP", "clusterIPs", "ipFamilies", "ipFamilyPolicy"):
        if old is not None and key in old["spec"]:
            new["spec"].setdefault(key, old["spec"][key])


def _secret(new: Json, old: Json | None) -> None:
    for key, value in new.pop("stringData", {}).items():
        new["data"] = {**new.get("data", {}), key: base64.b64encode(value.encode()).decode()}
    for value in new.get("data", {}).values():
        try:
            base64.b64decode(value, validate=True)
        except binascii.Error as error:
            at = next((i for i, c in enumerate(value) if not re.match(r"[A-Za-z0-9+/]", c)), len(value))
            message = f'Secret in version "v1" cannot be handled as a Secret: illegal base64 data at input byte {at}'
            raise bad_request(message) from error


def _namespace(new: Json, old: Json | None) -> None:
    metadata = new["metadata"]
    metadata["labels"] = {**metadata.get("labels", {}), "kubernetes.io/metadata.name": metadata["name"]}


_PREPARE = {"Pod": _pod, "Service": _service, "Secret": _secret, "Namespace": _namespace}


def check(resource: Resource, new: Json, old: Json | None) -> list[Cause]:
    """The refusals of built-in kinds that a workload meets, beyond types and required fields."""
    spec = new.get("spec") or {}
    causes: list[Cause] = []
    if resource.kind in ("Deployment", "ReplicaSet"):
        labels = spec.get("template", {}).get("metadata", {}).get("labels", {})
        if any(labels.get(key) != value for key, value in spec.get("selector", {}).get("matchLabels", {}).items()):
            shown = "{" + ",".join(f'"{key}":"{value}"' for key, value in sorted(labels.items())) + "}"
            message = f"Invalid value: {shown}: `selector` does not match template `labels`"
            causes.append(Cause("FieldValueInvalid", "spec.template.metadata.labels", message))
        if old is not None and old["spec"]["selector"] != spec.get("selector"):
            labels = spec.get("selector", {}).get("matchLabels", {})
            shown = '{"matchLabels":{' + ",".join(f'"{key}":"{value}"' for key, value in sorted(labels.items())) + "}}"
            causes.append(Cause("FieldValueInvalid", "spec.selector", f"Invalid value: {shown}: field is immutable"))
        if spec.get("template", {}).get("spec", {}).get("containers") == []:
            causes.append(Cause("FieldValueRequired", "spec.template.spec.containers", "Required value"))
    if resource.kind == "Service":
        names = [port.get("name") for port in spec.get("ports", [])]
        for i, name in enumerate(names):
            if name and name in names[:i]:
                causes.append(Cause("FieldValueDuplicate", f"spec.ports[{i}].name", f'Duplicate value: "{name}"'))
    if resource.kind == "Pod" and old is not None:
        changed = {key for key in {*spec, *old["spec"]} if spec.get(key) != old["spec"].get(key)}
        if changed - {
            "containers",
            "initContainers",
            "activeDeadlineSeconds",
            "tolerations",
            "terminationGracePeriodSeconds",
            "nodeName",
        }:
            message = (
                f"Forbidden: pod updates may not change fields other than `spec.containers[*].image`: {sorted(changed)}"
            )
            causes.append(Cause("FieldValueForbidden", "spec", message))
    return causes
