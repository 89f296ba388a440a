"""Deployments roll out within their limits and what loses its owner goes, under our controllers and the real ones."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from tests.contract.apiserver.replay import client_of
from tests.support.apiserver import start_api_server
from tests.support.emulated_rollout import rollout_scale, share
from tests.support.kube_assets import find_kube_assets

Json = dict[str, Any]
DEPLOYMENTS = "/apis/apps/v1/namespaces/default/deployments"
REPLICA_SETS = "/apis/apps/v1/namespaces/default/replicasets"
PODS = "/api/v1/namespaces/default/pods"
MERGE = {"Content-Type": "application/merge-patch+json"}


@pytest.fixture(scope="module", params=["emulated", "real"])
def client(request: pytest.FixtureRequest) -> Iterator[httpx.Client]:
    if request.param == "real":
        assets = find_kube_assets()
        if assets is None or assets.controller_manager is None:
            pytest.skip("no kube-controller-manager: set KUBEBUILDER_ASSETS to a folder that has one")
    with start_api_server(request.param) as server, client_of(server) as client:
        yield client


def _deployment(name: str, **spec: Any) -> Json:
    template = {"metadata": {"labels": {"app": name}}, "spec": {"containers": [{"name": "c", "image": "i:1"}]}}
    about = {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": name}}
    return {**about, "spec": {"selector": {"matchLabels": {"app": name}}, "template": template, **spec}}


def _pods(client: httpx.Client, name: str) -> list[Json]:
    items: list[Json] = client.get(f"{PODS}?labelSelector=app%3D{name}").json()["items"]
    return [each for each in items if not each["metadata"].get("deletionTimestamp")]


def _is_ready(pod: Json) -> bool:
    conditions = pod.get("status", {}).get("conditions", [])
    return any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)


def _make_ready(client: httpx.Client, pod: Json) -> None:
    condition = {"type": "Ready", "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z"}
    body: Json = {"status": {"phase": "Running", "conditions": [condition]}}
    client.patch(f"{PODS}/{pod['metadata']['name']}/status", json=body, headers=MERGE)


def _until(condition: Callable[[], Any], seconds: float = 60.0) -> Any:
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        found = condition()
        if found:
            return found
        time.sleep(0.05)
    raise TimeoutError(condition)


def _status(client: httpx.Client, name: str) -> Json:
    status: Json = client.get(f"{DEPLOYMENTS}/{name}").json().get("status", {})
    return status


def test_rollout_keeps_within_surge_and_availability(client: httpx.Client) -> None:
    limits = {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}}
    client.post(DEPLOYMENTS, json=_deployment("roll", replicas=2, strategy=limits)).raise_for_status()
    _until(lambda: len(_pods(client, "roll")) == 2)
    assert _status(client, "roll").get("availableReplicas", 0) == 0
    for pod in _pods(client, "roll"):
        _make_ready(client, pod)
    _until(lambda: _status(client, "roll").get("availableReplicas") == 2)
    first = {pod["metadata"]["name"] for pod in _pods(client, "roll")}
    change = {"spec": {"template": {"metadata": {"annotations": {"edit": "1"}}}}}
    client.patch(f"{DEPLOYMENTS}/roll", json=change, headers=MERGE).raise_for_status()
    largest, ends = 0, time.monotonic() + 60
    while time.monotonic() < ends:
        pods = _pods(client, "roll")
        largest = max(largest, len(pods))
        assert sum(map(_is_ready, pods)) >= 2
        new = [pod for pod in pods if pod["metadata"]["name"] not in first]
        waiting = [pod for pod in new if not _is_ready(pod)]
        if waiting:
            _make_ready(client, waiting[0])
        if len(new) == len(pods) == 2 and all(map(_is_ready, new)):
            break
        time.sleep(0.1)
    else:
        raise TimeoutError(f"still {pods}")
    assert largest == 3
    _until(lambda: _status(client, "roll").get("updatedReplicas") == 2)
    done = _until(lambda: _condition(client, "roll", "Progressing", "NewReplicaSetAvailable"))
    assert done["status"] == "True"
    labels = new[0]["metadata"]["labels"]
    owner = new[0]["metadata"]["ownerReferences"][0]
    assert owner["kind"] == "ReplicaSet"
    assert labels["pod-template-hash"]
    assert owner["name"] == f"roll-{labels['pod-template-hash']}"
    revisions = [
        each["metadata"]["annotations"]["deployment.kubernetes.io/revision"] for each in _owned(client, "roll")
    ]
    assert sorted(revisions) == ["1", "2"]


def _owned(client: httpx.Client, name: str) -> list[Json]:
    items: list[Json] = client.get(f"{REPLICA_SETS}?labelSelector=app%3D{name}").json()["items"]
    return items


def _condition(client: httpx.Client, name: str, kind: str, reason: str) -> Json | None:
    conditions = _status(client, name).get("conditions", [])
    return next((each for each in conditions if each["type"] == kind and each["reason"] == reason), None)


def test_progress_deadline_is_reported(client: httpx.Client) -> None:
    client.post(DEPLOYMENTS, json=_deployment("late", replicas=1, progressDeadlineSeconds=2)).raise_for_status()
    found = _until(lambda: _condition(client, "late", "Progressing", "ProgressDeadlineExceeded"))
    assert found["status"] == "False"


def test_deleted_pod_is_replaced_and_scaling_down_takes_the_one_that_is_not_ready(client: httpx.Client) -> None:
    client.post(DEPLOYMENTS, json=_deployment("kept", replicas=2)).raise_for_status()
    gone = _until(lambda: len(_pods(client, "kept")) == 2 and _pods(client, "kept")[0])
    client.delete(f"{PODS}/{gone['metadata']['name']}").raise_for_status()
    _until(lambda: gone["metadata"]["name"] not in str(_pods(client, "kept")) and len(_pods(client, "kept")) == 2)
    ready = _pods(client, "kept")[0]
    _make_ready(client, ready)
    _until(lambda: _status(client, "kept").get("readyReplicas") == 1)
    client.patch(f"{DEPLOYMENTS}/kept/scale", json={"spec": {"replicas": 1}}, headers=MERGE).raise_for_status()
    left = _until(lambda: len(_pods(client, "kept")) == 1 and _pods(client, "kept"))
    assert left[0]["metadata"]["name"] == ready["metadata"]["name"]


def test_dependents_go_with_their_owner(client: httpx.Client) -> None:
    client.post(DEPLOYMENTS, json=_deployment("owner", replicas=1)).raise_for_status()
    _until(lambda: _pods(client, "owner"))
    client.delete(f"{DEPLOYMENTS}/owner").raise_for_status()
    _until(lambda: not _owned(client, "owner") and not _pods(client, "owner"))


def test_orphans_stay(client: httpx.Client) -> None:
    client.post(DEPLOYMENTS, json=_deployment("orphaned", replicas=1)).raise_for_status()
    _until(lambda: _pods(client, "orphaned"))
    options = {"apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": "Orphan"}
    client.request("DELETE", f"{DEPLOYMENTS}/orphaned", json=options).raise_for_status()
    _until(lambda: client.get(f"{DEPLOYMENTS}/orphaned").status_code == 404)
    left = _owned(client, "orphaned")
    assert len(left) == 1
    assert "ownerReferences" not in left[0]["metadata"]


@pytest.mark.parametrize(
    ("desired", "surge", "unavailable", "new", "old", "expected"),
    [
        (2, 1, 0, (0, 0), (2, 2), {"new": 1}),  # surge first
        (2, 1, 0, (1, 0), (2, 2), {}),  # nothing may go before the new one is available
        (2, 1, 0, (1, 1), (2, 2), {"old": 1}),
        (2, 0, 1, (0, 0), (2, 2), {"old": 1}),  # no room: make some
        (2, 0, 0, (0, 0), (2, 2), {"old": 1}),  # neither is allowed: as if maxUnavailable were 1
        (4, "25%", "25%", (0, 0), (4, 4), {"new": 1}),
        (2, 1, 0, (1, 0), (2, 1), {}),  # an unhealthy old one does not let availability fall
        (2, 1, 1, (1, 0), (2, 1), {"old": 1}),  # and goes first where it may
        (1, 1, 0, (3, 1), (0, 0), {"new": 1}),  # scaled down
    ],
)
def test_next_step_of_a_rollout(
    desired: int, surge: int | str, unavailable: int | str, new: tuple[int, int], old: tuple[int, int], expected: Json
) -> None:
    def replica_set(name: str, counts: tuple[int, int]) -> Json:
        metadata = {"name": name, "creationTimestamp": "2026-01-01T00:00:00Z"}
        return {"metadata": metadata, "spec": {"replicas": counts[0]}, "status": {"availableReplicas": counts[1]}}

    limits = {"rollingUpdate": {"maxSurge": surge, "maxUnavailable": unavailable}}
    deployment = {"spec": {"replicas": desired, "strategy": limits}}
    assert rollout_scale(deployment, replica_set("new", new), [replica_set("old", old)]) == expected


def test_percentages_round_surge_up_and_unavailable_down() -> None:
    assert (share("25%", 3, up=True), share("25%", 3, up=False), share(2, 3, up=True)) == (1, 0, 2)
