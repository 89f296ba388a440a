"""docs/production.md names nothing that does not exist: values of the chart, profiles, reasons, flags, files."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from reprise_operator.children.profiles import PROFILES

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "production.md").read_text()
OPERATOR = "\n".join(path.read_text() for path in sorted((ROOT / "operator").rglob("*.py")))
CRD = (ROOT / "crds" / "serving.reprise.io_inferenceservices.yaml").read_text()


def values() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((ROOT / "charts" / "reprise-operator" / "values.yaml").read_text())
    return loaded


@pytest.mark.parametrize("path", sorted(set(re.findall(r"--set ([A-Za-z.]+)=", TEXT))))
def test_every_value_that_is_set_is_one_of_the_chart(path: str) -> None:
    found: Any = values()
    for part in path.split("."):
        assert part in found, f"charts/reprise-operator/values.yaml has no {path}"
        found = found[part]


def test_the_table_of_profiles_is_that_of_the_operator() -> None:
    """Rows name profiles by their full names; an ellipsis stands for the ones between."""
    section = TEXT[TEXT.index("## 4. NPU nodes") : TEXT.index("## 5. Security")]
    named = set(re.findall(r"`([a-z0-9-]+)`", "\n".join(re.findall(r"^\| (`.*?)\|", section, re.MULTILINE))))
    assert named <= set(PROFILES)
    assert {name for name in PROFILES if not name.startswith("hami-")} <= named
    for resource in re.findall(r"`(huawei\.com/[A-Za-z0-9-]+)`", section):
        assert resource in {profile.resource for profile in PROFILES.values()}


def reasons() -> list[str]:
    table = TEXT[TEXT.index("| reason | what to do |") :]
    return [
        reason
        for row in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE)
        for reason in re.findall(r"`([A-Z][A-Za-z]+)`", row)
    ]


@pytest.mark.parametrize("reason", reasons())
def test_every_reason_is_one_that_the_operator_or_the_schema_gives(reason: str) -> None:
    assert f'"{reason}"' in OPERATOR or f"reason: {reason}" in CRD


def test_every_reason_that_needs_a_person_is_explained() -> None:
    stalled = set(re.findall(r'\bstalled\(\s*"([A-Za-z]+)"', OPERATOR)) | {"NotSupported", "InvalidSpec"}
    by_last_words = re.search(r"LAST_WORDS = \((.*?)\n\)", OPERATOR, re.DOTALL)
    assert by_last_words is not None
    stalled |= set(re.findall(r'\(\s*"([A-Za-z]+)",', by_last_words[1]))
    assert len(stalled) > 10, "the pattern no longer finds them"
    assert stalled <= set(reasons())


def test_links_lead_to_headings_and_files_exist() -> None:
    headings = {
        re.sub(r"[^a-z0-9 -]", "", line.lower()).strip().replace(" ", "-")
        for line in re.findall(r"^##+ (.*)$", TEXT, re.MULTILINE)
    }
    assert set(re.findall(r"\]\(#([^)]+)\)", TEXT)) <= headings
    for path in re.findall(r"(?:charts|crds|tests)/[\w./-]*", TEXT):
        assert (ROOT / path).exists(), path
