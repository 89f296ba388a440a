"""spec.autoscaling and spec.disruption: what is refused, and the objects they become."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from reprise_operator.children.load import GAUGES, load_query
from reprise_operator.kinds import HORIZONTAL_POD_AUTOSCALERS, OPTIONAL_TYPES, SCALED_OBJECTS
from reprise_operator.plan import plan
from reprise_operator.spec import SpecError, parse
from tests.support.factories import PROMETHEUS, SETTINGS, body, planned


def hpa(**fields: Any) -> dict[str, Any]:
    return {"autoscaling": {"maxReplicas": 4, **fields}}


def keda(**fields: Any) -> dict[str, Any]:
    return {"autoscaling": {"maxReplicas": 4, "provider": "keda", "prometheus": PROMETHEUS, **fields}}


# Refused ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (hpa(minReplicas=5), "spec.autoscaling.minReplicas is 5, above maxReplicas, which is 4"),
        (hpa(minReplicas=0), "spec.autoscaling.minReplicas is 0; .* Set provider: keda"),
        (hpa(prometheus=PROMETHEUS), "prometheus is only asked by KEDA"),
        (hpa(metric="cpu"), r"spec.runtime.resources.requests.cpu"),
        (hpa(metric="memory"), r"spec.runtime.resources.requests.memory"),
        (hpa(metric="my_metric"), "target is needed with metric my_metric"),
        (hpa(metric="a/b", target=1), "has no '/'"),
        (keda(metric="a-b", target=1), "no name of a Prometheus series"),
        (keda(prometheus={**PROMETHEUS, "query": "sum(x)"}), "target is needed with prometheus.query"),
        (keda(metric="cpu"), "metric cpu is not read from Prometheus"),
        (
            {
                "autoscaling": {"maxReplicas": 2, "minReplicas": 0, "provider": "keda", "metric": "cpu"},
                "runtime": {"resources": {"requests": {"cpu": 1}}},
            },
            "cpu of no pods wakes nobody",
        ),
        ({"autoscaling": {"minReplicas": 1}}, "spec.autoscaling.maxReplicas"),
        ({"disruption": {}}, "either minAvailable or maxUnavailable"),
        ({"disruption": {"minAvailable": 1, "maxUnavailable": 1}}, "either minAvailable or maxUnavailable"),
        ({"disruption": {"minAvailable": "101%"}}, "spec.disruption.minAvailable is '101%'"),
        ({"disruption": {"maxUnavailable": "one"}}, "spec.disruption.maxUnavailable is 'one'"),
        ({"disruption": {"maxUnavailable": "1"}}, "must be a number of pods, or a percentage"),
        ({"disruption": {"maxUnavailable": -1}}, "spec.disruption.maxUnavailable is -1"),
        ({"disruption": {"maxUnavailable": ""}}, "spec.disruption.maxUnavailable is ''"),
    ],
)
def test_what_could_never_work_is_refused_with_what_to_do(spec: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError, match=words) as caught:
        parse(body(spec))
    assert caught.value.reason == "InvalidSpec"


def test_keda_without_a_prometheus_says_where_to_name_it() -> None:
    spec = {"autoscaling": {"maxReplicas": 4, "provider": "keda"}}
    with pytest.raises(SpecError, match=r"spec\.autoscaling\.prometheus\.serverAddress is needed"):
        planned(spec)
    settings = replace(SETTINGS, prometheus_url="http://central:9090")
    made = plan(parse(body(spec)), settings, available=frozenset(OPTIONAL_TYPES))
    assert made.autoscaler is not None
    (trigger,) = made.autoscaler["spec"]["triggers"]
    assert trigger["metadata"]["serverAddress"] == "http://central:9090"


# Made ---------------------------------------------------------------------------------------------------------------


def test_the_number_of_pods_is_left_out_and_the_workload_is_the_target() -> None:
    """Fault operator 3: an update reset replicas to 1 under an autoscaler."""
    for spec in (hpa(), keda()):
        made = planned(spec)
        assert made.autoscaled
        assert "replicas" not in made.workload["spec"]
        assert made.autoscaler is not None
        assert made.autoscaler["spec"]["scaleTargetRef"] == {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "name": made.workload["metadata"]["name"],
        }


VOLUMES = {"prefixCaching": {"persistence": {"size": "10Gi"}}}


def test_a_stateful_set_is_scaled_like_a_deployment() -> None:
    for spec in (hpa(), keda(prometheus=PROMETHEUS)):
        made = planned(spec | VOLUMES)
        name = made.workload["metadata"]["name"]
        assert made.workload["kind"] == "StatefulSet"
        assert "replicas" not in made.workload["spec"]
        assert made.autoscaler is not None
        target = made.autoscaler["spec"]["scaleTargetRef"]
        assert target == {"apiVersion": "apps/v1", "kind": "StatefulSet", "name": name}
    assert made.autoscaler is not None
    (trigger,) = made.autoscaler["spec"]["triggers"]
    (pattern,) = re.findall(r'pod=~"([^"]*)"', trigger["metadata"]["query"])
    assert re.fullmatch(pattern, f"{name}-0")
    assert not re.fullmatch(pattern, "qwen-other-0")


@pytest.mark.parametrize(
    ("spec", "metric"),
    [
        (hpa(), {"metric": {"name": "vllm:num_requests_waiting"}, "target": ("AverageValue", "4")}),
        (hpa(target=9), {"metric": {"name": "vllm:num_requests_waiting"}, "target": ("AverageValue", "9")}),
        (
            hpa(metric="vllm:num_requests_running"),
            {"metric": {"name": "vllm:num_requests_running"}, "target": ("AverageValue", "32")},
        ),
        (
            hpa(metric="vllm:kv_cache_usage_perc"),
            {"metric": {"name": "vllm:kv_cache_usage_perc"}, "target": ("AverageValue", "800m")},
        ),
        (
            hpa(metric="prometheus.googleapis.com|vllm:num_requests_waiting|gauge", target=3),
            {
                "metric": {"name": "prometheus.googleapis.com|vllm:num_requests_waiting|gauge"},
                "target": ("AverageValue", "3"),
            },
        ),
    ],
)
def test_an_hpa_takes_the_engines_metrics_as_metrics_of_the_pods(spec: dict[str, Any], metric: dict[str, Any]) -> None:
    autoscaler = planned(spec).autoscaler
    assert autoscaler is not None
    (found,) = autoscaler["spec"]["metrics"]
    kind, value = metric["target"]
    assert found == {"type": "Pods", "pods": {**metric, "target": {"type": kind, "averageValue": value}}}


@pytest.mark.parametrize("bound", ["requests", "limits"])
def test_cpu_is_of_the_engine_container_alone(bound: str) -> None:
    spec = hpa(metric="cpu", target=60) | {"runtime": {"resources": {bound: {"cpu": 4}}}}
    autoscaler = planned(spec).autoscaler
    assert autoscaler is not None
    assert autoscaler["spec"]["metrics"] == [
        {
            "type": "ContainerResource",
            "containerResource": {
                "name": "cpu",
                "container": "engine",
                "target": {"type": "Utilization", "averageUtilization": 60},
            },
        }
    ]


def trigger(spec: dict[str, Any]) -> dict[str, Any]:
    autoscaler = planned(spec).autoscaler
    assert autoscaler is not None
    (found,) = autoscaler["spec"]["triggers"]
    return dict(found)


def test_keda_asks_prometheus_for_all_pods_together() -> None:
    found = trigger(keda())
    assert (found["type"], found["metricType"]) == ("prometheus", "AverageValue")
    assert found["metadata"] == {
        "serverAddress": "http://prometheus:9090",
        "query": 'sum(vllm:num_requests_waiting{namespace="llm",pod=~"qwen-([a-z0-9]+-[a-z0-9]{5}|[0-9]+)"})',
        "threshold": "4",
        "ignoreNullValues": "false",
    }
    assert all(isinstance(value, str) for value in found["metadata"].values()), "KEDA's metadata are strings"


def test_a_query_of_the_users_is_passed_on() -> None:
    found = trigger(keda(target=7, prometheus={**PROMETHEUS, "query": "sum(rate(gateway_requests_total[1m]))"}))
    assert found["metadata"]["query"] == "sum(rate(gateway_requests_total[1m]))"
    assert found["metadata"]["threshold"] == "7"


def test_keda_measures_cpu_without_prometheus() -> None:
    spec = {
        "autoscaling": {"maxReplicas": 2, "provider": "keda", "metric": "cpu"},
        "runtime": {"resources": {"requests": {"cpu": 1}}},
    }
    assert trigger(spec) == {
        "type": "cpu",
        "metricType": "Utilization",
        "metadata": {"value": "80", "containerName": "engine"},
    }


def test_zero_is_not_unset() -> None:
    """Fault operator 4: minReplicas 0 was taken for unset."""
    made = planned(keda(minReplicas=0))
    assert made.autoscaler is not None
    assert made.autoscaler["spec"]["minReplicaCount"] == 0
    (found,) = made.autoscaler["spec"]["triggers"]
    assert found["metadata"]["ignoreNullValues"] == "true", "no pod, no series: that is no fault there"
    assert made.replicas == 1, "a new service starts with a pod"
    assert planned({"replicas": 0, **keda(minReplicas=0)}).replicas == 0
    unset = planned(keda()).autoscaler
    assert unset is not None
    assert unset["spec"]["minReplicaCount"] == 1


@pytest.mark.parametrize(
    ("replicas", "start"),
    [(1, 2), (2, 2), (3, 3), (4, 4), (9, 4)],
    ids=["default", "least", "asked", "most", "too-many"],
)
def test_replicas_is_what_a_service_starts_with_within_the_bounds(replicas: int, start: int) -> None:
    assert planned({"replicas": replicas, **hpa(minReplicas=2)}).replicas == start


def test_suspended_the_pods_are_ours_and_keda_is_paused_first() -> None:
    made = planned({"suspend": True, **keda()})
    assert (made.autoscaled, made.replicas, made.workload["spec"]["replicas"]) == (False, 0, 0)
    assert [manifest["kind"] for manifest in made.children] == ["Service", "ScaledObject", "Deployment"]
    assert made.autoscaler is not None
    assert made.autoscaler["metadata"]["annotations"]["autoscaling.keda.sh/paused"] == "true"
    running = planned(keda())
    assert [manifest["kind"] for manifest in running.children] == ["Service", "Deployment", "ScaledObject"]
    assert running.autoscaler is not None
    assert "autoscaling.keda.sh/paused" not in running.autoscaler["metadata"]["annotations"]
    suspended = planned({"suspend": True, **hpa()})
    assert suspended.autoscaler == planned(hpa()).autoscaler, "at 0 replicas an HPA rests by itself"


def test_what_the_cluster_does_not_have_is_asked_for_and_left_out() -> None:
    made = planned(keda(), available=frozenset(OPTIONAL_TYPES) - {SCALED_OBJECTS})
    assert made.autoscaler is None
    assert made.asks == {SCALED_OBJECTS}
    assert "replicas" not in made.workload["spec"]
    assert planned(hpa()).asks == {HORIZONTAL_POD_AUTOSCALERS}
    assert planned().asks == frozenset()


@pytest.mark.parametrize("field", ["minAvailable", "maxUnavailable"])
@pytest.mark.parametrize("value", [0, 2, "50%", "0%", "100%"])
def test_the_disruption_budget_is_of_all_pods(field: str, value: int | str) -> None:
    made = planned({"disruption": {field: value}})
    budget = made.disruption_budget
    assert budget is not None
    assert budget["spec"] == {
        "selector": made.workload["spec"]["selector"],
        field: value,
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
    }
    assert planned().disruption_budget is None


# The query ----------------------------------------------------------------------------------------------------------


def matches(workload: str, pod: str) -> bool:
    query = load_query("vllm:num_requests_waiting", namespace="llm", workload=workload, to_zero=False)
    found = re.search(r'pod=~"([^"]*)"', query)
    assert found is not None
    return re.fullmatch(found[1], pod) is not None


LONG = "a" * 63


@pytest.mark.parametrize(
    ("workload", "pod", "counts"),
    [
        ("qwen", "qwen-6d4f9b7c5d-x2k4p", True),
        ("qwen", "qwen-0", True),
        ("qwen", "qwen-12", True),
        ("qwen", "qwen-2-6d4f9b7c5d-x2k4p", False),
        ("qwen", "qwen-2-0", False),
        ("qwen", "qwen-check-6d4f9b7c5d-x2k4p", False),
        ("qwen", "aqwen-6d4f9b7c5d-x2k4p", False),
        ("a" * 46, f"{'a' * 46}-6d4f9b7c5d-x2k4p", True),
        (LONG, f"{'a' * 58}x2k4p", True),
        ("a" * 50, f"{'a' * 50}-6d4f9bx2k4p"[:63], True),
        (LONG, "b" * 63, False),
    ],
)
def test_the_query_counts_this_services_pods_only(workload: str, pod: str, counts: bool) -> None:
    assert matches(workload, pod) is counts


def test_a_share_is_in_percent_and_a_counter_a_rate() -> None:
    def query(metric: str) -> str:
        return load_query(metric, namespace="n", workload="w", to_zero=False)

    assert query("vllm:kv_cache_usage_perc").startswith("100 * sum(vllm:kv_cache_usage_perc{")
    assert query("vllm:generation_tokens_total").startswith("sum(rate(vllm:generation_tokens_total{")
    assert query("vllm:generation_tokens_total").endswith("[2m]))")


def test_a_busy_service_without_a_queue_is_not_scaled_to_zero() -> None:
    found = load_query("vllm:num_requests_waiting", namespace="n", workload="w", to_zero=True)
    assert '+ 0.001 * sum({__name__=~"vllm:num_requests_waiting|vllm:num_requests_running",namespace="n"' in found


def test_gauges_are_what_the_engine_exports() -> None:
    from pathlib import Path

    source = (Path(__file__).parents[2] / "engine/reprise_engine/server/metrics.py").read_text()
    for gauge in GAUGES:
        assert f'"{gauge}"' in source
