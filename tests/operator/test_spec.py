"""Body → typed spec: defaults, what is refused and with which words."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from reprise_operator.resource import ClaimModel, FetchedModel, HostPathModel
from reprise_operator.spec import SpecError, identity_of, parse
from reprise_operator.spec_types import DriverMode, Runtime
from tests.support.factories import UID, body


def test_unset_fields_have_the_documented_defaults() -> None:
    service = parse(body())
    spec = service.spec
    assert service.identity == identity_of(body())
    assert (service.identity.name, service.identity.namespace, service.identity.uid) == ("qwen", "llm", UID)
    assert service.source == HostPathModel(path="/models/qwen")
    assert service.served_name == "qwen"
    assert service.prefix_caching is True
    assert (spec.runtime.name, spec.accelerator.profile, spec.accelerator.driver) == (
        Runtime.REPRISE,
        "ascend910",
        DriverMode.AUTO,
    )
    assert (spec.service.type, spec.service.port, spec.service.session_affinity) == ("ClusterIP", 8000, None)
    assert (spec.replicas, spec.suspend, spec.memory.utilization) == (1, False, None)
    assert (spec.memory.auto_tune, spec.memory.floor) == (True, None)


@pytest.mark.parametrize(("given", "expected"), [({}, True), ({"enabled": True}, True), ({"enabled": False}, False)])
def test_prefix_caching_is_three_valued(given: dict[str, bool], expected: bool) -> None:
    assert parse(body({"prefixCaching": given})).prefix_caching is expected


def test_zero_replicas_is_not_unset() -> None:
    """Fault operator 4: 0 was taken for unset."""
    assert parse(body({"replicas": 0})).spec.replicas == 0


@pytest.mark.parametrize(
    ("uri", "source"),
    [
        ("hostpath:///models/qwen", HostPathModel(path="/models/qwen")),
        ("hostpath:///models/qwen/", HostPathModel(path="/models/qwen")),
        ("hostpath:///models/a b.gguf", HostPathModel(path="/models/a b.gguf")),
        ("pvc://models", ClaimModel(claim="models", path="")),
        ("pvc://models/Qwen3-8B/q4.gguf", ClaimModel(claim="models", path="Qwen3-8B/q4.gguf")),
        ("hf://Qwen/Qwen3-8B", FetchedModel(scheme="hf", location="Qwen/Qwen3-8B")),
        ("hf://Qwen/Qwen3-8B@main", FetchedModel(scheme="hf", location="Qwen/Qwen3-8B", revision="main")),
        ("modelscope://Qwen/Qwen3-8B", FetchedModel(scheme="modelscope", location="Qwen/Qwen3-8B")),
        ("s3://bucket", FetchedModel(scheme="s3", location="bucket")),
        ("s3://bucket/a b/q4.gguf", FetchedModel(scheme="s3", location="bucket/a b/q4.gguf")),
        ("s3://bucket/a/", FetchedModel(scheme="s3", location="bucket/a")),
    ],
)
def test_model_uris(uri: str, source: object) -> None:
    assert parse(body({"model": {"uri": uri}})).source == source


@pytest.mark.parametrize(
    "uri",
    [
        "hostpath://models",
        "hostpath:///",
        "hostpath:///../etc",
        "pvc://",
        "pvc://Models/x",
        "pvc://m/../../etc",
        "/models/qwen",
        "file:///m",
        "hf://qwen",
        "hf://Qwen/..",
        "hf://-x/y",
        "modelscope://a/b/c",
        "s3://",
        "s3://b/../c",
    ],
)
def test_bad_model_uris_are_refused_with_what_is_possible(uri: str) -> None:
    with pytest.raises(SpecError, match="hostpath:///absolute/path or pvc://claim/path") as caught:
        parse(body({"model": {"uri": uri}}))
    assert caught.value.reason == "InvalidSpec"
    assert repr(uri) in caught.value.message


def test_a_revision_may_stand_in_a_field_of_its_own() -> None:
    model = {"uri": "hf://a/b", "revision": "refs/pr/1"}
    assert parse(body({"model": model})).source == FetchedModel(scheme="hf", location="a/b", revision="refs/pr/1")


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ({"uri": "hf://a/b@v1", "revision": "v1"}, "spec.model.uri names @v1: give one"),
        ({"uri": "s3://a/b", "revision": "v1"}, "a bucket has no revisions"),
        ({"uri": "pvc://m", "revision": "v1"}, "spec.model.revision is of models that are fetched"),
        ({"uri": "hostpath:///m", "secretRef": {"name": "x"}}, "spec.model.secretRef is of models that are fetched"),
        ({"uri": "pvc://m", "cache": {"claimName": "x"}}, "spec.model.cache is of models that are fetched"),
        ({"uri": "hf://a/b", "cache": {"claimName": "x", "sizeLimit": "1Gi"}}, "sizeLimit is of the volume"),
    ],
)
def test_what_does_not_go_with_the_uri_is_refused(model: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError, match=words) as caught:
        parse(body({"model": model}))
    assert caught.value.reason == "InvalidSpec"


@pytest.mark.parametrize(
    ("spec", "path"),
    [
        ({"memory": {"utilization": 1.5}}, "spec.memory.utilization"),
        ({"memory": {"floor": 0}}, "spec.memory.floor"),
        ({"memory": {"utilization": 0.8, "floor": 0.9}}, "spec.memory.floor is 0.9, above spec.memory.utilization 0.8"),
        ({"service": {"port": 0}}, "spec.service.port"),
        ({"runtime": {"name": "sglang"}}, "spec.runtime.name"),
        ({"accelerator": {"profile": "gpu"}}, "spec.accelerator.profile"),
        ({"model": {"maxModelLen": 0}}, "spec.model.maxModelLen"),
        ({"prefixCaching": {"enabled": "sometimes"}}, "spec.prefixCaching.enabled"),
        ({"unheardOf": 1}, "spec.unheardOf"),
    ],
)
def test_a_wrong_value_is_named(spec: dict[str, Any], path: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse(body(spec))
    assert caught.value.reason == "InvalidSpec"
    assert path in caught.value.message


def test_a_spec_without_a_model_is_refused() -> None:
    broken = body()
    del broken["spec"]["model"]
    with pytest.raises(SpecError, match=r"spec\.model: Field required"):
        parse(broken)


@pytest.mark.parametrize(
    "argument",
    [
        "--port=1",
        "--port",
        "--gpu_memory_utilization",
        "--gpu-memory_utilization=0.5",
        "--no-enable-prefix-caching",
        "--no_enable_prefix_caching",
        "--enable-chunked-prefill",
        "--model=x",
        "--max-model-len 5",
        "-tp",
        "-tp=2",
        "--api_key=secret",
    ],
)
def test_extra_arguments_may_not_repeat_a_field(argument: str) -> None:
    with pytest.raises(SpecError, match="extraArgs repeats") as caught:
        parse(body({"runtime": {"extraArgs": ["--seed=1", argument]}}))
    assert "secret" not in caught.value.message


@pytest.mark.parametrize("argument", ["--max-num-seqs=4", "--model-loader-x", "--portal", "value", '{"port": 1}', "-t"])
def test_other_extra_arguments_pass(argument: str) -> None:
    assert parse(body({"runtime": {"extraArgs": [argument]}})).spec.runtime.extra_args == (argument,)


VLLM = {"runtime": {"name": "vllm-ascend"}}


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"model": {"maxModelLen": 4096}, "chunkedPrefill": {"enabled": True}}, "chunkedPrefill"),
        ({}, "maxModelLen is None"),
        ({"model": {"maxModelLen": 65_537}}, "maxModelLen is 65537"),
        ({"model": {"maxModelLen": 4096}, "accelerator": {"profile": "cpu"}}, "needs an NPU"),
    ],
)
def test_vllm_ascend_has_its_limits(spec: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError, match=words) as caught:
        parse(body({**VLLM, **spec, "model": {"uri": "hostpath:///m", **spec.get("model", {})}}))
    assert caught.value.reason == "InvalidSpec"


@pytest.mark.parametrize(
    "spec",
    [
        {"model": {"maxModelLen": 65_536}},
        {"prefixCaching": {"enabled": False}, "chunkedPrefill": {"enabled": True}},
        {"prefixCaching": {"enabled": False}, "model": {"maxModelLen": 200_000}},
        {"model": {"maxModelLen": 4096}, "chunkedPrefill": {"enabled": False}},
    ],
)
def test_vllm_ascend_within_its_limits(spec: dict[str, Any]) -> None:
    assert parse(body({**VLLM, **spec, "model": {"uri": "hostpath:///m", **spec.get("model", {})}}))


def test_our_engine_has_no_such_limits() -> None:
    spec = {
        "model": {"maxModelLen": 1_000_000},
        "chunkedPrefill": {"enabled": True},
        "prefixCaching": {"enabled": True},
    }
    assert parse(body(spec)).prefix_caching


@pytest.mark.parametrize(
    ("accelerator", "reason", "words"),
    [
        ({"profile": "cpu", "count": 1}, "InvalidSpec", "spec.accelerator.count"),
        ({"profile": "cpu", "driver": "runtime"}, "InvalidSpec", "spec.accelerator.driver"),
    ],
)
def test_devices_that_would_lie_idle_are_refused(accelerator: dict[str, Any], reason: str, words: str) -> None:
    with pytest.raises(SpecError, match=words) as caught:
        parse(body({"accelerator": accelerator}))
    assert caught.value.reason == reason


def test_whole_prompts_need_a_length() -> None:
    with pytest.raises(SpecError, match="maxModelLen is needed"):
        parse(body({"chunkedPrefill": {"enabled": False}}))


def test_parsing_changes_nothing() -> None:
    given = body({"podTemplate": {"affinity": {"nodeAffinity": {}}, "volumes": [{"name": "x", "emptyDir": {}}]}})
    before = copy.deepcopy(given)
    parse(given)
    assert given == before
