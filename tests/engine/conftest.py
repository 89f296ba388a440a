"""What tests share: over HTTP a server on the counting engine and two clients of the server that a module has; the
operators of an emulated NPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
import torch

from tests.support.engine_server import RunningServer, fake_options, running_server
from tests.support.npu import WheelMissing, npu_operators
from tests.support.npu.schemas import npu_schemas


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


@pytest.fixture(scope="session")
def npu_wheel() -> None:
    """Skips where the vendor's wheel, with the operators' schemas, cannot be had."""
    try:
        npu_schemas()
    except WheelMissing as missing:
        pytest.skip(str(missing))


@pytest.fixture
def npu(npu_wheel: None) -> Iterator[Any]:
    """`torch.ops.npu` of an emulated A2."""
    with npu_operators():
        yield torch.ops.npu


@pytest.fixture
def float32_npu(npu_wheel: None) -> Iterator[Any]:
    """The same, whose attention takes float32 too."""
    with npu_operators(also_float32=True):
        yield torch.ops.npu
