"""docs/cache-of-a-service.md: its manifest is honoured and does what the text says; its names exist."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from reprise_operator.children.prefix_cache import CACHE_VOLUME, ENGINE_GROUP, WARMUP_SECONDS
from reprise_operator.plan import Plan, plan
from reprise_operator.settings import Settings
from reprise_operator.spec import parse

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "cache-of-a-service.md").read_text()
OPERATOR = "\n".join(path.read_text() for path in sorted((ROOT / "operator").rglob("*.py")))
CRD = (ROOT / "crds" / "serving.reprise.io_inferenceservices.yaml").read_text()


def example() -> Plan:
    (block,) = re.findall(r"```yaml\n(.*?)```", TEXT, re.DOTALL)
    body = yaml.safe_load(block)
    body["metadata"] |= {"uid": "u", "generation": 1}
    return plan(parse(body), Settings())


def test_the_example_does_what_the_text_says() -> None:
    made = example()
    assert made.workload["kind"] == "StatefulSet"
    (engine,) = made.workload["spec"]["template"]["spec"]["containers"]
    assert engine["resources"]["requests"]["memory"] == "96Gi"
    assert engine["resources"]["limits"]["memory"] == "112Gi"
    assert "each pod requests 96Gi and may use 112Gi" in TEXT
    assert made.secret_names == ("qwen3-keys", "qwen3-salt")
    assert made.warmup is not None
    assert f"`{made.warmup['metadata']['name'].replace('qwen3', 'NAME')}`" in TEXT
    (claim,) = made.workload["spec"]["volumeClaimTemplates"]
    assert claim["metadata"]["name"] == CACHE_VOLUME
    assert f"`{CACHE_VOLUME}-NAME-HASH-0`" in TEXT
    assert f"group {ENGINE_GROUP}" in TEXT
    assert f"`timeoutSeconds` ({WARMUP_SECONDS})" in TEXT


def test_events_and_fields_exist() -> None:
    (events,) = re.findall(r"events (`[A-Za-z]+`, `[A-Za-z]+`)", TEXT)
    for event in re.findall(r"`([A-Za-z]+)`", events):
        assert f'"{event}"' in OPERATOR
    fields = set(re.findall(r"^\s+([a-z][A-Za-z]+):", CRD, re.MULTILINE))
    for field in re.findall(r"`([a-z]+[A-Z][A-Za-z]+)`", TEXT):
        assert field in fields | {"fsGroup", "updateStrategy"}, field
