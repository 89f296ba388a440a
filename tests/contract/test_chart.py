"""The chart: the CRD is crds/ byte for byte, it lints, it renders what the operator understands, and it applies."""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path
from typing import Any

import helm_python
import pytest
import yaml

from reprise_operator.options import parse_options
from reprise_operator.settings import ENGINE_PORT, Settings
from tests.support.apiserver import ApiServer
from tests.support.factories import planned
from tests.support.kubectl import Kubectl

PROJECT = Path(__file__).resolve().parents[2]
CHART = PROJECT / "charts" / "reprise-operator"
RELEASE, NAMESPACE = "reprise", "reprise-system"


def render(values: dict[str, Any] | None = None) -> list[dict[str, Any]]:
    with helm_python.Chart.load(CHART) as chart:
        files = chart.render(values or {}, name=RELEASE, namespace=NAMESPACE)
    texts = [text for name, text in files.items() if name.endswith(".yaml")]
    return [manifest for text in texts for manifest in yaml.safe_load_all(text) if manifest]


def only(manifests: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    (found,) = [manifest for manifest in manifests if manifest["kind"] == kind]
    return found


def container(values: dict[str, Any] | None = None) -> dict[str, Any]:
    (found,) = only(render(values), "Deployment")["spec"]["template"]["spec"]["containers"]
    return dict(found)


def test_the_crd_is_the_one_of_the_project_byte_for_byte() -> None:
    ours = sorted((PROJECT / "crds").glob("*.yaml"))
    charts = sorted((CHART / "crds").iterdir())
    assert [path.name for path in charts] == [path.name for path in ours]
    assert [path.read_bytes() for path in charts] == [path.read_bytes() for path in ours], (
        "copy crds/*.yaml to charts/reprise-operator/crds/"
    )


def test_it_lints() -> None:
    found = helm_python.lint(str(CHART))
    assert found["errors"] == []
    # 1 is an information: an icon is recommended.
    assert [message for message in found["messages"] if message["severity"] > 1] == []


def test_one_operator_at_a_time() -> None:
    deployment = only(render(), "Deployment")
    assert deployment["spec"]["replicas"] == 1
    assert deployment["spec"]["strategy"] == {"type": "Recreate"}


def test_of_several_operators_one_works_and_the_others_are_kept_apart() -> None:
    manifests = render({"replicas": 2})
    deployment = only(manifests, "Deployment")
    assert deployment["spec"]["replicas"] == 2
    assert deployment["spec"]["strategy"]["type"] == "RollingUpdate"
    pod = deployment["spec"]["template"]
    labels = pod["metadata"]["labels"]
    budget = only(manifests, "PodDisruptionBudget")["spec"]
    assert budget["maxUnavailable"] == 1
    (spread,) = pod["spec"]["topologySpreadConstraints"]
    for selector in (budget["selector"], spread["labelSelector"], deployment["spec"]["selector"]):
        assert selector["matchLabels"].items() <= labels.items()
    # One that waits for the lease is ready, or a rollout of two would not end: tests/operator/test_main.py.
    assert not [m for m in render() if m["kind"] == "PodDisruptionBudget"], "a budget of one only holds up a drain"


def test_the_pod_is_locked_down() -> None:
    pod = only(render(), "Deployment")["spec"]["template"]["spec"]
    assert pod["securityContext"] == {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
    security = container()["securityContext"]
    assert security["readOnlyRootFilesystem"] is True
    assert security["allowPrivilegeEscalation"] is False
    assert security["capabilities"] == {"drop": ["ALL"]}
    assert security["runAsUser"] == 65532
    assert not [volume for volume in pod["volumes"] if "hostPath" in volume]


def test_where_keda_finds_prometheus() -> None:
    assert not [argument for argument in container()["args"] if argument.startswith("--prometheus")]
    options = parse_options(_without_key(container({"prometheus": {"url": "http://p:9090"}})["args"]), {})
    assert options.settings.prometheus_url == "http://p:9090"


@pytest.mark.parametrize(
    ("values", "namespace", "lease", "image"),
    [
        ({}, None, NAMESPACE, Settings().reprise_image),
        ({"watchNamespace": "models", "leaderElection": False}, "models", None, Settings().reprise_image),
        ({"endpointPicker": {"image": "r.example/p:1"}}, None, NAMESPACE, Settings().reprise_image),
        ({"engine": {"image": "r.example/e:1"}, "extraArgs": ["--workers=9"]}, None, NAMESPACE, "r.example/e:1"),
        ({"settings": {"workers": 9}}, None, NAMESPACE, Settings().reprise_image),
    ],
)
def test_its_arguments_parse_in_the_operator(
    values: dict[str, Any], namespace: str | None, lease: str | None, image: str
) -> None:
    options = parse_options(_without_key(container(values)["args"]), {})
    assert (options.settings.namespace, options.lease_namespace) == (namespace, lease)
    assert options.settings.reprise_image == image
    picker = values.get("endpointPicker", {}).get("image", Settings().endpoint_picker_image)
    assert options.settings.endpoint_picker_image == picker
    assert options.settings.endpoint_picker_service_account == Settings().endpoint_picker_service_account
    assert options.settings.workers == (9 if {"extraArgs", "settings"} & set(values) else Settings().workers)


def test_every_setting_is_one_of_the_operators_and_reaches_it() -> None:
    described = json.loads((CHART / "values.schema.json").read_text())["properties"]["settings"]["properties"]
    values = yaml.safe_load((CHART / "values.yaml").read_text())["settings"]
    assert set(described) == set(values)
    given = {name: number for number, name in enumerate(values, start=1000)} | {"hitRateWindowSeconds": 5000}
    settings = parse_options(_without_key(container({"settings": given})["args"]), {}).settings
    for name, number in given.items():
        assert getattr(settings, re.sub("([A-Z])", r"_\1", name).lower()) == number
    assert parse_options(_without_key(container()["args"]), {}).settings == Settings()
    # The comment of each says what the operator takes where it is null.
    for name, default in re.findall(r"^  (\w+): null .*\((\d+)\)$", (CHART / "values.yaml").read_text(), re.MULTILINE):
        assert getattr(Settings(), re.sub("([A-Z])", r"_\1", name).lower()) == int(default)


def test_an_image_is_named_by_its_digest_where_one_is_given() -> None:
    digest = "sha256:" + "0" * 64
    image = {"repository": "r.example/operator", "tag": "1", "digest": digest}
    assert container({"image": image})["image"] == f"r.example/operator@{digest}"
    assert container({"image": {**image, "digest": ""}})["image"] == "r.example/operator:1"


def test_monitors_select_the_operator_and_its_metrics_port() -> None:
    values = {name: {"enabled": True, "labels": {"release": "p"}} for name in ("podMonitor", "serviceMonitor")}
    manifests = render({"metrics": values})
    labels = only(manifests, "Deployment")["spec"]["template"]["metadata"]["labels"]
    ports = {port["name"] for port in container()["ports"]}
    pod_monitor, service_monitor = only(manifests, "PodMonitor"), only(manifests, "ServiceMonitor")
    assert pod_monitor["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert {endpoint["port"] for endpoint in pod_monitor["spec"]["podMetricsEndpoints"]} <= ports
    service = only(manifests, "Service")
    assert service["spec"]["selector"].items() <= labels.items()
    assert service_monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    assert {e["port"] for e in service_monitor["spec"]["endpoints"]} == {p["name"] for p in service["spec"]["ports"]}
    assert {port["targetPort"] for port in service["spec"]["ports"]} <= ports
    assert {m["metadata"]["labels"]["release"] for m in (pod_monitor, service_monitor)} == {"p"}
    kinds = {manifest["kind"] for manifest in render()}
    assert not kinds & {"PodMonitor", "ServiceMonitor", "Service", "PrometheusRule", "ConfigMap", "NetworkPolicy"}


def test_the_network_policy_lets_through_what_the_operator_needs() -> None:
    policy = only(render({"networkPolicy": {"enabled": True}}), "NetworkPolicy")["spec"]
    labels = only(render(), "Deployment")["spec"]["template"]["metadata"]["labels"]
    assert policy["podSelector"]["matchLabels"].items() <= labels.items()
    assert policy["ingress"] == [{"ports": [{"protocol": "TCP", "port": "metrics"}]}]
    _, api_server, engines = policy["egress"]
    assert api_server == {"ports": [{"protocol": "TCP", "port": 443}, {"protocol": "TCP", "port": 6443}]}
    assert [port["port"] for port in engines["ports"]] == [ENGINE_PORT]
    (peer,) = engines["to"]
    pod = planned().workload["spec"]["template"]["metadata"]["labels"]
    assert peer["podSelector"]["matchLabels"].items() <= pod.items()
    assert peer["namespaceSelector"] == {}
    narrow: dict[str, Any] = {
        "watchNamespace": "models",
        "networkPolicy": {
            "enabled": True,
            "metricsFrom": [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}],
            "apiServer": {"cidrs": ["10.0.0.1/32"]},
        },
    }
    policy = only(render(narrow), "NetworkPolicy")["spec"]
    assert policy["ingress"][0]["from"] == narrow["networkPolicy"]["metricsFrom"]
    assert policy["egress"][1]["to"] == [{"ipBlock": {"cidr": "10.0.0.1/32"}}]
    (peer,) = policy["egress"][2]["to"]
    assert peer["namespaceSelector"] == {"matchLabels": {"kubernetes.io/metadata.name": "models"}}


def test_nodes_are_read_where_the_values_say_so() -> None:
    assert parse_options(_without_key(container()["args"]), {}).settings.read_nodes is False
    assert parse_options(_without_key(container({"rbac": {"readNodes": True}})["args"]), {}).settings.read_nodes is True


def test_the_key_of_the_hashes_is_made_once_or_is_ones_own() -> None:
    made = only(render(), "Secret")
    assert made["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"
    assert len(base64.b64decode(made["data"]["key"])) == 48
    for values, name in (({}, made["metadata"]["name"]), ({"referenceKey": {"existingSecret": "mine"}}, "mine")):
        manifests = render(values)
        (volume,) = [v for v in only(manifests, "Deployment")["spec"]["template"]["spec"]["volumes"] if "secret" in v]
        assert volume["secret"]["secretName"] == name
        (mount,) = [mount for mount in container(values)["volumeMounts"] if mount["name"] == volume["name"]]
        assert f"--reference-key-file={mount['mountPath']}/key" in container(values)["args"]
    assert not [found for found in render({"referenceKey": {"existingSecret": "mine"}}) if found["kind"] == "Secret"]
    without = {"referenceKey": {"create": False}}
    assert not [found for found in render(without) if found["kind"] == "Secret"]
    assert not [argument for argument in container(without)["args"] if "reference-key" in argument]


def test_the_image_that_fetches() -> None:
    options = parse_options([*_without_key(container({"fetch": {"image": "r.example/f:1"}})["args"])], {})
    assert options.settings.fetch_image == "r.example/f:1"
    assert parse_options(_without_key(container()["args"]), {}).settings.fetch_image is None


def _without_key(arguments: list[str]) -> list[str]:
    """The file of the key is in the pod only."""
    return [argument for argument in arguments if not argument.startswith("--reference-key-file=")]


def test_its_ports_and_probes_are_the_operators() -> None:
    found = container()
    ports = {port["name"]: port["containerPort"] for port in found["ports"]}
    assert ports == {"metrics": Settings().metrics_port, "health": Settings().health_port}
    paths = {kind: found[kind]["httpGet"] for kind in ("startupProbe", "livenessProbe", "readinessProbe")}
    assert {probe["port"] for probe in paths.values()} == {"health"}
    assert paths["livenessProbe"]["path"] == "/healthz"
    assert paths["readinessProbe"]["path"] == "/readyz"


def test_every_value_has_a_schema_and_a_wrong_one_is_refused() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    values = yaml.safe_load((CHART / "values.yaml").read_text())

    def check(given: Any, described: dict[str, Any], path: str) -> None:
        if isinstance(given, dict) and "properties" in described:
            assert described.get("additionalProperties") is False, path
            for key, value in given.items():
                assert key in described["properties"], f"{path}.{key} has no schema"
                check(value, described["properties"][key], f"{path}.{key}")

    check(values, schema, "values")
    for wrong in (
        {"replicas": 0},
        {"replicas": 2, "leaderElection": False},
        {"settings": {"workers": 0}},
        {"settings": {"wokers": 4}},
        {"image": {"digest": "latest"}},
        {"metrics": {"podMonitor": {"interval": "often"}}},
        {"networkPolicy": {"apiServer": {"cidrs": ["everywhere"]}}},
        {"image": {"repository": ""}},
        {"watchNamespace": "Not A Name"},
        {"log": {"level": "loud"}},
        {"extraArgs": ["-A"]},
        {"endpointPicker": {"namespaces": ["Not A Name"]}},
    ):
        with pytest.raises(helm_python.HelmError):
            render(wrong)


ALL_ON: dict[str, Any] = {
    "replicas": 2,
    "networkPolicy": {"enabled": True, "apiServer": {"cidrs": ["10.0.0.1/32"]}},
    "dashboard": {"enabled": True},
    "extraEnv": [{"name": "HTTPS_PROXY", "value": "http://proxy"}],
    "settings": {"workers": 8, "resyncSeconds": 120.5},
}


@pytest.mark.parametrize(
    "values", [{}, {"watchNamespace": NAMESPACE}, ALL_ON], ids=["cluster", "namespaced", "all that needs no CRD"]
)
def test_it_applies(api_server: ApiServer, values: dict[str, Any]) -> None:
    if not api_server.has_controller_manager:
        pytest.skip("the emulated API server has no RBAC kinds")
    kubectl = Kubectl(kubeconfig=api_server.kubeconfig_path, namespace=NAMESPACE)
    kubectl.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}})
    # The real API server checks every field: an unknown one is an error with strict validation.
    kubectl("apply", "--server-side", "--validate=strict", "-f", "-", stdin=yaml.safe_dump_all(render(values)))
    applied = kubectl.get("deployment", f"{RELEASE}-reprise-operator")
    assert applied is not None
    assert applied["spec"]["template"]["spec"]["containers"][0]["args"] == container(values)["args"]
