"""How the suite is dealt out to workers (tests/support/parallel.py): nothing is lost, what shares stays together."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import groupby

import pytest

from tests.support.parallel import by_turns, scope_of, workers


@dataclass(frozen=True, slots=True)
class Item:
    nodeid: str


NODE_IDS = (
    *(f"tests/contract/test_chart.py::test_{number}" for number in range(3)),
    *(f"tests/e2e/test_life.py::test_{number}" for number in range(2)),
    *(f"tests/engine/test_{file}.py::test_{number}[a-b]" for file in "xyz" for number in range(2)),
    *(f"tests/operator/test_faults.py::test_{number}[::1]" for number in range(8)),
    *(f"tests/operator/test_crd.py::test_{number}" for number in range(2)),
)


@pytest.mark.parametrize(
    ("nodeid", "scope"),
    [
        ("tests/engine/test_llm.py::test_a[b::c]", "tests/engine/test_llm.py"),
        ("tests/e2e/test_life.py::test_a", "tests/e2e/test_life.py"),
        ("tests/operator/test_faults.py::test_a[b::c]", "tests/operator/test_faults.py::test_a[b::c]"),
        ("tests/operator/test_crd.py::test_a", "tests/operator/test_crd.py"),
    ],
)
def test_what_one_worker_runs_in_a_row(nodeid: str, scope: str) -> None:
    assert scope_of(nodeid) == scope


def test_every_test_is_dealt_out_once_and_a_scope_stays_in_one_piece_and_in_order() -> None:
    ordered = [item.nodeid for item in by_turns(map(Item, NODE_IDS))]
    assert Counter(ordered) == Counter(NODE_IDS)
    pieces = [scope for scope, _ in groupby(ordered, scope_of)]
    assert len(pieces) == len(set(pieces))
    for scope in pieces:
        assert [each for each in ordered if scope_of(each) == scope] == [
            each for each in NODE_IDS if scope_of(each) == scope
        ]


def test_the_longest_comes_first_and_waiting_and_computing_take_turns() -> None:
    ordered = [item.nodeid for item in by_turns(map(Item, NODE_IDS))]
    assert ordered[0].startswith("tests/e2e/")
    pieces = [scope for scope, _ in groupby(ordered, scope_of)][1:]
    waits = "".join("w" if piece.startswith("tests/operator/") else "c" for piece in pieces)
    assert waits.count("c") == 4
    assert "cc" not in waits
    assert "wwww" not in waits


def test_there_is_a_worker_on_every_machine() -> None:
    assert workers() >= 1
