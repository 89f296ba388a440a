"""Why a container ended: the device's memory, the host's, a share that is too small, or something else."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from reprise_operator.naming import PLAN_HASH_ANNOTATION
from reprise_operator.observed import Observed, ObservedPod, Termination
from reprise_operator.out_of_memory import memory_ends, shortage
from reprise_operator.plan import Plan, plan
from reprise_operator.spec import parse
from reprise_operator.tuning import MemoryEnd, lowered
from tests.support.factories import (
    CURRENT,
    NOT_READY,
    OLD,
    SETTINGS,
    body,
    failing,
    failure,
    merged,
    observed,
    planned,
    pod,
    termination,
)
from tests.support.statuses import RECONCILING, STALLED, conditions, kstatus, message, status_of

NPU: dict[str, Any] = {}
VLLM: dict[str, Any] = {"runtime": {"name": "vllm-ascend"}, "model": {"maxModelLen": 4096}}
CPU: dict[str, Any] = {"accelerator": {"profile": "cpu"}}
LIMITED: dict[str, Any] = merged(CPU, {"runtime": {"resources": {"limits": {"memory": "2Gi"}}}})

TORCH_NPU = (
    "RuntimeError: NPU out of memory. Tried to allocate 3.47 GiB (NPU 0; 60.97 GiB total capacity; 58.92 GiB already "
    "allocated; 58.92 GiB current active; 1.66 GiB free; 58.95 GiB reserved in total by PyTorch)"
)
CORE_FAILED = "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}"
LOADING = "10:00:00 INFO Reading the model's configuration\n10:00:01 INFO Loading weights (safetensors, bfloat16)\n"
LOADED = LOADING + "10:00:09 INFO Sizing the KV cache\n10:00:09 INFO Allocating the KV cache\n"

# name, spec, the kubelet's reason, last words, end of the log → memory, whether a smaller share helps; None: none
CASES: list[tuple[str, dict[str, Any], str, str, str, tuple[str, bool] | None]] = [
    ("pool", NPU, "Error", "OutOfMemory: memory=npu phase=kv-cache: full.", "", ("device", True)),
    ("run time", NPU, "Error", "OutOfMemory: memory=npu phase=running: full.", "", ("device", True)),
    ("weights", NPU, "Error", "OutOfMemory: memory=npu phase=weights: full.", "", ("device", False)),
    ("profiling", NPU, "Error", "OutOfMemory: memory=npu phase=profiling: full.", "", ("device", False)),
    ("in the log", NPU, "Error", "10:00 ERROR memory=npu phase=running: full.\n", "", ("device", True)),
    ("host, said", NPU, "Error", "OutOfMemory: memory=host phase=kv-cache: full.", "", ("host", False)),
    ("host, killed", NPU, "OOMKilled", "", "", ("host", False)),
    ("host, killed after an NPU's words", NPU, "OOMKilled", TORCH_NPU, "", ("host", False)),
    ("engine killed", NPU, "Error", "EngineDead: The engine process was killed by SIGKILL; S", "", ("host", False)),
    ("torch_npu", NPU, "Error", TORCH_NPU, "", ("device", True)),
    ("cpu, said", LIMITED, "Error", "OutOfMemory: memory=host phase=running: full.", "", ("host", True)),
    ("cpu, said, weights", LIMITED, "Error", "OutOfMemory: memory=host phase=weights: full.", "", ("host", False)),
    ("cpu, killed", LIMITED, "OOMKilled", "", "", ("host", True)),
    ("cpu, killed serving", LIMITED, "OOMKilled", LOADED, "", ("host", True)),
    ("cpu, killed loading", LIMITED, "OOMKilled", LOADING, "", ("host", False)),
    ("cpu, killed without a limit", CPU, "OOMKilled", LOADED, "", ("host", False)),
    ("vllm", VLLM, "Error", TORCH_NPU, "", ("device", True)),
    ("vllm, log", VLLM, "Error", CORE_FAILED, f"(EngineCore pid=9) {TORCH_NPU}\n{CORE_FAILED}", ("device", True)),
    (
        "vllm, workspace",
        VLLM,
        "Error",
        "NPUWorkspaceAllocator tried to allocate 180.00 MiB(NPU 1; 60.96 GiB total capacity; 86.81 MiB free).",
        "",
        ("device", True),
    ),
    ("vllm, allocator's code", VLLM, "Error", "[ERROR] RankID:-1) ERR00006 PTA memory error", "", ("device", True)),
    (
        "vllm, CANN",
        VLLM,
        "Error",
        CORE_FAILED,
        "EL0004: [PID: 316198] Failed to allocate memory.\n Possible Cause: Available memory is insufficient.",
        ("device", True),
    ),
    ("vllm, CANN, newer", VLLM, "Error", "", "Memory_Allocation_Failure(EL0004): Failed to allocate", ("device", True)),
    ("vllm, operator", VLLM, "Error", "call aclnnAdd failed, error code is 207001", "", ("device", True)),
    ("vllm, HCCL", VLLM, "Error", "", "Failed to allocate resource[DeviceMemory] with info [size:2]", ("device", True)),
    ("vllm, HCCL, newer", VLLM, "Error", "", "EI0011: Failed to allocate [2] bytes of NPU memory.", ("device", True)),
    ("vllm, operator ran out", VLLM, "Error", "call aclnnAdd failed, error code is 207018", "", ("device", True)),
    (
        "vllm, CANN's share of the host",
        VLLM,
        "Error",
        CORE_FAILED,
        "error code is 207001\nEE1013: Failed to allocate 4096 bytes of host memory via malloc to Runtime.",
        ("host", False),
    ),
    ("vllm, HCCL, no memory", VLLM, "Error", "", "EI0007: Failed to allocate resource[Notify] with info [1]", None),
    (
        "vllm, not free",
        VLLM,
        "Error",
        CORE_FAILED,
        "ValueError: Free memory on device (8.0/64.0 GiB) on startup is less than desired GPU memory utilization (0.9, "
        "57.6 GiB). Decrease GPU memory utilization or reduce GPU memory used by other processes.",
        ("device", True),
    ),
    (
        "vllm, not free, newer words",
        VLLM,
        "Error",
        CORE_FAILED,
        "ValueError: Free memory on NPU device npu:0 (8/64 GiB) on startup is less than desired NPU memory utilization",
        ("device", True),
    ),
    # A smaller share leaves even less.
    ("vllm, share", VLLM, "Error", CORE_FAILED, "INFO Available KV cache memory: -0.87 GiB", ("device", False)),
    ("vllm, no blocks", VLLM, "Error", "", "ValueError: No available memory for the cache blocks.", ("device", False)),
    ("vllm, host", VLLM, "OOMKilled", "", TORCH_NPU, ("host", False)),
    ("vllm, room", VLLM, "Error", CORE_FAILED, "INFO Available KV cache memory: 20.87 GiB", None),
    ("vllm, other device error", VLLM, "Error", "call aclnnAdd failed, error code is 507015", "", None),
    ("vllm, other code", VLLM, "Error", "EL0005: [PID: 1] busy", "", None),
    ("too short a pool", NPU, "Error", "InsufficientMemory: Not one sequence of max_model_len 9 fits", "", None),
    ("killed by the probe", NPU, "Error", "", "", None),
    ("a bug", NPU, "Error", "RepriseError: KeyError: 'out of memory'", "", None),
    (
        "the engine died of something else",
        NPU,
        "Error",
        "EngineDead: The engine process was killed by SIGSEGV.",
        "",
        None,
    ),
    ("model", NPU, "Error", "UnsupportedModel: multimodal", "", None),
    ("done", NPU, "Completed", "", "", None),
]


@pytest.mark.parametrize("case", CASES, ids=[case[0] for case in CASES])
def test_why_it_ended(case: tuple[str, dict[str, Any], str, str, str, tuple[str, bool] | None]) -> None:
    _, spec, reason, words, log, expected = case
    found = shortage(parse(body(spec)), reason=reason, words=words, log=log)
    assert (None if found is None else (found.memory, found.share_helps)) == expected


# Which of them count ------------------------------------------------------------------------------------------------


def ended(number: int = 1, *, words: str = TORCH_NPU, reason: str = "Error", code: int = 1) -> Termination:
    return termination(number, words=words, reason=reason, code=code)


def dead(name: str = "qwen-a", *ends: Termination, template: str = CURRENT, ready: bool = False) -> ObservedPod:
    return replace(pod(name, ready=ready, template=template), terminations=ends or (ended(),))


def counted(of: Plan, seen: Observed) -> list[str]:
    return [found.pod_uid for found in memory_ends(of, seen)]


def test_the_present_template_s_pods_count_serving_ones_too() -> None:
    of = planned()
    seen = observed(
        of,
        dead("a"),
        dead("b", template=OLD),
        dead("c", ready=True),
        dead("d", ended(words="a bug")),
        dead("e", ended(reason="OOMKilled", words="", code=137)),
        replace(dead("f"), terminating=True),
        dead("g", replace(ended(), container="istio-proxy")),
        dead("h", replace(ended(), exit_code=0)),
    )
    assert counted(of, seen) == ["uid-a", "uid-c", "uid-f"]
    assert memory_ends(of, seen)[0] == MemoryEnd(
        pod_uid="uid-a", container_id="containerd://1", at="2026-11-30T00:00:00Z"
    )


def test_nothing_counts_until_the_present_plan_is_what_runs() -> None:
    of = planned()
    seen = observed(of, dead())
    assert counted(of, seen) == ["uid-qwen-a"]
    assert counted(of, replace(seen, template_hash=None)) == [], "the new pods are not known yet"
    assert counted(of, replace(seen, children=())) == []
    assert counted(planned({"model": {"maxModelLen": 1024}}), seen) == [], "they ran with other inputs"
    assert counted(planned({"replicas": 5}), seen) == [], "in the next pass"
    stepped = plan(of.service, SETTINGS, tuning=lowered(of.tuning, memory_ends(of, seen)))
    assert counted(stepped, seen) == [], "they ran with the share that was too much, and that has been answered"
    foreign = replace(seen, children=tuple(replace(child, owned=False) for child in seen.children))
    assert counted(of, foreign) == []
    bare = tuple(
        replace(
            child, body={**child.body, "metadata": {"name": child.name, "annotations": {PLAN_HASH_ANNOTATION: "x"}}}
        )
        for child in seen.children
    )
    assert counted(of, replace(seen, children=bare)) == []


# What is said -------------------------------------------------------------------------------------------------------


def stalled(spec: dict[str, Any], *, words: str = TORCH_NPU, reason: str = "Error", steps: int = 0) -> dict[str, Any]:
    """The status of a service whose one pod keeps ending so, after `steps` steps."""
    of = planned(spec)
    state = of.tuning
    for number in range(steps):
        state = lowered(state, [MemoryEnd(pod_uid="p", container_id=str(number), at="")])
    of = plan(of.service, SETTINGS, tuning=state)
    cause = failure(
        "CrashLoopBackOff", words=words, code=137 if reason == "OOMKilled" else 1, restarts=3, terminated=reason
    )
    status = status_of(of, failing(of, cause))
    assert kstatus(status) == STALLED
    return status


@pytest.mark.parametrize(
    ("spec", "words", "steps", "advice"),
    [
        (
            {"memory": {"autoTune": False}},
            TORCH_NPU,
            0,
            "Lower spec.memory.utilization or spec.model.maxModelLen, or set",
        ),
        ({}, TORCH_NPU, 4, "spec.memory.utilization is at its floor, 0.7: lower spec.memory.floor"),
        (
            {},
            "OutOfMemory: memory=npu phase=weights: full. Serve less.",
            0,
            "spec.memory.utilization has no part in this",
        ),
        ({}, "Available KV cache memory: -0.87 GiB", 0, "raise spec.memory.utilization, lower spec.model.maxModelLen"),
        (
            {},
            "Available KV cache memory: -0.87 GiB",
            2,
            "The share of 0.8 holds the weights and a step, but no KV cache",
        ),
    ],
)
def test_a_shortage_on_the_device_that_needs_a_person(
    spec: dict[str, Any], words: str, steps: int, advice: str
) -> None:
    status = stalled(spec, words=words, steps=steps)
    assert conditions(status)["Stalled"] == ("True", "DeviceOutOfMemory")
    assert advice in message(status, "Stalled")
    assert message(status, "Stalled").startswith("Pod qwen-a, container engine fails (exit code 1): ")
    assert status["memory"]["deviceOutOfMemory"] is True


def test_a_shortage_that_the_next_step_may_cure_is_not_a_persons_business() -> None:
    of = planned()
    cause = failure("CrashLoopBackOff", words=TORCH_NPU, code=1)
    status = status_of(of, failing(of, cause))
    assert kstatus(status) == RECONCILING
    assert message(status, "Ready").endswith("The engine's share is lowered.")


def test_the_host_s_memory_is_another_thing_with_another_cure() -> None:
    for status in (
        stalled({}, reason="OOMKilled", words=""),
        stalled({}, words="OutOfMemory: memory=host phase=weights: MemoryError. Give more."),
        stalled({}, words="EngineDead: The engine process was killed by SIGKILL; SIGKILL is what the kernel sends"),
    ):
        assert conditions(status)["Stalled"] == ("True", "OutOfMemory")
        assert "Raise or remove spec.runtime.resources.limits.memory." in message(status, "Stalled")
        assert status["memory"]["deviceOutOfMemory"] is False
        assert status["memory"]["steps"] == 0
    told = message(stalled(LIMITED, reason="OOMKilled", words="", steps=4), "Stalled")
    assert told.endswith("limits.memory; spec.memory.utilization went down to 0.7.")


def test_the_cause_in_vllm_s_log_is_what_is_told() -> None:
    of = planned(VLLM)
    crash = failure("CrashLoopBackOff", words=CORE_FAILED, code=1)
    cause = "(EngineCore pid=9) ValueError: Model architectures ['X'] are not supported for now."
    log = f"INFO starting\n{cause}\n{CORE_FAILED}"
    broken = replace(pod(ready=False, failures=[crash]), terminations=(replace(ended(words=CORE_FAILED), log=log),))
    status = status_of(of, observed(of, broken, status=NOT_READY))
    assert conditions(status)["Stalled"] == ("True", "UnsupportedModel")
    assert message(status, "Stalled") == f"Pod qwen-a, container engine fails (exit code 1): {cause}"


def test_a_share_that_went_down_too_far_is_said() -> None:
    words = "InsufficientMemory: Not one sequence of max_model_len 9 fits the KV cache"
    told = message(stalled({}, words=words, steps=2), "Stalled")
    assert "(spec.memory.utilization went down from 0.9 to 0.8; raise spec.memory.floor" in told
    assert "went down" not in message(stalled({}, words=words), "Stalled")


@pytest.mark.parametrize(
    ("spec", "steps", "expected", "words"),
    [
        ({}, 0, ("False", "Automatic"), "automatic"),
        ({"memory": {"utilization": 0.93}}, 0, ("False", "Requested"), "As spec.memory.utilization asks."),
        (
            {},
            1,
            ("True", "LoweredAfterOutOfMemory"),
            "Now 0.85: lowered from 0.9 in 1 step, since pods ran out of memory",
        ),
        (
            {"memory": {"utilization": 0.93}},
            2,
            ("True", "LoweredAfterOutOfMemory"),
            "requested by spec.memory.utilization. The floor is 0.73.",
        ),
        ({}, 4, ("True", "FloorReached"), "0.7 is the floor."),
        ({"memory": {"utilization": 0.4, "floor": 0.4}}, 1, ("False", "FloorReached"), "0.4 is the floor."),
    ],
)
def test_the_condition(spec: dict[str, Any], steps: int, expected: tuple[str, str], words: str) -> None:
    of = planned(spec)
    state = of.tuning
    for number in range(steps):
        state = lowered(state, [MemoryEnd(pod_uid="p", container_id=str(number), at="")])
    of = plan(of.service, SETTINGS, tuning=state)
    status = status_of(of, observed(of, pod()))
    assert conditions(status)["MemoryTuned"] == expected
    assert words in message(status, "MemoryTuned")
