"""What disturbs pods: deletion by hand, a drain, too little memory, a node that starts anew, another operator.

Whoever can serve goes on, and all is as before at the end.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.e2e.conversation import Conversation
from tests.e2e.serving import Serving, serving
from tests.e2e.site import Deployed, Site
from tests.support.kubectl import KubectlFailed, eventually

pytestmark = [pytest.mark.e2e, pytest.mark.cluster, pytest.mark.timeout(600)]

PAIR: dict[str, Any] = {"replicas": 2, "disruption": {"minAvailable": 1}}


def ready_again(service: Deployed, replicas: int) -> bool:
    status = service.status()
    return service.condition("Ready")["status"] == "True" and status.get("readyReplicas") == replicas


def test_a_pod_that_is_deleted_is_replaced_while_the_other_serves(site: Site) -> None:
    with site.deployed("paired", PAIR) as service:
        service.wait_ready()
        before = service.pod_uids()
        with site.reach("paired") as url:
            victim = service.pods()[0]
            site.kubectl("delete", "pod", victim["metadata"]["name"], "--wait=false")
            serving(service, url).while_waiting_for(
                lambda: len(service.pod_uids() - before) == 1 and ready_again(service, 2), "both serve again"
            )
        assert service.condition("Available")["status"] == "True"
        assert before - service.pod_uids() == {victim["metadata"]["uid"]}


def test_a_drain_leaves_what_the_disruption_budget_asks_for(site: Site) -> None:
    if site.requests is not None:
        pytest.skip("the nodes of a cluster of our own evict nobody")
    with site.deployed("drained", PAIR) as service:
        service.wait_ready()
        nodes = {pod["spec"]["nodeName"] for pod in service.pods()}
        selector = f"--pod-selector=serving.reprise.io/name={service.name}"
        try:
            site.kubectl("cordon", *nodes)
            with pytest.raises(KubectlFailed) as refused:
                site.kubectl("drain", *nodes, selector, "--delete-emptydir-data", "--timeout=20s")
            assert "disruption budget" in refused.value.stderr
            Serving(service, None).while_waiting_for(
                lambda: service.condition("Ready")["status"] == "False", "it says that it is not whole"
            )
            assert service.condition("Available")["status"] == "True"
        finally:
            site.kubectl("uncordon", *nodes)
        Serving(service, None).while_waiting_for(lambda: ready_again(service, 2), "both serve again")


def test_a_container_killed_for_its_memory_is_told_from_an_npu_without(site: Site) -> None:
    if site.requests is not None:
        pytest.skip("the pods of a cluster of our own are processes without a memory limit")
    little = {"limits": {"memory": "160Mi"}, "requests": {"memory": "160Mi"}}
    # Too little to import torch, so that nothing asks for the NPU, which these nodes only say they have.
    spec = {"runtime": {"resources": little}, "accelerator": {"profile": "ascend910", "driver": "runtime"}}
    with site.deployed("starved", spec) as service:
        message = service.wait_condition("Stalled", "True", "OutOfMemory")
        assert "resources.limits.memory" in message
        ended = [
            container.get("lastState", {}).get("terminated") or container["state"].get("terminated") or {}
            for pod in service.pods()
            for container in pod["status"]["containerStatuses"]
        ]
        assert "OOMKilled" in {each.get("reason") for each in ended}
        # No smaller share of a device would have helped.
        assert service.status()["memory"].get("steps", 0) == 0


def test_a_node_that_restarts(site: Site) -> None:
    if site.restart_node is None:
        pytest.skip("REPRISE_E2E_RESTART_NODE names no program that restarts a node")
    with site.deployed("rebooted") as service:
        service.wait_ready()
        with service.client() as client:
            Conversation(client=client, model="rebooted").say("What is the capital of France?")

        old = service.pod_uids()

        def serves_again() -> bool:
            """Another container does: what is said of the old one may stand until the kubelet looks."""
            pods = service.pods()
            return bool(pods) and all(
                container["ready"] and (container["restartCount"] > 0 or pod["metadata"]["uid"] not in old)
                for pod in pods
                for container in pod["status"].get("containerStatuses") or [{"ready": False}]
            )

        site.restart_node()
        eventually(serves_again, "another container is ready", within=240)
        eventually(lambda: ready_again(service, 1), "the service is", within=30)
        with service.client() as client:
            talk = Conversation(client=client, model="rebooted")
            talk.say("What is the capital of France?")
            again = talk.say("And of Italy?")
        assert again.cached_tokens > 0


def test_an_upgrade_of_the_chart_touches_no_pod(site: Site) -> None:
    if site.upgrade_chart is None:
        pytest.skip("the operator of a cluster of our own was not installed by the chart")
    with site.deployed("upgraded") as service:
        service.wait_ready()
        pods, generation = service.pod_uids(), service.deployment()["metadata"]["generation"]
        site.upgrade_chart()
        service.patch({"service": {"sessionAffinity": "ClientIP"}})

        def done() -> bool:
            found = site.kubectl.get("service", "upgraded") or {}
            return bool(found["spec"]["sessionAffinity"] == "ClientIP" and ready_again(service, 1))

        eventually(done, "the new operator works", within=120)
        assert service.pod_uids() == pods
        assert service.deployment()["metadata"]["generation"] == generation
