"""Optional kinds at an API server: absent, appearing, edited, going away; and two services with one host name."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import yaml

from reprise_operator.cluster import Key
from reprise_operator.discovery import OptionalKinds
from reprise_operator.kinds import HTTP_ROUTES, INFERENCE_POOLS, OPTIONAL_TYPES, POD_MONITORS
from reprise_operator.workqueue import Retry
from tests.operator.golden import output
from tests.operator.optional_crds import install, none_left, remove
from tests.operator.reconcile_bench import NAME, Bench, open_bench
from tests.support.kubectl import Kubectl

KINDS = (HTTP_ROUTES, INFERENCE_POOLS, POD_MONITORS)
GATEWAY = {
    "parentRefs": [{"name": "main", "namespace": "infra"}],
    "hostnames": ["llm.example.com"],
    "endpointPicker": {"name": "my-picker"},
}
ASKS: dict[str, Any] = {"gateway": GATEWAY, "monitoring": {"podMonitor": {"labels": {"release": "prometheus"}}}}


@pytest.fixture
def kinds_absent(kubectl: Kubectl) -> Iterator[None]:
    with none_left(kubectl):
        yield


@pytest.fixture
async def bench(kubectl: Kubectl, kinds_absent: None) -> AsyncIterator[Bench]:
    async with open_bench(kubectl) as opened:
        await opened.reconciler.kinds.poll()
        yield opened


def condition(bench: Bench, kind: str) -> tuple[str, str]:
    return bench.condition(kind)[:2]


def routes(bench: Bench) -> dict[str, list[str]]:
    return {route["metadata"]["name"]: route["spec"]["hostnames"] for route in bench.kubectl.list("httproutes")}


async def test_where_the_kinds_are_absent_nothing_breaks(bench: Bench) -> None:
    bench.apply(ASKS)
    await bench.make_ready()
    assert condition(bench, "Ready") == ("True", "Ready")
    assert condition(bench, "GatewayReady") == ("False", "HTTPRouteUnavailable")
    assert condition(bench, "Monitored") == ("False", "PodMonitorUnavailable")
    assert bench.child("service")["spec"]["sessionAffinity"] == "ClientIP"
    bench.requests.clear()
    await bench.reconcile()
    assert {plural for _, plural in bench.requests}.isdisjoint(kind.plural for kind in OPTIONAL_TYPES)


async def test_a_kind_that_appears_is_used_after_one_poll_and_no_pod_is_touched(bench: Bench) -> None:
    bench.apply(ASKS)
    await bench.make_ready()
    deployment = bench.child("deployment")["metadata"]
    install(bench.kubectl, *KINDS)
    changed, _ = await bench.reconciler.kinds.poll()
    assert changed == frozenset(KINDS)
    assert bench.reconciler.concerned(changed) == (bench.key,)
    await bench.settle()
    assert routes(bench) == {NAME: ["llm.example.com"]}
    pool = bench.child("inferencepool")["spec"]
    assert pool["endpointPickerRef"]["name"] == "my-picker"
    assert pool["selector"]["matchLabels"] == {"serving.reprise.io/name": NAME}
    assert bench.child("podmonitor")["metadata"]["labels"]["release"] == "prometheus"
    assert bench.child("service")["spec"]["sessionAffinity"] == "None"
    assert bench.child("deployment")["metadata"]["generation"] == deployment["generation"]
    assert condition(bench, "Monitored") == ("True", "PodMonitorApplied")
    assert condition(bench, "GatewayReady") == ("Unknown", "Waiting")
    assert condition(bench, "Ready") == ("True", "Ready")
    bench.kubectl.patch(
        "httproute",
        NAME,
        {
            "status": {
                "parents": [
                    {
                        "parentRef": {"name": "main", "namespace": "infra"},
                        "controllerName": "example.com/controller",
                        "conditions": [
                            {
                                "type": "Accepted",
                                "status": "True",
                                "reason": "Accepted",
                                "message": "",
                                "observedGeneration": 1,
                                "lastTransitionTime": "2026-01-01T00:00:00Z",
                            }
                        ],
                    }
                ]
            }
        },
        "--subresource=status",
    )
    await bench.settle()
    assert condition(bench, "GatewayReady") == ("True", "Routed")
    assert await bench.writes() == [], "and then it is idle"


async def test_who_does_not_ask_pays_nothing(bench: Bench) -> None:
    install(bench.kubectl, *KINDS)
    await bench.reconciler.kinds.poll()
    bench.apply()
    await bench.settle()
    bench.requests.clear()
    await bench.reconcile()
    assert {plural for _, plural in bench.requests} == {
        *("inferenceservices", "deployments", "statefulsets", "services", "configmaps", "pods", "replicasets")
    }
    assert bench.reconciler.concerned(KINDS) == ()


@pytest.mark.parametrize(
    ("kind", "edit"),
    [
        ("httproute", {"spec": {"hostnames": ["theirs.example.com"]}}),
        ("httproute", {"metadata": {"labels": {"app.kubernetes.io/managed-by": "me"}}}),
        ("inferencepool", {"spec": {"targetPorts": [{"number": 1}]}}),
        ("podmonitor", None),
        ("inferencepool", None),
    ],
    ids=["route", "label", "pool", "deleted-monitor", "deleted-pool"],
)
async def test_an_edit_is_found_by_the_next_poll_and_repaired(
    bench: Bench, kind: str, edit: dict[str, Any] | None
) -> None:
    install(bench.kubectl, *KINDS)
    await bench.reconciler.kinds.poll()
    bench.apply(ASKS)
    await bench.settle()
    await bench.reconciler.kinds.poll()
    assert (await bench.reconciler.kinds.poll())[1] == frozenset(), "nothing new"
    before = bench.child(kind)
    if edit is None:
        bench.kubectl.delete(kind, NAME)
    else:
        bench.kubectl.patch(kind, NAME, edit)
    _, woken = await bench.reconciler.kinds.poll()
    assert woken == {bench.key}
    await bench.settle()
    after = bench.child(kind)
    assert after["spec"] == before["spec"]
    assert after["metadata"]["labels"] == before["metadata"]["labels"]


async def test_what_is_not_asked_for_any_more_goes_also_after_a_restart(bench: Bench) -> None:
    install(bench.kubectl, *KINDS)
    await bench.reconciler.kinds.poll()
    bench.apply(ASKS)
    await bench.settle()
    bench.apply({"gateway": GATEWAY})
    await bench.settle()
    assert bench.kubectl.get("podmonitor", NAME) is None
    assert bench.kubectl.get("httproute", NAME) is not None
    # The rest while the operator is down.
    bench.restart()
    bench.reconciler.kinds = OptionalKinds(bench.reconciler.cluster, namespace=bench.kubectl.namespace, period=60.0)
    bench.apply()
    await bench.reconciler.kinds.first()
    await bench.settle()
    assert bench.kubectl.get("httproute", NAME) is None
    assert bench.kubectl.get("inferencepool", NAME) is None
    assert "GatewayReady" not in {entry["type"] for entry in bench.status()["conditions"]}


async def test_a_kind_that_goes_away_takes_nothing_with_it(bench: Bench) -> None:
    install(bench.kubectl, *KINDS)
    await bench.reconciler.kinds.poll()
    bench.apply(ASKS)
    await bench.make_ready()
    remove(bench.kubectl, *KINDS)
    # Between the deletion and the next poll a pass cannot apply: it says so and is tried again, and no more.
    with pytest.raises(Retry):
        await bench.reconcile()
    assert bench.condition("Available")[0] == "True"
    changed, _ = await bench.reconciler.kinds.poll()
    assert changed == frozenset(KINDS)
    await bench.settle()
    assert condition(bench, "Ready") == ("True", "Ready")
    assert condition(bench, "GatewayReady") == ("False", "HTTPRouteUnavailable")
    assert bench.child("service")["spec"]["sessionAffinity"] == "ClientIP"


async def test_a_managed_picker_is_there_while_there_are_pools(bench: Bench) -> None:
    picker = f"{NAME}-endpoint-picker"
    bench.apply({"gateway": {**GATEWAY, "endpointPicker": {"managed": True}}})
    await bench.make_ready()
    assert bench.kubectl.get("deployment", picker) is None
    install(bench.kubectl, *KINDS)
    await bench.reconciler.kinds.poll()
    await bench.settle()
    assert bench.child("inferencepool")["spec"]["endpointPickerRef"]["name"] == picker
    assert bench.kubectl.get("service", picker) is not None
    deployment = bench.kubectl.get("deployment", picker)
    assert deployment is not None
    assert condition(bench, "GatewayReady") == ("False", "EndpointPickerNotReady")
    assert condition(bench, "Ready") == ("True", "Ready")
    assert bench.status()["replicas"] == 1, "the engine's pods are counted, not the picker's"
    remove(bench.kubectl, *KINDS)
    await bench.reconciler.kinds.poll()
    await bench.settle()
    assert bench.kubectl.get("deployment", picker) is None
    assert bench.kubectl.get("service", picker) is None


# Two services with one host name ------------------------------------------------------------------------------------


async def passes(bench: Bench, name: str) -> None:
    key = Key(bench.kubectl.namespace, name)
    for _ in range(5):
        with contextlib.suppress(Retry):
            await bench.reconciler(key)


def told(bench: Bench, name: str) -> tuple[str, str, str]:
    body = bench.kubectl.get("risvc", name)
    assert body is not None
    (found,) = [entry for entry in body["status"]["conditions"] if entry["type"] == "Stalled"]
    return found["status"], found["reason"], found["message"]


async def test_two_services_with_one_host_name(bench: Bench) -> None:
    install(bench.kubectl, *KINDS)
    await bench.reconciler.kinds.poll()
    gateway = {key: GATEWAY[key] for key in ("parentRefs", "hostnames")}
    bench.apply({"gateway": {**gateway, "hostnames": ["other.example.com"]}, "replicas": 2}, name="b-younger")
    await passes(bench, "b-younger")
    younger = bench.kubectl.get("deployment", "b-younger")
    assert younger is not None
    # Of the same second the name decides, so "a" is the older in every case but a slow one.
    bench.apply({"gateway": gateway}, name="a-older")
    bodies = {name: bench.kubectl.get("risvc", name) for name in ("a-older", "b-younger")}
    stamps = {name: (body or {})["metadata"]["creationTimestamp"] for name, body in bodies.items()}
    older, newer = sorted(stamps, key=lambda name: (stamps[name], name))
    await passes(bench, "a-older")
    assert routes(bench) == {"a-older": ["llm.example.com"], "b-younger": ["other.example.com"]}

    # Both want one name now, whoever's spec is changed.
    bench.kubectl.patch("risvc", "b-younger", {"spec": {"gateway": {"hostnames": ["llm.example.com"]}}})
    bench.woken.clear()
    await passes(bench, "b-younger")
    assert bench.woken == [Key(bench.kubectl.namespace, "a-older")]
    await passes(bench, "a-older")
    assert list(routes(bench)) == [older]
    status, reason, message = told(bench, newer)
    assert (status, reason) == ("True", "HostnameTaken")
    assert f"InferenceService {bench.kubectl.namespace}/{older}" in message
    assert "llm.example.com" in message
    assert told(bench, older)[1] != "HostnameTaken"
    after = bench.kubectl.get("deployment", "b-younger")
    assert after is not None
    assert after["metadata"]["generation"] == younger["metadata"]["generation"], "running pods are untouched"

    # The older one goes: the other is woken, and routed.
    bench.kubectl.delete("risvc", older)
    bench.woken.clear()
    await passes(bench, older)
    assert Key(bench.kubectl.namespace, newer) in bench.woken
    await passes(bench, newer)
    assert newer in routes(bench)
    assert told(bench, newer)[1] != "HostnameTaken"


async def test_after_a_restart_the_first_pass_knows_the_others_host_names(bench: Bench) -> None:
    install(bench.kubectl, *KINDS)
    await bench.reconciler.kinds.poll()
    gateway = {key: GATEWAY[key] for key in ("parentRefs", "hostnames")}
    for name in ("a", "b"):
        bench.apply({"gateway": gateway}, name=name)
    services = await bench.reconciler.cluster.list_services(bench.kubectl.namespace)
    _, newer = sorted(
        (body["metadata"]["name"] for body in services),
        key=lambda name: next(
            (body["metadata"]["creationTimestamp"], name) for body in services if body["metadata"]["name"] == name
        ),
    )
    bench.reconciler.prime(services)
    await passes(bench, newer)
    assert routes(bench) == {}, "it never had a route, not even for a moment"
    assert told(bench, newer)[1] == "HostnameTaken"


# What the API server takes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gateway-managed", "gateway-own-picker"])
def test_the_api_server_takes_every_field(kubectl: Kubectl, kinds_absent: None, name: str) -> None:
    install(kubectl, *KINDS)
    for manifest in yaml.safe_load_all(output(name).read_text()):
        manifest["metadata"] = {**manifest["metadata"], "namespace": kubectl.namespace}
        kubectl(
            *("apply", "--server-side", "--dry-run=server", "--validate=strict", "-f", "-"), stdin=json.dumps(manifest)
        )
