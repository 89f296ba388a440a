"""The note of an event names what a write changed."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import pytest

from reprise_operator.changes import told_changes, what_changed
from tests.support.factories import merged, planned


def deployment(spec: Mapping[str, Any] | None = None, **live: Any) -> dict[str, Any]:
    """As the API server has it: with defaults of its own, and the controllers' annotations."""
    body = merged(
        copy.deepcopy(dict(planned({"accelerator": {"profile": "cpu"}, **(spec or {})}).workload)),
        {"spec": {"template": {"spec": {"restartPolicy": "Always", "dnsPolicy": "ClusterFirst"}}}},
    )
    return merged(body, live)


def note(spec: Mapping[str, Any], before: Mapping[str, Any] | None = None) -> str:
    return what_changed(deployment(before), deployment(spec))


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ({}, ""),
        ({"replicas": 3}, "replicas 1 → 3"),
        (
            {"prefixCaching": {"enabled": False}},
            "--enable-prefix-caching → --no-enable-prefix-caching",
        ),
        ({"memory": {"utilization": 0.5}}, "--gpu-memory-utilization 0.9 → 0.5"),
        ({"model": {"maxModelLen": 4096}}, "--max-model-len 4096 added"),
        (
            {"runtime": {"extraArgs": ["--max-num-seqs=3", "--kv-events-config", '{"a": 1}']}},
            '--max-num-seqs 3 added, --kv-events-config {"a": 1} added',
        ),
        ({"runtime": {"env": [{"name": "TOKEN", "value": "s3cret"}]}}, "env TOKEN added"),
        (
            {"runtime": {"image": "registry/engine:2"}},
            "image ghcr.io/reprise/reprise-engine:0.1.0 → registry/engine:2",
        ),
        ({"runtime": {"resources": {"limits": {"memory": "2Gi"}}}}, "resources"),
        ({"podTemplate": {"nodeSelector": {"zone": "a"}}}, "nodeSelector"),
        (
            {"podTemplate": {"volumes": [{"name": "x", "emptyDir": {}}]}},
            "volumes.x added",
        ),
        ({"podTemplate": {"metadata": {"annotations": {"team": "a"}}}}, "pod annotation team added"),
        ({"auth": {"apiKeySecretRef": {"name": "k"}}}, "env REPRISE_API_KEY added"),
    ],
)
def test_what_changed(spec: dict[str, Any], expected: str) -> None:
    assert note(spec) == expected


def test_the_other_way_round() -> None:
    assert note({}, {"memory": {"utilization": 0.5}, "model": {"maxModelLen": 64}}) == (
        "--gpu-memory-utilization 0.5 → 0.9, --max-model-len 64 removed"
    )
    assert note({}, {"runtime": {"env": [{"name": "A", "value": "b"}]}}) == "env A removed"
    changed = {"runtime": {"env": [{"name": "A", "value": "c"}]}}
    assert note(changed, {"runtime": {"env": [{"name": "A", "value": "b"}]}}) == "env A"


def test_nested_values_are_named_by_their_path() -> None:
    before = {"runtime": {"resources": {"limits": {"memory": "1Gi"}}}}
    assert (
        note({"runtime": {"resources": {"limits": {"memory": "2Gi"}}}}, before) == "resources.limits.memory 1Gi → 2Gi"
    )


def test_secrets_are_not_told() -> None:
    before = {"runtime": {"extraArgs": ["--hub-token", "abc"]}}
    told = note({"runtime": {"extraArgs": ["--hub-token", "xyz"]}}, before)
    assert told == "--hub-token changed"
    assert note({"runtime": {"extraArgs": ["--hub-token=xyz"]}}) == "--hub-token added"
    assert note({"runtime": {"extraArgs": ["--max-num-batched-tokens=9"]}}) == "--max-num-batched-tokens 9 added"


def test_credentials_in_values_are_not_told_either() -> None:
    """What shows by its form, whatever the flag is called."""
    before = {"runtime": {"extraArgs": ["--otlp-traces-endpoint=http://user:before@host/"]}}
    after = {"runtime": {"extraArgs": ["--otlp-traces-endpoint=http://user:after@host/", "--x=hf_abcdefghijklmnopqr"]}}
    told = note(after, before)
    assert told.startswith("--otlp-traces-endpoint http://[hidden]@host/ → ")
    assert "--x [hidden] added" in told
    assert "after@" not in told
    assert "before@" not in told
    assert "abcdef" not in told


def test_many_changes_are_cut_short() -> None:
    env = [{"name": f"V{number}", "value": "1"} for number in range(9)]
    assert note({"runtime": {"env": env}}) == ", ".join(f"env V{number} added" for number in range(6)) + " and 3 more"


def test_long_values_keep_their_ends() -> None:
    told = note({"runtime": {"image": f"registry.example/{'a' * 100}:v2"}})
    assert told.endswith(":v2")
    assert len(told) < 150


def test_a_services_port() -> None:
    before, after = planned().network_service, planned({"service": {"port": 80}}).network_service
    assert what_changed(before, after) == "ports.http.port 8000 → 80"


def test_labels_and_owners_of_the_object_and_nothing_of_other_controllers() -> None:
    before, after = deployment(), deployment()
    before["metadata"]["annotations"]["deployment.kubernetes.io/revision"] = "1"
    before["metadata"]["labels"]["app.kubernetes.io/managed-by"] = "me"
    before["metadata"]["ownerReferences"] = []
    assert what_changed(before, after) == "label app.kubernetes.io/managed-by, ownerReferences"


def test_a_rollout_is_called_one() -> None:
    assert told_changes(deployment(), deployment()) == ""
    assert told_changes(deployment(), deployment({"replicas": 2})) == ": replicas 1 → 2"
    rolled = told_changes(deployment(), deployment({"memory": {"utilization": 0.5}}))
    assert rolled == ", whose pods are replaced: --gpu-memory-utilization 0.9 → 0.5"


def test_lists_whose_items_cannot_be_told_apart_are_named_whole() -> None:
    tolerations = [{"key": "npu", "effect": "NoSchedule"}, {"key": "npu", "effect": "NoExecute"}]
    before = {"podTemplate": {"tolerations": tolerations}}
    assert note({"podTemplate": {"tolerations": tolerations[:1]}}, before) == "tolerations"
