"""The children one by one: argv, devices, a sound pod, names."""

from __future__ import annotations

import re
from typing import Any

import pytest

from reprise_operator.children.accelerator import with_node_affinity
from reprise_operator.children.pod import STARTUP_SECONDS
from reprise_operator.children.profiles import PROFILES
from reprise_operator.naming import child_name, selector_labels
from reprise_operator.plan import Plan
from reprise_operator.spec import identity_of
from tests.support.factories import SETTINGS, body, container, planned
from tests.support.node_spec import expand

CPU = {"accelerator": {"profile": "cpu"}}
VLLM = {"runtime": {"name": "vllm-ascend"}, "model": {"maxModelLen": 32_768}}


def pod_spec(of: Plan) -> dict[str, Any]:
    return dict(of.workload["spec"]["template"]["spec"])


def by_name(entries: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    names = [entry["name"] for entry in entries]
    assert len(names) == len(set(names)), f"a name appears twice: {names}"
    return {entry["name"]: entry for entry in entries}


# argv ---------------------------------------------------------------------------------------------------------------


def test_argv_of_our_engine() -> None:
    assert container(planned())["args"] == [
        "serve",
        "/model",
        "--served-model-name",
        "qwen",
        "--port",
        "8000",
        "--gpu-memory-utilization",
        "0.9",
        "--enable-prefix-caching",
        *("--device", "npu"),
    ]
    assert "--device" not in container(planned(CPU))["args"]


def test_argv_of_our_engine_with_every_field() -> None:
    spec = {
        "model": {"uri": "pvc://m/a.gguf", "servedName": "org/name", "maxModelLen": 4096, "dtype": "float32"},
        "prefixCaching": {"enabled": False, "blockSize": 256},
        "memory": {"utilization": 0.5},
        "chunkedPrefill": {"enabled": False},
        "runtime": {"extraArgs": ["--max-num-seqs", "8", '--override={"a b": "$HOME"}']},
    }
    assert container(planned(spec))["args"] == [
        *("serve", "/model/a.gguf", "--served-model-name", "org/name", "--port", "8000"),
        *("--gpu-memory-utilization", "0.5", "--no-enable-prefix-caching", "--block-size", "256"),
        *("--max-model-len", "4096", "--dtype", "float32"),
        *("--device", "npu", "--no-enable-chunked-prefill", "--max-num-batched-tokens", "4096"),
        *("--max-num-seqs", "8", '--override={"a b": "$HOME"}'),
    ]


@pytest.mark.parametrize("runtime", ["reprise", "vllm-ascend"])
def test_a_dollar_of_a_path_or_a_name_is_not_expanded_by_kubernetes(runtime: str) -> None:
    model = {"uri": "pvc://weights/$(HOME)/a$$b", "servedName": "$(POD_IP)$", "maxModelLen": 4096}
    args = container(planned({"model": model, "runtime": {"name": runtime}}))["args"]
    started = args[args.index("serve") :]
    environment = {"HOME": "/root", "POD_IP": "10.0.0.7"}
    assert [expand(argument, environment) for argument in started[:4]] == [
        "serve",
        "/model/$(HOME)/a$$b",
        "--served-model-name",
        "$(POD_IP)$",
    ]


def test_arguments_reach_the_engine_as_they_are_written() -> None:
    """Fault operator 14: a shell in between broke JSON, spaces and booleans."""
    extra = ['--kv-events-config={"publisher": "zmq", "x": true}', "two words", "'quoted' $HOME `id` ;&|", ""]
    engine = container(planned({"runtime": {"extraArgs": extra}}))
    assert engine["args"][-len(extra) :] == extra
    assert "command" not in engine


def test_argv_of_vllm_ascend_with_prefix_caching() -> None:
    args = container(planned(VLLM))["args"]
    assert args[:4] == ["vllm", "serve", "/model", "--served-model-name"]
    assert "--enable-prefix-caching" in args
    assert "--no-enable-chunked-prefill" in args
    assert args[args.index("--max-num-batched-tokens") + 1] == "32768"


def test_argv_of_vllm_ascend_without_prefix_caching() -> None:
    args = container(planned({**VLLM, "prefixCaching": {"enabled": False}, "chunkedPrefill": {"enabled": True}}))[
        "args"
    ]
    assert "--no-enable-prefix-caching" in args
    assert "--enable-chunked-prefill" in args
    assert "--max-num-batched-tokens" not in args


def test_a_short_context_still_gets_a_batch_of_two_thousand_tokens() -> None:
    args = container(planned({**VLLM, "model": {"maxModelLen": 512}}))["args"]
    assert args[args.index("--max-num-batched-tokens") + 1] == "2048"


@pytest.mark.parametrize("flag", ["--max-num-batched-tokens", "--max_num_batched_tokens=9000"])
def test_a_batch_size_of_the_users_own_is_not_said_twice(flag: str) -> None:
    args = container(planned({**VLLM, "runtime": {"name": "vllm-ascend", "extraArgs": [flag]}}))["args"]
    assert [arg for arg in args if "batched" in arg] == [flag]


def test_tensor_parallelism_follows_the_devices() -> None:
    args = container(planned({**VLLM, "accelerator": {"count": 4}}))["args"]
    assert args[args.index("--tensor-parallel-size") + 1] == "4"
    assert "--tensor-parallel-size" not in container(planned(VLLM))["args"]


def test_a_310p_computes_in_float16_and_eagerly() -> None:
    """With either engine, and not twice where the user says so too."""
    for spec in ({}, VLLM, {"runtime": {"extraArgs": ["--enforce_eager"]}}):
        args = container(planned({**spec, "accelerator": {"profile": "ascend310p"}}))["args"]
        assert args[args.index("--dtype") + 1] == "float16"
        assert [arg.replace("_", "-") for arg in args].count("--enforce-eager") == 1
        assert "--enforce-eager" not in container(planned({**spec, "accelerator": {"profile": "ascend910b"}}))["args"]


# images and devices -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "image"),
    [
        ({}, SETTINGS.reprise_image),
        (VLLM, SETTINGS.vllm_ascend_image),
        ({**VLLM, "accelerator": {"profile": "ascend910c"}}, SETTINGS.vllm_ascend_image + "-a3"),
        ({**VLLM, "accelerator": {"profile": "cce-ascend310p"}}, SETTINGS.vllm_ascend_image + "-310p"),
        ({"runtime": {"image": "registry.local/engine:1"}}, "registry.local/engine:1"),
    ],
)
def test_image(spec: dict[str, Any], image: str) -> None:
    assert container(planned(spec))["image"] == image


@pytest.mark.parametrize(
    ("image", "policy"),
    [
        ("r.example/e:1", "IfNotPresent"),
        ("r.example/e:latest", "Always"),
        ("r.example:5000/e", "Always"),
        ("e", "Always"),
        (f"r.example/e@sha256:{'0' * 64}", "IfNotPresent"),
        (f"r.example/e:1@sha256:{'0' * 64}", "IfNotPresent"),
    ],
)
def test_the_pull_policy_is_that_of_this_image_and_not_of_the_one_before(image: str, policy: str) -> None:
    made = planned({"runtime": {"image": image}, "model": {"uri": "hf://org/model"}})
    assert container(made)["imagePullPolicy"] == policy
    (fetching,) = made.workload["spec"]["template"]["spec"]["initContainers"]
    assert fetching["imagePullPolicy"] == policy


@pytest.mark.parametrize(
    ("accelerator", "resource", "count"),
    [
        ({}, "huawei.com/Ascend910", "1"),
        ({"profile": "ascend910b"}, "huawei.com/Ascend910", "1"),
        ({"profile": "ascend910c"}, "huawei.com/Ascend910", "2"),
        ({"profile": "ascend310p"}, "huawei.com/Ascend310P", "1"),
        ({"profile": "cce-ascend910"}, "huawei.com/ascend-1980", "1"),
        ({"profile": "hami-ascend910b4"}, "huawei.com/Ascend910B4", "1"),
        ({"resourceName": "huawei.com/npu"}, "huawei.com/npu", "1"),
    ],
)
def test_devices_are_requested_and_limited_alike(accelerator: dict[str, Any], resource: str, count: str) -> None:
    resources = container(planned({"accelerator": accelerator}))["resources"]
    assert resources == {"requests": {resource: count}, "limits": {resource: count}}


def test_the_users_resources_stand_beside_the_devices() -> None:
    asked = {"requests": {"cpu": 4, "memory": "16Gi"}, "limits": {"memory": "32Gi"}}
    resources = container(planned({"runtime": {"resources": asked}}))["resources"]
    assert resources["requests"] == {"cpu": 4, "memory": "16Gi", "huawei.com/Ascend910": "1"}
    assert resources["limits"] == {"memory": "32Gi", "huawei.com/Ascend910": "1"}


def test_a_cpu_pod_has_no_device_and_no_driver() -> None:
    plan = planned(CPU)
    assert "resources" not in container(plan)
    assert [volume["name"] for volume in pod_spec(plan)["volumes"]] == ["model", "tmp", "shm"]
    assert "PYTORCH_NPU_ALLOC_CONF" not in by_name(container(plan)["env"])
    assert "supplementalGroups" not in pod_spec(plan)["securityContext"]


def test_segments_of_memory_grow_where_the_chip_has_such() -> None:
    for profile, expected in (("ascend910b", True), ("hami-ascend910c", True), ("ascend310p", False)):
        env = by_name(container(planned({"accelerator": {"profile": profile}}))["env"])
        assert ("PYTORCH_NPU_ALLOC_CONF" in env) is expected


@pytest.mark.parametrize(
    ("accelerator", "mounted"),
    [
        ({}, True),
        ({"driver": "runtime"}, False),
        ({"runtimeClassName": "ascend"}, False),
        ({"profile": "hami-ascend910b3"}, False),
        ({"profile": "hami-ascend910b3", "driver": "hostPath"}, True),
    ],
)
def test_the_driver_is_mounted_unless_a_runtime_injects_it(accelerator: dict[str, Any], mounted: bool) -> None:
    spec = pod_spec(planned({"accelerator": accelerator}))
    mounts = {mount["mountPath"]: mount for mount in spec["containers"][0]["volumeMounts"]}
    assert ("/usr/local/Ascend/driver" in mounts) is mounted
    if mounted:
        assert mounts["/usr/local/Ascend/driver"]["readOnly"] is True


def test_the_runtime_class_of_hami() -> None:
    assert pod_spec(planned({"accelerator": {"profile": "hami-ascend910b2"}}))["runtimeClassName"] == "ascend"


def test_the_users_affinity_is_narrowed_in_every_alternative() -> None:
    mine: list[dict[str, Any]] = [
        {"matchExpressions": [{"key": "zone", "operator": "In", "values": ["a"]}]},
        {"matchFields": []},
    ]
    user: dict[str, Any] = {
        "nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": mine}},
        "podAntiAffinity": {"x": 1},
    }
    narrowed = with_node_affinity(user, PROFILES["ascend910b"])
    terms = narrowed["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    for term in terms:
        assert term["matchExpressions"][-1]["key"] == "accelerator-type"
        assert "module-910b-8" in term["matchExpressions"][-1]["values"]
    assert terms[0]["matchExpressions"][0]["key"] == "zone"
    assert narrowed["podAntiAffinity"] == {"x": 1}
    assert len(mine[0]["matchExpressions"]) == 1, "the user's own value was changed"
    assert with_node_affinity(user, PROFILES["ascend910"]) == user


# a sound pod --------------------------------------------------------------------------------------------------------


def test_our_pod_runs_with_the_least_rights() -> None:
    spec = pod_spec(planned(CPU))
    security = spec["containers"][0]["securityContext"]
    assert security == {
        "allowPrivilegeEscalation": False,
        "privileged": False,
        "capabilities": {"drop": ["ALL"]},
        "readOnlyRootFilesystem": True,
    }
    assert spec["securityContext"] == {"seccompProfile": {"type": "RuntimeDefault"}, "runAsNonRoot": True}
    assert spec["automountServiceAccountToken"] is False
    assert spec["enableServiceLinks"] is False
    writable = {mount["mountPath"] for mount in spec["containers"][0]["volumeMounts"] if not mount.get("readOnly")}
    assert writable == {"/tmp", "/dev/shm"}


def test_devices_of_the_driver_are_reachable_without_capabilities() -> None:
    assert pod_spec(planned())["securityContext"]["supplementalGroups"] == [1000]


def test_a_loading_model_is_not_killed_by_a_probe() -> None:
    """Fault operator 10."""
    engine = container(planned())
    probe = engine["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] == STARTUP_SECONDS >= 1800
    assert planned().workload["spec"]["progressDeadlineSeconds"] > STARTUP_SECONDS
    for name in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert engine[name]["httpGet"]["path"] == "/health"
        assert engine[name]["httpGet"]["port"] == "http"
    liveness = engine["livenessProbe"]
    assert liveness["periodSeconds"] * liveness["failureThreshold"] >= 120


@pytest.mark.parametrize(("spec", "seconds"), [(CPU, 5), (VLLM, 60)])
def test_a_pod_drains_before_it_ends(spec: dict[str, Any], seconds: int) -> None:
    plan = planned(spec)
    assert container(plan)["lifecycle"]["preStop"] == {"sleep": {"seconds": seconds}}
    assert pod_spec(plan)["terminationGracePeriodSeconds"] == 120
    assert container(plan)["terminationMessagePolicy"] == "FallbackToLogsOnError"


@pytest.mark.parametrize(
    ("uri", "volume", "path"),
    [
        ("hostpath:///data/qwen", {"hostPath": {"path": "/data/qwen", "type": "Directory"}}, "/model"),
        ("hostpath:///data/q.gguf", {"hostPath": {"path": "/data", "type": "Directory"}}, "/model/q.gguf"),
        ("hostpath:///q.gguf", {"hostPath": {"path": "/", "type": "Directory"}}, "/model/q.gguf"),
        ("pvc://m", {"persistentVolumeClaim": {"claimName": "m", "readOnly": True}}, "/model"),
        ("pvc://m/a/b", {"persistentVolumeClaim": {"claimName": "m", "readOnly": True}}, "/model/a/b"),
    ],
)
def test_the_model_is_mounted_read_only(uri: str, volume: dict[str, Any], path: str) -> None:
    plan = planned({"model": {"uri": uri}})
    assert by_name(pod_spec(plan)["volumes"])["model"] == {"name": "model", **volume}
    assert container(plan)["volumeMounts"][0] == {"name": "model", "mountPath": "/model", "readOnly": True}
    assert container(plan)["args"][1] == path


@pytest.mark.parametrize(("spec", "variable"), [(CPU, "REPRISE_API_KEY"), (VLLM, "VLLM_API_KEY")])
def test_the_api_key_comes_from_the_secret_and_never_into_argv(spec: dict[str, Any], variable: str) -> None:
    plan = planned({**spec, "auth": {"apiKeySecretRef": {"name": "keys", "key": "k"}}})
    env = by_name(container(plan)["env"])
    assert env[variable] == {"name": variable, "valueFrom": {"secretKeyRef": {"name": "keys", "key": "k"}}}
    assert not any("key" in argument for argument in container(plan)["args"])
    assert plan.secret_names == ("keys",)


def test_the_users_environment_replaces_ours_by_name() -> None:
    env = by_name(
        container(
            planned(
                {
                    "runtime": {
                        "env": [
                            {"name": "PYTORCH_NPU_ALLOC_CONF", "value": "x"},
                            {"name": "ZONE", "valueFrom": {"fieldRef": {"fieldPath": "metadata.namespace"}}},
                            {"name": "EMPTY"},
                        ]
                    }
                }
            )
        )["env"]
    )
    assert env["PYTORCH_NPU_ALLOC_CONF"] == {"name": "PYTORCH_NPU_ALLOC_CONF", "value": "x"}
    assert env["ZONE"]["valueFrom"] == {"fieldRef": {"fieldPath": "metadata.namespace"}}
    assert env["EMPTY"]["value"] == ""
    assert env["POD_IP"]["valueFrom"]["fieldRef"]["fieldPath"] == "status.podIP"


def test_the_pod_template_is_merged() -> None:
    template = {
        "metadata": {"labels": {"team": "a", "app.kubernetes.io/name": "chat"}, "annotations": {"note": "b"}},
        "nodeSelector": {"zone": "a"},
        "tolerations": [{"key": "npu", "operator": "Exists"}],
        "schedulerName": "volcano",
        "serviceAccountName": "reader",
        "priorityClassName": "high",
        "volumes": [
            {"name": "shm", "emptyDir": {"sizeLimit": "64Gi", "medium": "Memory"}},
            {"name": "x", "emptyDir": {}},
        ],
        "volumeMounts": [{"name": "x", "mountPath": "/x"}],
    }
    plan = planned({"podTemplate": template, "runtime": {"imagePullSecrets": [{"name": "pull"}]}})
    metadata, spec = plan.workload["spec"]["template"]["metadata"], pod_spec(plan)
    assert metadata["labels"]["team"] == "a"
    assert metadata["labels"]["app.kubernetes.io/name"] == "chat"
    assert metadata["labels"]["llm-d.ai/engine-type"] == "vllm"
    assert metadata["annotations"] == {"note": "b"}
    for key in ("nodeSelector", "tolerations", "schedulerName", "serviceAccountName", "priorityClassName"):
        assert spec[key] == template[key]
    assert spec["imagePullSecrets"] == [{"name": "pull"}]
    volumes = by_name(spec["volumes"])
    assert volumes["shm"]["emptyDir"]["sizeLimit"] == "64Gi"
    assert "x" in volumes
    assert {"name": "x", "mountPath": "/x"} in container(plan)["volumeMounts"]


def test_a_mount_of_the_users_replaces_ours_at_the_same_place_however_it_is_written() -> None:
    mount = {"name": "fast", "mountPath": "/tmp/"}
    user = {"volumes": [{"name": "fast", "emptyDir": {"medium": "Memory"}}], "volumeMounts": [mount]}
    mounts = container(planned({"podTemplate": user}))["volumeMounts"]
    assert [mount["name"] for mount in mounts if mount["mountPath"].startswith("/tmp")] == ["fast"]


def test_nobody_can_take_a_pod_out_of_the_selector() -> None:
    labels = {"serving.reprise.io/name": "other", "app.kubernetes.io/managed-by": "me"}
    plan = planned({"podTemplate": {"metadata": {"labels": labels}}})
    assert (
        plan.workload["spec"]["template"]["metadata"]["labels"] | plan.workload["spec"]["selector"]["matchLabels"]
        == plan.workload["spec"]["template"]["metadata"]["labels"]
    )
    assert plan.workload["spec"]["template"]["metadata"]["labels"]["app.kubernetes.io/managed-by"] == "reprise-operator"


def test_a_rollout_on_npus_waits_for_no_spare_device() -> None:
    """Fault operator 7: no free device for the surge pod, and the rollout waited for ever."""
    assert planned().workload["spec"]["strategy"]["rollingUpdate"] == {"maxSurge": 0, "maxUnavailable": 1}
    assert planned(CPU).workload["spec"]["strategy"]["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}


# Service ------------------------------------------------------------------------------------------------------------


def test_the_service() -> None:
    plan = planned({"service": {"type": "NodePort", "port": 80, "sessionAffinity": "ClientIP"}})
    assert plan.network_service["spec"] == {
        "type": "NodePort",
        "selector": {"serving.reprise.io/name": "qwen"},
        "sessionAffinity": "ClientIP",
        "ports": [{"name": "http", "port": 80, "protocol": "TCP", "targetPort": "http"}],
    }
    assert plan.url == "http://qwen.llm.svc:80/v1"
    assert planned().url == "http://qwen.llm.svc:8000/v1"


# names --------------------------------------------------------------------------------------------------------------

DNS_LABEL = re.compile(r"^[a-z]([-a-z0-9]*[a-z0-9])?$")


@pytest.mark.parametrize(
    "name", ["qwen", "a", "qwen2.5", "7b-chat", "a" * 63, "a" * 64, "a" * 253, "a." * 126 + "a", "1"]
)
def test_child_names_are_dns_labels(name: str) -> None:
    """Fault operator 9: names over 63 characters."""
    child = child_name(identity_of(body(name=name)))
    assert DNS_LABEL.match(child), child
    assert len(child) <= 63
    assert selector_labels(identity_of(body(name=name))) == {"serving.reprise.io/name": child}


def test_a_fitting_name_stays_as_it_is() -> None:
    assert child_name(identity_of(body(name="a" * 63))) == "a" * 63


def test_no_two_names_become_one() -> None:
    """Fault operator 9: two long names truncated to the same one."""
    names = [
        "a" * 64,
        "a" * 65,
        "a" * 63 + "b",
        "a.b",
        "a-b",
        "s-1",
        "1",
        *(f"{'long-' * 20}{index}" for index in range(50)),
    ]
    children = {child_name(identity_of(body(name=name))) for name in names}
    assert len(children) == len(names)
