"""Tables, as `kubectl get` prints them, and the JSONPath that printer columns are written in."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import Any

from .builtins import Resource
from .errors import Json

Column = tuple[str, str, int]
"""Name, type, priority (1 is shown by `-o wide`)."""
_NAME: Column = ("Name", "name", 0)
_AGE: Column = ("Age", "string", 0)


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
    if seconds < 120:
        return f"{seconds}s"
    if seconds < 600:
        return f"{seconds // 60}m{seconds % 60}s" if seconds % 60 else f"{seconds // 60}m"
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
    return [f"{ready}/{len(spec['containers'])}", shown, restarts, "<age>", _or(status.get("podIP")), _or(spec.get("nodeName")), "<none>", "<none>"]  # fmt: skip


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


def _columns(*names: str, wide: tuple[str, ...] = ()) -> list[Column]:
    plain: list[Column] = [(each.rstrip("#"), "integer" if each.endswith("#") else "string", 0) for each in names]
    return [*plain, *((each, "string", 1) for each in wide)]


_WIDE = ("Containers", "Images", "Selector")
_KINDS: dict[str, tuple[list[Column], Any]] = {
    "Pod": ([_NAME, *_columns("Ready", "Status", "Restarts", "Age", wide=("IP", "Node", "Nominated Node", "Readiness Gates"))], _pod),
    "Deployment": ([_NAME, *_columns("Ready", "Up-to-date", "Available", "Age", wide=_WIDE)], _deployment),
    "ReplicaSet": ([_NAME, *_columns("Desired#", "Current#", "Ready#", "Age", wide=_WIDE)], _replica_set),
    "Service": ([_NAME, *_columns("Type", "Cluster-IP", "External-IP", "Port(s)", "Age", wide=("Selector",))], _service),
    "Namespace": ([_NAME, *_columns("Status", "Age")], lambda item: [item.get("status", {}).get("phase"), "<age>"]),
    "Secret": ([_NAME, *_columns("Type", "Data#", "Age")], lambda item: [item.get("type"), len(item.get("data", {})), "<age>"]),
    "ConfigMap": ([_NAME, *_columns("Data#", "Age")], lambda item: [len(item.get("data", {})), "<age>"]),
    "CustomResourceDefinition": ([_NAME, ("Created At", "date", 0)], lambda item: [item["metadata"]["creationTimestamp"]]),
}  # fmt: skip


def table(resource: Resource, items: list[Json], version: str, include: str | None, *, headers: bool = True) -> Json:
    """A Table of these objects. `include` as the includeObject parameter: Metadata (None), Object or None ("None")."""
    now = datetime.now(UTC)
    if resource.custom:
        declared = list(resource.columns) or [
            {"name": "Age", "type": "date", "jsonPath": ".metadata.creationTimestamp"}
        ]
        columns = [_NAME, *((each["name"], each["type"], each.get("priority", 0)) for each in declared)]
        rows = [[item["metadata"]["name"], *(_cell(item, each, now) for each in declared)] for item in items]
    elif resource.kind == "Event":
        columns = _columns("Last Seen", "Type", "Reason", "Object", "Message")
        rows = [_event(item) for item in items]
    else:
        columns, cells = _KINDS.get(resource.kind, ([_NAME, _AGE], lambda item: ["<age>"]))
        rows = [[item["metadata"]["name"], *cells(item)] for item in items]
    shown = [{"name": name, "type": "string" if kind == "name" else kind, "format": "name" if kind == "name" else "", "description": "", "priority": priority} for name, kind, priority in columns]  # fmt: skip
    return {
        "kind": "Table",
        "apiVersion": "meta.k8s.io/v1",
        "metadata": {"resourceVersion": version},
        "columnDefinitions": shown if headers else None,
        "rows": [
            {
                "cells": [age(item["metadata"]["creationTimestamp"], now) if cell == "<age>" else cell for cell in row],
                "object": None if include == "None" else item if include == "Object" else partial(item),
            }
            for item, row in zip(items, rows, strict=True)
        ],
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
