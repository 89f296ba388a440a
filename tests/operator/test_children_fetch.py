"""Models that are fetched: the init container, its volume, its credentials; and that engines never go out."""

from __future__ import annotations

from typing import Any

import pytest

from reprise_operator.children.args import fetched_folder
from reprise_operator.children.deployment import FETCH_SECONDS
from reprise_operator.children.fetch import CREDENTIALS
from reprise_operator.plan import Plan, plan
from reprise_operator.resource import FetchedModel
from reprise_operator.settings import Settings
from reprise_operator.spec import parse
from tests.support.factories import SETTINGS, body, container, planned

HUB = {"model": {"uri": "hf://Qwen/Qwen3-8B"}}
FOLDER = f"/model/{fetched_folder(FetchedModel(scheme='hf', location='Qwen/Qwen3-8B'))}"


def pod_spec(of: Plan) -> dict[str, Any]:
    return dict(of.workload["spec"]["template"]["spec"])


def fetching(of: Plan) -> dict[str, Any]:
    (only,) = pod_spec(of)["initContainers"]
    return dict(only)


def variables(of: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {entry["name"]: entry for entry in of["env"]}


def model_volume(of: Plan) -> dict[str, Any]:
    return next(dict(volume) for volume in pod_spec(of)["volumes"] if volume["name"] == "model")


def test_what_is_there_already_is_not_fetched() -> None:
    for uri in ("hostpath:///m", "pvc://m/x"):
        assert "initContainers" not in pod_spec(planned({"model": {"uri": uri}}))


@pytest.mark.parametrize("uri", ["hostpath:///m", "pvc://m/x", "hf://a/b", "modelscope://a/b", "s3://b/p"])
@pytest.mark.parametrize("runtime", ["reprise", "vllm-ascend"])
def test_an_engine_never_asks_a_hub(uri: str, runtime: str) -> None:
    engine = container(planned({"model": {"uri": uri, "maxModelLen": 4096}, "runtime": {"name": runtime}}))
    env = variables(engine)
    assert env["HF_HUB_OFFLINE"]["value"] == env["TRANSFORMERS_OFFLINE"]["value"] == "1"


@pytest.mark.parametrize(
    ("model", "args"),
    [
        ({"uri": "hf://Qwen/Qwen3-8B"}, ["fetch", "hf://Qwen/Qwen3-8B"]),
        ({"uri": "hf://Qwen/Qwen3-8B@v1"}, ["fetch", "hf://Qwen/Qwen3-8B", "--revision=v1"]),
        ({"uri": "hf://Qwen/Qwen3-8B", "revision": "-x"}, ["fetch", "hf://Qwen/Qwen3-8B", "--revision=-x"]),
        ({"uri": "modelscope://Qwen/Qwen3-8B"}, ["fetch", "modelscope://Qwen/Qwen3-8B"]),
        ({"uri": "s3://b/$(HOME)/x/"}, ["fetch", "s3://b/$$(HOME)/x"]),
    ],
)
def test_argv_of_the_fetch(model: dict[str, str], args: list[str]) -> None:
    of = planned({"model": model})
    engine, fetch = container(of), fetching(of)
    assert fetch["args"][:-1] == args
    assert fetch["args"][-1] == f"--to={engine['args'][1]}"
    assert "command" not in fetch


def test_the_engine_is_told_the_folder() -> None:
    assert container(planned(HUB))["args"][1] == FOLDER
    assert FOLDER.startswith("/model/hf-Qwen-Qwen3-8B-")


def test_a_gguf_file_of_a_bucket_is_told_by_name() -> None:
    of = planned({"model": {"uri": "s3://b/p/q4.gguf"}})
    assert container(of)["args"][1] == f"{fetching(of)['args'][-1].removeprefix('--to=')}/q4.gguf"


def test_another_revision_is_another_folder() -> None:
    uris = ["hf://a/b", "hf://a/b@v1", "hf://a/b@v2", "modelscope://a/b", "hf://a/b-c", "hf://a-b/c", "s3://a/b"]
    folders = {container(planned({"model": {"uri": uri}}))["args"][1] for uri in uris}
    assert len(folders) == len(uris)
    same = planned({"model": {"uri": "hf://a/b", "revision": "v1"}})
    assert container(same)["args"][1] == container(planned({"model": {"uri": "hf://a/b@v1"}}))["args"][1]


def test_a_long_name_is_a_valid_folder() -> None:
    folder = fetched_folder(FetchedModel(scheme="s3", location="b/" + "ü /" * 200))
    assert len(folder) < 80
    assert folder.isascii()
    assert "/" not in folder


# Volume -------------------------------------------------------------------------------------------------------------


def test_the_volume_is_the_pods_own_by_default() -> None:
    of = planned(HUB)
    assert model_volume(of) == {"name": "model", "emptyDir": {}}
    assert "fsGroup" not in pod_spec(of)["securityContext"]
    assert of.claim_names == ()


def test_its_size_can_be_bounded() -> None:
    of = planned({"model": {**HUB["model"], "cache": {"sizeLimit": "64Gi"}}})
    assert model_volume(of)["emptyDir"] == {"sizeLimit": "64Gi"}


def test_a_claim_keeps_it_and_our_user_may_write_there() -> None:
    of = planned({"model": {**HUB["model"], "cache": {"claimName": "models"}}})
    assert model_volume(of) == {"name": "model", "persistentVolumeClaim": {"claimName": "models"}}
    security = pod_spec(of)["securityContext"]
    assert (security["fsGroup"], security["fsGroupChangePolicy"]) == (65_532, "OnRootMismatch")
    assert of.claim_names == ("models",)


def test_only_the_fetch_may_write_to_it() -> None:
    of = planned(HUB)
    (mount,) = [mount for mount in fetching(of)["volumeMounts"] if mount["name"] == "model"]
    assert mount == {"name": "model", "mountPath": "/model"}
    (mount,) = [mount for mount in container(of)["volumeMounts"] if mount["name"] == "model"]
    assert mount["readOnly"] is True


def test_a_fetch_may_take_hours() -> None:
    plain = planned().workload["spec"]["progressDeadlineSeconds"]
    assert planned(HUB).workload["spec"]["progressDeadlineSeconds"] == plain + FETCH_SECONDS


# Image, environment, security ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "runtime", "image"),
    [
        (SETTINGS, {}, SETTINGS.reprise_image),
        (SETTINGS, {"image": "own:1"}, "own:1"),
        (SETTINGS, {"name": "vllm-ascend"}, SETTINGS.reprise_image),
        (SETTINGS, {"name": "vllm-ascend", "image": "own:1"}, SETTINGS.reprise_image),
        (Settings(fetch_image="fetch:1"), {"image": "own:1"}, "fetch:1"),
        (Settings(fetch_image="fetch:1"), {"name": "vllm-ascend"}, "fetch:1"),
    ],
)
def test_image(settings: Settings, runtime: dict[str, str], image: str) -> None:
    given = body({"model": {**HUB["model"], "maxModelLen": 4096}, "runtime": runtime})
    assert fetching(plan(parse(given), settings))["image"] == image


@pytest.mark.parametrize("uri", ["hf://a/b", "modelscope://a/b", "s3://b/p"])
@pytest.mark.parametrize("runtime", ["reprise", "vllm-ascend"])
def test_credentials_reach_the_fetch_by_reference_and_the_engine_not_at_all(uri: str, runtime: str) -> None:
    of = planned(
        {"model": {"uri": uri, "secretRef": {"name": "hub"}, "maxModelLen": 4096}, "runtime": {"name": runtime}}
    )
    required, optional = CREDENTIALS[uri.partition(":")[0]]
    env = variables(fetching(of))
    for key in required:
        assert env[key] == {"name": key, "valueFrom": {"secretKeyRef": {"name": "hub", "key": key}}}
    for key in optional:
        assert env[key]["valueFrom"]["secretKeyRef"] == {"name": "hub", "key": key, "optional": True}
    assert set(env) == {"HOME", *required, *optional}
    assert not set(variables(container(of))) & {*required, *optional}


def test_without_a_secret_there_are_no_credentials() -> None:
    assert set(variables(fetching(planned(HUB)))) == {"HOME"}


def test_a_mirror_or_a_proxy_of_the_users_reaches_the_fetch() -> None:
    env = [
        {"name": "HF_ENDPOINT", "value": "https://hf-mirror.example"},
        {"name": "HTTPS_PROXY", "value": "http://p:1"},
    ]
    of = planned({**HUB, "runtime": {"env": env}})
    found = variables(fetching(of))
    assert [found[entry["name"]] for entry in env] == env
    assert "HF_HUB_OFFLINE" not in found


@pytest.mark.parametrize("runtime", ["reprise", "vllm-ascend"])
def test_the_fetch_is_locked_down_whatever_the_engine_is(runtime: str) -> None:
    of = planned({"model": {**HUB["model"], "maxModelLen": 4096}, "runtime": {"name": runtime}})
    assert fetching(of)["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "privileged": False,
        "capabilities": {"drop": ["ALL"]},
        "readOnlyRootFilesystem": True,
        "runAsNonRoot": True,
    }


def test_the_fetch_holds_no_npu_and_changes_nothing_of_what_the_pod_asks_for() -> None:
    resources = {"requests": {"cpu": "4", "memory": "32Gi"}, "limits": {"cpu": "4", "memory": "32Gi"}}
    of = planned({**HUB, "runtime": {"resources": resources}})
    assert fetching(of)["resources"] == resources
    assert "huawei.com/Ascend910" in container(of)["resources"]["limits"]
    assert not [mount for mount in fetching(of)["volumeMounts"] if mount["name"].startswith("ascend")]
    assert "resources" not in fetching(planned(HUB))


def test_a_certificate_that_the_user_mounts_is_mounted_there_too() -> None:
    template = {
        "volumes": [{"name": "ca", "configMap": {"name": "ca"}}],
        "volumeMounts": [{"name": "ca", "mountPath": "/etc/ca", "readOnly": True}],
    }
    of = planned({**HUB, "podTemplate": template})
    assert {"name": "ca", "mountPath": "/etc/ca", "readOnly": True} in fetching(of)["volumeMounts"]
