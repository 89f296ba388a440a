"""kubectl, by both routes of apply, against each API server; what a person would type and see."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contract.apiserver.replay import client_of, install_definitions
from tests.support.apiserver import ApiServer, start_api_server
from tests.support.kube_assets import find_kube_assets, find_kubectl

WIDGET = "apiVersion: contract.reprise.io/v1\nkind: Widget\nmetadata: {name: NAME}\nspec: {size: small, replicas: 2}\n"
DEPLOYMENT = """
apiVersion: apps/v1
kind: Deployment
metadata: {name: d}
spec:
  selector: {matchLabels: {app: d}}
  template:
    metadata: {labels: {app: d}}
    spec:
      containers:
        - {name: engine, image: "engine:1", env: [{name: A, value: "1"}, {name: B, value: "2"}]}
"""


@pytest.fixture(scope="module", params=["emulated", "real"])
def server(request: pytest.FixtureRequest) -> Iterator[ApiServer]:
    if request.param == "real" and find_kube_assets() is None:
        pytest.skip("no kube-apiserver: run `make kube-assets`, or set KUBEBUILDER_ASSETS")
    with start_api_server(request.param, controllers=False) as server:
        with client_of(server) as client:
            install_definitions(client)
        yield server


@pytest.fixture
def kubectl(server: ApiServer, tmp_path: Path) -> Kubectl:
    return Kubectl(server, tmp_path)


class Kubectl:
    def __init__(self, server: ApiServer, home: Path) -> None:
        program = find_kubectl()
        assert program is not None
        self._program = str(program)
        self._env = {**os.environ, "KUBECONFIG": str(server.kubeconfig_path), "HOME": str(home)}

    def __call__(self, *arguments: str, stdin: str = "", code: int = 0) -> str:
        done = subprocess.run(
            [self._program, *arguments], input=stdin, text=True, env=self._env, capture_output=True, timeout=60
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr


def test_client_side_apply_shows_what_changed(kubectl: Kubectl) -> None:
    manifest = WIDGET.replace("NAME", "csa")
    assert "created" in kubectl("apply", "-f", "-", stdin=manifest)
    assert "unchanged" in kubectl("apply", "-f", "-", stdin=manifest)
    assert kubectl("diff", "-f", "-", stdin=manifest) == ""
    other = manifest.replace("replicas: 2", "replicas: 3")
    assert "+  replicas: 3" in kubectl("diff", "-f", "-", stdin=other, code=1)
    assert "configured" in kubectl("apply", "-f", "-", stdin=other)
    assert kubectl("get", "widget", "csa", "-o", "jsonpath={.spec.replicas}") == "3"


def test_server_side_apply_meets_another_manager(kubectl: Kubectl) -> None:
    manifest = WIDGET.replace("NAME", "ssa")
    assert "serverside-applied" in kubectl("apply", "--server-side", "-f", "-", stdin=manifest)
    kubectl("scale", "widget/ssa", "--replicas=1")
    refused = kubectl("apply", "--server-side", "-f", "-", stdin=manifest, code=1)
    assert "conflict" in refused
    assert ".spec.replicas" in refused
    kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", stdin=manifest)
    assert kubectl("get", "widget", "ssa", "-o", "jsonpath={.spec.replicas}") == "2"


def test_what_is_refused_says_why(kubectl: Kubectl) -> None:
    manifest = WIDGET.replace("NAME", "refused")
    typo = manifest.replace("replicas: 2", "replica: 2")
    assert 'unknown field "spec.replica"' in kubectl("apply", "-f", "-", stdin=typo, code=1)
    many = manifest.replace("replicas: 2", "replicas: 4")
    assert "a small widget has at most 3 replicas" in kubectl("apply", "-f", "-", stdin=many, code=1)


def test_columns(kubectl: Kubectl) -> None:
    kubectl("apply", "-f", "-", stdin=WIDGET.replace("NAME", "columns"))
    narrow = kubectl("get", "wdg", "columns").splitlines()
    assert narrow[0].split() == ["NAME", "READY", "HIT%", "CACHED", "REPLICAS", "AGE"]
    assert narrow[1].split()[:3] == ["columns", "Unknown", "2"]
    wide = kubectl("get", "wdg", "columns", "-o", "wide").splitlines()
    assert wide[0].split() == ["NAME", "READY", "HIT%", "CACHED", "REPLICAS", "SIZE", "AGE"]


def test_status_patch_wait_and_delete(kubectl: Kubectl) -> None:
    kubectl("apply", "-f", "-", stdin=WIDGET.replace("NAME", "waits"))
    ready = '{"status":{"conditions":[{"type":"Ready","status":"True"}]}}'
    kubectl("patch", "widget/waits", "--subresource=status", "--type=merge", "-p", ready)
    assert "condition met" in kubectl("wait", "--for=condition=Ready", "widget/waits", "--timeout=10s")
    assert "deleted" in kubectl("delete", "widget", "waits")
    assert "NotFound" in kubectl("get", "widget", "waits", code=1)


def test_a_built_in_kind_merges_by_key(kubectl: Kubectl) -> None:
    kubectl("apply", "-f", "-", stdin=DEPLOYMENT)
    kubectl("set", "env", "deployment/d", "C=3")
    kubectl("apply", "-f", "-", stdin=DEPLOYMENT.replace('{name: A, value: "1"}, ', ""))
    names = kubectl("get", "deployment", "d", "-o", "jsonpath={.spec.template.spec.containers[0].env[*].name}")
    assert set(names.split()) == {"B", "C"}
    assert "engine" in kubectl("describe", "deployment", "d")
    kubectl("delete", "deployment", "d")


def test_explain_and_discovery(kubectl: Kubectl) -> None:
    assert "How large." in kubectl("explain", "widget.spec.size")
    assert "widgets" in kubectl("api-resources", "--api-group=contract.reprise.io")
