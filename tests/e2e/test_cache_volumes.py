"""Warm-up and volumes, on any cluster: a pod begins with its prompts, and a new one with what the one before had."""

from __future__ import annotations

from typing import Any

import pytest

from tests.e2e.site import Deployed, Site
from tests.support.kubectl import eventually

pytestmark = [pytest.mark.e2e, pytest.mark.cluster]

SYSTEM = "You are the assistant of a library. Answer in one sentence, and name the shelf. " * 4
OTHER = "The quick brown fox jumps over the lazy dog, and the lazy dog does not mind it at all. " * 4


def cached(service: Deployed, prompt: str) -> tuple[int, int]:
    """(cached tokens, tokens) of a prompt."""
    with service.client() as client:
        answer = client.completions.create(model=service.name, prompt=prompt, max_tokens=1)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    return answer.usage.prompt_tokens_details.cached_tokens or 0, answer.usage.prompt_tokens


def test_a_service_is_warm_before_it_is_ready_and_keeps_its_blocks(site: Site) -> None:
    if not site.model_uris and not _has_default_class(site):
        pytest.skip("the cluster has no default StorageClass: nobody makes the volumes")
    spec: dict[str, Any] = {
        "prefixCaching": {
            "warmup": {"prompts": [SYSTEM], "timeoutSeconds": 60},
            "persistence": {"size": "1Gi"},
            "hostMemory": "64Mi",
        }
    }
    with site.deployed("volumes", spec) as service:
        service.wait_ready()
        found, tokens = cached(service, SYSTEM)
        assert found == tokens - 1, "the prompt of the spec was not computed before the pod was ready"
        assert cached(service, OTHER)[0] < 16
        (pod,) = service.pods()
        assert pod["metadata"]["ownerReferences"][0]["kind"] == "StatefulSet"

        service.kubectl.delete("pod", pod["metadata"]["name"], "--wait=true", "--timeout=120s")
        eventually(lambda: service.pod_uids() and pod["metadata"]["uid"] not in service.pod_uids(), "another pod")
        service.wait_ready()
        found, tokens = cached(service, OTHER)
        assert found >= tokens // 2, "what the pod before had computed is not on its volume"

        # Without the volume: the same pods' work by a Deployment, and no moment without one that serves.
        service.patch({"prefixCaching": {"persistence": None}})
        service.wait_ready()
        eventually(lambda: owners_of_pods(service) == ["ReplicaSet"], "the StatefulSet's pod has gone")
        assert cached(service, SYSTEM)[0] > 0


def owners_of_pods(service: Deployed) -> list[str]:
    return [pod["metadata"]["ownerReferences"][0]["kind"] for pod in service.pods()]


def _has_default_class(site: Site) -> bool:
    classes = site.kubectl("get", "storageclasses", "-o", "jsonpath={.items[*].metadata.annotations}")
    return '"storageclass.kubernetes.io/is-default-class":"true"' in classes.replace(" ", "")
