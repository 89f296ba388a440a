"""Where the end-to-end tests run, and what they hold in their hands: a cluster (ours, or the one that KUBECONFIG names)
and one InferenceService in it, seen through kubectl and through an OpenAI client, as their users see them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import openai

from tests.support.gitops import kstatus
from tests.support.kubectl import Kubectl, eventually
from tests.support.node_client import Manifest
from tests.support.request_recorder import RequestRecorder

READY_SECONDS = 240.0
"""For an engine to start on a busy machine."""
NAME_LABEL = "serving.reprise.io/name"


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """One cluster with an operator."""

    kubectl: Kubectl
    model_uri: str
    """A small model that the engine serves."""
    model_uris: Mapping[str, str]
    """More of them, by name: of our own cluster only."""
    image: str | None
    """Of the engine; None takes the operator's default."""
    reach: Callable[[str], AbstractContextManager[str]]
    """Name of a Service → http://host:port at which it answers meanwhile."""
    start_operator: Callable[[], None]
    stop_operator: Callable[[], None]
    requests: RequestRecorder | None = None
    """What the operator sends to the API server, where that can be seen."""
    upgrade_chart: Callable[[], None] | None = None
    """Another release of the operator's chart, where it was installed by one."""
    restart_node: Callable[[], None] | None = None
    """All containers end, kubelet and runtime start again, where that can be done."""

    def manifest(self, name: str, spec: Mapping[str, Any] | None = None) -> Manifest:
        """An InferenceService of the small model on a CPU; `spec` is merged over it, a level at a time."""
        runtime: Manifest = {"extraArgs": ["--num-gpu-blocks-override=600", "--max-num-seqs=4"]}
        if self.image is not None:
            runtime["image"] = self.image
        base: Manifest = {"model": {"uri": self.model_uri}, "runtime": runtime, "accelerator": {"profile": "cpu"}}
        return {
            "apiVersion": "serving.reprise.io/v1alpha1",
            "kind": "InferenceService",
            "metadata": {"name": name},
            "spec": _merged(base, spec or {}),
        }

    def apply(self, name: str, spec: Mapping[str, Any] | None = None) -> Deployed:
        self.kubectl.apply(self.manifest(name, spec))
        return Deployed(site=self, name=name)

    @contextlib.contextmanager
    def deployed(self, name: str, spec: Mapping[str, Any] | None = None) -> Iterator[Deployed]:
        """Applied, and deleted at the end with all it owns."""
        service = self.apply(name, spec)
        try:
            yield service
        finally:
            service.delete()


def _merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> Manifest:
    merged = dict(base)
    for key, value in over.items():
        nested = isinstance(value, Mapping) and isinstance(base.get(key), Mapping)
        merged[key] = _merged(base[key], value) if nested else value
    return merged


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployed:
    """One InferenceService and what belongs to it."""

    site: Site
    name: str

    @property
    def kubectl(self) -> Kubectl:
        return self.site.kubectl

    def body(self) -> Manifest:
        return self.kubectl.get("inferenceservice", self.name) or {}

    def status(self) -> Manifest:
        return self.body().get("status") or {}

    def condition(self, kind: str, body: Manifest | None = None) -> Manifest:
        status = (self.body() if body is None else body).get("status") or {}
        return next((c for c in status.get("conditions") or () if c["type"] == kind), {})

    def deployment(self) -> Manifest:
        return self.kubectl.get("deployment", self.name) or {}

    def pods(self) -> list[Manifest]:
        """Those that are not on their way out."""
        pods = self.kubectl.list("pods", f"{NAME_LABEL}={self.name}")
        return [pod for pod in pods if not pod["metadata"].get("deletionTimestamp")]

    def pod_uids(self) -> set[str]:
        return {pod["metadata"]["uid"] for pod in self.pods()}

    def args(self) -> list[str]:
        """Of the engine container, as running pods have them."""
        pods = self.pods()
        assert pods, f"{self.name} has no pods"
        args: list[str] = pods[0]["spec"]["containers"][0]["args"]
        return args

    def patch(self, spec: Mapping[str, Any]) -> None:
        """A merge patch of the spec."""
        self.kubectl.patch("inferenceservice", self.name, {"spec": spec})

    def wait_ready(self, *, within: float = READY_SECONDS) -> None:
        """Ready of the present generation, as kstatus reads it; a state of Failed ends the wait at once."""

        def look() -> bool:
            body = self.body()
            state = kstatus(body)
            assert state != "Failed", self.condition("Stalled", body).get("message")
            return state == "Current"

        eventually(look, f"{self.name} is Ready ({self.condition('Ready').get('message')})", within=within)

    def wait_condition(self, kind: str, status: str, reason: str, *, within: float = READY_SECONDS) -> str:
        """Waits for status and reason of a condition; its message."""

        def look() -> Manifest | None:
            body = self.body()
            found = self.condition(kind, body)
            fresh = found.get("observedGeneration") == body["metadata"]["generation"]
            return found if fresh and (found["status"], found["reason"]) == (status, reason) else None

        try:
            message: str = eventually(look, f"{self.name} has {kind}={status}/{reason}", within=within)["message"]
        except AssertionError as error:
            raise AssertionError(f"{error}; it has {self.status().get('conditions')}") from None
        return message

    @contextlib.contextmanager
    def client(self, *, api_key: str = "none") -> Iterator[openai.OpenAI]:
        """An OpenAI client of the Service."""
        with self.site.reach(self.name) as url, openai.OpenAI(base_url=f"{url}/v1", api_key=api_key) as client:
            yield client

    def delete(self) -> None:
        """Deletes it and waits until its children are gone too."""
        self.kubectl.delete("inferenceservice", self.name, "--wait=true", "--timeout=60s")
        self.wait_gone()

    def wait_gone(self, *, within: float = 90.0) -> None:
        def left() -> list[str]:
            kinds = "deployments,replicasets,statefulsets,services,configmaps,pods"
            return self.kubectl("get", kinds, "-l", f"{NAME_LABEL}={self.name}", "-o", "name").split()

        eventually(lambda: not left(), f"children of {self.name} are gone", within=within)
