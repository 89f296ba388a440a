"""What the built-in kinds refuse beyond types and required fields, as far as a workload meets it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from .builtins import Resource
from .errors import Cause, Json

_QUANTITY = r"[+-]?(\d+(\.\d*)?|\.\d+)([numkMGTPE]|[KMGTPE]i|[eE][+-]?\d+)?"
_MUTABLE = {
    *("containers", "initContainers", "activeDeadlineSeconds", "tolerations", "terminationGracePeriodSeconds"),
    "nodeName",
}
"""Fields of a pod's spec that may change, the node by binding."""


def unreadable(resource: Resource, new: Json) -> str:
    """Why an object cannot even be decoded, or an empty string: a quantity that is none."""
    for _, container in _containers(_template(resource, new), ""):
        for values in container.get("resources", {}).values():
            for value in values.values() if isinstance(values, dict) else ():
                if not re.fullmatch(_QUANTITY, str(value)):
                    return f"quantities must match the regular expression '^{_QUANTITY}$': {value}"
    return ""


def check(resource: Resource, new: Json, old: Json | None) -> list[Cause]:
    """The refusals of one write."""
    path = "spec" if resource.kind == "Pod" else "spec.template.spec"
    causes = list(_pod_spec(_template(resource, new), path))
    if resource.kind in ("Deployment", "ReplicaSet"):
        causes += _workload(new["spec"], old["spec"] if old else None)
    elif resource.kind == "Service":
        causes += _service(new)
    elif resource.kind == "Pod" and old is not None:
        changed = {key for key in {*new["spec"], *old["spec"]} if new["spec"].get(key) != old["spec"].get(key)}
        if changed - _MUTABLE:
            message = "Forbidden: pod updates may not change fields other than `spec.containers[*].image`: "
            causes.append(Cause("FieldValueForbidden", "spec", message + ", ".join(sorted(changed))))
    return causes


def _template(resource: Resource, new: Json) -> Json:
    if resource.kind not in ("Pod", "Deployment", "ReplicaSet"):
        return {}
    spec: Json = new["spec"] if resource.kind == "Pod" else new["spec"].get("template", {}).get("spec") or {}
    return spec


def _containers(spec: Json, path: str) -> Iterator[tuple[str, Json]]:
    for kind in ("initContainers", "containers"):
        for i, container in enumerate(spec.get(kind, ())):
            yield f"{path}.{kind}[{i}]", container


def _pod_spec(spec: Json, path: str) -> Iterator[Cause]:
    if spec and not spec.get("containers"):
        yield Cause("FieldValueRequired", f"{path}.containers", "Required value")
    volumes = {volume["name"] for volume in spec.get("volumes", ())}
    for where, container in _containers(spec, path):
        if not container.get("image"):
            yield Cause("FieldValueRequired", f"{where}.image", "Required value")
        for i, mount in enumerate(container.get("volumeMounts", ())):
            if mount["name"] not in volumes:
                message = f"Not found: {json.dumps(mount['name'])}"
                yield Cause("FieldValueNotFound", f"{where}.volumeMounts[{i}].name", message)
        for i, port in enumerate(container.get("ports", ())):
            yield from _port(f"{where}.ports[{i}].containerPort", port["containerPort"])


def _port(path: str, value: int | str) -> Iterator[Cause]:
    if isinstance(value, int) and not 1 <= value <= 65535:
        yield Cause("FieldValueInvalid", path, f"Invalid value: {value}: must be between 1 and 65535, inclusive")


def _workload(spec: Json, old: Json | None) -> Iterator[Cause]:
    if spec["replicas"] < 0:
        message = f"Invalid value: {spec['replicas']}: must be greater than or equal to 0"
        yield Cause("FieldValueInvalid", "spec.replicas", message)
    wanted, labels = spec["selector"].get("matchLabels", {}), spec["template"].get("metadata", {}).get("labels", {})
    if any(labels.get(key) != value for key, value in wanted.items()):
        message = f"Invalid value: {_shown(labels)}: `selector` does not match template `labels`"
        yield Cause("FieldValueInvalid", "spec.template.metadata.labels", message)
    if old is not None and old["selector"] != spec["selector"]:
        message = f"Invalid value: {_shown(spec['selector'])}: field is immutable"
        yield Cause("FieldValueInvalid", "spec.selector", message)


def _shown(value: Json) -> str:
    return json.dumps(value, separators=(",", ":"), sort_keys=True)


def _service(new: Json) -> Iterator[Cause]:
    if "." in new["metadata"]["name"]:
        message = f"Invalid value: {json.dumps(new['metadata']['name'])}: must not contain dots"
        yield Cause("FieldValueInvalid", "metadata.name", message)
    ports = new["spec"].get("ports", [])
    names = [port.get("name") for port in ports]
    for i, port in enumerate(ports):
        if len(ports) > 1 and not names[i]:
            yield Cause("FieldValueRequired", f"spec.ports[{i}].name", "Required value")
        elif names[i] and names[i] in names[:i]:
            message = f"Duplicate value: {json.dumps(names[i])}"
            yield Cause("FieldValueDuplicate", f"spec.ports[{i}].name", message)
        yield from _port(f"spec.ports[{i}].port", port["port"])
        yield from _port(f"spec.ports[{i}].targetPort", port["targetPort"])
