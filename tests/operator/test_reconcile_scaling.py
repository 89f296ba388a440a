"""Scaling on an API server: who decides the number of pods, and that it never jumps when that changes.

The autoscaler's writes are `kubectl scale` of the workload, except where kube-controller-manager runs its own.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.operator.reconcile_bench import NAME, Bench
from tests.support.apiserver import ApiServer
from tests.support.factories import PROMETHEUS
from tests.support.kubectl import Kubectl, KubectlFailed, eventually

KEDA_DEFINITION = Path(__file__).parent / "data" / "keda_scaledobjects.yaml"
HPA: dict[str, Any] = {"autoscaling": {"minReplicas": 2, "maxReplicas": 6}}
KEDA: dict[str, Any] = {
    "autoscaling": {"minReplicas": 2, "maxReplicas": 6, "provider": "keda", "prometheus": PROMETHEUS}
}
TO_ZERO: dict[str, Any] = {"autoscaling": {**KEDA["autoscaling"], "minReplicas": 0}}
HPA_SECONDS = 60.0
"""The HPA controller looks every second (tests/support/apiserver.py), and takes its time where it is asked much."""


@pytest.fixture
def keda(bench: Bench) -> Iterator[None]:
    """A cluster where KEDA is installed."""
    with keda_installed(bench.kubectl):
        yield


@contextlib.contextmanager
def keda_installed(kubectl: Kubectl) -> Iterator[None]:
    kubectl.apply(yaml.safe_load(KEDA_DEFINITION.read_text()))
    kubectl("wait", "--for=condition=Established", "crd/scaledobjects.keda.sh")
    eventually(lambda: _is_served(kubectl), "ScaledObjects are served")
    try:
        yield
    finally:
        kubectl.delete("crd", "scaledobjects.keda.sh", "--wait=true")


def _is_served(kubectl: Kubectl) -> bool:
    try:
        kubectl("get", "--raw", f"/apis/keda.sh/v1alpha1/namespaces/{kubectl.namespace}/scaledobjects")
    except KubectlFailed:
        return False
    return True


class Watch:
    """The numbers of pods in the workload's spec, as a watch saw them."""

    def __init__(self, kubectl: Kubectl, path: Path) -> None:
        self._path = path
        self._kubectl = kubectl

    @contextlib.contextmanager
    def running(self) -> Iterator[Watch]:
        command = [self._kubectl.program, "--namespace", self._kubectl.namespace]
        command += ["get", "deployment", NAME, "--watch", "-o", 'jsonpath={.spec.replicas}{"\\n"}']
        with self._path.open("wb") as output:
            process = subprocess.Popen(command, stdout=output, env=dict(self._kubectl.environment))
        try:
            eventually(lambda: self.values, "the watch has begun")
            yield self
            # A last change that the watch must deliver: what came before it has been seen then.
            before = len(self._lines())
            self._kubectl.patch("deployment", NAME, {"metadata": {"annotations": {"end": "1"}}})
            eventually(lambda: len(self._lines()) > before, "the watch has seen the end")
        finally:
            process.terminate()
            process.wait()

    def _lines(self) -> list[int]:
        return [int(line) for line in self._path.read_text().split()]

    @property
    def values(self) -> list[int]:
        """In order, repetitions left out."""
        lines = self._lines()
        return [value for index, value in enumerate(lines) if index == 0 or lines[index - 1] != value]


def replicas(bench: Bench) -> int:
    return int(bench.child("deployment")["spec"]["replicas"])


async def counted(bench: Bench, count: int) -> None:
    """Waits until the workload's controller counts so many pods, and the service says so."""
    eventually(lambda: bench.child("deployment")["status"].get("replicas", 0) == count, f"{count} pods")
    await bench.settle()


def scale_workload(bench: Bench, count: int) -> None:
    """What an autoscaler does."""
    bench.kubectl("scale", f"deployment/{NAME}", f"--replicas={count}")


def owners(bench: Bench) -> set[str]:
    """The field managers that own the workload's number of pods; empty where the API server does not show them."""
    text = bench.kubectl("get", "deployment", NAME, "-o", "json", "--show-managed-fields")
    entries = json.loads(text)["metadata"].get("managedFields", [])
    return {entry["manager"] for entry in entries if "f:replicas" in entry["fieldsV1"].get("f:spec", {})}


# From one to the other --------------------------------------------------------------------------------------------


async def test_fixed_to_hpa_to_keda_to_fixed_without_a_jump(bench: Bench, keda: None, tmp_path: Path) -> None:
    """Faults operator 3 and 5, on the way through all of it."""
    bench.clock.now = time.time()
    await bench.reconciler.kinds.poll()
    bench.apply({"replicas": 3})
    await bench.settle()
    with Watch(bench.kubectl, tmp_path / "replicas").running() as watch:
        bench.apply(HPA)  # spec.replicas is 1 now, the schema's default
        await bench.settle()
        assert replicas(bench) == 3
        assert bench.kubectl.get("hpa", NAME) is not None
        assert "reprise-operator" not in owners(bench)

        scale_workload(bench, 4)
        await bench.settle()
        bench.apply({**HPA, "memory": {"utilization": 0.7}})
        await bench.settle()
        (container,) = bench.child("deployment")["spec"]["template"]["spec"]["containers"]
        assert "0.7" in container["args"], "the change has reached the pods"
        assert replicas(bench) == 4, "an update reset replicas under an autoscaler (fault 3)"

        bench.restart()
        await bench.settle()
        assert replicas(bench) == 4

        bench.apply(KEDA)
        await bench.settle()
        assert bench.kubectl.get("hpa", NAME) is None, "the old child is left over (fault 5)"
        assert bench.child("scaledobject")["spec"]["scaleTargetRef"]["name"] == NAME
        scale_workload(bench, 5)
        await bench.settle()

        bench.apply(HPA)
        await bench.settle()
        assert bench.kubectl.get("scaledobject", NAME) is None
        assert bench.kubectl.get("hpa", NAME) is not None
        bench.apply(KEDA)
        await bench.settle()
        scale_workload(bench, 6)
        await bench.settle()

        bench.apply({"replicas": 6})
        await bench.settle()
        assert bench.kubectl.get("scaledobject", NAME) is None
    assert watch.values == [3, 4, 5, 6]
    scale_workload(bench, 2)
    await bench.settle()
    assert replicas(bench) == 6, "a fixed number is ours again"
    bench.apply({"replicas": 1})
    await bench.settle()
    assert replicas(bench) == 1


async def test_the_number_is_not_taken_back_before_keda_has_let_go(bench: Bench, keda: None, tmp_path: Path) -> None:
    bench.clock.now = time.time()
    await bench.reconciler.kinds.poll()
    bench.apply(KEDA)
    await bench.settle()
    bench.kubectl.patch("scaledobject", NAME, {"metadata": {"finalizers": ["finalizer.keda.sh/test"]}})
    scale_workload(bench, 4)
    await bench.settle()
    with Watch(bench.kubectl, tmp_path / "replicas").running() as watch:
        bench.apply({"replicas": 3})
        for _ in range(3):
            assert await bench.reconcile() == 1.0, "it looks again soon, since no event tells"
        assert bench.child("scaledobject")["metadata"]["deletionTimestamp"]
        assert replicas(bench) == 4
        scale_workload(bench, 5)  # KEDA, which has not seen it yet
        bench.kubectl.patch("scaledobject", NAME, {"metadata": {"finalizers": None}})
        await bench.settle()
    assert watch.values == [4, 5, 3]


async def test_a_write_of_the_autoscaler_between_read_and_hand_over_is_kept(bench: Bench) -> None:
    bench.apply({"replicas": 3})
    await bench.settle()
    apply = bench.reconciler.cluster.apply

    async def scaled_meanwhile(*args: Any, **options: Any) -> Any:
        if options.get("hand_over") == 3 and replicas(bench) == 3:
            scale_workload(bench, 5)
        return await apply(*args, **options)

    bench.reconciler.cluster.apply = scaled_meanwhile  # type: ignore[method-assign]
    bench.apply(HPA)
    await bench.settle()
    assert replicas(bench) == 5


async def test_a_new_autoscaled_service_starts_within_its_bounds(bench: Bench) -> None:
    bench.apply({**HPA, "replicas": 4})
    await bench.reconcile()
    assert replicas(bench) == 4
    await bench.settle()
    assert replicas(bench) == 4
    assert "reprise-operator" not in owners(bench)


async def test_an_idle_autoscaled_service_is_never_written(bench: Bench, crd_server: ApiServer) -> None:
    bench.apply({**HPA, "replicas": 2, "disruption": {"minAvailable": 1}})
    await bench.make_ready()
    if crd_server.has_controller_manager:
        eventually(lambda: _conditions(bench, "ScalingActive"), "the HPA was looked at", within=HPA_SECONDS)
    await bench.settle()
    assert await bench.writes_of_passes(20) == []


def _conditions(bench: Bench, kind: str) -> list[dict[str, Any]]:
    """Of our HPA."""
    found = (bench.child("hpa").get("status") or {}).get("conditions") or ()
    return [condition for condition in found if condition["type"] == kind]


@pytest.mark.parametrize("server_side", [False, True], ids=["client-side", "server-side"])
async def test_the_manifest_stays_equal_to_the_cluster(bench: Bench, server_side: bool) -> None:
    """What Argo CD and Flux compare: nothing of ours is in spec, however many pods the autoscaler runs."""
    manifest = {
        "apiVersion": "serving.reprise.io/v1alpha1",
        "kind": "InferenceService",
        "metadata": {"name": NAME},
        "spec": {"model": {"uri": "hostpath:///m"}, "accelerator": {"profile": "cpu"}, **HPA},
    }
    bench.kubectl.apply(manifest, server_side=server_side)
    await bench.settle()
    scale_workload(bench, 5)
    await bench.settle()
    flags = ["--server-side"] if server_side else []
    assert bench.kubectl("diff", *flags, "-f", "-", stdin=yaml.safe_dump(manifest)) == ""


# Off and on ----------------------------------------------------------------------------------------------------------


async def test_suspended_under_an_hpa_and_back(bench: Bench, tmp_path: Path) -> None:
    bench.apply({**HPA, "replicas": 3})
    await bench.settle()
    with Watch(bench.kubectl, tmp_path / "replicas").running() as watch:
        bench.apply({**HPA, "suspend": True})
        await bench.settle()
        assert replicas(bench) == 0
        assert bench.kubectl.get("hpa", NAME) is not None, "at 0 replicas it rests by itself"
        assert bench.condition("AutoscalingActive")[:2] == ("False", "Suspended")
        bench.apply(HPA)
        await bench.settle()
    assert watch.values == [3, 0, 2]
    assert "reprise-operator" not in owners(bench)


async def test_suspended_keda_is_paused_before_the_pods_go(bench: Bench, keda: None) -> None:
    await bench.reconciler.kinds.poll()
    bench.apply(KEDA)
    await bench.settle()
    bench.apply({**KEDA, "suspend": True})
    written = await bench.writes()
    assert [plural for _, plural in written if plural in ("scaledobjects", "deployments")] == [
        "scaledobjects",
        "deployments",
    ]
    assert bench.child("scaledobject")["metadata"]["annotations"]["autoscaling.keda.sh/paused"] == "true"
    assert replicas(bench) == 0
    await bench.settle()
    bench.apply(KEDA)
    await bench.settle()
    assert "autoscaling.keda.sh/paused" not in bench.child("scaledobject")["metadata"]["annotations"]
    assert replicas(bench) == 2


async def test_scaled_to_zero_by_keda_it_stays_there(bench: Bench, keda: None) -> None:
    """Fault operator 4: 0 was taken for unset."""
    await bench.reconciler.kinds.poll()
    bench.apply(TO_ZERO)
    await bench.settle()
    assert bench.child("scaledobject")["spec"]["minReplicaCount"] == 0
    assert replicas(bench) == 1
    scale_workload(bench, 0)
    await bench.settle()
    bench.apply({**TO_ZERO, "memory": {"utilization": 0.7}})
    await bench.settle()
    assert replicas(bench) == 0
    await counted(bench, 0)
    assert bench.condition("Ready")[:2] == ("True", "ScaledToZero")
    assert bench.status()["replicas"] == 0
    bench.apply(HPA)  # an HPA never counts from 0 upwards
    await bench.settle()
    assert replicas(bench) == 2


async def test_replicas_zero_is_off(bench: Bench) -> None:
    bench.apply({"replicas": 2})
    await bench.settle()
    bench.kubectl("scale", f"inferenceservice/{NAME}", "--replicas=0")
    await bench.settle()
    await counted(bench, 0)
    assert bench.condition("Ready")[:2] == ("True", "ScaledToZero")
    assert (bench.status()["replicas"], bench.status()["readyReplicas"]) == (0, 0)


# KEDA that is not there ----------------------------------------------------------------------------------------------


async def test_without_keda_it_says_what_is_missing_and_it_is_right_when_keda_comes(bench: Bench) -> None:
    bench.apply({**KEDA, "replicas": 2})
    await bench.make_ready()
    status, reason, message = bench.condition("AutoscalingActive")
    assert (status, reason) == ("False", "KedaNotInstalled")
    assert "install KEDA" in message
    assert bench.condition("Ready")[0] == "True", "the pods serve meanwhile"
    assert bench.condition("Stalled")[0] == "False"
    with keda_installed(bench.kubectl):
        kinds, _ = await bench.reconciler.kinds.poll()
        assert bench.key in bench.reconciler.concerned(kinds), "who waits for it is woken"
        await bench.settle()
        assert bench.child("scaledobject")["spec"]["maxReplicaCount"] == 6
        assert bench.condition("AutoscalingActive")[:2] == ("Unknown", "Pending")
        ready = [{"type": "Ready", "status": "True", "reason": "ScaledObjectReady", "message": "ready"}]
        bench.kubectl.patch("scaledobject", NAME, {"status": {"conditions": ready}}, "--subresource=status")
        await bench.settle()
        assert bench.condition("AutoscalingActive")[:2] == ("True", "Scaling")
    await bench.reconciler.kinds.poll()
    await bench.settle()
    assert bench.condition("AutoscalingActive")[:2] == ("False", "KedaNotInstalled")
    assert replicas(bench) == 2


# The scale subresource -----------------------------------------------------------------------------------------------


async def test_kubectl_scale_of_the_service(bench: Bench) -> None:
    bench.apply()
    await bench.settle()
    bench.kubectl("scale", f"inferenceservice/{NAME}", "--replicas=3")
    await bench.settle()
    assert replicas(bench) == 3
    text = bench.kubectl(
        "get",
        "--raw",
        f"/apis/serving.reprise.io/v1alpha1/namespaces/{bench.kubectl.namespace}/inferenceservices/{NAME}/scale",
    )
    scale = json.loads(text)
    assert scale["spec"] == {"replicas": 3}
    await counted(bench, 3)
    assert bench.status()["replicas"] == 3
    assert {pod["metadata"]["name"] for pod in bench.kubectl.list("pods", bench.status()["selector"])} == {
        pod["metadata"]["name"] for pod in bench.pods()
    }


async def test_kubectl_scale_under_an_autoscaler_says_that_it_changes_nothing(bench: Bench) -> None:
    bench.apply(HPA)
    await bench.settle()
    with pytest.raises(KubectlFailed, match="with autoscaling leave replicas out"):
        bench.kubectl("scale", f"inferenceservice/{NAME}", "--replicas=9")
    with pytest.raises(KubectlFailed, match="with autoscaling leave replicas out"):
        bench.kubectl("scale", f"inferenceservice/{NAME}", "--replicas=0")
    bench.kubectl("scale", f"inferenceservice/{NAME}", "--replicas=5")
    await bench.settle()
    assert replicas(bench) == 2
    assert ("Warning", "ReplicasIgnored") in bench.events()
    assert "spec.replicas (5) is only what a service starts with" in bench.condition("AutoscalingActive")[2]


async def test_an_hpa_of_the_users_on_the_service(bench: Bench, controller_manager: None) -> None:
    bench.apply()
    await bench.make_ready()
    bench.kubectl.apply(
        {
            "apiVersion": "autoscaling/v2",
            "kind": "HorizontalPodAutoscaler",
            "metadata": {"name": "mine"},
            "spec": {
                "scaleTargetRef": {
                    "apiVersion": "serving.reprise.io/v1alpha1",
                    "kind": "InferenceService",
                    "name": NAME,
                },
                "minReplicas": 3,
                "maxReplicas": 4,
                "metrics": [
                    {
                        "type": "Pods",
                        "pods": {
                            "metric": {"name": "vllm:num_requests_waiting"},
                            "target": {"type": "AverageValue", "averageValue": "4"},
                        },
                    }
                ],
            },
        }
    )

    def scaled() -> bool:
        body = bench.kubectl.get("inferenceservice", NAME)
        assert body is not None
        return bool(body["spec"]["replicas"] == 3)

    eventually(scaled, "the HPA has scaled the service", within=HPA_SECONDS)
    await bench.settle()
    assert replicas(bench) == 3
    assert bench.kubectl.get("hpa", "mine") is not None, "it is not ours to delete"
    assert "AutoscalingActive" not in {condition["type"] for condition in bench.status()["conditions"]}


async def test_our_hpa_scales_and_says_when_it_has_no_metrics(bench: Bench, controller_manager: None) -> None:
    """kube-controller-manager's own: it enforces the bounds, and its conditions reach the service."""
    bench.apply({**HPA, "replicas": 3})
    await bench.make_ready()

    def told() -> bool:
        return [item["status"] for item in _conditions(bench, "ScalingActive")] == ["False"]

    eventually(told, "the HPA has missed its metrics", within=HPA_SECONDS)
    await bench.settle()
    status, reason, message = bench.condition("AutoscalingActive")
    assert (status, reason) == ("False", "MetricsUnavailable")
    assert "vllm:num_requests_waiting" in message
    assert bench.condition("Ready")[0] == "True"
    scale_workload(bench, 9)
    eventually(lambda: replicas(bench) == 6, "the HPA keeps to maxReplicas", within=HPA_SECONDS)
    assert {"kube-controller-manager"} == owners(bench)
    bench.apply({**HPA, "memory": {"utilization": 0.7}})
    await bench.settle()
    assert replicas(bench) == 6
