"""docs/status.md explains every condition, reason and figure that there is, and none that there is not."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from reprise_operator import conditions
from reprise_operator.cache_effect import MISS_REASONS, Effect

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "status.md").read_text()


def rows(header: str) -> dict[str, str]:
    """First column → row, of the table under `header`."""
    section = TEXT[TEXT.index(header) :]
    table = section[: section.index("\n\n")]
    found = [line for line in table.splitlines()[2:] if line.startswith("|")]
    return {line.split("|")[1].strip(): line for line in found}


def status_schema() -> dict[str, Any]:
    crd = yaml.safe_load((ROOT / "crds" / "serving.reprise.io_inferenceservices.yaml").read_text())
    schema: dict[str, Any] = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["status"]
    return schema


def test_the_conditions() -> None:
    known = {value for name, value in vars(conditions).items() if name.isupper() and isinstance(value, str)}
    assert {name.strip("`") for name in rows("| type | who reads it |")} == known


def test_the_reasons() -> None:
    told = rows("| reason | status |")
    assert {name.strip("`") for name in told} == {effect.value for effect in Effect}


def test_the_figures() -> None:
    named = set(re.findall(r"`(\w+)`", " ".join(rows("| field | what it is |"))))
    properties = set(status_schema()["properties"]["prefixCache"]["properties"])
    assert named | {"windowSeconds", "observedAt"} == properties
    described = status_schema()["properties"]["prefixCache"]["properties"]["missReason"]["description"]
    assert all(word in described for word in MISS_REASONS.values())


def test_the_files_it_names_are_there() -> None:
    for path in re.findall(r"(examples/[\w./-]+)", TEXT):
        assert (ROOT / path.rstrip(".")).exists(), path
