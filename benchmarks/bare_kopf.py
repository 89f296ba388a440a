"""The least that kopf handlers can do for an InferenceService: its Deployment and its Service are created, and one
field of the spec is handed on. No status, no drift repair, no server-side apply, no lease. The operator is measured
beside it.

    python -m kopf run --all-namespaces --standalone benchmarks/bare_kopf.py
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import kopf
from kubernetes.aio.client import ApiClient, AppsV1Api, Configuration, CoreV1Api, V1Deployment, V1Service
from kubernetes.aio.config import load_kube_config

GROUP, PLURAL = "serving.reprise.io", "inferenceservices"
LABEL = "app.kubernetes.io/managed-by"


def args(spec: Mapping[str, Any]) -> list[str]:
    return ["serve", "/model", "--max-model-len", str(spec["model"].get("maxModelLen", 4096))]


def children(name: str, spec: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    labels = {"app": name, LABEL: "bare-kopf"}
    container = {"name": "engine", "image": "engine:1", "args": args(spec), "ports": [{"containerPort": 8000}]}
    deployment = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": name, "labels": labels},
        "spec": {
            "selector": {"matchLabels": {"app": name}},
            "template": {"metadata": {"labels": labels}, "spec": {"containers": [container]}},
        },
    }
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name, "labels": labels},
        "spec": {"selector": {"app": name}, "ports": [{"port": 8000}]},
    }
    return deployment, service


@kopf.on.startup()
async def start(memo: kopf.Memo, settings: kopf.OperatorSettings, **_: Any) -> None:
    settings.posting.enabled = False
    configuration = Configuration()
    await load_kube_config(os.environ["KUBECONFIG"], client_configuration=configuration)  # type: ignore[no-untyped-call]
    memo.api = ApiClient(configuration)


@kopf.on.cleanup()
async def stop(memo: kopf.Memo, **_: Any) -> None:
    await memo.api.close()


@kopf.on.create(GROUP, PLURAL)
async def create(body: kopf.Body, spec: kopf.Spec, name: str, namespace: str | None, memo: Any, **_: Any) -> None:
    deployment, service = children(name, spec)
    for child in (deployment, service):
        kopf.adopt(child, owner=body)
    await CoreV1Api(memo.api).create_namespaced_service(str(namespace), V1Service.model_validate(service))
    await AppsV1Api(memo.api).create_namespaced_deployment(str(namespace), V1Deployment.model_validate(deployment))


@kopf.on.update(GROUP, PLURAL, field="spec")
async def update(spec: kopf.Spec, name: str, namespace: str | None, memo: Any, **_: Any) -> None:
    container = {"name": "engine", "args": args(spec)}
    change = {"spec": {"template": {"spec": {"containers": [container]}}}}
    await AppsV1Api(memo.api).patch_namespaced_deployment(
        name, str(namespace), change, _content_type="application/strategic-merge-patch+json"
    )
