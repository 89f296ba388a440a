"""What goes wrong is said once, in the right place, and nothing else stops working."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from tests.e2e.site import Site
from tests.support.kubectl import KubectlFailed, eventually, secret

pytestmark = [pytest.mark.e2e, pytest.mark.cluster]

VLLM: Mapping[str, Any] = {"runtime": {"name": "vllm-ascend"}, "accelerator": {"profile": "ascend910"}}


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"memory": {"utilization": 1.5}}, "utilization"),
        ({"memory": {"utilization": 0}}, "utilization"),
        ({"replicas": -1}, "spec.replicas"),
        ({"model": {"uri": "smollm2"}}, "hostpath://"),
        ({"model": {"uri": "ftp://somewhere/model"}}, "hostpath://"),
        ({"prefixCaching": {"enabled": "yes"}}, "spec.prefixCaching.enabled"),
        ({"prefixCachng": {"enabled": True}}, 'unknown field "spec.prefixCachng"'),
        ({"runtime": {"extraArgs": ["--gpu_memory-utilization=0.5"]}}, "extraArgs"),
        ({"runtime": {"extraArgs": ["--no-enable-prefix-caching"]}}, "extraArgs"),
        (
            {**VLLM, "model": {"maxModelLen": 4096}, "chunkedPrefill": {"enabled": True}},
            "vllm-ascend cannot combine prefix caching",
        ),
        ({**VLLM, "model": {"maxModelLen": 131_072}}, "at most 65536"),
        (VLLM, "model.maxModelLen"),
    ],
)
def test_an_invalid_manifest_is_refused_with_the_reason(site: Site, spec: Mapping[str, Any], words: str) -> None:
    with pytest.raises(KubectlFailed) as failure:
        site.apply("refused", spec)
    assert words in failure.value.stderr
    assert site.kubectl.get("inferenceservice", "refused") is None


def test_an_image_that_cannot_be_pulled(site: Site) -> None:
    image = "registry.invalid/reprise/absent:1"
    with site.deployed("imageless", {"runtime": {"image": image}}) as service:
        message = service.wait_condition("Stalled", "True", "ImagePullFailed", within=120)
        assert image in message
        assert service.condition("Available")["status"] == "False"


def test_a_secret_that_does_not_exist_and_then_does(site: Site) -> None:
    site.kubectl.delete("secret", "late-keys")
    spec = {"auth": {"apiKeySecretRef": {"name": "late-keys", "key": "token"}}}
    with site.deployed("keyless", spec) as service:
        message = service.wait_condition("Stalled", "True", "SecretNotFound", within=60)
        assert "late-keys" in message
        site.kubectl.apply(secret("late-keys", token="x"))
        service.wait_condition("Ready", "True", "Ready")


def test_a_model_that_is_not_there(site: Site) -> None:
    with site.deployed("modelless", {"model": {"uri": "hostpath:///models/absent"}}) as service:
        message = service.wait_condition("Stalled", "True", "VolumeMountFailed", within=180)
        assert "/models/absent is not a directory" in message


def test_a_wrong_engine_argument_is_quoted(site: Site) -> None:
    with site.deployed("argued", {"runtime": {"extraArgs": ["--no-such-flag"]}}) as service:
        message = service.wait_condition("Stalled", "True", "InvalidArguments", within=180)
        assert "--no-such-flag" in message


def test_a_claim_that_does_not_exist(site: Site) -> None:
    with site.deployed("claimless", {"model": {"uri": "pvc://absent/model"}}) as service:
        message = service.wait_condition("Stalled", "True", "ClaimNotFound", within=60)
        assert "absent" in message


def test_a_name_that_is_taken_is_left_alone(site: Site) -> None:
    site.kubectl.delete("deployment", "taken")
    foreign = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "taken", "labels": {"whose": "mine"}},
        "spec": {
            "replicas": 0,
            "selector": {"matchLabels": {"app": "taken"}},
            "template": {
                "metadata": {"labels": {"app": "taken"}},
                "spec": {"containers": [{"name": "main", "image": "registry.invalid/mine:1"}]},
            },
        },
    }
    site.kubectl.apply(foreign)
    service = site.apply("taken")
    message = service.wait_condition("Stalled", "True", "NameTaken", within=30)
    assert "taken" in message
    found = site.kubectl.get("deployment", "taken") or {}
    assert found["metadata"]["labels"] == {"whose": "mine"}
    assert "ownerReferences" not in found["metadata"]
    # The way out that the message offers: once the name is free, the service goes on by itself.
    site.kubectl.delete("deployment", "taken")
    service.wait_condition("Ready", "True", "Ready")
    service.delete()


def test_too_few_npus_leave_the_others_serving(site: Site) -> None:
    # The nodes have two; nothing of the kind runs on a CPU, so only the scheduling is looked at.
    spec = {"accelerator": {"profile": "ascend910"}, "replicas": 3, "runtime": {"image": "registry.invalid/npu:1"}}
    with site.deployed("npus", spec) as service:

        def unscheduled() -> list[str]:
            return [
                condition["message"]
                for pod in service.pods()
                for condition in pod.get("status", {}).get("conditions") or ()
                if condition["type"] == "PodScheduled" and condition.get("reason") == "Unschedulable"
            ]

        messages = eventually(unscheduled, "one pod finds no NPU", within=60)
        assert len(messages) == 1
        assert "huawei.com/Ascend910" in messages[0]
