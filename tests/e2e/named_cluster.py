"""The cluster that KUBECONFIG names (make e2e): the operator installed by its chart, the engine in its image.

    REPRISE_E2E_MODEL            model URI that the nodes can serve; hostpath:///models/smollm2 unless set
    REPRISE_E2E_ENGINE_IMAGE     repository:tag of the engine; the operator's default unless set
    REPRISE_E2E_OPERATOR_IMAGE   repository:tag of the operator; the chart's default unless set
    REPRISE_E2E_RESTART_NODE     a program that restarts a node with all its containers; a test is skipped unless set

The release, its namespace and the namespace of the tests are removed at the end; the CRD stays, as helm leaves it.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import helm_python
import pytest

from tests.e2e.site import Site
from tests.support.cluster import CRD, PROJECT
from tests.support.kubectl import Kubectl, eventually, namespace
from tests.support.node_client import Manifest

NAMESPACE = "reprise-e2e"
SYSTEM = "reprise-e2e-system"
RELEASE = "reprise"
OPERATOR = "app.kubernetes.io/name=reprise-operator"


@contextlib.contextmanager
def named_site() -> Iterator[Site]:
    """Installs the chart and yields the site; fails at once, saying so, where KUBECONFIG names no cluster."""
    path = os.environ.get("KUBECONFIG", str(Path.home() / ".kube" / "config"))
    if not Path(path).is_file():
        pytest.fail(f"make e2e needs a cluster: KUBECONFIG names {path}, which is not there.", pytrace=False)
    kubectl = Kubectl(kubeconfig=Path(path), namespace=NAMESPACE)
    system = Kubectl(kubeconfig=Path(path), namespace=SYSTEM)
    for name in (NAMESPACE, SYSTEM):
        kubectl("delete", "namespace", name, "--ignore-not-found", "--timeout=180s", timeout=200)
        kubectl.apply(namespace(name))
    eventually(lambda: kubectl.get("serviceaccount", "default"), "the namespace's service account")
    # helm never upgrades a CRD that is already there; the tests mean this tree's.
    kubectl("apply", "--server-side", "--force-conflicts", "-f", str(CRD))
    with helm_python.Config(kubeconfig_path=path, namespace=SYSTEM) as helm:
        chart = str(PROJECT / "charts" / "reprise-operator")
        helm.install(chart, RELEASE, values(), namespace=SYSTEM, wait="legacy", timeout=180)

        def upgrade() -> None:
            changed = values()
            changed["extraArgs"].append("--resync-seconds=601")
            helm.upgrade(chart, RELEASE, changed, namespace=SYSTEM, wait="legacy", timeout=180)

        try:
            yield _site(kubectl, system, upgrade_chart=upgrade)
        finally:
            # First what the operator serves, then the operator; deletion needs it no more than this.
            kubectl("delete", "namespace", NAMESPACE, "--timeout=240s", timeout=300)
            helm.uninstall(RELEASE, wait="legacy", timeout=120)
            kubectl("delete", "namespace", SYSTEM, "--timeout=180s", timeout=200)


def values() -> Manifest:
    """Of the chart: the images under test, and figures within seconds."""
    chosen: Manifest = {"extraArgs": ["--scrape-seconds=2", "--status-min-interval-seconds=2"]}
    if image := os.environ.get("REPRISE_E2E_OPERATOR_IMAGE"):
        repository, _, tag = image.rpartition(":")
        chosen["image"] = {"repository": repository, "tag": tag}
    return chosen


def restarter() -> Callable[[], None] | None:
    program = os.environ.get("REPRISE_E2E_RESTART_NODE")
    if program is None:
        return None

    def restart() -> None:
        subprocess.run([program], check=True, timeout=180)

    return restart


def _site(kubectl: Kubectl, system: Kubectl, *, upgrade_chart: Callable[[], None]) -> Site:
    def scale(replicas: int) -> None:
        system("scale", "deployment", "-l", OPERATOR, f"--replicas={replicas}")

        def there() -> bool:
            (found,) = system.list("deployments", OPERATOR)
            pods = system.list("pods", OPERATOR)
            return bool(len(pods) == replicas == (found.get("status") or {}).get("readyReplicas", 0))

        eventually(there, f"the operator has {replicas} pods", within=120)

    @contextlib.contextmanager
    def reach(service: str) -> Iterator[str]:
        with port_forward(kubectl, service) as url:
            yield url

    return Site(
        kubectl=kubectl,
        model_uri=os.environ.get("REPRISE_E2E_MODEL", "hostpath:///models/smollm2"),
        model_uris={},
        image=os.environ.get("REPRISE_E2E_ENGINE_IMAGE"),
        reach=reach,
        start_operator=lambda: scale(1),
        stop_operator=lambda: scale(0),
        upgrade_chart=upgrade_chart,
        restart_node=restarter(),
    )


@contextlib.contextmanager
def port_forward(kubectl: Kubectl, service: str, *, port: int = 8000) -> Iterator[str]:
    """`kubectl port-forward` to a Service; yields http://127.0.0.1:port."""
    process = subprocess.Popen(
        [kubectl.program, "--namespace", kubectl.namespace, "port-forward", f"service/{service}", f":{port}"],
        env=dict(kubectl.environment),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        match = re.search(r"127\.0\.0\.1:(\d+)", line)
        assert match is not None, f"kubectl port-forward: {line}{process.stdout.read()}"
        yield f"http://127.0.0.1:{match[1]}"
    finally:
        process.terminate()
        process.wait(10)
        process.stdout.close()
