"""The life of InferenceServices as their users lead it, chapter by chapter: what an operator must be allowed to do.

Written for tests that watch what the operator sends meanwhile. A chapter asks for something by kubectl and waits for
what users see; it neither knows nor says which requests that takes. A new kind of child needs a chapter that makes one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from reprise_operator.kinds import ALL_CHILD_TYPES, WORKLOAD_KINDS, ResourceType
from reprise_operator.naming import NAME_LABEL
from tests.support.kubectl import Kubectl, eventually, secret

Manifest = dict[str, Any]
PATIENCE_SECONDS = 45.0

CHAPTERS: tuple[tuple[str, Mapping[str, Any]], ...] = (
    ("plain", {}),
    ("keyed", {"auth": {"apiKeySecretRef": {"name": "keys"}}, "model": {"uri": "pvc://models/qwen"}}),
    ("kept", {"disruption": {"minAvailable": 1}, "replicas": 2}),
    ("monitored", {"monitoring": {"podMonitor": {"enabled": True}}}),
    ("scaled", {"autoscaling": {"minReplicas": 1, "maxReplicas": 3, "provider": "hpa"}}),
    (
        "eventful",
        {
            "autoscaling": {
                "minReplicas": 1,
                "maxReplicas": 3,
                "provider": "keda",
                "prometheus": {"serverAddress": "http://prometheus.example:9090"},
            }
        },
    ),
    ("persistent", {"prefixCaching": {"persistence": {"size": "1Gi"}}}),
    ("warmed", {"prefixCaching": {"warmup": {"prompts": ["You are"]}}}),
    (
        "routed",
        {
            "gateway": {
                "parentRefs": [{"name": "gate"}],
                "hostnames": ["qwen.example"],
                "inferencePool": True,
                "endpointPicker": {"name": "picker"},
            }
        },
    ),
    ("fetched", {"model": {"uri": "hf://org/name@main"}}),
)
"""Name of a service → the spec that is merged over a small one. What the operator does not honour yet it refuses, and a
chapter is then over as soon as it says so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    """`tell` leads the services through their lives in `kubectl`'s namespace."""

    kubectl: Kubectl

    def tell(self) -> None:
        # A Secret and a claim that do not exist at first, as it often goes.
        self.kubectl.apply(*(service(name, spec) for name, spec in CHAPTERS))
        for name, _ in CHAPTERS:
            eventually(partial(self._is_told, name), f"{name} is told about", within=PATIENCE_SECONDS)
        self.kubectl.apply(secret("keys", **{"api-key": "abc"}))
        eventually(lambda: self._reason("keyed") != "SecretNotFound", "the Secret is found", within=PATIENCE_SECONDS)
        self._drift()
        self._leftovers()
        self.kubectl.patch("inferenceservice", "plain", {"spec": {"suspend": True}})
        eventually(lambda: self._replicas("plain") == 0, "the suspended one has no pods", within=PATIENCE_SECONDS)
        names = [name for name, _ in CHAPTERS]
        self.kubectl("delete", "inferenceservice", *names, "--wait=true", f"--timeout={PATIENCE_SECONDS:.0f}s")
        eventually(lambda: not self._children(), "the children go with their owners", within=PATIENCE_SECONDS)

    def _drift(self) -> None:
        """Somebody edits a child by hand, and deletes one."""
        self.kubectl.patch("deployment", "plain", {"spec": {"replicas": 3}})
        eventually(lambda: self._replicas("plain") == 1, "the edit is set back", within=PATIENCE_SECONDS)
        self.kubectl.delete("service", "plain")
        eventually(lambda: self.kubectl.get("service", "plain"), "the Service is back", within=PATIENCE_SECONDS)

    def _leftovers(self) -> None:
        """Of each kind of child one that no plan names, as an older release may have left it, is deleted."""
        left = []
        for resource in ALL_CHILD_TYPES:
            if resource.kind in WORKLOAD_KINDS:
                continue  # one that no plan names serves on until another does (handover.py)
            made = next(iter(self.kubectl.list(qualified(resource), NAME_LABEL)), None)
            if made is not None:
                self.kubectl("create", "-f", "-", stdin=_text(leftover(made)))
                left.append((resource, f"{made['metadata']['name']}-left"))
        for resource, name in left:
            gone = f"the leftover {resource.kind} is deleted"
            eventually(partial(self._is_gone, resource, name), gone, within=PATIENCE_SECONDS)

    def _is_gone(self, resource: ResourceType, name: str) -> bool:
        return self.kubectl.get(qualified(resource), name) is None

    def _is_told(self, name: str) -> bool:
        """Whether the operator has said something about the present spec that is not "wait"."""
        body = self.kubectl.get("inferenceservice", name) or {}
        return bool((body.get("status") or {}).get("observedGeneration") == body["metadata"]["generation"])

    def _reason(self, name: str) -> str:
        body = self.kubectl.get("inferenceservice", name) or {}
        found = [item for item in body["status"]["conditions"] if item["type"] == "Ready"]
        return str(found[0]["reason"])

    def _replicas(self, name: str) -> int:
        body = self.kubectl.get("deployment", name)
        return -1 if body is None else int(body["spec"]["replicas"])

    def _children(self) -> list[Manifest]:
        return [child for resource in ALL_CHILD_TYPES for child in self.kubectl.list(qualified(resource), NAME_LABEL)]


def service(name: str, spec: Mapping[str, Any]) -> Manifest:
    base = {"model": {"uri": "hostpath:///m"}, "accelerator": {"profile": "cpu"}}
    return {
        "apiVersion": "serving.reprise.io/v1alpha1",
        "kind": "InferenceService",
        "metadata": {"name": name},
        "spec": {**base, **spec},
    }


def leftover(child: Manifest) -> Manifest:
    """A copy of a child under a name of its own, with the same owner."""
    metadata = {
        key: child["metadata"][key] for key in ("labels", "annotations", "ownerReferences") if key in child["metadata"]
    }
    spec = dict(child.get("spec") or {})
    for given_by_the_server in ("clusterIP", "clusterIPs", "healthCheckNodePort"):
        spec.pop(given_by_the_server, None)
    rest = {key: child[key] for key in ("data",) if key in child}
    return {
        "apiVersion": child["apiVersion"],
        "kind": child["kind"],
        "metadata": {**metadata, "name": f"{child['metadata']['name']}-left"},
        **({"spec": spec} if spec else {}),
        **rest,
    }


def qualified(resource: ResourceType) -> str:
    """As kubectl takes it without doubt: plural.version.group."""
    version = resource.api_version.rpartition("/")[2]
    return f"{resource.plural}.{version}.{resource.group}" if resource.group else resource.plural


def stand_ins(kubectl: Kubectl) -> Iterator[Manifest]:
    """CRDs for the kinds of child that this API server does not have (of operators that are not installed): they take
    anything. For a story that only asks whether they may be written."""
    served = set(kubectl("api-resources", "--verbs=list", "-o", "name").split())
    for resource in ALL_CHILD_TYPES:
        name = f"{resource.plural}.{resource.group}" if resource.group else resource.plural
        if name not in served:
            yield _anything(resource, name)


def _anything(resource: ResourceType, name: str) -> Manifest:
    schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    version = {
        "name": resource.api_version.rpartition("/")[2],
        "served": True,
        "storage": True,
        "schema": {"openAPIV3Schema": schema},
    }
    names = {"plural": resource.plural, "kind": resource.kind, "singular": resource.kind.lower()}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        # *.k8s.io groups are the community's own: without its approval the API server refuses a CRD of them.
        "metadata": {"name": name, "annotations": {"api-approved.kubernetes.io": "unapproved, for a test"}},
        "spec": {"group": resource.group, "scope": "Namespaced", "names": names, "versions": [version]},
    }


def _text(manifest: Manifest) -> str:
    return json.dumps(manifest)
