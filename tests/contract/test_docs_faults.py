"""docs/faults.md: every kind of fault has tests, and they are there."""

from __future__ import annotations

import ast
import re
from functools import cache

from tests.support.cluster import PROJECT

PAGE = PROJECT / "docs" / "faults.md"


@cache
def functions(path: str) -> frozenset[str]:
    tree = ast.parse((PROJECT / path).read_text())
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def test_every_fault_has_tests_that_exist() -> None:
    rows = re.findall(r"^\| (\d+) \| (.+?) \| (.+) \|$", PAGE.read_text(), re.MULTILINE)
    assert [int(number) for number, _, _ in rows] == [*range(1, 18), *range(1, 18)]
    for number, fault, cell in rows:
        named = re.findall(r"`(tests/[a-z0-9_/]+\.py)::(test_[a-z0-9_]+)`", cell)
        assert named, f"{number}: {fault}"
        assert len(named) == cell.count("`") / 2, f"{number}: something in backticks is no test: {cell}"
        for path, name in named:
            assert name in functions(path), f"{number}: {path} has no {name}"
