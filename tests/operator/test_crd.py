"""The CRD: what it promises in writing, and what an API server refuses by it, with which words."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from reprise_operator.children.profiles import PROFILES
from reprise_operator.kinds import FOREIGN_TYPES
from reprise_operator.plan import plan as make_plan
from reprise_operator.release_state import LastGood, Rejected, started, state_status
from reprise_operator.settings import GROUP, KIND, PLURAL, VERSION
from reprise_operator.spec import RESERVED_FLAGS, RESERVED_PATTERN, parse
from reprise_operator.spec_types import DURATION_PATTERN, HOSTNAME_PATTERN, Spec
from reprise_operator.tuning import MemoryEnd, lowered
from tests.contract.apiserver.replay import client_of, install_definitions
from tests.operator.golden import inputs, output
from tests.support.apiserver import ApiServer
from tests.support.factories import NOW, SETTINGS, UID, merged, metrics, observed, planned, pod, window
from tests.support.statuses import status_of

PROJECT = Path(__file__).resolve().parents[2]
CRD_FILE = PROJECT / "crds" / "serving.reprise.io_inferenceservices.yaml"
CRD: dict[str, Any] = yaml.safe_load(CRD_FILE.read_text())
SCHEMA: dict[str, Any] = CRD["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
SPEC: dict[str, Any] = SCHEMA["properties"]["spec"]
STATUS: dict[str, Any] = SCHEMA["properties"]["status"]


def at(path: str, schema: Mapping[str, Any] = SPEC) -> dict[str, Any]:
    """The schema of a field."""
    for part in path.split("."):
        schema = schema["properties"][part]
    return dict(schema)


def walk(schema: Mapping[str, Any], path: str = "spec") -> Iterator[tuple[str, Mapping[str, Any]]]:
    yield path, schema
    for key, nested in schema.get("properties", {}).items():
        yield from walk(nested, f"{path}.{key}")
    for key in ("items", "additionalProperties"):
        if key in schema:
            yield from walk(schema[key], f"{path}[]")


# In writing ---------------------------------------------------------------------------------------------------------


def test_names() -> None:
    names = CRD["spec"]["names"]
    assert CRD["metadata"]["name"] == f"{PLURAL}.{GROUP}"
    assert (CRD["spec"]["group"], names["kind"], names["plural"]) == (GROUP, KIND, PLURAL)
    assert names["shortNames"] == ["risvc"]
    assert CRD["spec"]["versions"][0]["name"] == VERSION


def test_it_can_be_applied_with_its_annotation() -> None:
    """kubectl apply keeps the whole object in an annotation, and those hold at most 262,144 bytes."""
    assert len(json.dumps(CRD)) < 131_072


def test_replicas_is_the_only_default_of_the_spec() -> None:
    assert [path for path, schema in walk(SPEC) if "default" in schema] == ["spec.replicas"]
    assert at("replicas")["default"] == 1


def test_the_status_says_not_ready_before_the_operator_does() -> None:
    (condition,) = STATUS["default"]["conditions"]
    assert (condition["type"], condition["status"], condition["reason"]) == ("Ready", "Unknown", "Pending")


def test_columns() -> None:
    columns = {column["name"]: column for column in CRD["spec"]["versions"][0]["additionalPrinterColumns"]}
    assert [name for name, column in columns.items() if not column.get("priority")] == [
        *("Ready", "Model", "Prefix-Cache", "Hit%", "Mem-Util", "Replicas", "Age")
    ]
    assert columns["URL"]["priority"] == 1
    assert [columns[name]["type"] for name in ("Prefix-Cache", "Hit%", "Mem-Util")] == ["boolean", "number", "number"]


def test_scale() -> None:
    assert CRD["spec"]["versions"][0]["subresources"] == {
        "status": {},
        "scale": {
            "specReplicasPath": ".spec.replicas",
            "statusReplicasPath": ".status.replicas",
            "labelSelectorPath": ".status.selector",
        },
    }


def test_profiles_are_those_of_the_operator() -> None:
    assert at("accelerator.profile")["enum"] == list(PROFILES)


def test_the_rule_on_extra_arguments_is_the_operators() -> None:
    (rule,) = at("runtime.extraArgs")["items"]["x-kubernetes-validations"]
    quoted = RESERVED_PATTERN.replace("\\", "\\\\")
    assert rule["rule"] == f"!self.matches('{quoted}')"
    for field in RESERVED_FLAGS.values():
        assert field.startswith("(") or field in rule["message"]
        if not field.startswith("("):
            at(field)


def test_the_schema_and_the_operator_know_the_same_fields() -> None:
    """A field of the schema is read by spec.py: none is accepted and ignored."""
    known = {info.alias or name for name, info in Spec.model_fields.items()}
    assert set(SPEC["properties"]) == known
    for name, info in Spec.model_fields.items():
        nested = getattr(info.annotation, "model_fields", None)
        if nested is None:
            continue
        section = info.alias or name
        fields = {field.alias or key for key, field in nested.items()}
        assert set(at(section)["properties"]) == fields, section


def test_every_rule_has_a_message() -> None:
    rules = [rule for _, schema in walk(SCHEMA, "") for rule in schema.get("x-kubernetes-validations", ())]
    assert len(rules) >= 20
    assert all(len(rule["message"]) > 10 for rule in rules)


# At an API server ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(api_server: ApiServer) -> Iterator[httpx.Client]:
    """An API server that has the CRD."""
    with client_of(api_server) as client:
        install_definitions(client)
        yield client


def manifest(spec: Mapping[str, Any], name: str = "case") -> dict[str, Any]:
    return {
        "apiVersion": f"{GROUP}/{VERSION}",
        "kind": KIND,
        "metadata": {"name": name, "namespace": "default"},
        "spec": merged({"model": {"uri": "hostpath:///models/m"}}, spec),
    }


URL = f"/apis/{GROUP}/{VERSION}/namespaces/default/{PLURAL}"


def create(server: httpx.Client, body: Mapping[str, Any], **options: str) -> dict[str, Any]:
    """The object as a dry run would store it."""
    answer = server.post(URL, params={"dryRun": "All", **options}, json=body)
    assert answer.status_code == 201, answer.text
    created: dict[str, Any] = answer.json()
    created["metadata"] |= {"uid": UID, "namespace": "default"}
    return created


def refusal(server: httpx.Client, body: Mapping[str, Any], **options: str) -> tuple[int, str]:
    """Status code and message."""
    answer = server.post(URL, params={"dryRun": "All", **options}, json=body)
    return answer.status_code, answer.json().get("message", "")


VLLM = {"runtime": {"name": "vllm-ascend"}}
CPU = {"accelerator": {"profile": "cpu"}}
ROUTED = {"parentRefs": [{"name": "main"}]}

REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("scheme", {"model": {"uri": "file:///m"}}, "must be hostpath:///absolute/path"),
    ("relative path", {"model": {"uri": "hostpath://m"}}, "must be hostpath:///absolute/path"),
    ("dots", {"model": {"uri": "pvc://m/../etc"}}, "must not contain '..'"),
    ("revision of a volume", {"model": {"uri": "pvc://m", "revision": "v1"}}, "of hf:// and modelscope:// models only"),
    ("revision twice", {"model": {"uri": "hf://a/b@v1", "revision": "v1"}}, "give either revision or @revision"),
    ("secret of a volume", {"model": {"secretRef": {"name": "x"}}}, "are of models that are fetched"),
    ("cache of a volume", {"model": {"cache": {}}}, "are of models that are fetched"),
    ("two caches", {"model": {"uri": "hf://a/b", "cache": {"claimName": "x", "sizeLimit": 1}}}, "give one of them"),
    ("served name", {"model": {"servedName": "--port"}}, "must not start with '-'"),
    ("length", {"model": {"maxModelLen": 0}}, "greater than or equal to 1"),
    ("dtype", {"model": {"dtype": "int4"}}, 'supported values: "auto"'),
    ("utilization high", {"memory": {"utilization": 0.99}}, "must be above 0 and at most 0.98"),
    ("utilization zero", {"memory": {"utilization": 0}}, "must be above 0 and at most 0.98"),
    ("floor", {"memory": {"utilization": 0.8, "floor": 0.9}}, "floor must not be above utilization"),
    (
        "chunked prefill with caching",
        {**VLLM, "model": {"maxModelLen": 4096}, "chunkedPrefill": {"enabled": True}},
        "vllm-ascend cannot combine prefix caching",
    ),
    (
        "chunked prefill with caching, said",
        {
            **VLLM,
            "model": {"maxModelLen": 4096},
            "prefixCaching": {"enabled": True},
            "chunkedPrefill": {"enabled": True},
        },
        "vllm-ascend cannot combine prefix caching",
    ),
    ("no length", VLLM, "needs model.maxModelLen of at most 65536"),
    ("long", {**VLLM, "model": {"maxModelLen": 65_537}}, "needs model.maxModelLen of at most 65536"),
    ("vllm-ascend on a cpu", {**VLLM, **CPU, "prefixCaching": {"enabled": False}}, "vllm-ascend needs an NPU"),
    ("whole prompts", {"chunkedPrefill": {"enabled": False}}, "needs model.maxModelLen"),
    ("flag=value", {"runtime": {"extraArgs": ["--seed=1", "--port=1"]}}, "repeats a flag that the operator sets"),
    ("flag value", {"runtime": {"extraArgs": ["--gpu-memory-utilization", "0.5"]}}, "memory.utilization"),
    ("underscores", {"runtime": {"extraArgs": ["--max_model_len=5"]}}, "repeats a flag"),
    ("mixed", {"runtime": {"extraArgs": ["--enable-prefix_caching"]}}, "repeats a flag"),
    ("negated", {"runtime": {"extraArgs": ["--no-enable-prefix-caching"]}}, "prefixCaching.enabled"),
    ("short", {"runtime": {"extraArgs": ["-tp", "2"]}}, "accelerator.count"),
    ("too many arguments", {"runtime": {"extraArgs": ["x"] * 65}}, "must have at most 64 items"),
    ("variable twice", {"runtime": {"env": [{"name": "A", "value": "1"}, {"name": "A", "value": "2"}]}}, "Duplicate"),
    (
        "value and source",
        {"runtime": {"env": [{"name": "A", "value": "1", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}]}},
        "give value or valueFrom, not both",
    ),
    ("quantity", {"runtime": {"resources": {"limits": {"memory": "16 GB"}}}}, "must be a quantity"),
    ("negative quantity", {"runtime": {"resources": {"limits": {"memory": -1}}}}, "must be a quantity"),
    ("block", {"prefixCaching": {"blockSize": 16}}, "must be 128, 256, 384 or 512"),
    (
        "two volumes",
        {"prefixCaching": {"persistence": {"claimName": "a", "size": "1Gi"}}},
        "give either claimName",
    ),
    ("one volume, two pods", {"replicas": 2, "prefixCaching": {"persistence": {"claimName": "a"}}}, "one volume"),
    (
        "one volume of one node, two pods",
        {"replicas": 2, "prefixCaching": {"persistence": {"claimName": "a", "accessModes": ["ReadWriteOnce"]}}},
        "one volume",
    ),
    (
        "a class of a claim",
        {"prefixCaching": {"persistence": {"claimName": "a", "storageClassName": "b"}}},
        "storageClassName goes with size",
    ),
    (
        "a volume nobody may write",
        {"prefixCaching": {"persistence": {"size": "1Gi", "accessModes": ["ReadOnlyMany"]}}},
        "must hold one that lets pods write",
    ),
    (
        "tiers of vllm-ascend",
        {**VLLM, "model": {"maxModelLen": 4096}, "prefixCaching": {"hostMemory": "1Gi"}},
        "vllm-ascend caches on the device alone",
    ),
    (
        "isolation of vllm-ascend",
        {**VLLM, "model": {"maxModelLen": 4096}, "prefixCaching": {"isolation": "perKey"}},
        "vllm-ascend caches on the device alone",
    ),
    ("warm-up twice", {"runtime": {"extraArgs": ["--warmup-prompts=/x"]}}, "prefixCaching.warmup"),
    ("warm-up", {"prefixCaching": {"warmup": {}}}, "give either prompts or configMapKeyRef"),
    ("disruption", {"disruption": {"minAvailable": 1, "maxUnavailable": "10%"}}, "give either minAvailable"),
    ("a change of nothing", {"rollout": {"maxSurge": 0, "maxUnavailable": "0%"}}, "must not both be 0"),
    ("no pods", {"rollout": {"maxSurge": -1}}, "must be a number that is not negative"),
    ("no share", {"rollout": {"maxUnavailable": "half"}}, "or a percentage such as 25%"),
    ("no time", {"rollout": {"progressDeadlineSeconds": 5}}, "greater than or equal to 10"),
    ("bounds", {"autoscaling": {"minReplicas": 3, "maxReplicas": 2}}, "minReplicas must not be above maxReplicas"),
    ("to zero", {"autoscaling": {"minReplicas": 0, "maxReplicas": 2}}, "minReplicas 0 needs provider: keda"),
    (
        "who asks Prometheus",
        {"autoscaling": {"maxReplicas": 2, "prometheus": {"serverAddress": "http://p:9090"}}},
        "prometheus is only asked by KEDA",
    ),
    (
        "query without target",
        {"autoscaling": {"maxReplicas": 2, "provider": "keda", "prometheus": {"query": "sum(x)"}}},
        "target is needed",
    ),
    (
        "address",
        {"autoscaling": {"maxReplicas": 2, "provider": "keda", "prometheus": {"serverAddress": "prometheus:9090"}}},
        "must be a URL",
    ),
    ("percentage", {"disruption": {"maxUnavailable": "101%"}}, "a percentage from 0% to 100%"),
    ("off by replicas", {"replicas": 0, "autoscaling": {"maxReplicas": 2}}, "with autoscaling leave replicas out"),
    ("two deciders", {"replicas": 9, "autoscaling": {"maxReplicas": 2}}, "with autoscaling leave replicas out"),
    ("replicas", {"replicas": -1}, "greater than or equal to 0"),
    ("profile", {"accelerator": {"profile": "gpu"}}, 'supported values: "cpu"'),
    ("devices of a cpu", {"accelerator": {"profile": "cpu", "count": 1}}, "has no device"),
    ("resource", {"accelerator": {"resourceName": "npu"}}, "such as huawei.com/Ascend910"),
    ("port", {"service": {"port": 70_000}}, "less than or equal to 65535"),
    ("gateway for nothing", {"gateway": {}}, "give parentRefs, the Gateways of a route, or endpointPicker"),
    (
        "host names for nobody",
        {"gateway": {"hostnames": ["a.example"], "endpointPicker": {"name": "p"}}},
        "hostnames need parentRefs",
    ),
    ("host name", {"gateway": {**ROUTED, "hostnames": ["LLM.example"]}}, "must be a host name in lower case"),
    (
        "pool without a picker",
        {"gateway": {**ROUTED, "inferencePool": True}},
        "inferencePool: true needs endpointPicker",
    ),
    (
        "picker without a pool",
        {"gateway": {"inferencePool": False, "endpointPicker": {"name": "p"}}},
        "and false excludes it",
    ),
    ("two pickers", {"gateway": {"endpointPicker": {"name": "p", "managed": True}}}, "or managed: true"),
    ("no picker", {"gateway": {"endpointPicker": {"managed": False}}}, "or managed: true"),
    (
        "resources of somebody else's",
        {"gateway": {"endpointPicker": {"name": "p", "resources": {"limits": {"cpu": 1}}}}},
        "resources are of a managed picker",
    ),
    ("interval", {"monitoring": {"podMonitor": {"interval": "30"}}}, "must be a duration such as 30s"),
    (
        "monitor's labels",
        {"monitoring": {"podMonitor": {"labels": {"serving.reprise.io/name": "x"}}}},
        "are the operator's own",
    ),
    (
        "selector",
        {"podTemplate": {"metadata": {"labels": {"serving.reprise.io/name": "x"}}}},
        "are the operator's own",
    ),
]

ACCEPTED: list[dict[str, Any]] = [
    {},
    {"model": {"uri": "hf://Qwen/Qwen3-8B@main"}},
    {"model": {"uri": "s3://bucket/a/b"}},
    {"model": {"uri": "hf://a/b", "revision": "v1", "secretRef": {"name": "hub"}, "cache": {"claimName": "models"}}},
    {"model": {"uri": "modelscope://a/b", "cache": {"sizeLimit": "64Gi"}}},
    {"model": {"uri": "pvc://claim"}},
    {"memory": {"utilization": 0.98}},
    {**VLLM, "model": {"maxModelLen": 65_536}},
    {**VLLM, "prefixCaching": {"enabled": False}, "chunkedPrefill": {"enabled": True}},
    {"chunkedPrefill": {"enabled": True}, "model": {"maxModelLen": 1_000_000}},
    {"runtime": {"extraArgs": ["--max-num-seqs", "3", "--ports=2", '{"port": 1}', ""]}},
    {"runtime": {"resources": {"limits": {"cpu": 4, "memory": "16Gi", "ephemeral-storage": "1.5e3"}}}},
    {"prefixCaching": {"blockSize": 16}, **CPU},
    {"gateway": {**ROUTED, "hostnames": ["llm.example.com", "*.example.com"]}},
    {
        "gateway": {
            **ROUTED,
            "inferencePool": True,
            "endpointPicker": {"name": "p", "port": 9, "failureMode": "FailOpen"},
        }
    },
    {"gateway": {"endpointPicker": {"managed": True, "resources": {"requests": {"cpu": 2}}}}},
    {"monitoring": {"podMonitor": {"enabled": True, "interval": "1m30s", "labels": {"release": "x"}}}},
    {"replicas": 0},
    {"rollout": {"maxSurge": 0, "maxUnavailable": "25%", "progressDeadlineSeconds": 600}},
    {"rollout": {"maxSurge": "50%"}},
    {
        "prefixCaching": {
            "hashAlgorithm": "xxhash_cbor",
            "isolation": "perKey",
            "isolationSecretRef": {"name": "salt"},
            "hostMemory": "64Gi",
            "persistence": {
                "size": "100Gi",
                "storageClassName": "fast",
                "accessModes": ["ReadWriteOnce"],
                "limit": 10**10,
            },
            "warmup": {"prompts": ["You are"], "timeoutSeconds": 60},
        },
        "auth": {"apiKeySecretRef": {"name": "keys"}},
        "replicas": 2,
    },
    {"replicas": 3, "prefixCaching": {"persistence": {"claimName": "a", "accessModes": ["ReadWriteMany"]}}},
    {"prefixCaching": {"warmup": {"configMapKeyRef": {"name": "a", "key": "b.jsonl"}}}},
    {**VLLM, "model": {"maxModelLen": 4096}, "prefixCaching": {"isolation": "none", "hashAlgorithm": "sha256_cbor"}},
    {"replicas": 3, "autoscaling": {"minReplicas": 2, "maxReplicas": 4}},
    {"replicas": 0, "autoscaling": {"minReplicas": 0, "maxReplicas": 4, "provider": "keda"}},
    {"disruption": {"minAvailable": "100%"}},
    {"disruption": {"maxUnavailable": 0}},
    {"podTemplate": {"affinity": {"nodeAffinity": {"x": [1]}}, "volumes": [{"name": "a", "emptyDir": {}}]}},
]


@pytest.mark.parametrize(("spec", "words"), [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED])
def test_refused_with_words_that_help(server: httpx.Client, spec: dict[str, Any], words: str) -> None:
    code, message = refusal(server, manifest(spec))
    assert code == 422
    assert words in message


@pytest.mark.parametrize("spec", ACCEPTED, ids=lambda spec: json.dumps(spec)[:60])
def test_accepted(server: httpx.Client, spec: dict[str, Any]) -> None:
    created = create(server, manifest(spec))
    assert created["spec"] == {"replicas": 1} | manifest(spec)["spec"], "something was pruned or defaulted"
    assert created["status"] == STATUS["default"]


def test_a_model_is_required(server: httpx.Client) -> None:
    code, message = refusal(server, {**manifest({}), "spec": {"replicas": 1}})
    assert code == 422
    assert "spec.model: Required value" in message


def test_a_misspelt_field_is_refused_by_strict_validation(server: httpx.Client) -> None:
    code, message = refusal(server, manifest({"prefixCache": {"enabled": True}}), fieldValidation="Strict")
    assert code == 400
    assert 'unknown field "spec.prefixCache"' in message


EXAMPLES = sorted([*(PROJECT / "examples").glob("*.yaml"), *(PROJECT / "examples" / "ascend").glob("*.yaml")])


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_are_accepted_and_honoured(server: httpx.Client, path: Path) -> None:
    created = create(server, yaml.safe_load(path.read_text()), fieldValidation="Strict")
    assert parse(created).spec.model.uri == created["spec"]["model"]["uri"]


def test_what_the_api_server_accepts_the_operator_reads(server: httpx.Client) -> None:
    """Each accepted spec is honoured, never a surprise."""
    for spec in ACCEPTED:
        parse(create(server, manifest(spec)))


def test_null_is_unset_and_unset_is_on(server: httpx.Client) -> None:
    created = create(server, manifest({"prefixCaching": {"enabled": None}}))
    assert created["spec"]["prefixCaching"] == {}
    assert parse(created).prefix_caching is True


def test_status_and_scale(server: httpx.Client) -> None:
    url = f"{URL}/case-scale"
    patch = {"Content-Type": "application/merge-patch+json"}
    assert server.post(URL, json=manifest({}, "case-scale")).status_code == 201
    try:
        status = {"replicas": 1, "selector": "serving.reprise.io/name=case-scale"}
        written = server.patch(f"{url}/status", headers=patch, content=json.dumps({"status": status})).json()
        assert written["status"]["replicas"] == 1
        assert written["metadata"]["generation"] == 1
        scale = server.get(f"{url}/scale").json()
        assert scale["spec"] == {"replicas": 1}
        assert scale["status"] == status
        server.patch(f"{url}/scale", headers=patch, content=json.dumps({"spec": {"replicas": 3}})).raise_for_status()
        scaled = server.get(url).json()
        assert scaled["spec"]["replicas"] == 3
        assert scaled["metadata"]["generation"] == 2
    finally:
        server.delete(url).raise_for_status()


def test_the_operators_status_is_kept_whole(server: httpx.Client) -> None:
    """A field of status.py that the schema lacks would be pruned, and written again for ever."""
    plan = planned({"memory": {"utilization": 0.8}})
    end = MemoryEnd(pod_uid="p", container_id="containerd://1", at="2026-11-30T00:00:00Z")
    plan = make_plan(plan.service, SETTINGS, tuning=lowered(plan.tuning, [end]))
    hits = window().observe([pod(metrics=metrics(at=NOW - 30))])
    served = pod(metrics=metrics(queries=2000, hits=1500))
    status = status_of(plan, observed(plan, served), hits=hits.observe([served]))
    assert {"prefixCache", "memory", "engine", "conditions"} <= set(status)
    good = LastGood(template_hash="0" * 16, pod_template_hash="5d9c6d5fd8")
    rejected = Rejected(template_hash="1" * 16, reason="RolledBack", message="why", pod_template_hash="5d9c6d5fd8")
    state = started("0" * 16, NOW, last_good=good)
    state = replace(state, rejected=rejected, check_job="qwen-check-1", check_waits="an image")
    status["rollout"] = state_status(state)
    url = f"{URL}/case-status"
    patch = {"Content-Type": "application/merge-patch+json"}
    assert server.post(URL, json=manifest({}, "case-status")).status_code == 201
    try:
        written = server.patch(f"{url}/status", headers=patch, content=json.dumps({"status": status}))
        assert written.status_code == 200, written.text
        assert written.json()["status"] == status
        table = server.get(url, headers={"Accept": "application/json;as=Table;v=v1;g=meta.k8s.io"}).json()
        columns = [column["name"] for column in table["columnDefinitions"]]
        row = dict(zip(columns, table["rows"][0]["cells"], strict=True))
        assert row["Ready"] == "True"
        assert row["Model"] == "qwen"
        assert row["Prefix-Cache"] is True
        assert (row["Hit%"], row["Mem-Util"], row["Replicas"]) == (75, 0.75, 1)
        assert (row["URL"], row["Reason"]) == ("http://qwen.llm.svc:8000/v1", "Ready")
    finally:
        server.delete(url).raise_for_status()


def test_patterns_are_those_of_the_operator() -> None:
    (hostname,) = at("gateway.hostnames")["items"]["x-kubernetes-validations"]
    assert hostname["rule"] == f"self.matches('{HOSTNAME_PATTERN}')"
    (interval,) = at("monitoring.podMonitor.interval")["x-kubernetes-validations"]
    assert interval["rule"] == f"self.matches('{DURATION_PATTERN}')"


@pytest.mark.parametrize("name", inputs())
def test_children_are_accepted_by_server_side_apply(server: httpx.Client, name: str) -> None:
    # Of other projects: test_reconcile_gateway.py and test_reconcile_scaling.py have their CRDs.
    optional = {(kind.api_version, kind.kind) for kind in FOREIGN_TYPES}
    for child in yaml.safe_load_all(output(name).read_text()):
        if (child["apiVersion"], child["kind"]) in optional:
            continue
        child["metadata"]["namespace"] = "default"
        group = "api/v1" if child["apiVersion"] == "v1" else f"apis/{child['apiVersion']}"
        answer = server.patch(
            f"/{group}/namespaces/default/{child['kind'].lower()}s/{child['metadata']['name']}",
            params={"fieldManager": "reprise-operator", "dryRun": "All", "fieldValidation": "Strict"},
            headers={"Content-Type": "application/apply-patch+yaml"},
            content=json.dumps(child),
        )
        assert answer.status_code == 201, answer.text
