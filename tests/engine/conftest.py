"""What tests over HTTP share: a server on the counting engine, and two clients of the server that a module has."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import openai
import pytest

from tests.conftest import NPU_LINE
from tests.support.engine_server import RunningServer, fake_options, running_server
from tests.support.npu.wheel import WheelMissing
from tests.support.npu_device import NPUUnderTest, npu_under_test


@pytest.fixture
def npu(request: pytest.FixtureRequest) -> Iterator[NPUUnderTest]:
    """The real NPU with `-m npu` on a machine that has one, else the emulated one (tests/support/npu_device.py)."""
    try:
        with npu_under_test(request.config.getoption("-m")) as found:
            request.config.stash[NPU_LINE] = found.name
            yield found
    except WheelMissing as missing:
        pytest.skip(f"{missing}: the emulated NPU has no schemas")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A module that needs another one defines its own."""
    with running_server(fake_options(tmp_path_factory.mktemp("model"))) as running:
        yield running


@pytest.fixture
def client(server: RunningServer) -> httpx.Client:
    """Of a server that has nothing cached."""
    server.client.post("/reset_prefix_cache").raise_for_status()
    return server.client


@pytest.fixture
def sdk(client: httpx.Client) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{client.base_url}/v1", api_key="none", max_retries=0) as made:
        yield made
