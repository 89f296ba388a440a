"""`pytest -n auto`: how many workers a machine takes, and what one worker does in a row.

Half of the suite waits (for controllers, leases, back-offs), the other half computes, so there are more workers than
cores and the two halves are dealt out by turns. Each worker has an API server of its own.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any, Protocol, TypeVar

import psutil
import pytest
from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped]

WORKER_BYTES = 2 * 2**30
"""Of a worker at its largest: PyTorch with a model, an API server, and the engines of an end-to-end test."""
MOST_WORKERS = 12
WAITING_TOO = 2
"""Workers beside one a core."""


class Named(Protocol):
    """Of a pytest.Item what matters here."""

    @property
    def nodeid(self) -> str: ...


T = TypeVar("T", bound=Named)

_SHARING = ("tests/operator/test_crd.py", "tests/operator/test_gitops.py", "tests/operator/test_leader.py")
"""Files of tests/operator whose tests share a fixture that is dear."""


def workers() -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cores + WAITING_TOO, psutil.virtual_memory().available // WORKER_BYTES, MOST_WORKERS))


def scope_of(nodeid: str) -> str:
    """What one worker runs in a row: a file, or one test where those of a file share only the API server."""
    file = nodeid.partition("::")[0]
    return nodeid if file.startswith("tests/operator/") and file not in _SHARING else file


class Scheduling(LoadScopeScheduling):  # type: ignore[misc]  # xdist tells no types
    """In the order of collection, by `scope_of`."""

    def __init__(self, config: pytest.Config, log: Any = None) -> None:
        config.option.loadscopereorder = False  # ours already is an order, see `by_turns`
        super().__init__(config, log)

    def _split_scope(self, nodeid: str) -> str:
        return scope_of(nodeid)


def by_turns(items: Iterable[T]) -> list[T]:
    """The longest (e2e) first, then what waits and what computes by turns."""
    scopes: dict[str, list[T]] = {}
    for item in items:
        scopes.setdefault(scope_of(item.nodeid), []).append(item)
    first = [scope for scope in scopes if scope.startswith("tests/e2e/")]
    waiting = [scope for scope in scopes if scope.startswith("tests/operator/")]
    computing = [scope for scope in scopes if not scope.startswith(("tests/e2e/", "tests/operator/"))]
    ordered = [*first, *_merged(waiting, computing)]
    return [item for scope in ordered for item in scopes[scope]]


def _merged(one: Sequence[str], other: Sequence[str]) -> list[str]:
    """Both in their order, spread evenly over each other."""
    places = [((number + 0.5) / len(each), scope) for each in (one, other) for number, scope in enumerate(each)]
    return [scope for _, scope in sorted(places)]
