"""Alerts and dashboard ask for series that engine and operator really export, with labels that these really carry."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from reprise_engine.cache_report import Tier, TierStats
from reprise_engine.config import ResolvedConfig
from reprise_engine.messages import SchedulerStats
from reprise_engine.request import FinishReason, RequestTimes
from reprise_engine.server.metrics import Metrics
from reprise_operator.kinds import DEPLOYMENTS, WATCHED_TYPES
from reprise_operator.metrics import OperatorMetrics
from tests.contract.test_chart import CHART, only, render

PROJECT = Path(__file__).resolve().parents[2]
TROUBLE = PROJECT / "docs" / "operations" / "troubleshooting.md"

# Labels that Prometheus gives every series of a pod it scrapes.
TARGET_LABELS = frozenset({"namespace", "pod"})
WORDS = frozenset(
    {"absent", "and", "by", "count", "histogram_quantile", "label_values", "max", "min_over_time", "or", "rate", "sum"}
    | {"time", "vector"}
)


def engine() -> CollectorRegistry:
    """After one of everything has happened."""
    metrics = Metrics("m")
    metrics.configured(
        ResolvedConfig(
            block_size=16,
            num_gpu_blocks=8,
            max_model_len=64,
            max_num_seqs=1,
            max_num_batched_tokens=64,
            enable_prefix_caching=True,
            enable_chunked_prefill=True,
            gpu_memory_utilization=0.9,
            device="cpu",
            dtype="float32",
            prefix_cache_pin_blocks=0,
            vocab_size=8,
            eos_token_ids=(1,),
            version="0",
        )
    )
    metrics.engine_stats(SchedulerStats(tiers=(TierStats(tier=Tier.HOST),)))
    times = RequestTimes(arrival=1.0, first_scheduled=2.0, first_token=3.0, last_token=4.0)
    metrics.first_token(prompt_tokens=4, cached_tokens=2, times=times)
    metrics.tokens(2, since_previous=0.1)
    metrics.finished(FinishReason.STOP, output_tokens=3, times=times)
    return metrics.registry


def operator() -> CollectorRegistry:
    metrics = OperatorMetrics()
    metrics.on_request("get", DEPLOYMENTS, "ok")
    metrics.on_watch_event("pods", 1.0)
    metrics.writes.labels("Deployment", "created").inc()
    for resource in WATCHED_TYPES:
        metrics.watch_behind.labels(resource.plural)
    conditions = [{"type": kind, "status": "True", "reason": "X"} for kind in ("Ready", "Stalled")]
    status = {
        "conditions": conditions,
        "replicas": 1,
        "readyReplicas": 1,
        "memory": {"effective": 0.9, "steps": 1},
        "prefixCache": {"hitRatePercent": 50},
    }
    metrics.served.tell("n", "s", status)
    return metrics.registry


@pytest.fixture(scope="module")
def exported() -> Mapping[str, frozenset[str]]:
    """Name of a series → its labels."""
    found: dict[str, frozenset[str]] = {}
    for registry in (engine(), operator()):
        for family in registry.collect():
            for sample in family.samples:
                found[sample.name] = found.get(sample.name, frozenset()) | frozenset(sample.labels)
    return found


def rules() -> list[dict[str, Any]]:
    rule = only(render({"prometheusRule": {"enabled": True}}), "PrometheusRule")
    return [rule for group in rule["spec"]["groups"] for rule in group["rules"]]


def dashboard() -> dict[str, Any]:
    config_map = only(render({"dashboard": {"enabled": True}}), "ConfigMap")
    loaded: dict[str, Any] = json.loads(config_map["data"]["reprise.json"])
    return loaded


def expressions() -> Iterator[tuple[str, str]]:
    for rule in rules():
        yield f"alert {rule['alert']}", rule["expr"]
    for panel in dashboard()["panels"]:
        for target in panel.get("targets", ()):
            yield f"panel {panel['title']}", target["expr"]
    for variable in dashboard()["templating"]["list"]:
        if variable["type"] == "query":
            query = re.sub(r", (\w+)\)$", r") by (\1)", variable["query"]["query"])
            yield f"variable {variable['name']}", query


def names(expression: str) -> set[str]:
    """All that could be the name of a series: what is left without strings, label lists, durations and words."""
    text = re.sub(r'"[^"]*"', "", expression)
    text = re.sub(r"\{[^}]*\}|\[[^\]]*\]|by \([^)]*\)", "", text)
    text = re.sub(r"\boffset \d+[smhd]", "", text)
    return set(re.findall(r"[A-Za-z_:][\w:]*", text)) - WORDS


def labels(expression: str) -> set[str]:
    matched = re.findall(r"(\w+)(?:=~|!=|!~|=)\"", expression)
    grouped = [label for group in re.findall(r"by \(([^)]*)\)", expression) for label in group.split(", ")]
    return {*matched, *grouped}


@pytest.mark.parametrize(("where", "expression"), list(expressions()))
def test_every_series_and_label_is_exported(
    where: str, expression: str, exported: Mapping[str, frozenset[str]]
) -> None:
    asked = names(expression)
    assert asked, where
    assert asked <= set(exported), f"{where} asks for what nobody exports"
    known = TARGET_LABELS.union(*(exported[name] for name in asked))
    assert labels(expression) <= known, where
    for opening, closing in ("()", "{}", "[]"):
        assert expression.count(opening) == expression.count(closing), where


def test_the_check_finds_a_wrong_name_and_a_wrong_label(exported: Mapping[str, frozenset[str]]) -> None:
    wrong = 'sum by (nobody) (rate(vllm:prefix_cache_hit_total{model="x"}[5m] offset 1h)) > 3'
    assert names(wrong) == {"vllm:prefix_cache_hit_total"}
    assert labels(wrong) == {"nobody", "model"}
    assert "vllm:prefix_cache_hit_total" not in exported
    assert "vllm:prefix_cache_hits_total" in exported


def test_every_metric_of_the_operator_is_looked_at_somewhere(exported: Mapping[str, frozenset[str]]) -> None:
    """A figure that no alert and no panel shows is one that nobody misses."""
    looked_at = set().union(*(names(expression) for _, expression in expressions()))
    ours = {name for name in exported if name.startswith("reprise_operator") and not name.endswith("_created")}
    histogram = {name for name in ours if name.endswith(("_seconds_sum", "_seconds_count"))}
    elsewhere = {"reprise_operator_watch_last_event_timestamp_seconds", "reprise_operator_service_replicas"}
    assert ours - histogram - elsewhere <= looked_at


def test_each_alert_says_what_it_means_and_where_help_is() -> None:
    headings = {
        re.sub(r"[^a-z0-9 -]", "", line.lower()).strip().replace(" ", "-")
        for line in re.findall(r"^##+ (.*)$", TROUBLE.read_text(), re.MULTILINE)
    }
    found = rules()
    assert len(found) >= 12
    assert len({rule["alert"] for rule in found}) == len(found)
    for rule in found:
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert {"summary", "description", "runbook"} == set(rule["annotations"])
        path, _, anchor = rule["annotations"]["runbook"].partition("#")
        assert PROJECT / path == TROUBLE
        assert anchor in headings, rule["alert"]
        used = set(re.findall(r"\$labels\.(\w+)", str(rule["annotations"])))
        assert used <= labels(rule["expr"]), f"{rule['alert']} names labels that its result does not have"


def test_thresholds_are_values() -> None:
    def expression(alert: str, thresholds: dict[str, float]) -> str:
        rule = only(render({"prometheusRule": {"enabled": True, "thresholds": thresholds}}), "PrometheusRule")
        found = [r["expr"] for group in rule["spec"]["groups"] for r in group["rules"] if r["alert"] == alert]
        return str(found[0])

    assert expression("RepriseOperatorBacklog", {"queueDepth": 7}).endswith("> 7")
    assert expression("RepriseKVCacheFull", {"kvCacheUsage": 0.5}).endswith("> 0.5")
    assert "< 0.25 * (" in expression("RepriseHitRateCollapsed", {"hitRateDrop": 0.25})


def test_the_dashboard_is_found_by_the_sidecar_and_its_panels_do_not_overlap() -> None:
    config_map = only(render({"dashboard": {"enabled": True, "labelValue": "yes"}}), "ConfigMap")
    assert config_map["metadata"]["labels"]["grafana_dashboard"] == "yes"
    assert dashboard() == json.loads((CHART / "dashboards" / "reprise.json").read_text())
    assert len(json.dumps(dashboard())) < 250_000
    taken: set[tuple[int, int]] = set()
    for panel in dashboard()["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        assert max(x for x, _ in cells) < 24
        taken |= cells
    identities = [panel["id"] for panel in dashboard()["panels"]]
    assert len(set(identities)) == len(identities)
