"""What the tests read and patch by plain requests is what kubectl reads and patches."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from reprise_operator.kinds import DEPLOYMENTS, INFERENCE_SERVICES
from tests.support.apiserver import ApiServer
from tests.support.cluster import install_crd
from tests.support.kubectl import Kubectl, KubectlFailed, namespace
from tests.support.life_story import qualified
from tests.support.plain_requests import NotAnswered, apply, get, get_all, merge_patch

Manifest = dict[str, Any]
SERVICE: Manifest = {
    "apiVersion": "serving.reprise.io/v1alpha1",
    "kind": "InferenceService",
    "metadata": {"name": "qwen", "labels": {"which": "one"}},
    "spec": {"model": {"uri": "hostpath:///m"}, "accelerator": {"profile": "cpu"}},
}


@pytest.fixture
def kubectl(api_server: ApiServer) -> Iterator[Kubectl]:
    everywhere = Kubectl(kubeconfig=api_server.kubeconfig_path)
    install_crd(everywhere)
    kubectl = Kubectl(kubeconfig=api_server.kubeconfig_path, namespace=f"plain-{uuid.uuid4().hex[:8]}")
    kubectl.put(namespace(kubectl.namespace))
    kubectl.put(SERVICE)
    yield kubectl
    kubectl.delete_namespace()


def told(kubectl: Kubectl, *args: str) -> Any:
    return json.loads(kubectl("get", *args, "-o", "json", "--show-managed-fields"))


@pytest.mark.parametrize("kind", ["inferenceservice", "inferenceservices", "risvc", qualified(INFERENCE_SERVICES)])
def test_an_object_by_every_name_of_its_kind(kubectl: Kubectl, kind: str) -> None:
    assert get(kubectl.kubeconfig, kubectl.namespace, kind, "qwen") == told(kubectl, kind, "qwen")
    assert get(kubectl.kubeconfig, kubectl.namespace, kind, "absent") is None


@pytest.mark.parametrize("name", ["default", "absent"])
def test_an_object_without_a_namespace(kubectl: Kubectl, name: str) -> None:
    found = get(kubectl.kubeconfig, kubectl.namespace, "namespace", name)
    assert (found is None) == (name == "absent")
    assert found is None or found == told(kubectl, "namespace", name)


@pytest.mark.parametrize("selector", ["", "which=one", "which=other"])
@pytest.mark.parametrize("kind", ["risvc", "configmaps", qualified(DEPLOYMENTS), "pods"])
def test_a_list(kubectl: Kubectl, kind: str, selector: str) -> None:
    listed = get_all(kubectl.kubeconfig, kubectl.namespace, kind, selector)
    assert listed == told(kubectl, kind, f"--selector={selector}")["items"]
    assert kind != "risvc" or len(listed) == (selector != "which=other")


def test_a_patch(kubectl: Kubectl) -> None:
    merge_patch(kubectl.kubeconfig, kubectl.namespace, "risvc", "qwen", {"spec": {"replicas": 2}}, status=False)
    told_status = {"status": {"observedGeneration": 1}}
    merge_patch(kubectl.kubeconfig, kubectl.namespace, "risvc", "qwen", told_status, status=True)
    found = told(kubectl, "risvc", "qwen")
    assert (found["spec"]["replicas"], found["status"]["observedGeneration"]) == (2, 1)
    managers = {entry["manager"] for entry in found["metadata"]["managedFields"]}
    assert managers == {"kubectl-client-side-apply", "kubectl-patch"}


def history(kubectl: Kubectl, name: str, put: Callable[[Manifest], object]) -> list[Manifest]:
    """What there is after each of some applies, without what is of the moment."""
    steps: list[Manifest] = [
        {"replicas": 2, "runtime": {"extraArgs": ["--a", "--b"], "env": [{"name": "A", "value": "<&> é"}]}},
        {"replicas": 2, "runtime": {"extraArgs": ["--b"]}, "prefixCaching": {"enabled": False}},
        {"prefixCaching": {"enabled": True}},
        {"prefixCaching": {"enabled": True}},
    ]
    found: list[Manifest] = []
    for labels, spec in zip(({"a": "b", "c": "d"}, {"c": "e"}, {}, {}), steps, strict=True):
        put({**SERVICE, "metadata": {"name": name, "labels": labels}, "spec": SERVICE["spec"] | spec})
        told_now = told(kubectl, "risvc", name)
        metadata = told_now["metadata"]
        fields = [{**entry, "time": None} for entry in metadata["managedFields"]]
        changed = metadata["resourceVersion"] != (found[-1]["version"] if found else "")
        annotations = {key: text.replace(name, "NAME") for key, text in metadata["annotations"].items()}
        kept = {"labels": metadata.get("labels"), "annotations": annotations, "generation": metadata["generation"]}
        found.append(kept | {"spec": told_now["spec"], "fields": fields, "changed": changed})
        found[-1]["version"] = metadata["resourceVersion"]
    return [{key: value for key, value in each.items() if key != "version"} for each in found]


def test_an_apply(kubectl: Kubectl) -> None:
    """Of what is new, of a change that adds, sets and takes away, and of the same again."""
    mine = history(kubectl, "mine", lambda manifest: apply(kubectl.kubeconfig, kubectl.namespace, manifest))
    assert mine == history(kubectl, "typed", kubectl.apply)
    assert [each["changed"] for each in mine] == [True, True, True, False]
    with pytest.raises(NotAnswered):
        apply(kubectl.kubeconfig, kubectl.namespace, {**SERVICE, "spec": {"replicas": -1}})
    config: Manifest = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "c"}, "data": {"a": "b"}}
    apply(kubectl.kubeconfig, kubectl.namespace, config)
    assert told(kubectl, "configmap", "c")["data"] == {"a": "b"}
    with pytest.raises(NotAnswered):
        apply(kubectl.kubeconfig, kubectl.namespace, config | {"data": {}})


def test_what_does_not_succeed_is_told_in_kubectl_s_words(kubectl: Kubectl) -> None:
    with pytest.raises(NotAnswered):
        get_all(kubectl.kubeconfig, kubectl.namespace, "unheard", "")
    with pytest.raises(KubectlFailed, match='the server doesn\'t have a resource type "unheard"'):
        kubectl.list("unheard")
    with pytest.raises(KubectlFailed, match=r'The InferenceService "qwen" is invalid|is invalid: spec.replicas'):
        kubectl.patch("risvc", "qwen", {"spec": {"replicas": -1}})
    with pytest.raises(KubectlFailed, match="not found"):
        kubectl.patch("risvc", "absent", {"spec": {"replicas": 1}})
