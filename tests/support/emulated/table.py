"""Tables, as `kubectl get` prints them, and the JSONPath that printer columns are written in."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from .builtins import INTEGERS, Resource
from .errors import Json

Column = tuple[str, str, int]
"""Name, type, priority (1 is shown by `-o wide`)."""
_NAME: Column = ("Name", "string", 0)


def json_path(value: Any, path: str) -> Any:
    """The first value at `.a.b[0].c` or `.a[?(@.type=="x")].b`, or None."""
    for key, index, field, wanted in re.findall(r"\.([\w-]+)|\[(\d+)]|\[\?\(@\.([\w.]+)==[\"']([^\"']*)[\"']\)]", path):
        if key:
            value = value.get(key) if isinstance(value, dict) else None
        elif index:
            value = value[int(index)] if isinstance(value, list) and len(value) > int(index) else None
        else:
            value = next((item for item in value or [] if str(json_path(item, f".{field}")) == wanted), None)
    return value


def age(since: str | None, now: datetime) -> str:
    """As kubectl counts it: 5s, 3m12s, 2h, 4d."""
    if not since:
        return "<unknown>"
    seconds = int((now - datetime.fromisoformat(since)).total_seconds())
    if seconds < 600:
        minutes = f"{seconds // 60}m" if seconds >= 120 else ""
        return minutes + (f"{seconds % 60 if minutes else seconds}s" if seconds % 60 or not minutes else "")
    return (
        f"{seconds // 60}m"
        if seconds < 10800
        else f"{seconds // 3600}h"
        if seconds < 172800
        else f"{seconds // 86400}d"
    )


def _pod(pod: Json) -> list[Any]:
    status, spec = pod.get("status", {}), pod["spec"]
    statuses = status.get("containerStatuses", [])
    shown = status.get("reason") or status.get("phase", "Pending")
    for each in statuses:
        state = each.get("state", {})
        shown = state.get("waiting", {}).get("reason") or state.get("terminated", {}).get("reason") or shown
    if pod["metadata"].get("deletionTimestamp"):
        shown = "Terminating"
    ready = sum(1 for each in statuses if each.get("ready"))
    restarts = str(sum(each.get("restartCount", 0) for each in statuses))
    wide = [_or(status.get("podIP")), _or(spec.get("nodeName")), "<none>", "<none>"]
    return [f"{ready}/{len(spec['containers'])}", shown, restarts, "<age>", *wide]


def _or(value: Any) -> str:
    return str(value) if value else "<none>"


def _labels(labels: Json | None) -> str:
    return ",".join(f"{key}={value}" for key, value in sorted((labels or {}).items())) or "<none>"


def _containers(item: Json) -> list[str]:
    containers = item["spec"]["template"]["spec"]["containers"]
    return [",".join(each[key] for each in containers) for key in ("name", "image")]


def _deployment(item: Json) -> list[Any]:
    status, wide = item.get("status", {}), [*_containers(item), _labels(item["spec"]["selector"].get("matchLabels"))]
    ready = f"{status.get('readyReplicas', 0)}/{item['spec'].get('replicas', 0)}"
    return [ready, status.get("updatedReplicas", 0), status.get("availableReplicas", 0), "<age>", *wide]


def _replica_set(item: Json) -> list[Any]:
    status, wide = item.get("status", {}), [*_containers(item), _labels(item["spec"]["selector"].get("matchLabels"))]
    return [item["spec"].get("replicas", 0), status.get("replicas", 0), status.get("readyReplicas", 0), "<age>", *wide]


def _service(item: Json) -> list[Any]:
    spec = item["spec"]
    ports = ",".join(f"{port['port']}/{port['protocol']}" for port in spec.get("ports", []))
    return [spec["type"], _or(spec.get("clusterIP")), "<none>", _or(ports), "<age>", _labels(spec.get("selector"))]


def _event(item: Json) -> list[Any]:
    about = item["involvedObject"]
    seen = item.get("lastTimestamp") or item.get("eventTime") or item["metadata"]["creationTimestamp"]
    shown = f"{about.get('kind', '').lower()}/{about.get('name', '')}"
    return [age(seen, datetime.now(UTC)), item.get("type"), item.get("reason"), shown, item.get("message", "").strip()]


_CELLS: dict[str, Callable[[Json], list[Any]]] = {
    "Pod": _pod,
    "Deployment": _deployment,
    "ReplicaSet": _replica_set,
    "Service": _service,
    "Event": _event,
    "Namespace": lambda item: [item.get("status", {}).get("phase"), "<age>"],
    "Secret": lambda item: [item.get("type"), len(item.get("data", {})), "<age>"],
    "ConfigMap": lambda item: [len(item.get("data", {})), "<age>"],
    "CustomResourceDefinition": lambda item: [item["metadata"]["creationTimestamp"]],
}


def _columns(resource: Resource) -> list[Column]:
    if resource.custom:
        return [_NAME, *((each["name"], each["type"], each.get("priority", 0)) for each in _declared(resource))]
    shown, _, wide = "\0".join(resource.columns).partition("\0|\0")
    integers = {name.split(".")[1] for name in INTEGERS if name.split(".")[0] == resource.kind}
    types = {"Created At": "date", **dict.fromkeys(integers, "integer")}
    columns = [(each, types.get(each, "string"), 0) for each in shown.split("\0")]
    columns += [(each, "string", 1) for each in wide.split("\0") if each]
    return columns if resource.kind == "Event" else [_NAME, *columns]


def _declared(resource: Resource) -> list[Json]:
    return list(resource.columns) or [{"name": "Age", "type": "date", "jsonPath": ".metadata.creationTimestamp"}]


def _row(resource: Resource, item: Json, now: datetime) -> list[Any]:
    if resource.custom:
        cells = [_cell(item, each, now) for each in _declared(resource)]
    else:
        cells = _CELLS[resource.kind](item) if resource.kind in _CELLS else ["<age>"]
    cells = [age(item["metadata"]["creationTimestamp"], now) if cell == "<age>" else cell for cell in cells]
    return cells if resource.kind == "Event" else [item["metadata"]["name"], *cells]


def table(resource: Resource, items: list[Json], version: str, include: str | None, *, headers: bool = True) -> Json:
    """A Table of these objects. `include` as the includeObject parameter: Metadata (None), Object or None ("None")."""
    now = datetime.now(UTC)
    columns = [
        {
            "name": name,
            "type": kind,
            "format": "name" if name == "Name" else "",
            "description": "",
            "priority": priority,
        }
        for name, kind, priority in _columns(resource)
    ]
    objects = [None if include == "None" else item if include == "Object" else partial(item) for item in items]
    return {
        "kind": "Table",
        "apiVersion": "meta.k8s.io/v1",
        "metadata": {"resourceVersion": version},
        "columnDefinitions": columns if headers else None,
        "rows": [{"cells": _row(resource, item, now), "object": o} for item, o in zip(items, objects, strict=True)],
    }


def _cell(item: Json, column: Json, now: datetime) -> Any:
    value = json_path(item, column["jsonPath"])
    if column["type"] == "date":
        return age(value, now) if value else None
    if column["type"] in ("integer", "number", "boolean"):
        return value if isinstance(value, bool) == (column["type"] == "boolean") else None
    return value if value is None or isinstance(value, str) else str(value)


def partial(item: Json) -> Json:
    return {"kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1", "metadata": item["metadata"]}
