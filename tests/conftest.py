"""What all tests share: one API server a session, started by the first test that asks for it."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from tests.support.apiserver import ApiServer, start_api_server

_VERSION_LINE = pytest.StashKey[str]()
NPU_LINE = pytest.StashKey[str]()
"""Which NPU tests ran on."""


@pytest.fixture(scope="session")
def api_server(request: pytest.FixtureRequest) -> Iterator[ApiServer]:
    """A real kube-apiserver where one is found, else the emulated one; $REPRISE_TEST_API_SERVER has the last word."""
    with start_api_server() as server:
        request.config.stash[_VERSION_LINE] = server.version_line
        yield server


@pytest.hookimpl(tryfirst=True)  # before `-m` selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What asks for an NPU is selected by `-m npu`, and runs on a real one where there is one."""
    for item in items:
        if "ascend" in getattr(item, "fixturenames", ()):
            item.add_marker("npu")


def pytest_configure() -> None:
    # Like Ctrl-C: fixtures end what they started. By default TERM would leave an API server and an operator behind.
    signal.signal(signal.SIGTERM, signal.default_int_handler)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    version_line = config.stash.get(_VERSION_LINE, None)
    if version_line is not None:
        terminalreporter.write_line(f"API server: {version_line}")
    npu_line = config.stash.get(NPU_LINE, None)
    if npu_line is not None:
        terminalreporter.write_line(f"NPU: {npu_line}")
