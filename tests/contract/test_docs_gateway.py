"""docs/gateway.md names what is there: reasons, values of the chart, kinds, flags. And the picker is told the truth."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from reprise_engine.config import DEFAULT_BLOCK_SIZE, NPU_BLOCK_SIZE
from reprise_operator.children.picker import engine_block_size
from reprise_operator.kinds import HTTP_ROUTES, INFERENCE_POOLS, POD_MONITORS
from reprise_operator.options import parse_options
from reprise_operator.spec import parse
from tests.support.factories import body

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "gateway.md").read_text()
ATTACHMENTS = (ROOT / "operator" / "reprise_operator" / "attachments.py").read_text()


def test_every_reason_is_given_and_explained() -> None:
    table = TEXT[TEXT.index("| reason | |") : TEXT.index("Without the HTTPRoute kind")]
    explained = set(re.findall(r"`([A-Z][A-Za-z]+)`", "\n".join(re.findall(r"^\| (`.*?) \|", table, re.MULTILINE))))
    given = set(re.findall(r'condition\("(?:True|False|Unknown)", "([A-Za-z]+)"', ATTACHMENTS))
    assert len(given) >= 9, "the pattern no longer finds them"
    assert given - {"PodMonitorApplied", "PodMonitorUnavailable", "Applying"} == explained
    assert {"PodMonitorApplied", "PodMonitorUnavailable"} <= set(re.findall(r"`([A-Z][A-Za-z]+)`", TEXT))


@pytest.mark.parametrize("path", sorted(set(re.findall(r"`((?:rbac|endpointPicker)\.[A-Za-z]+)`", TEXT))))
def test_every_value_is_one_of_the_chart(path: str) -> None:
    found: Any = yaml.safe_load((ROOT / "charts" / "reprise-operator" / "values.yaml").read_text())
    for part in path.split("."):
        assert part in found, path
        found = found[part]


def test_kinds_and_flags() -> None:
    for kind in (HTTP_ROUTES, INFERENCE_POOLS, POD_MONITORS):
        assert f"{kind.kind}, `{kind.api_version}`" in TEXT
    for flag in re.findall(r"`(--discovery-[a-z-]+)`", TEXT):
        assert parse_options(["run", "-A", f"{flag}=5"], {}).settings.discovery_seconds == 5


@pytest.mark.parametrize("text", re.findall(r"```yaml\n(.*?)```", TEXT, re.DOTALL))
def test_every_example_is_a_spec(text: str) -> None:
    assert parse(body(yaml.safe_load(text)["spec"])).spec.model.uri


def test_the_block_size_a_picker_is_told_is_the_engines_own() -> None:
    assert engine_block_size(parse(body({"accelerator": {"profile": "cpu"}}))) == DEFAULT_BLOCK_SIZE
    assert engine_block_size(parse(body())) == NPU_BLOCK_SIZE
