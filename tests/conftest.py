"""What all tests share: one API server a session, and under `-n` a worker, started by the first that asks for it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import hypothesis
import pytest

from tests.support.apiserver import ApiServer, start_api_server
from tests.support.parallel import Scheduling, by_turns, workers

# As a server starts its engine (engine_process.py), for the engines in this process too: OpenMP's threads wait for each
# other awake, in the way of whom they wait for where the cores are taken. Read when torch is imported.
os.environ.setdefault("GOMP_SPINCOUNT", "500")

_VERSION_LINE = pytest.StashKey[str]()
_TOLD_BY_WORKERS = "ran_on"
NPU_LINE = pytest.StashKey[str]()
"""Which NPU tests ran on."""


@pytest.fixture(scope="session")
def api_server(request: pytest.FixtureRequest) -> Iterator[ApiServer]:
    """A real kube-apiserver where one is found, else the emulated one; $REPRISE_TEST_API_SERVER has the last word."""
    with start_api_server() as server:
        request.config.stash[_VERSION_LINE] = server.version_line
        yield server


@pytest.hookimpl(tryfirst=True)  # before `-m` selects
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What asks for an NPU is selected by `-m npu`, and runs on a real one where there is one."""
    for item in items:
        if "ascend" in getattr(item, "fixturenames", ()):
            item.add_marker("npu")
    if hasattr(config, "workerinput"):
        items[:] = by_turns(items)


def pytest_configure() -> None:
    # Like Ctrl-C: fixtures end what they started. By default TERM would leave an API server and an operator behind.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    # No example has 200 ms on the clock where workers share the cores. Under CI hypothesis' own profile says so, too.
    hypothesis.settings.register_profile("tests", hypothesis.settings.default, deadline=None)
    hypothesis.settings.load_profile("tests")


def pytest_xdist_auto_num_workers() -> int:
    return workers()


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Scheduling:
    return Scheduling(config, log)


def pytest_sessionfinish(session: pytest.Session) -> None:
    told: dict[str, Any] | None = getattr(session.config, "workeroutput", None)
    if told is not None:
        told[_TOLD_BY_WORKERS] = [session.config.stash.get(key, None) for key in (_VERSION_LINE, NPU_LINE)]


def pytest_testnodedown(node: Any) -> None:
    """A worker has ended; the one who tells is not it."""
    lines = getattr(node, "workeroutput", {}).get(_TOLD_BY_WORKERS, [None, None])
    for key, line in zip((_VERSION_LINE, NPU_LINE), lines, strict=True):
        if line is not None:
            node.config.stash[key] = line


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    version_line = config.stash.get(_VERSION_LINE, None)
    if version_line is not None:
        terminalreporter.write_line(f"API server: {version_line}")
    npu_line = config.stash.get(NPU_LINE, None)
    if npu_line is not None:
        terminalreporter.write_line(f"NPU: {npu_line}")
