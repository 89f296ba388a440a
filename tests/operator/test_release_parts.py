"""What a release is decided from: the check's Job and its verdict, free devices, the end of a log."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from reprise_operator.cause import HIDDEN, end_of, without_secrets
from reprise_operator.checks import Check, CheckState, outcome_of
from reprise_operator.children.check_job import build_check_job, check_job_name
from reprise_operator.children.strategy import Strategy, default_strategy, may_surge, surge_strategy
from reprise_operator.children.vllm_check import SCRIPT
from reprise_operator.devices import free_pods
from reprise_operator.naming import NAME_LABEL, selector_labels
from reprise_operator.observed import ContainerFailure, ObservedPod
from reprise_operator.plan import Plan
from reprise_operator.spec import SpecError
from tests.support.factories import UID, failure, planned, pod

# The Job ------------------------------------------------------------------------------------------------------------


def check_job(of: Plan, *, node: str | None = "n1", template: Mapping[str, Any] | None = None) -> dict[str, Any]:
    return build_check_job(of.service, template or of.workload["spec"]["template"], template_hash="abc", node=node)


def test_the_check_runs_the_new_image_with_the_new_arguments_and_no_device() -> None:
    spec = {
        "runtime": {
            "image": "r.example/e:2",
            "imagePullSecrets": [{"name": "pull"}],
            "extraArgs": ["--seed=$(SEED)"],
            "env": [{"name": "SEED", "value": "3"}],
            "resources": {"requests": {"memory": "200Gi"}, "limits": {"memory": "200Gi"}},
        },
        "accelerator": {"profile": "hami-ascend910b3", "count": 1},
        "podTemplate": {"tolerations": [{"key": "npu", "operator": "Exists"}], "metadata": {"labels": {"team": "a"}}},
    }
    of = planned(spec)
    job = check_job(of)
    assert job["spec"]["backoffLimit"] == 0
    assert job["spec"]["activeDeadlineSeconds"] > 0
    assert [owner["uid"] for owner in job["metadata"]["ownerReferences"]] == [UID]
    pod_spec = job["spec"]["template"]["spec"]
    (container,) = pod_spec["containers"]
    engine = of.workload["spec"]["template"]["spec"]["containers"][0]
    assert container["image"] == "r.example/e:2"
    assert container["args"] == ["check", *engine["args"][1:]]
    assert container["env"] == engine["env"]
    assert container["resources"] == {"requests": {"cpu": "100m", "memory": "512Mi"}}
    assert "huawei.com" not in json.dumps(job)
    assert "runtimeClassName" not in pod_spec, "it would want a device"
    assert pod_spec["restartPolicy"] == "Never"
    assert pod_spec["imagePullSecrets"] == [{"name": "pull"}]
    assert pod_spec["tolerations"] == [{"key": "npu", "operator": "Exists"}]
    assert pod_spec["automountServiceAccountToken"] is False
    assert pod_spec["securityContext"]["runAsNonRoot"] is True
    assert container["securityContext"] == engine["securityContext"]
    assert container["securityContext"]["allowPrivilegeEscalation"] is False
    assert not {"startupProbe", "readinessProbe", "livenessProbe", "lifecycle", "ports"} & set(container)
    (preferred,) = pod_spec["affinity"]["nodeAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    assert preferred["preference"]["matchFields"][0]["values"] == ["n1"]


def test_the_check_has_the_model_but_neither_driver_nor_traffic() -> None:
    of = planned({"podTemplate": {"metadata": {"labels": {"team": "a"}}}})
    job = check_job(of)
    pod_template = job["spec"]["template"]
    assert [volume["name"] for volume in pod_template["spec"]["volumes"]] == ["model", "tmp"]
    mounts = pod_template["spec"]["containers"][0]["volumeMounts"]
    assert [(mount["name"], mount["mountPath"]) for mount in mounts] == [("model", "/model"), ("tmp", "/tmp")]
    labels = pod_template["metadata"]["labels"]
    assert labels["team"] == "a"
    assert not selector_labels(of.identity).items() & labels.items(), "a Service would send it requests"
    assert NAME_LABEL not in labels
    assert "llm-d.ai/engine-type" not in labels
    assert labels["app.kubernetes.io/component"] == "check"
    assert "serving.reprise.io/owner-uid" not in job["metadata"]["labels"], "it would be pruned with the children"


def test_the_check_leaves_the_cache_s_volume_to_the_pod_that_serves() -> None:
    """A volume that one pod may mount would keep the check waiting for the very pod that waits for it."""
    spec = check_job(planned({"prefixCaching": {"persistence": {"claimName": "a"}}}))["spec"]["template"]["spec"]
    assert "prefix-cache" not in {volume["name"] for volume in spec["volumes"]}
    assert "prefix-cache" not in {mount["name"] for mount in spec["containers"][0]["volumeMounts"]}
    assert "--prefix-cache-dir" in spec["containers"][0]["args"]


def test_a_model_that_is_yet_to_be_fetched_is_not_looked_for() -> None:
    of = planned()
    template = dict(of.workload["spec"]["template"])
    template["spec"] = {**template["spec"], "initContainers": [{"name": "fetch", "image": "x"}]}
    spec = check_job(of, template=template)["spec"]["template"]["spec"]
    assert "initContainers" not in spec
    assert spec["containers"][0]["args"][:2] == ["check", "--arguments-only"]


def test_vllm_checks_with_its_own_parser() -> None:
    of = planned({"runtime": {"name": "vllm-ascend"}, "model": {"maxModelLen": 4096}})
    args = check_job(of)["spec"]["template"]["spec"]["containers"][0]["args"]
    assert args[:2] == ["python3", "-c"]
    assert args[2] == SCRIPT
    assert args[3] == "/model"
    assert args[4:] == of.workload["spec"]["template"]["spec"]["containers"][0]["args"][3:]
    assert "$(" not in SCRIPT, "Kubernetes would expand it"


def test_its_name_fits_and_tells_templates_apart() -> None:
    of = planned(name="x" * 63)
    names = {check_job_name(of.service, digest) for digest in ("a" * 16, "b" * 16)}
    assert len(names) == 2
    assert all(len(name) <= 63 for name in names)


# Its verdict --------------------------------------------------------------------------------------------------------


def job(*conditions: str, message: str = "") -> dict[str, Any]:
    return {"status": {"conditions": [{"type": kind, "status": "True", "message": message} for kind in conditions]}}


PULL = 'Back-off pulling image "r/e:2": ErrImagePull: r/e:2: not found'


@pytest.mark.parametrize(
    ("body", "failures", "wanted"),
    [
        (job(), (), Check(state=CheckState.RUNNING, reason="Checking")),
        (job("Complete"), (), Check(state=CheckState.PASSED)),
        (
            job("Failed"),
            (failure("Error", words="ConfigError: --seed is x", code=2, restarts=3),),
            Check(state=CheckState.FAILED, reason="CheckFailed", message="ConfigError: --seed is x"),
        ),
        (
            job("FailureTarget"),
            (failure("Error", words="ConfigError: --seed is x", code=2, restarts=3),),
            Check(state=CheckState.RUNNING, reason="Checking"),
        ),
        (
            job("Failed"),
            (failure("OOMKilled", code=137, restarts=3),),
            Check(state=CheckState.FAILED, reason="CheckFailed", message="exit code 137 without a last word"),
        ),
        # Its time is over and its pod is gone.
        (job("Failed"), (), Check(state=CheckState.FAILED, reason="CheckFailed")),
        # An image without the command cannot be asked; it could be pulled, and that is all.
        (
            job("Failed"),
            (
                failure(
                    "Error",
                    words="reprise: error: argument COMMAND: invalid choice: 'check' (choose …)",
                    code=2,
                    restarts=3,
                ),
            ),
            Check(state=CheckState.PASSED),
        ),
        (
            job(),
            (failure("ErrImagePull", words="r/e:2: not found", restarts=3),),
            Check(state=CheckState.RUNNING, reason="ImagePullFailed", message="r/e:2: not found"),
        ),
        (
            job(),
            (failure("ImagePullBackOff", words=PULL, restarts=3),),
            Check(state=CheckState.RUNNING, reason="ImagePullFailed", message="r/e:2: not found"),
        ),
        (
            job(),
            (failure("CreateContainerConfigError", words='secret "keys" not found', restarts=3),),
            Check(state=CheckState.RUNNING, reason="ContainerConfigInvalid", message='secret "keys" not found'),
        ),
    ],
)
def test_the_verdict_of_a_check(body: dict[str, Any], failures: Sequence[ContainerFailure], wanted: Check) -> None:
    assert outcome_of(body, [pod("c", ready=False, failures=failures)]) == wanted


def refusal(name: str, at: str, why: str = "exceeded quota: models") -> dict[str, Any]:
    words = f'Error creating: pods "{name}" is forbidden: {why}'
    return {"reason": "FailedCreate", "lastTimestamp": at, "message": words}


def test_a_check_whose_pod_may_not_be_created_says_so() -> None:
    """Until its deadline the Job itself has no word for it."""
    first = refusal("qwen-check-abc-x7k2p", "2026-01-01T00:00:01Z", "no quota")
    other = {"reason": "Suspended", "lastTimestamp": "2026-01-01T00:00:09Z", "message": "Job suspended"}
    newest = [refusal(f"qwen-check-abc-{name}", "2026-01-01T00:00:02Z") for name in ("aaaaa", "bbbbb")]
    found = [outcome_of(job(), [], [first, event, other]) for event in newest]
    words = "its pod is forbidden: exceeded quota: models"
    assert found[0] == Check(state=CheckState.RUNNING, reason="PodsRefused", message=words)
    assert found[0] == found[1], "the name of the pod that was not made is no news"
    assert outcome_of(job(), [], [other]) == Check(state=CheckState.RUNNING, reason="Checking")
    assert outcome_of(job(), [pod("c", ready=False)], newest).reason == "Checking", "it was a while ago: there is a pod"


def test_a_check_that_finds_no_node_says_so() -> None:
    waiting: ObservedPod = replace(pod("c", ready=False), scheduled=False, unschedulable_message="0/3 nodes")
    check = outcome_of(job(), [waiting])
    assert (check.state, check.message) == (CheckState.RUNNING, "its pod has no node: 0/3 nodes")


# The strategy -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "strategy", "least"),
    [
        ({}, Strategy(surge=0, unavailable=1), 0),
        ({"replicas": 3}, Strategy(surge=0, unavailable=1), 2),
        ({"replicas": 3, "rollout": {"maxUnavailable": 3}}, Strategy(surge=0, unavailable=2), 1),
        ({"replicas": 4, "rollout": {"maxUnavailable": "50%"}}, Strategy(surge=0, unavailable="50%"), 2),
        ({"replicas": 4, "rollout": {"maxUnavailable": "150%"}}, Strategy(surge=0, unavailable="99%"), 1),
        ({"replicas": 2, "rollout": {"maxSurge": 2}}, Strategy(surge=0, unavailable=1), 1),
        ({"accelerator": {"profile": "cpu"}}, Strategy(surge=1, unavailable=0), 1),
        ({"accelerator": {"profile": "cpu"}, "rollout": {"maxSurge": "0%"}}, Strategy(surge="0%", unavailable=1), 0),
        (
            {"accelerator": {"profile": "cpu"}, "replicas": 2, "rollout": {"maxSurge": 2, "maxUnavailable": "10%"}},
            Strategy(surge=2, unavailable="10%"),
            2,
        ),
    ],
)
def test_the_strategy_where_no_free_device_is_seen(spec: dict[str, Any], strategy: Strategy, least: int) -> None:
    of = planned(spec)
    assert default_strategy(of.service) == strategy
    assert strategy.least_available(of.replicas) == least
    assert of.workload["spec"]["strategy"]["rollingUpdate"] == strategy.manifest()


def test_the_deadline_is_the_specs_or_more_than_a_pod_may_take_to_start() -> None:
    assert planned().workload["spec"]["progressDeadlineSeconds"] == 3900
    assert planned({"rollout": {"progressDeadlineSeconds": 600}}).workload["spec"]["progressDeadlineSeconds"] == 600
    warm = {"prefixCaching": {"warmup": {"prompts": ["a"], "timeoutSeconds": 900}}}
    assert planned(warm).workload["spec"]["progressDeadlineSeconds"] == 3900 + 900
    both = {**warm, "rollout": {"progressDeadlineSeconds": 600}}
    assert planned(both).workload["spec"]["progressDeadlineSeconds"] == 600


@pytest.mark.parametrize("spec", [{}, {"accelerator": {"profile": "cpu"}}])
def test_no_pod_is_added_that_would_wait_for_its_predecessors_volume(spec: dict[str, Any]) -> None:
    held = planned({**spec, "prefixCaching": {"persistence": {"claimName": "a"}}}).service
    shared = {"claimName": "a", "accessModes": ["ReadWriteMany"]}
    free = planned({**spec, "prefixCaching": {"persistence": shared}}).service
    assert default_strategy(held) == Strategy(surge=0, unavailable=1)
    assert surge_strategy(held, 1, free=4, broken=0) is None
    assert not may_surge(held)
    assert may_surge(free) is not bool(spec), "on an NPU, where a device is seen free"


@pytest.mark.parametrize("surge", [0, "0%"])
def test_a_rollout_that_could_replace_nothing_is_refused(surge: int | str) -> None:
    with pytest.raises(SpecError, match=r"spec\.rollout\.maxSurge and spec\.rollout\.maxUnavailable are both 0"):
        planned({"rollout": {"maxSurge": surge, "maxUnavailable": 0}})


def test_waiting_for_devices_that_may_not_be_seen_is_refused() -> None:
    spec = {"rollout": {"maxUnavailable": 0}}
    with pytest.raises(SpecError, match=r"spec\.rollout\.maxUnavailable is 0, .*rbac\.readNodes"):
        planned(spec)
    assert planned(spec, read_nodes=True).workload["spec"]["strategy"]["rollingUpdate"] == {
        "maxSurge": 1,
        "maxUnavailable": 0,
    }
    assert planned(spec | {"accelerator": {"profile": "cpu"}})


# Devices ------------------------------------------------------------------------------------------------------------

DEVICE = "huawei.com/Ascend910"
OURS = {NAME_LABEL: "qwen"}


def node(name: str = "n1", *, npus: int = 8, labels: dict[str, str] | None = None, **spec: Any) -> dict[str, Any]:
    return {
        "metadata": {"name": name, "labels": labels or {}},
        "spec": spec,
        "status": {
            "allocatable": {DEVICE: str(npus), "cpu": "64", "memory": "512Gi", "pods": "110"},
            "conditions": [{"type": "Ready", "status": "True"}],
        },
    }


def user(npus: int, where: str | None = "n1", *, phase: str = "Running", **labels: str) -> dict[str, Any]:
    container = {"name": "c", "resources": {"limits": {DEVICE: str(npus)}}}
    body: dict[str, Any] = {
        "metadata": {"labels": labels},
        "spec": {"containers": [container]},
        "status": {"phase": phase},
    }
    if where is not None:
        body["spec"]["nodeName"] = where
    return body


def free(
    nodes: Sequence[dict[str, Any]], pods: Sequence[dict[str, Any]] = (), spec: Mapping[str, Any] | None = None
) -> int:
    template = planned(spec).workload["spec"]["template"]
    return free_pods(template, nodes, pods, device=DEVICE, ours=OURS)


def test_free_devices_are_counted_over_the_nodes_that_may_run_the_pod() -> None:
    assert free([]) == 0
    assert free([node()]) == 8
    assert free([node()], [user(5)]) == 3
    assert free([node()], [user(5), user(3, phase="Succeeded")]) == 3
    assert free([node(), node("n2", npus=1)], [user(8)]) == 1
    assert (
        free(
            [node(npus=3), node("n2", npus=1)],
            spec={"runtime": {"name": "vllm-ascend"}, "model": {"maxModelLen": 99}, "accelerator": {"count": 2}},
        )
        == 1
    )
    assert free([node(npus=0)]) == 0


def test_who_waits_for_a_device_already_comes_first_but_for_ourselves() -> None:
    waiting = user(1, None, phase="Pending", app="theirs")
    assert free([node(npus=2)], [waiting]) == 1
    assert free([node(npus=1)], [waiting, waiting]) == 0
    assert free([node(npus=1)], [user(1, None, phase="Pending", **{NAME_LABEL: "qwen"})]) == 1


def test_other_resources_may_run_out_first() -> None:
    big = {"runtime": {"resources": {"requests": {"memory": "200Gi", "cpu": "500m"}}}}
    assert free([node()], spec=big) == 2


@pytest.mark.parametrize(
    ("of", "pod_template", "fits"),
    [
        (node(unschedulable=True), {}, False),
        (node(taints=[{"key": "npu", "effect": "NoSchedule"}]), {}, False),
        (node(taints=[{"key": "npu", "effect": "PreferNoSchedule"}]), {}, True),
        (node(taints=[{"key": "npu", "effect": "NoSchedule"}]), {"tolerations": [{"operator": "Exists"}]}, True),
        (
            node(taints=[{"key": "npu", "value": "a", "effect": "NoExecute"}]),
            {"tolerations": [{"key": "npu", "value": "a", "effect": "NoSchedule"}]},
            False,
        ),
        (
            node(taints=[{"key": "npu", "value": "a", "effect": "NoExecute"}]),
            {"tolerations": [{"key": "npu", "value": "a"}]},
            True,
        ),
        (node(), {"nodeSelector": {"zone": "a"}}, False),
        (node(labels={"zone": "a"}), {"nodeSelector": {"zone": "a"}}, True),
    ],
)
def test_nodes_that_may_not_run_it_do_not_count(of: dict[str, Any], pod_template: dict[str, Any], fits: bool) -> None:
    assert (free([of], spec={"podTemplate": pod_template}) > 0) is fits


@pytest.mark.parametrize(
    ("rule", "fits"),
    [
        ({"key": "zone", "operator": "In", "values": ["a", "b"]}, True),
        ({"key": "zone", "operator": "NotIn", "values": ["a"]}, False),
        ({"key": "zone", "operator": "Exists"}, True),
        ({"key": "rack", "operator": "DoesNotExist"}, True),
        ({"key": "size", "operator": "Gt", "values": ["3"]}, True),
        ({"key": "size", "operator": "Lt", "values": ["3"]}, False),
        ({"key": "rack", "operator": "Gt", "values": ["3"]}, False),
    ],
)
def test_required_affinity_is_honoured(rule: dict[str, Any], fits: bool) -> None:
    required = {"nodeSelectorTerms": [{"matchExpressions": [rule]}]}
    affinity = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}}
    found = free([node(labels={"zone": "a", "size": "8"})], spec={"podTemplate": {"affinity": affinity}})
    assert (found > 0) is fits


def test_the_profiles_own_node_label_is_honoured() -> None:
    spec = {"accelerator": {"profile": "ascend910b"}}
    assert free([node()], spec=spec) == 0
    assert free([node(labels={"accelerator-type": "module-910b-8"})], spec=spec) == 8


# Causes -------------------------------------------------------------------------------------------------------------


def test_of_a_long_log_the_end_is_kept() -> None:
    text = "Traceback\n" + "  File x\n" * 500 + "ValueError: the last line says why\n"
    kept = end_of(text, limit=80)
    assert len(kept) <= 80
    assert kept.startswith("… File x")
    assert kept.endswith("ValueError: the last line says why")
    assert end_of("short\n  and\twhole") == "short and whole"


@pytest.mark.parametrize(
    ("text", "secret"),
    [
        ("args: {'api_key': 'sup3r-s3cret', 'port': 8000}", "sup3r-s3cret"),
        ("--api-key=sup3r-s3cret --port 8000", "sup3r-s3cret"),
        ("Authorization: Bearer abcdef0123456789 refused", "abcdef0123456789"),
        ("HF_TOKEN=hf_abcdefghijklmnopqrst is wrong", "hf_abcdefghijklmnopqrst"),
        ("AWS_SECRET_ACCESS_KEY: wJalrXUtnFEMI/K7MDENG", "wJalrXUtnFEMI"),
        ("cannot reach https://me:pa55w0rd@hub.example/x", "pa55w0rd"),
        ("GET https://s3.example/x?X-Amz-Signature=deadbeefcafe&a=1", "deadbeefcafe"),
        ('{"password": "hunter22"}', "hunter22"),
        ("token sk-abcdefghijklmnopqrstuv", "sk-abcdefghijklmnopqrstuv"),
    ],
)
def test_what_looks_like_a_secret_is_hidden(text: str, secret: str) -> None:
    shown = without_secrets(text)
    assert secret not in shown
    assert HIDDEN in shown
    assert secret not in end_of(text)


@pytest.mark.parametrize(
    "text",
    [
        "ValueError: the tokenizer has 151669 tokens: too many",
        "prompt_tokens: 12, max_model_len=4096",
        "ConfigError: REPRISE_API_KEY is set, but empty; give a key, or unset it.",
        "UnsupportedModel: qwen is a multimodal model (LlavaForConditionalGeneration)",
    ],
)
def test_what_is_no_secret_is_not_hidden(text: str) -> None:
    assert without_secrets(text) == text
