"""What `kubectl get`, `patch` and `apply` would ask the API server for, as plain requests over one kept connection.

Tests ask thousands of times, and each kubectl takes 65 ms of a core before it has asked. Only what succeeds is answered
here: for everything else the caller runs kubectl, whose words a person sees.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import urllib3

from tests.support.node_client import MERGE_PATCH, Credentials, Manifest

TIMEOUT = urllib3.Timeout(connect=5.0, read=60.0)


class NotAnswered(Exception):
    """The request failed, was refused, or is of a sort that only kubectl knows."""


@dataclass(frozen=True, slots=True)
class _Kind:
    """One kind of object, and the names that kubectl takes for it."""

    api_version: str
    kind: str
    plural: str
    namespaced: bool
    names: frozenset[str]

    def path(self, namespace: str) -> str:
        root = f"/apis/{self.api_version}" if "/" in self.api_version else f"/api/{self.api_version}"
        return f"{root}/namespaces/{namespace}/{self.plural}" if self.namespaced else f"{root}/{self.plural}"


@dataclass(slots=True)
class _Server:
    pool: urllib3.PoolManager
    credentials: Credentials
    kinds: dict[str, _Kind] = field(default_factory=dict)

    def request(
        self, method: str, path: str, *, query: Mapping[str, str] | None = None, body: Mapping[str, Any] | None = None
    ) -> tuple[int, Manifest]:
        """Status and answer; raises NotAnswered without an answer in JSON. A body is a merge patch or a new object."""
        status, data = self.send(method, path, query=query, body=body)
        try:
            found: Manifest = json.loads(data)
        except ValueError as error:
            raise NotAnswered(f"{method} {path}: {error}") from error
        return status, found

    def send(
        self, method: str, path: str, *, query: Mapping[str, str] | None = None, body: Mapping[str, Any] | None = None
    ) -> tuple[int, bytes]:
        """The same, whatever the answer consists of."""
        headers = {**self.credentials.headers, "Accept": "application/json", "User-Agent": "kubectl (tests)"}
        if body is not None:
            headers["Content-Type"] = MERGE_PATCH if method == "PATCH" else "application/json"
        try:
            answer = self.pool.request(
                method,
                f"{self.credentials.server}{path}?{urlencode(query or {})}",
                body=None if body is None else json.dumps(body).encode(),
                headers=headers,
                timeout=TIMEOUT,
                retries=False,
            )
        except urllib3.exceptions.HTTPError as error:
            raise NotAnswered(f"{method} {path}: {error}") from error
        return answer.status, answer.data

    def read(self, path: str) -> Manifest:
        status, body = self.request("GET", path)
        if status != 200:
            raise NotAnswered(f"GET {path}: {status}")
        return body

    def find(self, name: str) -> _Kind:
        """By what a person types: plural, singular or short name, with or without its group."""
        if name not in self.kinds:
            # Kinds come with CRDs, so one that is not known yet is looked for anew. kubectl prefers the first group.
            found = list(self._discover())
            self.kinds = {each: kind for kind in reversed(found) for each in kind.names}
            if name not in self.kinds:
                raise NotAnswered(f"no kind is called {name}")
        return self.kinds[name]

    def _discover(self) -> Iterator[_Kind]:
        preferred = [group["preferredVersion"]["groupVersion"] for group in self.read("/apis")["groups"]]
        for api_version in ["v1", *preferred]:
            group, _, version = api_version.rpartition("/")
            try:
                listed = self.read(f"/apis/{api_version}" if group else f"/api/{api_version}")["resources"]
            except NotAnswered:
                continue  # the last kind of its group has just gone
            for each in listed:
                if "/" in each["name"]:
                    continue  # a subresource
                short = {each["name"], each.get("singularName") or each["kind"].lower(), *each.get("shortNames", ())}
                long = {f"{each['name']}.{rest}" for rest in (group, f"{version}.{group}") if group}
                yield _Kind(api_version, each["kind"], each["name"], each["namespaced"], frozenset(short | long))


def get(kubeconfig: Path, namespace: str, kind: str, name: str) -> Manifest | None:
    """The object, or None where the API server says that there is none. Raises NotAnswered."""
    server = _server(kubeconfig)
    status, body = server.request("GET", f"{server.find(kind).path(namespace)}/{name}")
    if status == 404 and (body.get("details") or {}).get("name") == name:
        return None
    if status != 200:
        raise NotAnswered(f"get {kind} {name}: {status}")
    return body


def answers(kubeconfig: Path, path: str) -> bool:
    """Whether `kubectl get --raw` of this path would succeed. Raises NotAnswered where the API server is not there."""
    return _server(kubeconfig).send("GET", path)[0] == 200


def get_all(kubeconfig: Path, namespace: str, kind: str, selector: str) -> list[Manifest]:
    """All objects that have these labels, each with its kind, which a list leaves out. Raises NotAnswered."""
    server = _server(kubeconfig)
    found = server.find(kind)
    status, body = server.request("GET", found.path(namespace), query={"labelSelector": selector} if selector else None)
    if status != 200:
        raise NotAnswered(f"list {kind}: {status}")
    return [{"apiVersion": found.api_version, "kind": found.kind, **item} for item in body["items"]]


def merge_patch(
    kubeconfig: Path, namespace: str, kind: str, name: str, body: Mapping[str, Any], *, status: bool
) -> None:
    """As `kubectl patch --type=merge` (of the status where `status`), its name as field manager included.

    Raises NotAnswered; a merge patch that was lost on its way back is the same when kubectl sends it again.
    """
    server = _server(kubeconfig)
    path = f"{server.find(kind).path(namespace)}/{name}" + ("/status" if status else "")
    code, _ = server.request("PATCH", path, query={"fieldManager": "kubectl-patch"}, body=body)
    if code != 200:
        raise NotAnswered(f"patch {kind} {name}: {code}")


def apply(kubeconfig: Path, namespace: str, manifest: Manifest) -> None:
    """As `kubectl apply`, client-side, of an object that is new or whose kind comes from a CRD.

    Raises NotAnswered: also for other kinds, whose patches need their schemas.
    """
    server = _server(kubeconfig)
    path = server.find(manifest["kind"].lower()).path(namespace)
    name, modified = manifest["metadata"]["name"], _with_configuration(manifest, namespace)
    status, current = server.request("GET", f"{path}/{name}")
    query = {"fieldManager": "kubectl-client-side-apply", "fieldValidation": "Strict"}
    if status == 404:
        code, _ = server.request("POST", path, query=query, body=modified)
        if code != 201:
            raise NotAnswered(f"create {path}/{name}: {code}")
        return
    text = (current["metadata"].get("annotations") or {}).get(_CONFIGURATION) if status == 200 else None
    if text is None or "." not in manifest["apiVersion"].partition("/")[0]:
        raise NotAnswered(f"apply {path}/{name}")
    original = json.loads(text)
    if patch := _merged(_additions(current, modified), _deletions(original, modified)):
        code, _ = server.request("PATCH", f"{path}/{name}", query=query, body=patch)
        if code != 200:
            raise NotAnswered(f"apply {path}/{name}: {code}")


def delete_namespace(kubeconfig: Path, namespace: str) -> None:
    """As `kubectl delete namespace --wait=false`. Raises NotAnswered."""
    status, _ = _server(kubeconfig).request("DELETE", f"/api/v1/namespaces/{namespace}")
    if status not in (200, 202):
        raise NotAnswered(f"delete namespace {namespace}: {status}")


_CONFIGURATION = "kubectl.kubernetes.io/last-applied-configuration"


def _with_configuration(manifest: Manifest, namespace: str) -> Manifest:
    """With the annotation by which the next `kubectl apply` knows what this one set."""
    metadata = {**manifest["metadata"]}
    if manifest["kind"] != "Namespace":
        metadata.setdefault("namespace", namespace)
    annotations = metadata.setdefault("annotations", {})
    text = json.dumps({**manifest, "metadata": metadata}, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return {**manifest, "metadata": {**metadata, "annotations": {**annotations, _CONFIGURATION: text + "\n"}}}


def _additions(current: Any, modified: Mapping[str, Any]) -> Manifest:
    """What a merge patch must set, so that `current` has all that `modified` has."""
    found: Manifest = {}
    for key, value in modified.items():
        there = current.get(key)
        if isinstance(value, Mapping) and isinstance(there, Mapping):
            if below := _additions(there, value):
                found[key] = below
        elif key not in current or there != value:
            found[key] = value
    return found


def _deletions(original: Mapping[str, Any], modified: Mapping[str, Any]) -> Manifest:
    """What was set by the last manifest and is not in this one."""
    found: Manifest = {key: None for key in original if key not in modified}
    for key, value in original.items():
        there = modified.get(key)
        if isinstance(value, Mapping) and isinstance(there, Mapping) and (below := _deletions(value, there)):
            found[key] = below
    return found


def _merged(one: Mapping[str, Any], other: Mapping[str, Any]) -> Manifest:
    found = {**one}
    for key, value in other.items():
        there = found.get(key)
        found[key] = _merged(there, value) if isinstance(there, Mapping) and isinstance(value, Mapping) else value
    return found


def _server(kubeconfig: Path) -> _Server:
    try:
        return _connected(kubeconfig, kubeconfig.stat().st_mtime_ns)
    except (OSError, KeyError) as error:
        raise NotAnswered(f"{kubeconfig}: {error!r}") from error


@cache
def _connected(kubeconfig: Path, _written: int) -> _Server:
    credentials = Credentials.from_kubeconfig(kubeconfig)
    tls: dict[str, Any] = {} if credentials.tls is None else {"ssl_context": credentials.tls}
    return _Server(urllib3.PoolManager(maxsize=4, **tls), credentials)
