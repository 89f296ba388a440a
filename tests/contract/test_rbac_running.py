"""The operator's process under exactly the roles that the chart renders: they suffice for a life, and all are used.

test_rbac.py compares tables. Here the operator runs with a token of the chart's service account against an API server
that authorizes by RBAC, over a wire that writes down each request and its answer. None may be forbidden, and what is
granted and was never used must be listed in RARELY with the reason. Whoever adds a permission adds a chapter to
tests/support/life_story.py that needs it.
"""

from __future__ import annotations

import contextlib
import uuid
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from reprise_operator.kinds import ADMISSION_PERMISSIONS, Permission
from reprise_operator.process import LEASE_NAME
from tests.contract.test_chart import NAMESPACE, container, render
from tests.contract.test_rbac import ACCOUNT, bound_roles
from tests.operator.operator_process import Process, ended
from tests.support.apiserver import ApiServer, start_api_server
from tests.support.cluster import install_crd
from tests.support.kube_assets import find_kube_assets
from tests.support.kubectl import Kubectl, eventually, namespace
from tests.support.life_story import Story, service, stand_ins
from tests.support.request_recorder import Exchange, recording

Verb = tuple[Permission, str]

RARELY: Mapping[Verb, str] = {
    **{
        (permission, verb): "never sent: asked for by OwnerReferencesPermissionEnforcement"
        for permission, verbs in ADMISSION_PERMISSIONS.items()
        for verb in verbs
    },
    (("", "events"), "patch"): "an event that repeats is counted a minute later",
    (("", "events"), "list"): "of a pod that a node cannot give its volumes, and there is no node",
    (("", "pods"), "delete"): "a StatefulSet's pods of an older template, when the others serve",
    (("", "pods/log"), "get"): "of a container that has ended",
    **{
        (("batch", "jobs"), verb): "a change is checked before the last pod that serves is taken for it"
        for verb in ("get", "create", "delete")
    },
    **{
        (("apps", kind), "delete"): "a workload that another has taken over from"
        for kind in ("deployments", "statefulsets")
    },
}
"""What a story of a minute does not come to, and why it is needed all the same."""


@pytest.fixture(scope="module")
def server() -> Iterator[ApiServer]:
    """One of its own: an operator of all namespaces would look after those of other tests."""
    if find_kube_assets() is None:
        pytest.skip("the emulated API server has no RBAC: run `make kube-assets`, or set KUBEBUILDER_ASSETS")
    with start_api_server("real") as server:
        if not server.has_controller_manager:
            pytest.skip("no kube-controller-manager, which makes the namespace's service account")
        yield server


@pytest.fixture
def kubectl(server: ApiServer) -> Kubectl:
    kubectl = Kubectl(kubeconfig=server.kubeconfig_path, namespace=f"models-{uuid.uuid4().hex[:6]}")
    for name in (NAMESPACE, kubectl.namespace):
        kubectl.apply(namespace(name))
    install_crd(kubectl)
    for definition in stand_ins(kubectl):
        kubectl.apply(definition)
    return kubectl


def as_account(kubectl: Kubectl, folder: Path) -> Path:
    """A kubeconfig with a token of the chart's service account, and nobody else's rights."""
    token = replace(kubectl, namespace=NAMESPACE)("create", "token", ACCOUNT).strip()
    config = yaml.safe_load(kubectl.kubeconfig.read_text())
    config["users"] = [{"name": config["users"][0]["name"], "user": {"token": token}}]
    path = folder / "account.kubeconfig"
    path.write_text(yaml.safe_dump(config))
    return path


@contextlib.contextmanager
def applied(kubectl: Kubectl, manifests: Iterable[dict[str, Any]]) -> Iterator[None]:
    """What the chart renders but its Deployment, until the end."""
    by_namespace: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for manifest in manifests:
        if manifest["kind"] != "Deployment":
            by_namespace[manifest["metadata"].get("namespace", NAMESPACE)].append(manifest)
    texts = {name: yaml.safe_dump_all(found) for name, found in by_namespace.items()}
    for name, text in texts.items():
        replace(kubectl, namespace=name)("apply", "--server-side", "-f", "-", stdin=text)
    eventually(lambda: replace(kubectl, namespace=NAMESPACE).get("serviceaccount", ACCOUNT), "the account")
    try:
        yield
    finally:
        for name, text in texts.items():
            replace(kubectl, namespace=name)("delete", "-f", "-", stdin=text)
        replace(kubectl, namespace=NAMESPACE).delete("lease", LEASE_NAME)  # the next one is to make its own


def arguments_of(values: dict[str, Any]) -> list[str]:
    """The operator's, without what is in its pod only."""
    inside = ("run", "--reference-key-file")
    return [argument for argument in container(values)["args"] if not argument.startswith(inside)]


def used(exchanges: Iterable[Exchange]) -> set[Verb]:
    """What the API server's authorizer was asked for."""
    found: set[Verb] = set()
    for exchange in exchanges:
        parts = exchange.request.path.strip("/").split("/")
        if parts[0] not in ("api", "apis"):
            continue
        group, rest = ("", parts[2:]) if parts[0] == "api" else (parts[1] if len(parts) > 1 else "", parts[3:])
        if rest[:1] == ["namespaces"] and len(rest) > 2:
            rest = rest[2:]
        if not rest:
            continue  # discovery, which everybody may read
        name = rest[1] if len(rest) > 1 else None
        permission: Permission = (group, f"{rest[0]}/{rest[2]}" if len(rest) > 2 else rest[0])
        method = exchange.request.method
        if method == "GET" and name is None:
            verbs = ["watch" if exchange.request.is_watch else "list"]
        else:
            verbs = [{"GET": "get", "POST": "create", "PUT": "update"}.get(method, method.lower())]
        if method == "PATCH" and exchange.status == 201:
            verbs.append("create")  # an apply that creates is authorized as both
        found |= {(permission, verb) for verb in verbs}
    return found


def flat(roles: Mapping[Any, Mapping[Permission, Iterable[str]]]) -> set[Verb]:
    return {(permission, verb) for role in roles.values() for permission, verbs in role.items() for verb in verbs}


@pytest.mark.parametrize("namespaced", [False, True], ids=["all namespaces", "one namespace"])
def test_the_chart_grants_what_a_life_takes_and_no_more(kubectl: Kubectl, tmp_path: Path, *, namespaced: bool) -> None:
    values = {"watchNamespace": kubectl.namespace} if namespaced else {}
    manifests = render(values)
    roles = bound_roles(manifests)
    log = tmp_path / "operator.log"
    with applied(kubectl, manifests), recording(as_account(kubectl, tmp_path), folder=tmp_path) as wire:
        arguments = (*arguments_of(values), "--scrape-seconds=3", "--discovery-seconds=3")
        with ended(Process(wire.kubeconfig, log, *arguments)) as operator:
            operator.wait_leading()
            Story(kubectl=kubectl).tell()
            assert operator.stop() < 10
            exchanges = wire.exchanges()
    assert [exchange for exchange in exchanges if exchange.status in (401, 403)] == []
    assert '"level": "error"' not in log.read_text()
    granted, needed = flat(roles), used(exchanges)
    assert needed <= granted, "asked for, and answered by somebody else's rights"
    unused = granted - needed
    assert unused <= set(RARELY), (
        f"granted and never used: {sorted(unused - set(RARELY))}. Add a chapter to tests/support/life_story.py that "
        "needs it, or take it out of kinds.py and the chart"
    )
    assert set(RARELY) <= granted, f"no longer granted: {sorted(set(RARELY) - granted)}"


def test_a_right_that_is_taken_away_is_missed(kubectl: Kubectl, tmp_path: Path) -> None:
    """The test above can fail: without one verb of one rule the same wire shows the refusal, and the log names it."""
    values = {"watchNamespace": kubectl.namespace}
    manifests = render(values)
    role = next(m for m in manifests if m["kind"] == "Role" and m["metadata"]["namespace"] == kubectl.namespace)
    rule = next(rule for rule in role["rules"] if "services" in rule["resources"])
    rule["resources"].remove("services")
    verbs = [verb for verb in rule["verbs"] if verb != "patch"]
    role["rules"].append({"apiGroups": [""], "resources": ["services"], "verbs": verbs})
    with applied(kubectl, manifests), recording(as_account(kubectl, tmp_path), folder=tmp_path) as wire:
        arguments = arguments_of(values)
        with ended(Process(wire.kubeconfig, tmp_path / "operator.log", *arguments)) as operator:
            operator.wait_leading()
            kubectl.apply(service("plain", {}))
            refused = eventually(lambda: [e for e in wire.exchanges() if e.status == 403], "a refusal")

            def stalled() -> str | None:
                status = (kubectl.get("inferenceservice", "plain") or {}).get("status") or {}
                conditions = {item["type"]: item for item in status.get("conditions") or ()}
                found = conditions.get("Stalled", {})
                return found["message"] if found.get("status") == "True" else None

            message = eventually(stalled, "the status says so")
            operator.stop()
        kubectl.delete("inferenceservice", "plain")
    assert used(refused) == {(("", "services"), "patch")}
    assert 'cannot patch resource "services"' in message
