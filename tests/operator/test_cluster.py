"""cluster.py against an API server: what is applied, what is a conflict, what is not sent at all."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st
from kubernetes.aio.client import Configuration

from reprise_operator.api import Api, ClusterError, Fault, load_connection
from reprise_operator.cluster import Cluster, Key, merge_difference
from reprise_operator.kinds import ResourceType
from reprise_operator.leader import Leadership, LeadershipLost, LeaseTimes
from reprise_operator.naming import OWNER_UID_LABEL
from reprise_operator.observed import ObservedChild
from reprise_operator.server_side_apply import ApplyOutcome, yaml_of
from tests.support.apiserver import ApiServer
from tests.support.kubectl import Kubectl

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.text("ab", max_size=2),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from("xyz"), inner, max_size=3),
    max_leaves=8,
)


class Requests:
    def __init__(self) -> None:
        self.seen: list[tuple[str, str, str]] = []

    def __call__(self, verb: str, resource: ResourceType, outcome: str) -> None:
        self.seen.append((verb, resource.plural, outcome))


@pytest.fixture
def requests() -> Requests:
    return Requests()


@pytest.fixture
async def cluster(kubectl: Kubectl, requests: Requests) -> AsyncIterator[Cluster]:
    async with Api(await load_connection(), on_request=requests) as api:
        yield Cluster(api)


def network_service(namespace: str, *, port: int = 8000, uid: str = "u1", name: str = "web") -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name, "namespace": namespace, "labels": {OWNER_UID_LABEL: uid}},
        "spec": {
            "selector": {"app": "web"},
            "ports": [{"name": "http", "port": port, "protocol": "TCP", "targetPort": "http"}],
        },
    }


def owned(kubectl: Kubectl) -> dict[str, Any]:
    """An owner that exists (the garbage collector deletes the children of one that does not), and what it owns."""
    kubectl.apply({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "owner"}})
    owner = kubectl.get("configmap", "owner")
    assert owner is not None
    uid = owner["metadata"]["uid"]
    manifest = network_service(kubectl.namespace, uid=uid)
    manifest["metadata"]["ownerReferences"] = [
        {"apiVersion": "v1", "kind": "ConfigMap", "name": "owner", "uid": uid, "controller": True}
    ]
    return manifest


async def child(cluster: Cluster, manifest: dict[str, Any]) -> ObservedChild:
    metadata = manifest["metadata"]
    uid = metadata["labels"][OWNER_UID_LABEL]
    (found,) = await cluster.children(
        metadata["namespace"],
        owner_uid=uid,
        selector={OWNER_UID_LABEL: uid},
        planned=[(manifest["kind"], metadata["name"])],
    )
    return found


@example("a 😀😀 b")
@example("\\\\ud83d\\\\ude00 \\\\😀")
@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_an_apply_means_the_same_as_yaml_and_as_json(text: str) -> None:
    """The API server reads it as YAML, which knows no pairs of surrogates."""
    body = {text: [text, {"b": text}]}
    written = yaml_of(body)
    assert yaml.safe_load(written) == body
    assert json.loads(written) == body


async def test_apply_creates_then_changes_then_leaves_alone(cluster: Cluster, kubectl: Kubectl) -> None:
    manifest = owned(kubectl)
    assert (await cluster.apply(manifest, present=None)).outcome is ApplyOutcome.CREATED
    present = await child(cluster, manifest)
    assert (present.kind, present.name, present.owned, present.terminating) == ("Service", "web", True, False)
    assert present.body["kind"] == "Service", "items of a list come without it"
    assert (await cluster.apply(manifest, present=present)).outcome is ApplyOutcome.UNCHANGED
    manifest["spec"]["ports"][0]["port"] = 81
    result = await cluster.apply(manifest, present=present)
    assert result.outcome is ApplyOutcome.CHANGED
    assert result.body is not None
    assert [port["port"] for port in result.body["spec"]["ports"]] == [81]


@pytest.mark.parametrize(
    "edit",
    [
        {"spec": {"selector": {"app": "other"}}},
        {"metadata": {"labels": {OWNER_UID_LABEL: None}}},
        {"metadata": {"ownerReferences": []}},
        # A list that is merged by a key: an apply alone would ask for two ports of the same name, and be refused.
        {"spec": {"ports": [{"name": "http", "port": 81, "protocol": "TCP", "targetPort": "http"}]}},
    ],
    ids=["selector", "label", "owner", "port"],
)
async def test_what_somebody_else_edited_is_set_back(cluster: Cluster, kubectl: Kubectl, edit: dict[str, Any]) -> None:
    manifest = owned(kubectl)
    await cluster.apply(manifest, present=None)
    kubectl.patch("service", "web", edit)
    result = await cluster.apply(manifest, present=await child(cluster, manifest))
    assert result.outcome is ApplyOutcome.CHANGED, result.message
    live = kubectl.get("service", "web")
    assert live is not None
    assert live["spec"]["selector"] == {"app": "web"}
    assert [port["port"] for port in live["spec"]["ports"]] == [8000]
    assert live["metadata"]["labels"] == manifest["metadata"]["labels"]
    assert [owner["name"] for owner in live["metadata"]["ownerReferences"]] == ["owner"]


async def test_after_a_repair_our_lists_are_ours_alone(
    cluster: Cluster, kubectl: Kubectl, crd_server: ApiServer
) -> None:
    """Two owners of a list's element, and a later apply without it could not remove it."""
    manifest = owned(kubectl)
    await cluster.apply(manifest, present=None)
    kubectl.patch("service", "web", {"spec": {"ports": [{"name": "http", "port": 81, "targetPort": "http"}]}})
    repaired = await cluster.apply(manifest, present=await child(cluster, manifest))
    assert repaired.outcome is ApplyOutcome.CHANGED
    assert repaired.body is not None
    owners = {(entry["manager"], entry["operation"]) for entry in repaired.body["metadata"]["managedFields"]}
    if crd_server.has_controller_manager:  # the emulated API server keeps managedFields to itself
        assert owners == {("reprise-operator", "Apply")}
    manifest["spec"]["ports"][0]["port"] = 82
    result = await cluster.apply(manifest, present=await child(cluster, manifest))
    assert result.outcome is ApplyOutcome.CHANGED
    assert result.body is not None
    assert [port["port"] for port in result.body["spec"]["ports"]] == [82]


async def test_an_object_that_was_replaced_meanwhile_is_a_conflict(cluster: Cluster, kubectl: Kubectl) -> None:
    manifest = owned(kubectl)
    await cluster.apply(manifest, present=None)
    present = await child(cluster, manifest)
    kubectl.delete("service", "web")
    assert (await cluster.apply(manifest, present=present)).outcome is ApplyOutcome.CONFLICT
    assert kubectl.get("service", "web") is None, "and nothing was created in its place"
    kubectl.apply({**manifest, "spec": {**manifest["spec"], "selector": {"app": "theirs"}}})
    assert (await cluster.apply(manifest, present=present)).outcome is ApplyOutcome.CONFLICT
    live = kubectl.get("service", "web")
    assert live is not None
    assert live["spec"]["selector"] == {"app": "theirs"}


async def test_one_that_appeared_meanwhile_is_not_taken_over(cluster: Cluster, kubectl: Kubectl) -> None:
    manifest = owned(kubectl)
    kubectl.apply(network_service(kubectl.namespace, port=99), server_side=True)
    kubectl.patch("service", "web", {"spec": {"selector": {"app": "theirs"}}})
    result = await cluster.apply(manifest, present=None)
    assert result.outcome is ApplyOutcome.CONFLICT
    live = kubectl.get("service", "web")
    assert live is not None
    assert (live["spec"]["selector"], live["spec"]["ports"][0]["port"]) == ({"app": "theirs"}, 99)


async def test_a_manifest_the_server_refuses_is_a_result_with_its_words(cluster: Cluster, kubectl: Kubectl) -> None:
    manifest = owned(kubectl)
    await cluster.apply(manifest, present=None)
    manifest["spec"]["ports"][0]["port"] = 70_000
    result = await cluster.apply(manifest, present=await child(cluster, manifest))
    assert result.outcome is ApplyOutcome.REFUSED
    assert "spec.ports[0].port" in result.message
    live = kubectl.get("service", "web")
    assert live is not None
    assert live["spec"]["ports"][0]["port"] == 8000


async def test_a_field_that_the_kind_does_not_have_is_a_refusal_though_the_server_answers_500(
    cluster: Cluster, kubectl: Kubectl
) -> None:
    manifest = owned(kubectl)
    manifest["spec"]["prot"] = 8000
    result = await cluster.apply(manifest, present=None)
    assert result.outcome is ApplyOutcome.REFUSED
    assert "prot: field not declared in schema" in result.message


async def test_a_foreign_object_under_a_planned_name_is_seen_as_foreign(cluster: Cluster, kubectl: Kubectl) -> None:
    foreign = network_service(kubectl.namespace, uid="somebody")
    kubectl.apply(foreign)
    found = await cluster.children(
        kubectl.namespace, owner_uid="us", selector={OWNER_UID_LABEL: "us"}, planned=[("Service", "web")]
    )
    assert [(child.name, child.owned) for child in found] == [("web", False)]


async def test_delete_only_takes_the_very_object(cluster: Cluster, kubectl: Kubectl) -> None:
    manifest = owned(kubectl)
    await cluster.apply(manifest, present=None)
    present = await child(cluster, manifest)
    assert not await cluster.delete(kubectl.namespace, kind="Service", name="web", uid="another")
    assert kubectl.get("service", "web") is not None
    assert await cluster.delete(kubectl.namespace, kind="Service", name="web", uid=present.uid)
    assert not await cluster.delete(kubectl.namespace, kind="Service", name="web", uid=present.uid)


async def test_what_does_not_exist_is_missing(cluster: Cluster, kubectl: Kubectl) -> None:
    kubectl.apply({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "there"}})
    assert await cluster.missing_secrets(kubectl.namespace, ["there", "absent"]) == ("absent",)
    assert await cluster.missing_claims(kubectl.namespace, ["absent"]) == ("absent",)
    assert await cluster.get_service(Key(kubectl.namespace, "absent")) is None


async def test_status_is_written_only_when_it_differs(cluster: Cluster, kubectl: Kubectl, requests: Requests) -> None:
    kubectl.apply(
        {
            "apiVersion": "serving.reprise.io/v1alpha1",
            "kind": "InferenceService",
            "metadata": {"name": "s"},
            "spec": {"model": {"uri": "hostpath:///m"}},
        }
    )
    key = Key(kubectl.namespace, "s")
    body = await cluster.get_service(key)
    assert body is not None
    wanted = {**body.get("status", {}), "url": "http://s", "replicas": 1}
    answer = await cluster.patch_status(body, wanted)
    assert answer is not None
    assert answer["status"]["url"] == "http://s"
    before = len(requests.seen)
    assert await cluster.patch_status(answer, wanted) is None
    assert len(requests.seen) == before
    del wanted["url"]
    answer = await cluster.patch_status(answer, wanted)
    assert answer is not None
    assert "url" not in answer["status"]
    assert answer["spec"] == body["spec"]
    with pytest.raises(ClusterError) as stale:
        await cluster.patch_status(body, {**wanted, "replicas": 2})
    assert stale.value.fault is Fault.CONFLICT
    kubectl.delete("inferenceservice", "s", "--wait=true")
    assert await cluster.patch_status(answer, {**wanted, "replicas": 2}) is None, "gone, and no fault"


async def test_a_long_list_is_read_to_its_end(
    cluster: Cluster, kubectl: Kubectl, requests: Requests, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("reprise_operator.api.PAGE_SIZE", 2)
    kubectl.apply(*(network_service(kubectl.namespace, name=f"web-{number}") for number in range(5)))
    found = await cluster.children(
        kubectl.namespace,
        owner_uid="u1",
        selector={OWNER_UID_LABEL: "u1"},
        planned=[("Service", f"web-{number}") for number in range(5)],
    )
    assert [child.name for child in found] == [f"web-{number}" for number in range(5)]
    assert requests.seen.count(("list", "services", "ok")) == 3


async def test_a_server_that_is_not_there_is_unavailable() -> None:
    async with Api(Configuration(host="http://127.0.0.1:1")) as api:
        with pytest.raises(ClusterError) as error:
            await Cluster(api).list_services(None)
    assert error.value.fault is Fault.UNAVAILABLE
    assert "no answer from the API server" in str(error.value)


async def test_a_request_that_no_permission_is_declared_for_is_never_sent() -> None:
    async with Api(Configuration(host="http://127.0.0.1:1")) as api:
        with pytest.raises(AssertionError, match=r"kinds\.PERMISSIONS lacks delete on secrets"):
            await api.request("delete", ResourceType("v1", "Secret", "secrets"), "default", "x")


@given(
    st.dictionaries(st.sampled_from("xyz"), JSON, max_size=3), st.dictionaries(st.sampled_from("xyz"), JSON, max_size=3)
)
def test_a_merge_difference_makes_the_one_into_the_other(present: dict[str, Any], wanted: dict[str, Any]) -> None:
    """The patch's own rules (RFC 7386), by which absent, null and {} of a nested object count as the same."""

    def patched(target: Any, patch: Any) -> Any:
        if not isinstance(patch, dict):
            return patch
        result = dict(target) if isinstance(target, dict) else {}
        for key, value in patch.items():
            if value is None:
                result.pop(key, None)
            else:
                result[key] = patched(result.get(key), value)
        return result

    stored = patched({}, present)
    aim = patched({}, wanted)
    assert patched(stored, merge_difference(stored, aim)) == aim
    assert merge_difference(aim, aim) == {}


# The lease ----------------------------------------------------------------------------------------------------------


async def test_the_second_operator_waits_until_the_first_hands_over(kubectl: Kubectl) -> None:
    async with Api(await load_connection()) as api:

        def candidate(identity: str) -> Leadership:
            times = LeaseTimes(duration=15, deadline=10.0, period=1.2)
            return Leadership(api.client, namespace=kubectl.namespace, name="lock", identity=identity, times=times)

        first, second = candidate("first"), candidate("second")
        await asyncio.wait_for(first.acquire(), 5)
        waiting = asyncio.create_task(second.acquire())
        keeping = asyncio.create_task(first.keep())
        await asyncio.sleep(2.5)
        assert not waiting.done()
        assert not keeping.done()
        keeping.cancel()
        await first.release()
        await asyncio.wait_for(waiting, 5)  # much sooner than the lease would have run out
        lease = kubectl.get("lease", "lock")
        assert lease is not None
        assert lease["spec"]["holderIdentity"] == "second"
        await first.release()  # not its lease any more
        lease = kubectl.get("lease", "lock")
        assert lease is not None
        assert lease["spec"]["holderIdentity"] == "second"


async def test_a_lease_that_cannot_be_renewed_is_lost() -> None:
    async with Api(Configuration(host="http://127.0.0.1:1")) as api:
        times = LeaseTimes(duration=3, deadline=2.0, period=1.0)
        leadership = Leadership(api.client, namespace="default", name="lock", identity="me", times=times)
        with pytest.raises(LeadershipLost, match="default/lock was not renewed"):
            await asyncio.wait_for(leadership.keep(), 10)
