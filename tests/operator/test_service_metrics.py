"""The figures of each service, as Prometheus reads them."""

from __future__ import annotations

from reprise_operator.metrics import OperatorMetrics
from tests.support.factories import metrics, observed, planned, pod
from tests.support.statuses import status_of


def value(of: OperatorMetrics, figure: str, **labels: str) -> float | None:
    return of.registry.get_sample_value(
        f"reprise_operator_service_{figure}", {"service_namespace": "llm", "service_name": "qwen", **labels}
    )


def test_a_service_is_told_as_its_status_says() -> None:
    of = OperatorMetrics()
    plan = planned()
    of.served.tell("llm", "qwen", status_of(plan, observed(plan, pod(metrics=metrics()))))
    assert value(of, "ready") == 1.0
    assert value(of, "ready_replicas") == 1.0
    assert value(of, "memory_utilization") == 0.9
    assert value(of, "hit_rate_percent") is None, "no traffic is no figure, not 0"
    assert "reprise_operator_service_stalled{" not in of.expose().decode()


def test_a_stalled_service_says_why_and_no_reason_stays_behind() -> None:
    of = OperatorMetrics()

    def stalled(reason: str) -> dict[str, object]:
        conditions = [
            {"type": "Ready", "status": "False", "reason": reason},
            {"type": "Stalled", "status": "True", "reason": reason},
        ]
        return {"conditions": conditions, "memory": {"steps": 2, "effective": 0.8}}

    of.served.tell("llm", "qwen", stalled("ImagePullFailed"))
    assert value(of, "stalled", reason="ImagePullFailed") == 1.0
    assert value(of, "memory_steps") == 2.0
    assert value(of, "ready") == 0.0
    of.served.tell("llm", "qwen", stalled("SecretNotFound"))
    assert value(of, "stalled", reason="ImagePullFailed") is None
    assert value(of, "stalled", reason="SecretNotFound") == 1.0


def test_a_service_that_is_gone_leaves_nothing() -> None:
    of = OperatorMetrics()
    of.served.tell("llm", "qwen", {"replicas": 3})
    assert value(of, "replicas") == 3.0
    of.served.forget("llm", "qwen")
    of.served.forget("llm", "qwen")
    assert 'service_name="qwen"' not in of.expose().decode()
