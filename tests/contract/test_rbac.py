"""The chart grants what the operator asks for, and no more."""

from __future__ import annotations

import uuid
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import helm_python
import pytest
import yaml
from aiohttp import web
from kubernetes.aio.client import (
    AuthorizationV1Api,
    Configuration,
    V1ResourceAttributes,
    V1SelfSubjectAccessReview,
    V1SelfSubjectAccessReviewSpec,
)

from reprise_operator.api import Api, ClusterError, Fault
from reprise_operator.cluster import Cluster, Key
from reprise_operator.kinds import (
    ADMISSION_PERMISSIONS,
    ALL_CHILD_TYPES,
    CLUSTER_PERMISSIONS,
    LEASE_PERMISSIONS,
    NODE_PERMISSIONS,
    OPTIONAL_TYPES,
    PERMISSIONS,
    WATCH_PERMISSIONS,
    Permission,
    ResourceType,
)
from reprise_operator.leader import Leadership
from reprise_operator.settings import GROUP, PLURAL
from tests.contract.test_chart import NAMESPACE, RELEASE, render
from tests.support.apiserver import ApiServer
from tests.support.cluster import CRD
from tests.support.kubectl import Kubectl, eventually

Granted = dict[Permission, frozenset[str]]
ACCOUNT = f"{RELEASE}-reprise-operator"


def union(*tables: Mapping[Permission, Iterable[str]]) -> Granted:
    verbs: dict[Permission, set[str]] = defaultdict(set)
    for table in tables:
        for permission, allowed in table.items():
            verbs[permission] |= set(allowed)
    return {permission: frozenset(allowed) for permission, allowed in verbs.items()}


def granted(role: dict[str, Any]) -> Granted:
    verbs: dict[Permission, set[str]] = defaultdict(set)
    for rule in role["rules"]:
        assert set(rule) == {"apiGroups", "resources", "verbs"}
        for group in rule["apiGroups"]:
            for resource in rule["resources"]:
                verbs[group, resource] |= set(rule["verbs"])
    return {permission: frozenset(allowed) for permission, allowed in verbs.items()}


def bound_roles(manifests: list[dict[str, Any]]) -> dict[tuple[str, str | None], Granted]:
    """(kind of role, namespace it holds in) → what it grants, of the roles bound to the operator's account."""
    roles = {
        (role["kind"], role["metadata"].get("namespace"), role["metadata"]["name"]): role
        for role in manifests
        if role["kind"] in ("Role", "ClusterRole")
    }
    found = {}
    for binding in manifests:
        if binding["kind"] not in ("RoleBinding", "ClusterRoleBinding"):
            continue
        assert [(subject["name"], subject["namespace"]) for subject in binding["subjects"]] == [(ACCOUNT, NAMESPACE)]
        kind, namespace = binding["roleRef"]["kind"], binding["metadata"].get("namespace")
        found[kind, namespace] = granted(roles[kind, namespace, binding["roleRef"]["name"]])
    return found


SERVED = union(PERMISSIONS, WATCH_PERMISSIONS, ADMISSION_PERMISSIONS)


def test_all_namespaces() -> None:
    assert bound_roles(render()) == {
        ("ClusterRole", None): union(SERVED, CLUSTER_PERMISSIONS),
        ("Role", NAMESPACE): dict(LEASE_PERMISSIONS),
    }


def test_nodes_are_listed_only_where_it_is_asked_for() -> None:
    assert bound_roles(render({"rbac": {"readNodes": True}}))["ClusterRole", None] == union(
        SERVED, CLUSTER_PERMISSIONS, NODE_PERMISSIONS
    )
    with pytest.raises(helm_python.HelmError, match=r"rbac\.readNodes needs all namespaces"):
        render({"rbac": {"readNodes": True}, "watchNamespace": "models"})


def test_one_namespace_needs_nothing_of_the_cluster() -> None:
    manifests = render({"watchNamespace": "models"})
    assert bound_roles(manifests) == {("Role", "models"): SERVED, ("Role", NAMESPACE): dict(LEASE_PERMISSIONS)}
    assert not [manifest for manifest in manifests if manifest["kind"].startswith("ClusterRole")]


def test_secrets_can_be_left_out_and_are_never_listed() -> None:
    without = bound_roles(render({"rbac": {"checkSecrets": False}}))["ClusterRole", None]
    assert ("", "secrets") not in without


@pytest.mark.parametrize(
    ("value", "kinds"),
    [
        ("gateway", {"inferencepools", "httproutes"}),
        ("podMonitors", {"podmonitors"}),
        ("keda", {"scaledobjects"}),
    ],
)
def test_each_optional_kind_can_be_left_out(value: str, kinds: set[str]) -> None:
    without = bound_roles(render({"rbac": {value: False}}))["ClusterRole", None]
    everything = bound_roles(render())["ClusterRole", None]
    assert {plural for _, plural in everything.keys() - without.keys()} == kinds
    assert kinds <= {kind.plural for kind in OPTIONAL_TYPES}


def test_no_wildcards_and_no_escalation() -> None:
    for role in bound_roles(render()).values():
        for (group, resource), verbs in role.items():
            assert "*" not in (group, resource)
            assert not verbs & {"*", "escalate", "bind", "impersonate"}
            assert group != "rbac.authorization.k8s.io"


def test_without_rbac_nothing_is_bound() -> None:
    assert bound_roles(render({"rbac": {"create": False}})) == {}


async def test_the_table_lists_nothing_that_is_never_asked_for() -> None:
    """api.py refuses what the table lacks; this is the other half: all of cluster.py, called once."""
    answer = {"metadata": {"name": "x", "uid": "u", "resourceVersion": "1"}, "spec": {}, "items": []}

    async def anything(_: web.Request) -> web.Response:
        return web.json_response(answer)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", anything)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    asked: dict[Permission, set[str]] = defaultdict(set)

    def note(verb: str, resource: ResourceType, _: str) -> None:
        asked[resource.group, resource.plural].add(verb)

    host = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        async with Api(Configuration(host=host), on_request=note) as api:
            cluster = Cluster(api)
            await cluster.list_services(None)
            await cluster.get_service(Key("n", "x"))
            for kind in ALL_CHILD_TYPES:
                manifest = {
                    "apiVersion": kind.api_version,
                    "kind": kind.kind,
                    "metadata": {"name": "x", "namespace": "n"},
                }
                await cluster.children("n", owner_uid="u", selector={}, planned=[(kind.kind, "x")], optional=[kind])
                await cluster.apply(manifest, present=None)
                await cluster.delete("n", kind=kind.kind, name="x", uid="u")
            await cluster.scale("n", kind="Deployment", name="x", uid="u", replicas=1)
            await cluster.delete("n", kind="Pod", name="x", uid="u")
            await cluster.pods("n", {})
            await cluster.log_tail("n", "x", "engine")
            await cluster.replica_sets("n", {})
            await cluster.missing_secrets("n", ["x"])
            await cluster.events_about("n", "u")
            await cluster.contents("Secret", "n", "x")
            await cluster.contents("ConfigMap", "n", "x")
            await cluster.missing_claims("n", ["x"])
            await cluster.pod_log("n", "x", "c", previous=True)
            await cluster.job("n", "x")
            await cluster.create_job(manifest)
            await cluster.delete_job("n", "x")
            await cluster.nodes_and_pods()
            await cluster.missing_config_maps("n", ["x"])
            await cluster.create_event("n", {})
            await cluster.patch_event("n", "x", {})
            service = {"metadata": {"name": "x", "namespace": "n", "resourceVersion": "1"}}
            await cluster.patch_status(service, {"url": "http://x"})
    finally:
        await runner.cleanup()
    asked["", "pods/log"] = {"get"} & asked["", "pods"]
    asked["", "pods"] -= {"get"}
    asked[GROUP, f"{PLURAL}/status"] = {"patch"} & asked[GROUP, PLURAL]
    asked[GROUP, PLURAL] -= {"patch"}
    for kind in ALL_CHILD_TYPES:
        asked[kind.group, kind.plural].add("create")  # an apply that creates is authorized as both
    assert union(asked) == union(PERMISSIONS, NODE_PERMISSIONS)


def test_endpoint_pickers_get_their_rights_from_the_chart_and_may_only_read() -> None:
    """The operator could give rights only if it had them; so whoever installs the chart gives them."""
    manifests = render({"endpointPicker": {"namespaces": ["llm", "team-b"], "serviceAccount": "pickers"}})
    accounts = [
        manifest["metadata"]["namespace"]
        for manifest in manifests
        if manifest["kind"] == "ServiceAccount" and manifest["metadata"]["name"] == "pickers"
    ]
    assert accounts == ["llm", "team-b"]
    roles = [role for role in manifests if role["kind"] == "Role" and role["metadata"]["namespace"] in accounts]
    assert [role["metadata"]["namespace"] for role in roles] == accounts
    for role in roles:
        table = granted(role)
        assert {verb for verbs in table.values() for verb in verbs} == {"get", "list", "watch"}
        assert {("", "pods"), ("inference.networking.k8s.io", "inferencepools")} <= set(table)
        assert ("", "secrets") not in table
    bindings = [
        binding
        for binding in manifests
        if binding["kind"] == "RoleBinding" and binding["metadata"]["namespace"] in accounts
    ]
    for binding in bindings:
        namespace = binding["metadata"]["namespace"]
        assert binding["subjects"] == [{"kind": "ServiceAccount", "name": "pickers", "namespace": namespace}]
    assert len(bindings) == 2


# With the account's own token, on an API server that has RBAC -------------------------------------------------------


@pytest.fixture
def account(api_server: ApiServer, request: pytest.FixtureRequest) -> Iterator[Configuration]:
    if not api_server.has_controller_manager:
        pytest.skip("the emulated API server has no RBAC")
    kubectl = Kubectl(kubeconfig=api_server.kubeconfig_path, namespace=NAMESPACE)
    kubectl.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}})
    eventually(lambda: kubectl.get("serviceaccount", "default"), "the namespace's service account")
    kubectl("apply", "--server-side", "-f", str(CRD))
    manifests = [manifest for manifest in render(request.param) if manifest["kind"] != "Deployment"]
    text = yaml.safe_dump_all(manifests)
    kubectl("apply", "--server-side", "-f", "-", stdin=text)
    configuration = Configuration(host=api_server.url)
    configuration.verify_ssl = False
    configuration.api_key["BearerToken"] = f"Bearer {kubectl('create', 'token', ACCOUNT).strip()}"
    yield configuration
    kubectl("delete", "-f", "-", stdin=text)


@pytest.fixture
def a_service(account: Configuration, api_server: ApiServer) -> Iterator[str]:
    """The name of a service in a namespace that is not the operator's own."""
    kubectl = Kubectl(kubeconfig=api_server.kubeconfig_path, namespace="default")
    name = f"seen-{uuid.uuid4().hex[:8]}"
    kubectl.apply(
        {
            "apiVersion": "serving.reprise.io/v1alpha1",
            "kind": "InferenceService",
            "metadata": {"name": name},
            "spec": {"model": {"uri": "hostpath:///m"}, "accelerator": {"profile": "cpu"}},
        }
    )
    yield name
    kubectl.delete("inferenceservice", name)


async def allowed(api: Api, verb: str, permission: Permission, namespace: str | None) -> bool:
    """What the authorizer answers for the account itself."""
    resource, _, subresource = permission[1].partition("/")
    attributes = V1ResourceAttributes(
        verb=verb, group=permission[0], resource=resource, subresource=subresource, namespace=namespace
    )
    review = V1SelfSubjectAccessReview(spec=V1SelfSubjectAccessReviewSpec(resource_attributes=attributes))
    answer = await AuthorizationV1Api(api.client).create_self_subject_access_review(review)
    assert answer.status is not None
    return bool(answer.status.allowed)


@pytest.mark.parametrize("account", [{}], indirect=True, ids=["cluster"])
async def test_the_account_may_do_all_of_it_everywhere(account: Configuration, a_service: str) -> None:
    async with Api(account) as api:
        for permission, verbs in union(SERVED, CLUSTER_PERMISSIONS).items():
            for verb in verbs:
                assert await allowed(api, verb, permission, None), (verb, permission)
        for verb in LEASE_PERMISSIONS["coordination.k8s.io", "leases"]:
            assert await allowed(api, verb, ("coordination.k8s.io", "leases"), NAMESPACE)
            assert not await allowed(api, verb, ("coordination.k8s.io", "leases"), "default")
        assert not await allowed(api, "list", ("", "secrets"), None)
        listed = {service["metadata"]["name"] for service in await Cluster(api).list_services(None)}
        assert a_service in listed  # those of other tests may be there too
        leadership = Leadership(api.client, namespace=NAMESPACE, name="lock", identity="me")
        await leadership.acquire()
        await leadership.release()


@pytest.mark.parametrize("account", [{"watchNamespace": NAMESPACE}], indirect=True, ids=["namespaced"])
async def test_the_account_of_one_namespace_may_do_nothing_elsewhere(account: Configuration) -> None:
    async with Api(account) as api:
        for permission, verbs in SERVED.items():
            for verb in verbs:
                assert await allowed(api, verb, permission, NAMESPACE), (verb, permission)
                assert not await allowed(api, verb, permission, "default"), (verb, permission)
        with pytest.raises(ClusterError) as refused:
            await Cluster(api).list_services(None)
        assert refused.value.fault is Fault.FORBIDDEN
