"""Gateway and monitoring, decided: which children there are for which kinds, and what the status says of them."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import pytest

from reprise_operator.children.gateway import PICKER_CONFIG_ANNOTATION
from reprise_operator.children.picker import PICKER_LABEL, picker_config
from reprise_operator.hostnames import HostnameTaken
from reprise_operator.kinds import HTTP_ROUTES, INFERENCE_POOLS, POD_MONITORS, ResourceType
from reprise_operator.naming import NAME_LABEL
from reprise_operator.observed import Observed
from reprise_operator.plan import Plan, plan
from reprise_operator.settings import Settings
from reprise_operator.spec import SpecError, parse
from tests.support.factories import NOW, SETTINGS, body, child, deployment_status, planned, pod
from tests.support.factories import observed as observed_with
from tests.support.statuses import conditions, kstatus, message, reason, status_of

ALL = frozenset({HTTP_ROUTES, INFERENCE_POOLS, POD_MONITORS})
ROUTE_ONLY = {"parentRefs": [{"name": "main"}], "hostnames": ["llm.example.com"]}
OWN = {**ROUTE_ONLY, "endpointPicker": {"name": "my-picker"}}
MANAGED = {**ROUTE_ONLY, "endpointPicker": {"managed": True}}
TAKEN = HostnameTaken(hostname="llm.example.com", parent="Gateway llm/main", owner=("llm", "older"))


def gated(
    gateway: dict[str, Any] | None,
    available: frozenset[ResourceType] = ALL,
    *,
    spec: dict[str, Any] | None = None,
    taken: HostnameTaken | None = None,
    settings: Settings = SETTINGS,
) -> Plan:
    given = {**(spec or {}), **({} if gateway is None else {"gateway": gateway})}
    return plan(parse(body(given)), settings, available=available, taken=taken)


def kinds(of: Plan) -> list[str]:
    return [manifest["kind"] for manifest in of.children]


ALWAYS = ["Service", "Deployment"]


@pytest.mark.parametrize(
    ("gateway", "available", "more", "backend", "affinity"),
    [
        (None, ALL, [], None, "None"),
        (ROUTE_ONLY, ALL, ["HTTPRoute"], "Service", "None"),
        (ROUTE_ONLY, {INFERENCE_POOLS}, [], None, "ClientIP"),
        (OWN, ALL, ["InferencePool", "HTTPRoute"], "InferencePool", "None"),
        (OWN, {HTTP_ROUTES}, ["HTTPRoute"], "Service", "None"),
        (OWN, {INFERENCE_POOLS}, ["InferencePool"], None, "ClientIP"),
        (OWN, set(), [], None, "ClientIP"),
        (MANAGED, ALL, ["Service", "Deployment", "InferencePool", "HTTPRoute"], "InferencePool", "None"),
        (MANAGED, {HTTP_ROUTES}, ["HTTPRoute"], "Service", "None"),
        ({"endpointPicker": {"name": "p"}}, ALL, ["InferencePool"], None, "None"),
        ({"endpointPicker": {"name": "p"}}, {HTTP_ROUTES}, [], None, "ClientIP"),
        ({**OWN, "inferencePool": True}, ALL, ["InferencePool", "HTTPRoute"], "InferencePool", "None"),
        ({**ROUTE_ONLY, "inferencePool": False}, ALL, ["HTTPRoute"], "Service", "None"),
    ],
)
def test_children_by_what_there_is(
    gateway: dict[str, Any] | None, available: Any, more: list[str], backend: str | None, affinity: str
) -> None:
    made = gated(gateway, frozenset(available))
    assert kinds(made) == ALWAYS + more
    assert made.network_service["spec"]["sessionAffinity"] == affinity
    backends = [
        (ref["kind"], ref["name"], ref["port"])
        for manifest in made.children
        if manifest["kind"] == "HTTPRoute"
        for rule in manifest["spec"]["rules"]
        for ref in rule["backendRefs"]
    ]
    assert backends == ([] if backend is None else [(backend, "qwen", 8000)])
    for manifest in made.children:
        assert manifest["metadata"]["labels"]["serving.reprise.io/owner-uid"] == made.identity.uid
        assert manifest["metadata"]["ownerReferences"][0]["name"] == "qwen"


@pytest.mark.parametrize("said", ["None", "ClientIP"])
def test_the_specs_own_affinity_stands(said: str) -> None:
    for available in (ALL, frozenset[ResourceType]()):
        made = gated(ROUTE_ONLY, available, spec={"service": {"sessionAffinity": said}})
        assert made.network_service["spec"]["sessionAffinity"] == said


def test_the_pods_know_nothing_of_it() -> None:
    """What comes and goes with a CRD must not roll a pod."""
    template = planned().workload
    for available in (ALL, frozenset[ResourceType]()):
        made = gated(MANAGED, available, spec={"monitoring": {"podMonitor": {}}})
        assert made.workload == template


def test_the_plan_says_which_kinds_it_asks_for_also_when_they_are_not_there() -> None:
    nothing = frozenset[ResourceType]()
    assert gated(None, nothing).asks == nothing
    assert gated(ROUTE_ONLY, nothing).asks == {HTTP_ROUTES}
    assert gated(MANAGED, nothing, spec={"monitoring": {"podMonitor": {}}}).asks == ALL


# The route ----------------------------------------------------------------------------------------------------------


def test_a_stream_is_not_cut_off_and_parents_are_as_given() -> None:
    parents: list[dict[str, Any]] = [
        {"name": "main", "namespace": "infra", "sectionName": "https", "port": 443},
        {"name": "b"},
    ]
    made = gated({"parentRefs": parents, "hostnames": ["a.example", "*.b.example"]})
    assert made.gateway is not None
    assert made.gateway.route is not None
    spec = made.gateway.route["spec"]
    assert spec["rules"][0]["timeouts"] == {"request": "0s", "backendRequest": "0s"}
    group: dict[str, Any] = {"group": "gateway.networking.k8s.io", "kind": "Gateway"}
    assert spec["parentRefs"] == [{**group, **parent} for parent in parents]
    assert spec["hostnames"] == ["a.example", "*.b.example"]
    assert "hostnames" not in gated({"parentRefs": [{"name": "b"}]}).children[-1]["spec"]


def test_a_taken_host_name_costs_the_route_and_nothing_else() -> None:
    free, taken = gated(MANAGED), gated(MANAGED, taken=TAKEN)
    assert kinds(taken) == [kind for kind in kinds(free) if kind != "HTTPRoute"]
    assert taken.workload == free.workload


# The pool and its picker --------------------------------------------------------------------------------------------


def pool(of: Plan) -> dict[str, Any]:
    assert of.gateway is not None
    assert of.gateway.pool is not None
    return dict(of.gateway.pool)


def test_the_pool_selects_the_engines_and_names_the_picker() -> None:
    made = gated({**OWN, "endpointPicker": {"name": "my-picker", "port": 9999, "failureMode": "FailClose"}})
    assert pool(made)["spec"] == {
        "selector": {"matchLabels": made.workload["spec"]["selector"]["matchLabels"]},
        "targetPorts": [{"number": 8000}],
        "endpointPickerRef": {
            "group": "",
            "kind": "Service",
            "name": "my-picker",
            "port": {"number": 9999},
            "failureMode": "FailClose",
        },
    }


def test_for_a_picker_of_somebody_elses_the_pool_carries_the_configuration_that_fits() -> None:
    own = gated(OWN, spec={"prefixCaching": {"blockSize": 256}})
    written = json.loads(pool(own)["metadata"]["annotations"][PICKER_CONFIG_ANNOTATION])
    assert written == picker_config(own.service)
    assert PICKER_CONFIG_ANNOTATION not in pool(gated(MANAGED))["metadata"]["annotations"]


@pytest.mark.parametrize(
    ("spec", "block"),
    [
        ({}, 128),
        ({"accelerator": {"profile": "cpu"}}, 64),
        ({"accelerator": {"profile": "cpu"}, "prefixCaching": {"blockSize": 80}}, 80),
        ({"prefixCaching": {"blockSize": 512}}, 512),
        ({"runtime": {"name": "vllm-ascend"}, "model": {"maxModelLen": 4096}}, 128),
        ({"prefixCaching": {"enabled": False}}, None),
    ],
    ids=["npu", "cpu-is-below-the-least", "cpu", "asked", "vllm", "off"],
)
def test_the_picker_is_told_the_engines_block_size(spec: dict[str, Any], block: int | None) -> None:
    config = picker_config(gated(MANAGED, spec=spec).service)
    parameters = [
        plugin["parameters"] for plugin in config["plugins"] if plugin["type"] == "approx-prefix-cache-producer"
    ]
    assert parameters == ([] if block is None else [{"autoTune": True, "blockSizeTokens": block}])
    declared = {plugin["type"] for plugin in config["plugins"]}
    used = {entry["pluginRef"] for profile in config["schedulingProfiles"] for entry in profile["plugins"]}
    assert used <= declared
    assert ("prefix-cache-scorer" in used) == (block is not None)


def picker(of: Plan) -> tuple[dict[str, Any], dict[str, Any]]:
    assert of.gateway is not None
    network_service, deployment = of.gateway.picker
    return dict(network_service), dict(deployment)


def test_a_managed_picker_is_reached_by_the_pool_and_gets_no_clients_requests() -> None:
    made = gated({**MANAGED, "endpointPicker": {"managed": True, "port": 9100}})
    network_service, deployment = picker(made)
    reference = pool(made)["spec"]["endpointPickerRef"]
    assert reference["name"] == network_service["metadata"]["name"] == "qwen-endpoint-picker"
    (port,) = network_service["spec"]["ports"]
    assert port["port"] == reference["port"]["number"] == 9100
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert network_service["spec"]["selector"].items() <= labels.items()
    assert (
        deployment["spec"]["selector"]["matchLabels"] == network_service["spec"]["selector"] == {PICKER_LABEL: "qwen"}
    )
    assert NAME_LABEL not in labels, "the engine's Service and pool would select it"
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    ports = {item["name"]: item["containerPort"] for item in container["ports"]}
    assert ports[port["targetPort"]] == 9002
    arguments = dict(argument.removeprefix("--").split("=", 1) for argument in container["args"])
    assert (arguments["pool-name"], arguments["pool-namespace"]) == (pool(made)["metadata"]["name"], "llm")
    assert json.loads(arguments["config-text"]) == picker_config(made.service)
    assert "$(" not in arguments["config-text"], "the kubelet would expand it"


def test_image_and_account_of_a_picker_are_the_operators_settings() -> None:
    settings = replace(SETTINGS, endpoint_picker_image="r.example/epp:1", endpoint_picker_service_account="pickers")
    _, deployment = picker(gated(MANAGED, settings=settings))
    template = deployment["spec"]["template"]["spec"]
    assert (template["containers"][0]["image"], template["serviceAccountName"]) == ("r.example/epp:1", "pickers")
    assert gated(MANAGED).workload["spec"]["template"]["spec"]["automountServiceAccountToken"] is False


def test_a_change_of_the_block_size_starts_the_picker_anew() -> None:
    before, after = picker(gated(MANAGED))[1], picker(gated(MANAGED, spec={"prefixCaching": {"blockSize": 256}}))[1]
    assert before["spec"]["template"] != after["spec"]["template"]
    same = picker(gated(MANAGED, spec={"runtime": {"extraArgs": ["--seed=7"]}}))[1]
    assert before["spec"]["template"] == same["spec"]["template"]


def test_a_picker_has_the_services_pull_secrets_and_resources_and_sleeps_with_it() -> None:
    spec = {"runtime": {"imagePullSecrets": [{"name": "registry"}]}, "suspend": True}
    asked = {"managed": True, "resources": {"requests": {"cpu": "2"}, "limits": {"memory": "8Gi"}}}
    _, deployment = picker(gated({**ROUTE_ONLY, "endpointPicker": asked}, spec=spec))
    template = deployment["spec"]["template"]["spec"]
    assert template["imagePullSecrets"] == [{"name": "registry"}]
    assert template["containers"][0]["resources"] == {
        "requests": {"cpu": "2", "memory": "512Mi"},
        "limits": {"memory": "8Gi"},
    }
    assert deployment["spec"]["replicas"] == 0
    more = {"managed": True, "resources": {"requests": {"memory": "8Gi"}}}
    _, deployment = picker(gated({**ROUTE_ONLY, "endpointPicker": more}))
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert container["resources"] == {"requests": {"cpu": "500m", "memory": "8Gi"}, "limits": {}}, "no limit below it"


def test_a_long_name_keeps_the_picker_within_a_dns_label() -> None:
    service = parse(body({"gateway": MANAGED}, name="a" * 63))
    made = plan(service, SETTINGS, available=ALL)
    for manifest in made.children:
        assert re.fullmatch(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?", manifest["metadata"]["name"])


# Refused ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gateway", "words"),
    [
        ({}, "spec.gateway asks for nothing"),
        ({"inferencePool": False}, "spec.gateway asks for nothing"),
        ({"hostnames": ["a.example"]}, "spec.gateway asks for nothing"),
        (
            {"hostnames": ["a.example"], "endpointPicker": {"name": "p"}},
            "spec.gateway.hostnames is given without spec.gateway.parentRefs",
        ),
        ({**ROUTE_ONLY, "inferencePool": True}, "inferencePool is true without spec.gateway.endpointPicker"),
        ({**OWN, "inferencePool": False}, "spec.gateway.inferencePool is false"),
        ({"endpointPicker": {}}, "either the name of a picker's Service, or managed: true"),
        ({"endpointPicker": {"name": "p", "managed": True}}, "either the name of a picker's Service, or managed: true"),
        ({"endpointPicker": {"name": "p", "resources": {}}}, "resources is of a managed picker"),
        ({**ROUTE_ONLY, "hostnames": ["Not A Host"]}, "spec.gateway.hostnames.0"),
        ({"parentRefs": [{"name": "a", "color": "b"}]}, "spec.gateway.parentRefs.0.color"),
    ],
)
def test_a_gateway_that_makes_no_sense_is_refused(gateway: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError, match=re.escape(words)) as caught:
        parse(body({"gateway": gateway}))
    assert caught.value.reason == "InvalidSpec"


# The monitor --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "available", "there"),
    [
        (None, ALL, False),
        ({}, ALL, True),
        ({"enabled": True}, ALL, True),
        ({"enabled": False}, ALL, False),
        ({}, {HTTP_ROUTES}, False),
    ],
)
def test_a_pod_monitor_where_it_is_asked_for_and_possible(
    asked: dict[str, Any] | None, available: Any, there: bool
) -> None:
    spec = {} if asked is None else {"monitoring": {"podMonitor": asked}}
    assert ("PodMonitor" in kinds(gated(None, frozenset(available), spec=spec))) is there


def test_the_pod_monitor_finds_the_engines_metrics() -> None:
    asked = {"interval": "15s", "labels": {"release": "prometheus", "app.kubernetes.io/managed-by": "me"}}
    made = gated(None, spec={"monitoring": {"podMonitor": asked}, "auth": {"apiKeySecretRef": {"name": "keys"}}})
    monitor = made.pod_monitor
    assert monitor is not None
    assert monitor["spec"]["selector"]["matchLabels"] == made.workload["spec"]["selector"]["matchLabels"]
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    assert endpoint == {"port": "http", "path": "/metrics", "scheme": "http", "interval": "15s"}
    (container,) = made.workload["spec"]["template"]["spec"]["containers"]
    assert endpoint["port"] in [port["name"] for port in container["ports"]]
    labels = monitor["metadata"]["labels"]
    assert (labels["release"], labels["app.kubernetes.io/managed-by"]) == ("prometheus", "reprise-operator")


# What the status says -----------------------------------------------------------------------------------------------


def seen(of: Plan, **statuses: dict[str, Any]) -> Observed:
    """Every child applied, the engine ready; `statuses` by kind, the picker's Deployment as "Picker"."""
    children = []
    for manifest in of.children:
        is_picker = manifest["metadata"]["name"].endswith("-endpoint-picker")
        kind = "Picker" if is_picker and manifest["kind"] == "Deployment" else manifest["kind"]
        status = statuses.get(kind, {})
        if kind == "Deployment":
            status = deployment_status()
        if kind == "Picker" and "Picker" not in statuses:
            status = {"availableReplicas": 1}
        children.append(replace(child(manifest, **status), generation=3))
    return replace(observed_with(of, pod()), children=tuple(children))


def parents(*answers: tuple[str, str, str], generation: int | None = None) -> dict[str, Any]:
    """(type, status, message) of one controller for Gateway main."""
    reference = {"group": "gateway.networking.k8s.io", "kind": "Gateway", "name": "main"}
    told = [
        {"type": kind, "status": value, "reason": "Because", "message": words}
        | ({} if generation is None else {"observedGeneration": generation})
        for kind, value, words in answers
    ]
    return {"parents": [{"parentRef": reference, "controllerName": "x/y", "conditions": told}]}


ACCEPTED = parents(("Accepted", "True", ""), ("ResolvedRefs", "True", ""))
REFUSED_POD = {
    "type": "ReplicaFailure",
    "status": "True",
    "message": 'error looking up service account llm/reprise-endpoint-picker: serviceaccount "x" not found',
}


@pytest.mark.parametrize(
    ("made", "statuses", "expected", "words"),
    [
        (gated(OWN), {"HTTPRoute": ACCEPTED}, ("True", "Routed"), "HTTPRoute/qwen"),
        (gated(OWN), {}, ("Unknown", "Waiting"), "Gateway main"),
        (gated(OWN), {"HTTPRoute": parents(("Accepted", "True", ""), generation=3)}, ("True", "Routed"), "accepted"),
        (gated(OWN), {"HTTPRoute": parents(("Accepted", "True", ""), generation=2)}, ("Unknown", "Waiting"), "main"),
        (gated(OWN), {"HTTPRoute": parents(("Accepted", "False", "x"), generation=2)}, ("Unknown", "Waiting"), "main"),
        (
            gated(OWN),
            {"HTTPRoute": parents(("Accepted", "False", "no such listener"))},
            ("False", "NotAccepted"),
            "HTTPRoute/qwen at Gateway main: Because: no such listener",
        ),
        (
            gated(OWN),
            {"HTTPRoute": ACCEPTED, "InferencePool": parents(("ResolvedRefs", "False", "no Service my-picker"))},
            ("False", "NotAccepted"),
            "InferencePool/qwen at Gateway main: Because: no Service my-picker",
        ),
        (gated(OWN, frozenset({HTTP_ROUTES})), {"HTTPRoute": ACCEPTED}, ("True", "RoutedToService"), "InferencePool"),
        (gated(OWN, frozenset()), {}, ("False", "HTTPRouteUnavailable"), "rbac.gateway"),
        (gated({"endpointPicker": {"name": "p"}}, frozenset()), {}, ("False", "InferencePoolUnavailable"), "Service"),
        (gated({"endpointPicker": {"name": "p"}}), {}, ("True", "PoolApplied"), "InferencePool/qwen"),
        (gated(MANAGED), {"HTTPRoute": ACCEPTED}, ("True", "Routed"), "HTTPRoute/qwen"),
        (
            gated(MANAGED),
            {"HTTPRoute": ACCEPTED, "Picker": {"conditions": [REFUSED_POD]}},
            ("False", "EndpointPickerNotReady"),
            "error looking up service account llm/reprise-endpoint-picker",
        ),
        (gated(MANAGED, spec={"suspend": True}), {"HTTPRoute": ACCEPTED}, ("True", "Routed"), ""),
    ],
)
def test_gateway_ready(made: Plan, statuses: dict[str, Any], expected: tuple[str, str], words: str) -> None:
    status = status_of(made, seen(made, **statuses))
    assert conditions(status)["GatewayReady"] == expected
    assert words in message(status, "GatewayReady")


def test_it_informs_and_does_not_make_a_service_unready() -> None:
    """Fault 11: whoever waits for Ready waits for the pods."""
    for made in (gated(OWN, frozenset()), gated(OWN)):
        status = status_of(made, seen(made))
        assert conditions(status)["GatewayReady"][0] != "True"
        assert kstatus(status) == ("True", "False", "False")


def test_nothing_is_said_of_what_is_not_asked_for() -> None:
    made = gated(None)
    assert {"GatewayReady", "Monitored"} & set(conditions(status_of(made, seen(made)))) == set()


def test_a_taken_host_name_stalls_the_younger_and_its_pods_are_reported() -> None:
    made = gated(OWN, taken=TAKEN)
    status = status_of(made, seen(made))
    assert kstatus(status) == ("False", "False", "True")
    assert reason(status) == "HostnameTaken"
    assert "InferenceService llm/older" in message(status, "Stalled")
    assert conditions(status)["GatewayReady"] == ("False", "HostnameTaken")
    assert conditions(status)["Available"] == ("True", "Serving")


@pytest.mark.parametrize(
    ("available", "expected"),
    [(ALL, ("True", "PodMonitorApplied")), (frozenset(), ("False", "PodMonitorUnavailable"))],
)
def test_monitored(available: frozenset[ResourceType], expected: tuple[str, str]) -> None:
    made = gated(None, available, spec={"monitoring": {"podMonitor": {}}})
    status = status_of(made, seen(made))
    assert conditions(status)["Monitored"] == expected
    assert kstatus(status) == ("True", "False", "False")


def test_an_idle_service_gets_the_same_status_again() -> None:
    made = gated(OWN)
    first = status_of(made, seen(made, HTTPRoute=ACCEPTED))
    again = status_of(made, seen(made, HTTPRoute=ACCEPTED), first, now=NOW + 600)
    assert again["conditions"] == first["conditions"]
