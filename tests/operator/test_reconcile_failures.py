"""One pass after another where something is wrong: what is said about it, what is left alone, and that it is cured.

As in test_reconcile.py the tests call the Reconciler, and write what a kubelet would say.
"""

from __future__ import annotations

import pytest

from reprise_operator.api import Body, ClusterError, Fault
from reprise_operator.cluster import Cluster, Key
from reprise_operator.observed import ObservedChild
from reprise_operator.server_side_apply import ApplyResult
from reprise_operator.workqueue import Retry
from tests.operator.reconcile_bench import NAME, Bench
from tests.support.kubectl import Kubectl, eventually


async def test_a_spec_that_cannot_be_honoured_leaves_the_pods_alone(bench: Bench) -> None:
    bench.apply()
    await bench.make_ready()
    before = bench.child("deployment")["spec"]
    bench.apply({"autoscaling": {"maxReplicas": 3, "metric": "cpu"}})
    assert await bench.writes() == [("patch", "inferenceservices"), ("create", "events")]
    status, reason, message = bench.condition("Stalled")
    assert (status, reason) == ("True", "InvalidSpec")
    assert "spec.autoscaling.metric cpu" in message
    assert bench.child("deployment")["spec"] == before
    assert bench.status()["readyReplicas"] == 1
    assert bench.events()[-1] == ("Warning", "InvalidSpec")
    assert await bench.writes() == []
    bench.kubectl("patch", "risvc", NAME, "--type=json", "-p", '[{"op": "remove", "path": "/spec/autoscaling"}]')
    await bench.settle()
    assert bench.condition("Ready")[0] == "True"


async def test_a_name_that_is_taken_is_left_alone(bench: Bench) -> None:
    foreign = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": NAME},
        "spec": {"selector": {"app": "theirs"}, "ports": [{"port": 99}]},
    }
    bench.kubectl.apply(foreign)
    bench.apply()
    await bench.settle()
    assert bench.condition("Stalled")[:2] == ("True", "NameTaken")
    assert bench.child("service")["spec"]["selector"] == {"app": "theirs"}
    bench.kubectl.delete("service", NAME)
    await bench.settle()
    assert bench.condition("Stalled")[0] == "False"
    assert bench.child("service")["metadata"]["ownerReferences"]


async def test_a_secret_that_does_not_exist_is_named_and_its_creation_is_the_cure(bench: Bench) -> None:
    bench.apply({"auth": {"apiKeySecretRef": {"name": "keys"}}})
    await bench.settle()
    status, reason, message = bench.condition("Stalled")
    assert (status, reason) == ("True", "SecretNotFound")
    assert "keys" in message
    assert (await bench.reconcile()) is not None, "it looks again by itself: no event tells of the Secret"
    bench.kubectl.apply({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "keys"}})
    await bench.settle()
    assert bench.condition("Stalled")[1] == "SecretKeyNotFound", "it is there, but the key is not"
    bench.kubectl.apply(
        {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "keys"}, "stringData": {"api-key": "x"}}
    )
    bench.clock.now += 61.0
    await bench.settle()
    assert bench.condition("Stalled")[0] == "False"


async def test_a_crash_is_told_in_the_containers_own_words(bench: Bench) -> None:
    bench.apply()
    await bench.settle()
    eventually(bench.pods, "there are pods")
    await bench.settle()
    bench.kubelet_says(
        phase="Running",
        containerStatuses=[
            {
                "name": "engine",
                "image": "x",
                "imageID": "",
                "ready": False,
                "restartCount": 3,
                "state": {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 40s restarting"}},
                "lastState": {
                    "terminated": {
                        "exitCode": 3,
                        "reason": "Error",
                        "message": "UnsupportedModel: LlavaForConditionalGeneration is multimodal",
                    }
                },
            }
        ],
    )
    await bench.settle()
    status, reason, message = bench.condition("Stalled")
    assert (status, reason) == ("True", "UnsupportedModel")
    assert "LlavaForConditionalGeneration" in message
    assert bench.events()[-1] == ("Warning", "UnsupportedModel")


async def test_a_refused_apply_is_stalled_with_the_servers_words(bench: Bench) -> None:
    bench.apply({"podTemplate": {"volumeMounts": [{"name": "absent", "mountPath": "/absent"}]}})
    await bench.settle_but_for_refusals()
    status, reason, message = bench.condition("Stalled")
    assert (status, reason) == ("True", "ApplyRefused")
    assert "volumeMounts" in message
    assert "absent" in message
    bench.apply({"podTemplate": {}})
    await bench.settle()
    assert bench.condition("Stalled")[0] == "False"


async def test_a_refused_change_that_is_taken_back_leaves_no_trace(bench: Bench) -> None:
    bench.apply()
    await bench.make_ready()
    bench.apply({"podTemplate": {"volumeMounts": [{"name": "absent", "mountPath": "/absent"}]}})
    await bench.settle_but_for_refusals()
    assert bench.condition("Stalled")[:2] == ("True", "ApplyRefused")
    bench.apply({"podTemplate": {}})
    await bench.settle()
    assert bench.condition("Stalled")[0] == "False"
    assert bench.condition("Ready")[0] == "True"


async def test_what_a_failing_webhook_says_is_in_the_status_while_the_apply_is_tried_again(bench: Bench) -> None:
    class Webhook(Cluster):
        async def apply(
            self, manifest: Body, *, present: ObservedChild | None, hand_over: int | None = None
        ) -> ApplyResult:
            if manifest["kind"] == "Deployment":
                raise ClusterError(Fault.UNAVAILABLE, 'failed calling webhook "policy.example"', status=500)
            return await super().apply(manifest, present=present, hand_over=hand_over)

    sound = bench.reconciler.cluster
    bench.reconciler.cluster = Webhook(sound._api)
    bench.apply()
    with pytest.raises(Retry, match="failed calling webhook"):
        await bench.reconcile()
    status, reason, message = bench.condition("Reconciling")
    assert (status, reason) == ("True", "Applying")
    assert 'Deployment/qwen is not applied yet, and tried again: failed calling webhook "policy.example"' in message
    bench.reconciler.cluster = sound
    await bench.make_ready()


async def test_a_server_that_fails_is_a_retry_and_counted(kubectl: Kubectl, bench: Bench) -> None:
    class Down:
        async def get_service(self, _: Key) -> None:
            raise ClusterError(Fault.UNAVAILABLE, "no answer", retry_after=7.0)

    bench.reconciler.cluster = Down()  # type: ignore[assignment]
    with pytest.raises(Retry, match="no answer") as retry:
        await bench.reconcile()
    assert retry.value.after == 7.0
    value = bench.reconciler.metrics.registry.get_sample_value
    assert value("reprise_operator_reconcile_total", {"outcome": "retry"}) == 1.0
