"""docs/scaling.md: its manifests are honoured, its table of metrics and its reasons are the operator's."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from reprise_operator.children.load import GAUGES, RESOURCES
from reprise_operator.kinds import OPTIONAL_TYPES
from reprise_operator.plan import plan
from reprise_operator.settings import Settings
from reprise_operator.spec import parse

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "scaling.md").read_text()
OPERATOR = "\n".join(path.read_text() for path in sorted((ROOT / "operator").rglob("*.py")))
MANIFESTS = [
    manifest
    for block in re.findall(r"```yaml\n(.*?)```", TEXT, re.DOTALL)
    for manifest in yaml.safe_load_all(block)
    if manifest.get("kind") == "InferenceService"
]


def test_there_are_manifests() -> None:
    assert len(MANIFESTS) == 3


@pytest.mark.parametrize("manifest", MANIFESTS, ids=range(len(MANIFESTS)))
def test_every_manifest_is_honoured(manifest: dict[str, Any]) -> None:
    body = {**manifest, "metadata": {"uid": "u", "generation": 1, **manifest["metadata"]}}
    made = plan(parse(body), Settings(), available=frozenset(OPTIONAL_TYPES))
    assert (made.autoscaler is not None) == ("autoscaling" in manifest["spec"])
    assert (made.disruption_budget is not None) == ("disruption" in manifest["spec"])


def test_the_table_of_metrics_is_the_operators() -> None:
    rows = re.findall(r"^\| (`[^|]*`) \|[^|]*\| (\d+) \|$", TEXT, re.MULTILINE)
    told = {name: int(target) for names, target in rows for name in re.findall(r"`([^`]+)`", names)}
    assert told == {name: gauge.target for name, gauge in GAUGES.items()} | dict(RESOURCES)


def test_every_reason_is_one_that_the_operator_gives() -> None:
    reasons = re.findall(r"^\| `(?:True|Unknown|False)` (`[^|]+?) \|", TEXT, re.MULTILINE)
    named = {reason for text in reasons for reason in re.findall(r"`(\w+)`", text)}
    ours = named - {"ScalingDisabled"}  # the cluster's own autoscaler gives it
    assert {"Scaling", "Pending", "MetricsUnavailable", "KedaNotInstalled"} <= ours
    assert [reason for reason in ours if f'"{reason}"' not in OPERATOR] == []


def test_values_of_the_chart_are_there() -> None:
    values = yaml.safe_load((ROOT / "charts" / "reprise-operator" / "values.yaml").read_text())
    assert values["prometheus"] == {"url": ""}
    assert "keda" in values["rbac"]
