"""Plays the stories of this folder against an API server and makes the answers comparable.

A story (stories/*.yaml) is a list of requests, played in order in a namespace of its own. Their answers, as a real
kube-apiserver gave them, are in answers/ under the same name. What differs from run to run (uids, times, versions,
addresses) is replaced by a name; resource versions are numbered in the order they appear, so whether a request
changed an object is part of the comparison.

A step with `real_only` is sent to both servers, since later steps build on it, but its answer is compared on the real
server only: the reason says what the emulation leaves out.
"""

from __future__ import annotations

import json
import re
import ssl
import string
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import yaml

from tests.support.apiserver import ApiServer

HERE = Path(__file__).resolve().parent
PROJECT_CRD = HERE.parents[2] / "crds" / "serving.reprise.io_inferenceservices.yaml"
STORIES = sorted(path.stem for path in (HERE / "stories").glob("*.yaml"))

PATCH_TYPES = {
    "merge": "application/merge-patch+json",
    "json": "application/json-patch+json",
    "strategic": "application/strategic-merge-patch+json",
    "apply": "application/apply-patch+yaml",
}
ACCEPT = {
    "table": "application/json;as=Table;v=v1;g=meta.k8s.io",
    "metadata": "application/json;as=PartialObjectMetadata;v=v1;g=meta.k8s.io",
}


def client_of(server: ApiServer) -> httpx.Client:
    """An HTTP client with the administrator's token and the server's certificate."""
    config = yaml.safe_load(server.kubeconfig_path.read_text())
    authority = config["clusters"][0]["cluster"].get("certificate-authority")
    return httpx.Client(
        base_url=server.url,
        headers={"Authorization": f"Bearer {config['users'][0]['user']['token']}", "User-Agent": "contract/1"},
        verify=ssl.create_default_context(cafile=authority) if authority else False,
        timeout=30,
    )


def install_definitions(client: httpx.Client) -> None:
    """The resource of these stories and, as it is, the project's own; returns when both are served."""
    for path in (HERE / "widgets.yaml", PROJECT_CRD):
        definition = yaml.safe_load(path.read_text())
        answer = client.post("/apis/apiextensions.k8s.io/v1/customresourcedefinitions", json=definition)
        if answer.status_code not in (201, 409):
            raise ValueError(f"{path.name} is refused: {answer.json()['message']}")
        spec = definition["spec"]
        url = f"/apis/{spec['group']}/{spec['versions'][0]['name']}/{spec['names']['plural']}?limit=1"
        for _ in range(200):
            if client.get(url).status_code == 200:
                break
        else:
            raise TimeoutError(f"{path.name} is not served")


def load_story(name: str) -> list[dict[str, Any]]:
    steps: list[dict[str, Any]] = yaml.safe_load((HERE / "stories" / f"{name}.yaml").read_text())
    names = [step["name"] for step in steps]
    if len(set(names)) != len(names):
        raise ValueError(f"{name}: two steps have the same name")
    return steps


def real_only(name: str) -> dict[str, str]:
    """The steps of a story that the emulation is not held to, with the reasons."""
    return {step["name"]: step["real_only"] for step in load_story(name) if "real_only" in step}


def play(name: str, client: httpx.Client) -> Iterator[tuple[str, dict[str, Any]]]:
    """Plays a story; yields each step's name and its normalised answer: status, warnings and body or events."""
    namespace = f"story-{name}"
    created = client.post(
        "/api/v1/namespaces", json={"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}}
    )
    created.raise_for_status()
    variables = {
        "ns": namespace,
        "widgets": f"/apis/contract.reprise.io/v1/namespaces/{namespace}/widgets",
        "services": f"/apis/serving.reprise.io/v1alpha1/namespaces/{namespace}/inferenceservices",
        "core": f"/api/v1/namespaces/{namespace}",
        "apps": f"/apis/apps/v1/namespaces/{namespace}",
    }
    normaliser = Normaliser()
    for step in load_story(name):
        answer, raw = _send(client, _fill(step, variables))
        for variable, path in step.get("save", {}).items():
            value: Any = raw
            for key in path.split("."):
                value = value[key]
            variables[variable] = str(value)
        yield step["name"], normaliser.normalise(answer)


def _fill(value: Any, variables: dict[str, str]) -> Any:
    if isinstance(value, str):
        return string.Template(value).safe_substitute(variables)
    if isinstance(value, list):
        return [_fill(item, variables) for item in value]
    if isinstance(value, dict):
        return {key: item if key == "save" else _fill(item, variables) for key, item in value.items()}
    return value


def _send(client: httpx.Client, step: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    headers = {"Accept": ACCEPT.get(step.get("accept", ""), "application/json"), "Content-Type": "application/json"}
    if "patch" in step:
        headers["Content-Type"] = PATCH_TYPES[step["patch"]]
    headers.update(step.get("headers", {}))
    content = step["raw"] if "raw" in step else json.dumps(step["body"]) if "body" in step else None
    answer = client.request(step["method"], step["path"], headers=headers, content=content)
    seen: dict[str, Any] = {"status": answer.status_code}
    warnings = answer.headers.get_list("warning")
    if warnings:
        seen["warnings"] = warnings
    if step.get("text") or "json" not in answer.headers.get("content-type", ""):
        return {**seen, "text": answer.text}, None
    if step.get("watch"):
        return {**seen, "events": [json.loads(line) for line in answer.text.splitlines()]}, None
    body = answer.json()
    if step.get("compare") == "reason":
        # The wording quotes what only a Go program has, or depends on the order of a Go map.
        return {**seen, "reason": body.get("reason")}, body
    return {**seen, "body": body}, body


class Normaliser:
    """Gives the changing parts of answers stable names; one for a story, since it remembers what it has seen."""

    def __init__(self) -> None:
        self._versions: dict[str, str] = {}

    def normalise(self, value: Any, *path: str) -> Any:
        if isinstance(value, dict):
            fields = {key: item for key, item in value.items() if key != "storageVersionHash"}
            return {key: self._field(key, item, value, path) for key, item in fields.items()}
        if isinstance(value, list):
            return [self.normalise(item, *path) for item in value]
        return _text(value) if isinstance(value, str) else value

    def _field(self, key: str, value: Any, parent: dict[str, Any], path: tuple[str, ...]) -> Any:
        if key == "resourceVersion" and isinstance(value, str):
            # A list's version is the whole server's, which other writers move.
            whole = "items" in path or not ({"uid", "name"} & parent.keys())
            return (
                "<version of the list>"
                if whole
                else self._versions.setdefault(value, f"<version {len(self._versions) + 1}>")
            )
        if key == "continue" and value:
            return "<continue>"
        if key in ("clusterIP", "clusterIPs") and value != "None" and value != ["None"]:
            return "<ip>" if isinstance(value, str) else ["<ip>"]
        if key == "managedFields":
            # Their order depends on whether two requests fell into the same second.
            value = sorted(value, key=lambda each: (each["operation"], each["manager"], each.get("subresource", "")))
        if key == "serverAddressByClientCIDRs":
            return "<of this server>"
        if key == "columnDefinitions" and value:
            value = [{**column, "description": "<text>"} for column in value]
        if key == "cells":
            return [
                re.sub(r"^\d+[smh](\d+s)?$", "<age>", c) if isinstance(c, str) else c for c in map(_text_or_same, value)
            ]
        return self.normalise(value, *path, key)


def _text_or_same(value: Any) -> Any:
    return _text(value) if isinstance(value, str) else value


def _text(value: str) -> str:
    value = re.sub(r"(?!0{8})[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}", "<uid>", value)
    value = re.sub(r"(?!1970)\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z", "<time>", value)
    value = re.sub(r"\b10\.96\.\d+\.\d+\b", "<ip>", value)
    value = re.sub(r"\bp-[a-z0-9]{5}\b", "p-<random>", value)
    return re.sub(r"(resource ?version:?|precondition|record) ?\(?\d+\)?( \(\d+\))?", r"\1 <n>", value)
