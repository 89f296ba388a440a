"""CONTRIBUTING.md's table of faults names tests that are there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
SECTION = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").split("## Faults of the kind")[1].split("\n## ")[0]


def test_every_fault_has_tests_that_exist() -> None:
    rows = re.findall(r"^\| (?!fault |---)(.+?) \| (.+) \|$", SECTION, re.MULTILINE)
    assert len(rows) == 18
    for fault, cell in rows:
        named = re.findall(r"`(test_\w+\.py)::(test_\w+)`", cell)
        assert named, fault
        for file, test in named:
            source = (ROOT / "tests" / "engine" / file).read_text(encoding="utf-8")
            assert re.search(rf"^(?:async )?def {test}\(", source, re.MULTILINE), test
