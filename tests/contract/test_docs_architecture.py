"""ARCHITECTURE.md and benchmarks/README.md name every module, and none that is not there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEXT = "".join((ROOT / name).read_text(encoding="utf-8") for name in ("ARCHITECTURE.md", "benchmarks/README.md"))
SOURCES = [
    path
    for folder in ("engine/reprise_engine", "operator/reprise_operator", "benchmarks")
    for path in (ROOT / folder).rglob("*.py")
    if path.name != "__init__.py"
]


def test_every_module_is_named() -> None:
    assert len(SOURCES) > 150
    named = set(re.findall(r"\w+\.py", TEXT))
    assert [str(path.relative_to(ROOT)) for path in SOURCES if path.name not in named] == []


def test_every_name_is_a_module() -> None:
    present = [f"/{path.relative_to(ROOT)}" for path in [*SOURCES, *(ROOT / "tests").rglob("*.py")]]
    named = set(re.findall(r"`([\w/]+\.py)`", TEXT))
    assert [name for name in named if not any(path.endswith(f"/{name}") for path in present)] == []
