"""An API server with our CRD, and a namespace of its own for each test that asks for one."""

from __future__ import annotations

import os
import uuid
from collections.abc import AsyncIterator, Iterator

import pytest

from tests.operator.reconcile_bench import Bench, open_bench
from tests.support.apiserver import ApiServer
from tests.support.cluster import install_crd
from tests.support.kubectl import Kubectl, eventually, namespace


@pytest.fixture(scope="session")
def crd_server(api_server: ApiServer) -> ApiServer:
    install_crd(Kubectl(kubeconfig=api_server.kubeconfig_path))
    return api_server


@pytest.fixture
def kubectl(crd_server: ApiServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Kubectl]:
    """kubectl in a new namespace; KUBECONFIG is set for what connects in this process."""
    monkeypatch.setenv("KUBECONFIG", str(crd_server.kubeconfig_path))
    assert os.environ["KUBECONFIG"]
    kubectl = Kubectl(kubeconfig=crd_server.kubeconfig_path, namespace=f"op-{uuid.uuid4().hex[:8]}")
    kubectl.put(namespace(kubectl.namespace))
    if crd_server.has_controller_manager:
        account = "the namespace's service account"
        eventually(lambda: kubectl.get("serviceaccount", "default"), account, every=0.03)
    yield kubectl
    kubectl.delete_namespace()


@pytest.fixture
async def bench(kubectl: Kubectl) -> AsyncIterator[Bench]:
    async with open_bench(kubectl) as opened:
        yield opened


@pytest.fixture
def controller_manager(crd_server: ApiServer) -> None:
    if not crd_server.has_controller_manager:
        pytest.skip("beside the emulated API server nobody runs HorizontalPodAutoscalers or evicts pods")
