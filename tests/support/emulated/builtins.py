"""The built-in kinds: schemas derived from the models of the Kubernetes client, plus what those do not say."""

from __future__ import annotations

import base64
import binascii
import functools
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from kubernetes.client import models

from .errors import Json, bad_request
from .schema import PRESERVE, validator_of


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
    columns: tuple[Any, ...] = ()
    """Of a custom kind as its definition has them, else names as in builtins.yaml."""
    selectable: tuple[str, ...] = ()
    """Fields one can select by, beside metadata.name and metadata.namespace."""
    custom: bool = False
    generation: bool = False
    """Whether metadata.generation counts changes of anything but metadata and status."""
    seed: Json = field(default_factory=dict)
    """The structs a typed object always has: nobody owns them, only what is in them."""
    since: int = 0
    """Changes before this version cannot be watched."""

    @functools.cached_property
    def validator(self) -> Any:
        return validator_of(self.schema)

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version


_DATA: Json = yaml.safe_load((Path(__file__).parent / "builtins.yaml").read_text())
INTEGERS: list[str] = _DATA["integers"]
"""Columns of Tables that hold integers, as Kind.Column."""
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
    defaults = _DATA["defaults"].get(name, {})
    for attribute, kind in model.openapi_types.items():
        if kind in ("V1JSONSchemaProps", "dict(str, V1JSONSchemaProps)"):
            kind = "object"  # recursive, and checked where definitions are registered
        found = dict(model_schema(kind))
        path, inner = f"{name}.{attribute}", re.fullmatch(r"[Ll]ist\[(.*Condition)]", kind)
        keys = ["type"] if inner else _DATA["merge_keys"].get(path)
        if keys:
            found |= {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": keys, "x-merge-key": keys[0]}
        if path in _DATA["sets"]:
            found["x-kubernetes-list-type"] = "set"
        if kind == "datetime" and name == "CoreV1Event":
            found["nullable"] = True
        if path in _DATA["quantities"]:
            found["additionalProperties"] = {PRESERVE: True}
        if kind in _DATA["atomic"] or path == "V1ServiceSpec.selector":
            found["x-kubernetes-map-type"] = "atomic"
        if attribute in defaults:
            found["default"] = defaults[attribute]
            found["nullable"] = defaults[attribute] is None
        properties[model.attribute_map[attribute]] = found
    required = [model.attribute_map[each] for each, field_ in model.model_fields.items() if field_.is_required()]
    return {**schema, "required": required} if required else schema


OBJECT_META = model_schema("V1ObjectMeta")


def builtin_resources() -> list[Resource]:
    """The kinds of builtins.yaml."""
    paths = {"specReplicasPath": ".spec.replicas", "statusReplicasPath": ".status.replicas"}
    return [
        Resource(
            group=about.get("group", ""),
            version="v1",
            kind=(kind := re.sub(r"^(Core)?V1", "", about["model"])),
            plural=about["plural"],
            schema=model_schema(about["model"]),
            namespaced=not about.get("cluster"),
            singular=kind.lower(),
            short_names=tuple(about.get("short", ())),
            categories=("all",) if about.get("all") else (),
            subresources=frozenset(about.get("subresources", ["status"])),
            scale_paths=paths if "scale" in about.get("subresources", ()) else {},
            columns=tuple(about.get("columns", ["Age"])),
            selectable=tuple(about.get("select", ())),
            generation=bool(about.get("generation")),
            seed={"metadata": {}, "spec": {}, "status": {}, **about.get("seed", {})},
        )
        for about in _DATA["kinds"]
    ]


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
    if resource.kind in _PREPARE:
        _PREPARE[resource.kind](new, old)


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
