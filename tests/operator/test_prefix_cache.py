"""spec.prefixCaching: what is refused and why, what it makes of the children; flags: tests/contract/test_argv.py."""

from __future__ import annotations

import json
from typing import Any

import pytest

from reprise_operator.cache_checks import MAX_PROMPTS_BYTES
from reprise_operator.children.prefix_cache import CACHE_MOUNT, WARMUP_HASH_ANNOTATION
from reprise_operator.naming import MAX_STATEFUL_SET_NAME
from reprise_operator.plan import Plan
from reprise_operator.spec import SpecError, parse
from tests.support.factories import body, container, merged, planned

CPU = {"accelerator": {"profile": "cpu"}}
VLLM = {"runtime": {"name": "vllm-ascend"}, "model": {"maxModelLen": 4096}}
KEYS = {"auth": {"apiKeySecretRef": {"name": "keys"}}}
SIZE = {"persistence": {"size": "100Gi"}}
CLAIM = {"persistence": {"claimName": "blocks"}}


def cache(fields: dict[str, Any], *more: dict[str, Any]) -> dict[str, Any]:
    spec: dict[str, Any] = {"prefixCaching": fields}
    for part in more:
        spec = merged(spec, part)
    return spec


def template(of: Plan) -> dict[str, Any]:
    return dict(of.workload["spec"]["template"])


# Refused ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "reason", "words"),
    [
        (
            cache({"hostMemory": "1Gi"}, VLLM),
            "NotSupported",
            "hostMemory (that runtime's cache is on the device alone)",
        ),
        (cache(SIZE, VLLM), "NotSupported", "spec.prefixCaching.persistence (that"),
        (cache({"warmup": {"prompts": ["a"]}}, VLLM), "NotSupported", "spec.prefixCaching.warmup (that"),
        (cache({"isolation": "perKey"}, VLLM, KEYS), "NotSupported", "isolation: perKey (that runtime makes no salts"),
        (cache({"isolation": "perKey"}), "InvalidSpec", "there are no API keys"),
        (cache({"isolation": "perKey", **SIZE}, KEYS), "InvalidSpec", "nothing on the volume"),
        (cache({"isolationSecretRef": {"name": "s"}}), "InvalidSpec", "goes with isolation: perKey"),
        (cache({"hostMemory": "16 GB"}), "InvalidSpec", "'16 GB' is not a quantity"),
        (cache({"hostMemory": -1}), "InvalidSpec", "negative"),
        (
            cache({"hostMemory": "1Gi"}, {"runtime": {"resources": {"limits": {"memory": "8 GB"}}}}),
            "InvalidSpec",
            "spec.runtime.resources.limits.memory: '8 GB'",
        ),
        (cache({"persistence": {}}), "InvalidSpec", "either claimName"),
        (cache({"persistence": {"claimName": "a", "size": "1Gi"}}), "InvalidSpec", "either claimName"),
        (
            cache({"persistence": {"claimName": "a", "storageClassName": "b"}}),
            "InvalidSpec",
            "storageClassName goes with",
        ),
        (cache(CLAIM, {"replicas": 2}), "InvalidSpec", "one volume, and spec.replicas is 2"),
        (cache({"persistence": {"size": "1Gi", "accessModes": ["ReadOnlyMany"]}}), "InvalidSpec", "blocks are written"),
        (cache({"persistence": {"size": 0}}), "InvalidSpec", "persistence.size is 0"),
        (cache({"persistence": {"claimName": "a", "limit": 0}}), "InvalidSpec", "persistence.limit is 0"),
        (cache({"persistence": {"size": "1Gi", "limit": "2Gi"}}), "InvalidSpec", "more than the volume's size 1Gi"),
        (
            cache(SIZE, {"runtime": {"extraArgs": ["--prefix_cache_dir=/x"]}}),
            "InvalidSpec",
            "extraArgs has --prefix_cache_dir",
        ),
        (
            cache(CLAIM, {"podTemplate": {"volumes": [{"name": "prefix-cache", "emptyDir": {}}]}}),
            "InvalidSpec",
            "spec.podTemplate.volumes has a volume 'prefix-cache'",
        ),
        (cache({"warmup": {}}), "InvalidSpec", "either prompts or configMapKeyRef"),
        (cache({"warmup": {"prompts": ["ä" * 500_000]}}), "InvalidSpec", f"and a ConfigMap holds {MAX_PROMPTS_BYTES}"),
        (
            cache({"warmup": {"prompts": ["a"], "timeoutSeconds": 0}}),
            "InvalidSpec",
            "spec.prefixCaching.warmup.timeoutSeconds",
        ),
        (
            cache({"warmup": {"prompts": ["a"]}}, {"podTemplate": {"volumes": [{"name": "warmup", "emptyDir": {}}]}}),
            "InvalidSpec",
            "a volume 'warmup'",
        ),
        (
            cache(SIZE, {"rollout": {"maxSurge": 1}}),
            "NotSupported",
            "spec.rollout.maxSurge is 1, and spec.prefixCaching.persistence makes the pods those of a StatefulSet",
        ),
        (cache(SIZE, {"rollout": {"maxSurge": "25%"}}), "NotSupported", "spec.rollout.maxSurge is 25%"),
        (cache(SIZE, {"rollout": {"maxUnavailable": 0}}), "NotSupported", "spec.rollout.maxUnavailable is 0"),
        (cache(SIZE, {"rollout": {"maxUnavailable": 2}, "replicas": 4}), "NotSupported", "maxUnavailable is 2"),
        (cache(CLAIM, {"rollout": {"maxSurge": 1}}), "NotSupported", "one pod, whose volume its successor needs"),
        (cache(CLAIM, {"rollout": {"maxUnavailable": "0%"}}), "NotSupported", "spec.rollout.maxUnavailable is 0%"),
        (
            cache(CLAIM, {"autoscaling": {"minReplicas": 1, "maxReplicas": 3}}),
            "InvalidSpec",
            "claimName is one volume, and spec.autoscaling.maxReplicas is 3",
        ),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(spec: dict[str, Any], reason: str, words: str) -> None:
    with pytest.raises(SpecError) as refused:
        parse(body(spec))
    assert refused.value.reason == reason
    assert words in refused.value.message


@pytest.mark.parametrize(
    "spec",
    [
        cache({"isolation": "none", "hashAlgorithm": "xxhash_cbor"}, VLLM),
        cache({"isolation": "perKey"}, {"runtime": {"env": [{"name": "VLLM_API_KEY", "value": "k"}]}}),
        cache({"isolation": "perKey", "isolationSecretRef": {"name": "s"}, **SIZE}, KEYS),
        cache({"persistence": {"claimName": "a", "accessModes": ["ReadWriteMany"]}}, {"replicas": 3}),
        cache({}, {"runtime": {"extraArgs": ["--prefix-cache-dir=/nvme", "--prefix-cache-disk-size=1TiB"]}}),
        cache({"persistence": {"claimName": "a"}}, {"replicas": 0}),
        cache(CLAIM, {"autoscaling": {"minReplicas": 1, "maxReplicas": 1}}),
        cache(CLAIM, {"rollout": {"maxSurge": 0, "maxUnavailable": 1, "progressDeadlineSeconds": 60}}),
        cache(SIZE, {"rollout": {"maxSurge": 0, "maxUnavailable": 1, "progressDeadlineSeconds": 60}}),
        cache(
            {"persistence": {"claimName": "a", "accessModes": ["ReadWriteMany"]}},
            {"rollout": {"maxSurge": 2, "maxUnavailable": 0}, "accelerator": {"profile": "cpu"}, "replicas": 3},
        ),
    ],
)
def test_what_can_be_honoured_is_not(spec: dict[str, Any]) -> None:
    assert planned(spec)


# The disk tier ------------------------------------------------------------------------------------------------------


def test_a_volume_of_each_replicas_own_makes_a_stateful_set() -> None:
    made = planned(cache({"persistence": {"size": "100Gi", "storageClassName": "fast"}}, {"replicas": 3}))
    assert made.workload["kind"] == "StatefulSet"
    spec = made.workload["spec"]
    assert spec["replicas"] == 3
    assert spec["podManagementPolicy"] == "Parallel"
    assert spec["serviceName"] == made.network_service["metadata"]["name"]
    assert spec["persistentVolumeClaimRetentionPolicy"] == {"whenDeleted": "Delete", "whenScaled": "Retain"}
    (claim,) = spec["volumeClaimTemplates"]
    assert claim["spec"] == {
        "accessModes": ["ReadWriteOnce"],
        "resources": {"requests": {"storage": "100Gi"}},
        "storageClassName": "fast",
    }
    mounts = {mount["mountPath"]: mount for mount in container(made)["volumeMounts"]}
    assert mounts[CACHE_MOUNT] == {"name": claim["metadata"]["name"], "mountPath": CACHE_MOUNT}
    assert claim["metadata"]["name"] not in {volume["name"] for volume in template(made)["spec"]["volumes"]}
    assert made.claim_names == ()


def test_the_volume_can_be_written_by_the_engine_and_stays_private() -> None:
    security = template(planned(cache(SIZE)))["spec"]["securityContext"]
    assert security["fsGroup"] == 65532
    # Always would give the engine's private folder to the group at each start.
    assert security["fsGroupChangePolicy"] == "OnRootMismatch"
    assert "fsGroup" not in template(planned())["spec"]["securityContext"]


def test_other_volumes_are_another_stateful_set() -> None:
    """Its volumeClaimTemplates are immutable: they are in the name."""

    def name(persistence: dict[str, Any], service: str = "qwen") -> str:
        return str(planned(cache({"persistence": persistence}), name=service).workload["metadata"]["name"])

    first = name({"size": "100Gi"})
    assert first.startswith("qwen-")
    assert first == name({"size": 100 * 1024**3}), "the same size in other words"
    assert first == name({"size": "100Gi", "limit": "50Gi"}), "a flag only"
    assert first == name({"size": "100Gi", "accessModes": ["ReadWriteOnce"]})
    modes = ["ReadWriteOnce", "ReadOnlyMany"]
    made = [
        planned(cache({"persistence": {"size": "1Gi", "accessModes": order}})).workload
        for order in (modes, modes[::-1], [*modes, modes[0]])
    ]
    assert made[0] == made[1] == made[2], "the API server takes another order for another claim, and refuses it"
    others = [
        name({"size": "200Gi"}),
        name({"size": "100Gi", "storageClassName": "fast"}),
        name({"size": "100Gi", "storageClassName": ""}),
        name({"size": "100Gi", "accessModes": ["ReadWriteOncePod"]}),
    ]
    assert len({first, *others}) == 5
    long = [name({"size": "1Gi"}, f"a-very-long-name-of-a-service-that-is-nearly-too-long-{end}") for end in ("a", "b")]
    assert len(set(long)) == 2
    assert all(len(found) <= MAX_STATEFUL_SET_NAME for found in (first, *others, *long))


def test_a_claim_that_exists_is_mounted_by_a_deployment() -> None:
    made = planned(cache(CLAIM, CPU))
    assert made.workload["kind"] == "Deployment"
    assert made.claim_names == ("blocks",)
    (volume,) = [volume for volume in template(made)["spec"]["volumes"] if volume["name"] == "prefix-cache"]
    assert volume == {"name": "prefix-cache", "persistentVolumeClaim": {"claimName": "blocks"}}


def test_no_pod_waits_for_a_volume_that_its_predecessor_holds() -> None:
    def surge(persistence: dict[str, Any]) -> int:
        made = planned(cache({"persistence": persistence}, CPU))
        return int(made.workload["spec"]["strategy"]["rollingUpdate"]["maxSurge"])

    assert surge({"claimName": "a"}) == 0
    assert surge({"claimName": "a", "accessModes": ["ReadWriteMany"]}) == 1


def test_switching_the_cache_off_keeps_the_volume() -> None:
    fields = {"hostMemory": "8Gi", "warmup": {"prompts": ["a"]}, **SIZE}
    on, off = planned(cache(fields)), planned(cache({**fields, "enabled": False}))
    assert off.workload["metadata"]["name"] == on.workload["metadata"]["name"]
    assert off.workload["spec"]["volumeClaimTemplates"] == on.workload["spec"]["volumeClaimTemplates"]
    assert not [argument for argument in container(off)["args"] if argument.startswith(("--prefix-cache", "--warmup"))]
    assert off.warmup is None
    assert container(off)["resources"] == container(planned())["resources"]


# Host memory --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {"requests": {"memory": "8Gi"}}),
        ({"requests": {"cpu": 2}}, {"requests": {"cpu": 2, "memory": "8Gi"}}),
        ({"requests": {"memory": "4Gi"}}, {"requests": {"memory": "12Gi"}}),
        ({"limits": {"memory": "16G"}}, {"limits": {"memory": "24013608Ki"}}),
        (
            {"requests": {"memory": "4Gi"}, "limits": {"memory": "6Gi"}},
            {"requests": {"memory": "12Gi"}, "limits": {"memory": "14Gi"}},
        ),
    ],
)
def test_the_host_tier_comes_on_top_of_what_the_engine_gets(given: dict[str, Any], expected: dict[str, Any]) -> None:
    spec = cache({"hostMemory": "8Gi"}, CPU, {"runtime": {"resources": given}})
    assert container(planned(spec))["resources"] == expected


def test_the_devices_stay_beside_the_host_tier() -> None:
    resources = container(planned(cache({"hostMemory": "8Gi"})))["resources"]
    assert resources["limits"] == {"huawei.com/Ascend910": "1"}
    assert resources["requests"] == {"huawei.com/Ascend910": "1", "memory": "8Gi"}


# Isolation ----------------------------------------------------------------------------------------------------------


def test_the_secret_comes_from_its_secret_and_never_into_argv() -> None:
    made = planned(cache({"isolation": "perKey", "isolationSecretRef": {"name": "salt"}}, KEYS))
    env = {entry["name"]: entry for entry in container(made)["env"]}
    reference = env["REPRISE_PREFIX_CACHE_ISOLATION_SECRET"]["valueFrom"]["secretKeyRef"]
    assert reference == {"name": "salt", "key": "isolation-secret"}
    assert made.secret_names == ("keys", "salt")
    assert not [argument for argument in container(made)["args"] if "secret" in argument]


# Warm-up ------------------------------------------------------------------------------------------------------------


def test_prompts_are_a_config_map_of_lines() -> None:
    prompts = ["You are a helpful assistant.\nAnswer briefly.", 'with "quotes" and ünï\u2028codé']
    made = planned(cache({"warmup": {"prompts": prompts}}))
    assert made.warmup is not None
    assert made.warmup in made.children
    assert made.warmup["metadata"]["name"] == "qwen-warmup"
    lines = made.warmup["data"]["prompts.jsonl"].removesuffix("\n").split("\n")
    assert [json.loads(line)["prompt"] for line in lines] == prompts
    (volume,) = [volume for volume in template(made)["spec"]["volumes"] if volume["name"] == "warmup"]
    assert volume["configMap"] == {
        "name": "qwen-warmup",
        "items": [{"key": "prompts.jsonl", "path": "prompts.jsonl"}],
        "optional": True,
    }


def test_other_prompts_are_other_pods() -> None:
    def annotation(prompts: list[str]) -> str:
        return str(
            template(planned(cache({"warmup": {"prompts": prompts}})))["metadata"]["annotations"][
                WARMUP_HASH_ANNOTATION
            ]
        )

    assert annotation(["a"]) == annotation(["a"])
    assert annotation(["a"]) != annotation(["b"])
    assert annotation(["a", "b"]) != annotation(["b", "a"])


@pytest.mark.parametrize(("key", "path"), [("prompts", "prompts.txt"), ("x.jsonl", "prompts.jsonl")])
def test_prompts_of_a_config_map_keep_their_form(key: str, path: str) -> None:
    made = planned(cache({"warmup": {"configMapKeyRef": {"name": "mine", "key": key}}}))
    assert made.warmup is None
    assert made.config_map_names == ("mine",)
    (volume,) = [volume for volume in template(made)["spec"]["volumes"] if volume["name"] == "warmup"]
    assert volume["configMap"] == {"name": "mine", "items": [{"key": key, "path": path}], "optional": True}
    assert f"/etc/reprise/warmup/{path}" in container(made)["args"]


@pytest.mark.parametrize(("timeout", "seconds"), [(None, 300), (7200, 7200)])
def test_no_probe_kills_a_pod_that_warms_up(timeout: int | None, seconds: int) -> None:
    def patience(made: Plan) -> tuple[int, int]:
        probe = container(made)["startupProbe"]
        return probe["periodSeconds"] * probe["failureThreshold"], made.workload["spec"]["progressDeadlineSeconds"]

    warmup = {"prompts": ["a"], **({} if timeout is None else {"timeoutSeconds": timeout})}
    plain, warm = patience(planned()), patience(planned(cache({"warmup": warmup})))
    assert [b - a for a, b in zip(plain, warm, strict=True)] == [seconds, seconds]
