"""The Plan as a whole: the automatic memory rule, invariants over arbitrary specs, what makes the pods roll."""

from __future__ import annotations

import copy
import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from reprise_operator.children.profiles import PROFILES
from reprise_operator.naming import PLAN_HASH_ANNOTATION
from reprise_operator.plan import Plan, plan
from reprise_operator.spec import SpecError, parse
from reprise_operator.spec_types import Spec
from tests.support.factories import SETTINGS, UID, body, container, planned


@pytest.mark.parametrize(
    ("spec", "effective", "words"),
    [
        ({}, 0.90, "unset or at most 32768"),
        ({"model": {"maxModelLen": 32_768}}, 0.90, "unset or at most 32768"),
        ({"model": {"maxModelLen": 49_152}}, 0.875, "49152"),
        ({"model": {"maxModelLen": 65_536}}, 0.85, "65536"),
        ({"model": {"maxModelLen": 1_000_000}}, 0.85, "1000000"),
        ({"model": {"maxModelLen": 65_536}, "prefixCaching": {"enabled": False}}, 0.90, "prefix caching is off"),
        ({"model": {"maxModelLen": 65_536}, "memory": {"utilization": 0.93}}, 0.93, "requested"),
    ],
)
def test_memory_utilization(spec: dict[str, Any], effective: float, words: str) -> None:
    made = planned(spec)
    assert made.memory.effective == pytest.approx(effective)
    assert words in made.memory.reason
    assert made.memory.requested == spec.get("memory", {}).get("utilization")
    args = container(made)["args"]
    assert float(args[args.index("--gpu-memory-utilization") + 1]) == pytest.approx(effective)


def test_a_suspended_service_keeps_everything_but_its_pods() -> None:
    running, suspended = planned({"replicas": 3}), planned({"replicas": 3, "suspend": True})
    assert (running.replicas, suspended.replicas) == (3, 0)
    assert suspended.workload["spec"]["replicas"] == 0
    assert suspended.network_service == running.network_service
    assert suspended.workload["spec"]["template"] == running.workload["spec"]["template"]


def test_children_belong_to_their_owner() -> None:
    for manifest in planned().children:
        (owner,) = manifest["metadata"]["ownerReferences"]
        assert owner == {
            "apiVersion": "serving.reprise.io/v1alpha1",
            "kind": "InferenceService",
            "name": "qwen",
            "uid": UID,
            "controller": True,
            "blockOwnerDeletion": True,
        }
        assert manifest["metadata"]["namespace"] == "llm"
        assert manifest["metadata"]["labels"]["serving.reprise.io/owner-uid"] == UID


INPUTS: dict[str, dict[str, Any]] = {
    "model.uri": {"model": {"uri": "hostpath:///models/other"}},
    "model.servedName": {"model": {"servedName": "other"}},
    "model.maxModelLen": {"model": {"maxModelLen": 1024}},
    "model.dtype": {"model": {"dtype": "float32"}},
    "model.revision": {"model": {"uri": "hf://a/b", "revision": "v1"}},
    "model.secretRef": {"model": {"uri": "hf://a/b", "secretRef": {"name": "hub"}}},
    "model.cache": {"model": {"uri": "hf://a/b", "cache": {"claimName": "models"}}},
    "runtime.name": {"runtime": {"name": "vllm-ascend"}, "model": {"maxModelLen": 1024}},
    "runtime.image": {"runtime": {"image": "other:1"}},
    "runtime.imagePullSecrets": {"runtime": {"imagePullSecrets": [{"name": "pull"}]}},
    "runtime.extraArgs": {"runtime": {"extraArgs": ["--seed=7"]}},
    "runtime.env": {"runtime": {"env": [{"name": "A", "value": "1"}]}},
    "runtime.resources": {"runtime": {"resources": {"requests": {"cpu": "1"}}}},
    "prefixCaching.enabled": {"prefixCaching": {"enabled": False}},
    "prefixCaching.blockSize": {"prefixCaching": {"blockSize": 128}},
    "prefixCaching.hashAlgorithm": {"prefixCaching": {"hashAlgorithm": "xxhash"}},
    "prefixCaching.isolation": {
        "prefixCaching": {"isolation": "perKey"},
        "auth": {"apiKeySecretRef": {"name": "keys"}},
    },
    "prefixCaching.isolationSecretRef": {
        "prefixCaching": {"isolation": "perKey", "isolationSecretRef": {"name": "salt"}},
        "auth": {"apiKeySecretRef": {"name": "keys"}},
    },
    "prefixCaching.hostMemory": {"prefixCaching": {"hostMemory": "8Gi"}},
    "prefixCaching.persistence": {"prefixCaching": {"persistence": {"claimName": "blocks"}}},
    "prefixCaching.warmup": {"prefixCaching": {"warmup": {"prompts": ["You are"]}}},
    "memory.utilization": {"memory": {"utilization": 0.5}},
    "chunkedPrefill.enabled": {"chunkedPrefill": {"enabled": True}},
    "accelerator.profile": {"accelerator": {"profile": "ascend310p"}},
    "accelerator.count": {"accelerator": {"profile": "ascend910c", "count": 2}},
    "accelerator.resourceName": {"accelerator": {"resourceName": "huawei.com/npu"}},
    "accelerator.runtimeClassName": {"accelerator": {"runtimeClassName": "ascend"}},
    "accelerator.driver": {"accelerator": {"driver": "runtime"}},
    "auth.apiKeySecretRef": {"auth": {"apiKeySecretRef": {"name": "keys"}}},
    "podTemplate.metadata": {"podTemplate": {"metadata": {"annotations": {"a": "b"}}}},
    "podTemplate.nodeSelector": {"podTemplate": {"nodeSelector": {"a": "b"}}},
    "podTemplate.tolerations": {"podTemplate": {"tolerations": [{"operator": "Exists"}]}},
    "podTemplate.affinity": {"podTemplate": {"affinity": {"podAffinity": {}}}},
    "podTemplate.schedulerName": {"podTemplate": {"schedulerName": "volcano"}},
    "podTemplate.serviceAccountName": {"podTemplate": {"serviceAccountName": "a"}},
    "podTemplate.priorityClassName": {"podTemplate": {"priorityClassName": "a"}},
    "podTemplate.volumes": {"podTemplate": {"volumes": [{"name": "a", "emptyDir": {}}]}},
    "podTemplate.volumeMounts": {"podTemplate": {"volumeMounts": [{"name": "tmp", "mountPath": "/a"}]}},
}


@pytest.mark.parametrize("field", INPUTS)
def test_every_input_of_the_pod_rolls_it_out(field: str) -> None:
    """Faults operator 1 and 2: a change of a flag, argument or variable never reached the pods."""
    fetched = INPUTS[field].get("model", {}).get("uri") == "hf://a/b"
    before, after = planned({"model": {"uri": "hf://a/b"}} if fetched else None), planned(INPUTS[field])
    assert after.workload["spec"]["template"] != before.workload["spec"]["template"]
    assert plan_hash(after) != plan_hash(before)


def test_every_field_of_the_spec_is_an_input_or_known_not_to_be() -> None:
    elsewhere = {
        *("replicas", "suspend", "service.type", "service.port", "service.sessionAffinity"),
        *("gateway", "monitoring.podMonitor", "autoscaling", "disruption"),
    }
    elsewhere |= {"memory.autoTune", "memory.floor"}  # of the way down, not of where it starts
    elsewhere |= {"rollout.maxSurge", "rollout.maxUnavailable", "rollout.progressDeadlineSeconds"}
    fields: set[str] = set()
    for name, info in Spec.model_fields.items():
        nested = info.annotation
        if isinstance(nested, type) and issubclass(nested, BaseModel):
            fields |= {f"{info.alias or name}.{sub.alias or key}" for key, sub in nested.model_fields.items()}
        else:
            fields.add(info.alias or name)
    assert fields == elsewhere | set(INPUTS)


@pytest.mark.parametrize(
    "spec",
    [
        {"replicas": 5},
        {"suspend": True},
        {"service": {"port": 80}},
        {"autoscaling": {"maxReplicas": 3}},
        {"disruption": {"minAvailable": 1}},
        {"gateway": {"parentRefs": [{"name": "main"}], "endpointPicker": {"managed": True}}},
        {"monitoring": {"podMonitor": {}}},
    ],
)
def test_what_is_no_input_of_the_pod_does_not_restart_it(spec: dict[str, Any]) -> None:
    assert planned(spec).workload["spec"]["template"] == planned().workload["spec"]["template"]


def plan_hash(of: Plan) -> str:
    return str(of.workload["metadata"]["annotations"][PLAN_HASH_ANNOTATION])


# Invariants over arbitrary specs ------------------------------------------------------------------------------------

_dns = st.from_regex(r"\A[a-z0-9]([-a-z0-9]{0,40}[a-z0-9])?(\.[a-z0-9]([-a-z0-9]{0,20}[a-z0-9])?){0,4}\Z")
_words = st.text(alphabet=st.characters(codec="utf-8", exclude_characters="\0"), max_size=12)
_variable = st.from_regex(r"\A[A-Z_]{1,12}\Z") | st.sampled_from(
    ["POD_IP", "HOME", "PYTORCH_NPU_ALLOC_CONF", "REPRISE_API_KEY"]
)
_volume = st.sampled_from(["model", "tmp", "shm", "ascend-driver", "x", "y"])


def _optional(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({}, optional=fields)


_specs = st.fixed_dictionaries(
    {
        "model": st.fixed_dictionaries(
            {"uri": st.sampled_from(["hostpath:///m", "hostpath:///m/x.gguf", "pvc://c/a/b", "pvc://c"])},
            optional={"servedName": _words.filter(bool), "maxModelLen": st.integers(1, 200_000)},
        )
    },
    optional={
        "runtime": _optional(
            name=st.sampled_from(["reprise", "vllm-ascend"]),
            extraArgs=st.lists(_words, max_size=4),
            env=st.lists(st.fixed_dictionaries({"name": _variable, "value": _words}), max_size=5),
            resources=_optional(requests=st.dictionaries(st.sampled_from(["cpu", "memory"]), st.just("1"))),
        ),
        "prefixCaching": _optional(
            enabled=st.booleans(),
            blockSize=st.sampled_from([128, 256]),
            hashAlgorithm=st.sampled_from(["sha256", "xxhash_cbor"]),
            isolation=st.sampled_from(["none", "perKey"]),
            hostMemory=st.sampled_from(["8Gi", 0, "1e9"]),
            persistence=_optional(
                claimName=st.just("blocks"), size=st.sampled_from(["1Gi", 10**12]), storageClassName=st.just("fast")
            ),
            warmup=_optional(prompts=st.lists(_words.filter(bool), max_size=3), timeoutSeconds=st.integers(1, 90_000)),
        ),
        "memory": _optional(utilization=st.floats(0.01, 0.98)),
        "chunkedPrefill": _optional(enabled=st.booleans()),
        "accelerator": _optional(
            profile=st.sampled_from(sorted(PROFILES)), driver=st.sampled_from(["auto", "runtime"])
        ),
        "replicas": st.integers(0, 9),
        "suspend": st.booleans(),
        "service": _optional(port=st.integers(1, 65_535)),
        "auth": _optional(apiKeySecretRef=st.just({"name": "keys"})),
        "podTemplate": _optional(
            metadata=_optional(
                labels=st.dictionaries(st.sampled_from(["team", "serving.reprise.io/name"]), st.just("z"))
            ),
            volumes=st.lists(st.fixed_dictionaries({"name": _volume, "emptyDir": st.just({})}), max_size=3),
        ),
    },
)


@given(name=_dns, spec=_specs)
@settings(max_examples=200, deadline=None)
def test_invariants_of_every_plan(name: str, spec: dict[str, Any]) -> None:
    given_body = {**body(name=name), "spec": spec}
    before = copy.deepcopy(given_body)
    try:
        service = parse(given_body)
    except SpecError:
        return
    made = plan(service, SETTINGS)

    assert given_body == before, "the input was changed"
    assert plan(parse(given_body), SETTINGS) == made, "the same input gave another plan"
    json.dumps(made.children)
    engine, template = container(made), made.workload["spec"]["template"]
    for manifest in made.children:
        assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", manifest["metadata"]["name"])
        assert len(manifest["metadata"]["name"]) <= 63
        assert all(len(value) <= 63 for value in manifest["metadata"]["labels"].values())
    selector = made.workload["spec"]["selector"]["matchLabels"]
    assert (
        selector
        == made.network_service["spec"]["selector"]
        == planned(name=name).workload["spec"]["selector"]["matchLabels"]
    )
    assert selector.items() <= template["metadata"]["labels"].items(), "the pods are outside their own selector"
    assert made.selector == ",".join(f"{key}={value}" for key, value in selector.items())
    wanted = spec.get("prefixCaching", {}).get("enabled") is not False
    ours = engine["args"][: len(engine["args"]) - len(service.spec.runtime.extra_args)]
    assert ours.count("--enable-prefix-caching") == int(wanted)
    assert ours.count("--no-enable-prefix-caching") == int(not wanted)
    assert 0 < made.memory.effective <= 0.98
    for key, entries in (
        ("name", engine["env"]),
        ("name", template["spec"]["volumes"]),
        ("mountPath", engine["volumeMounts"]),
    ):
        values = [entry[key] for entry in entries]
        assert len(values) == len(set(values)), f"{key} twice: the API server refuses the whole apply"
    volumes = {volume["name"] for volume in template["spec"]["volumes"]}
    volumes |= {claim["metadata"]["name"] for claim in made.workload["spec"].get("volumeClaimTemplates", ())}
    assert {mount["name"] for mount in engine["volumeMounts"]} <= volumes
    resources = engine.get("resources", {})
    for resource, quantity in resources.get("limits", {}).items():
        if resource.startswith("huawei.com/"):
            assert resources["requests"][resource] == quantity
    assert engine["securityContext"]["privileged"] is False
    assert made.replicas == (0 if spec.get("suspend") else spec.get("replicas", 1))
