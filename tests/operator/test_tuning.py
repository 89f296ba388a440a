"""How the memory's share goes down: by which step, how far, what is remembered and when it is forgotten."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from reprise_operator.plan import plan
from reprise_operator.settings import Settings
from reprise_operator.spec import parse
from reprise_operator.tuning import STEP, MemoryEnd, MemoryState, carried, lowered, memory_status
from tests.support.factories import SETTINGS, body, container, merged


def end(number: int = 1, *, pod: str = "pod-1") -> MemoryEnd:
    return MemoryEnd(pod_uid=pod, container_id=f"containerd://{number}", at=f"2026-11-30T00:00:{number:02d}Z")


def state(
    spec: Mapping[str, Any] | None = None, previous: Mapping[str, Any] | None = None, settings: Settings = SETTINGS
) -> MemoryState:
    return carried(parse(body(spec)), settings, previous or {})


def written(of: MemoryState) -> dict[str, Any]:
    """What the next pass, or the next process, finds in the status."""
    return memory_status(of)


def test_a_part_of_a_device_is_where_the_steps_begin() -> None:
    part: dict[str, Any] = {
        "accelerator": {"profile": "hami-ascend910b3", "count": 1},
        "runtime": {"resources": {"limits": {"huawei.com/Ascend910B3-memory": "16384"}}},
    }
    begun = state(part)
    assert begun.effective == 0.25
    assert lowered(begun, [end()]).effective == 0.2
    other = copy.deepcopy(part)
    other["runtime"]["resources"]["limits"]["huawei.com/Ascend910B3-memory"] = "32768"
    assert state(other).inputs_hash != begun.inputs_hash


def test_what_takes_no_device_memory_keeps_the_steps() -> None:
    stepped = written(lowered(state(), [end()]))
    warm = {"warmup": {"prompts": ["a"]}, "persistence": {"size": "1Gi"}, "hashAlgorithm": "sha256"}
    assert state({"prefixCaching": warm}, stepped).steps == 1
    assert state({"prefixCaching": {"enabled": False}}, stepped).steps == 0


@pytest.mark.parametrize(
    ("memory", "length", "expected"),
    [
        ({}, None, [0.90, 0.85, 0.80, 0.75, 0.70]),
        ({}, 65_536, [0.85, 0.80, 0.75, 0.70, 0.65]),
        ({}, 49_152, [0.875, 0.825, 0.775, 0.725, 0.675]),
        ({"floor": 0.82}, None, [0.90, 0.85, 0.82]),
        ({"floor": 0.60}, 65_536, [0.85, 0.80, 0.75, 0.70, 0.65, 0.60]),
        ({"floor": 0.95}, None, [0.90]),
        ({"utilization": 0.93}, None, [0.93, 0.88, 0.83, 0.78, 0.73]),
        ({"utilization": 0.5}, None, [0.5, 0.45, 0.4, 0.35, 0.3]),
        ({"utilization": 0.5, "floor": 0.5}, None, [0.5]),
        ({"utilization": 0.12}, None, [0.12, 0.07, 0.05]),
        ({"utilization": 0.03}, None, [0.03]),
        ({"autoTune": False}, None, [0.90]),
        ({"autoTune": False, "utilization": 0.93, "floor": 0.1}, None, [0.93]),
        ({"autoTune": True, "floor": 0.8}, None, [0.90, 0.85, 0.80]),
    ],
)
def test_the_steps_down(memory: dict[str, Any], length: int | None, expected: list[float]) -> None:
    spec = {"memory": memory, "model": {"maxModelLen": length}}
    now = state(spec)
    seen = [now.effective]
    for number in range(1, 30):
        below = lowered(now, [end(number)])
        if below.steps == now.steps:
            break
        assert below.steps == now.steps + 1
        assert below.last == end(number)
        now = state(spec, written(below))
        assert now == below, "the status holds all that is needed"
        seen.append(now.effective)
    assert seen == expected


def test_what_is_written() -> None:
    spec = {"memory": {"utilization": 0.93}}
    before = state(spec)
    assert written(before) == {
        "requested": 0.93,
        "effective": 0.93,
        "reason": "requested by spec.memory.utilization",
        "inputsHash": before.inputs_hash,
        "steps": 0,
    }
    after = lowered(lowered(before, [end(1)]), [end(2)])
    assert written(after) == {
        "requested": 0.93,
        "effective": 0.83,
        "reason": "lowered from 0.93 in 2 steps, since pods ran out of memory; requested by spec.memory.utilization",
        "inputsHash": before.inputs_hash,
        "steps": 2,
        "lastOutOfMemory": {"podUID": "pod-1", "containerID": "containerd://2", "at": "2026-11-30T00:00:02Z"},
    }


def test_the_engine_is_told_and_nothing_else_changes() -> None:
    service = parse(body())
    before = plan(service, SETTINGS)
    after = plan(service, SETTINGS, tuning=lowered(before.tuning, [end()]))
    assert after.memory.effective == 0.85
    changed = [
        pair for pair in zip(container(before)["args"], container(after)["args"], strict=True) if len({*pair}) > 1
    ]
    assert changed == [("0.9", "0.85")]
    assert {**container(after), "args": None} == {**container(before), "args": None}
    assert after.network_service == before.network_service


def test_one_step_for_however_many_ends() -> None:
    now = lowered(state(), [end(3, pod="c"), end(1, pod="a"), end(2, pod="b")])
    assert now.steps == 1
    assert now.last == end(3, pod="c"), "the newest"
    assert lowered(now, [end(3, pod="c")]) == now, "counted once"


def test_at_the_floor_from_the_start_it_is_said_once_and_not_written_again() -> None:
    spec = {"memory": {"utilization": 0.5, "floor": 0.5}}
    before = state(spec)
    assert not before.is_at_floor, "memory has not run out"
    after = lowered(before, [end(1)])
    assert (after.steps, after.effective, after.is_at_floor) == (0, 0.5, True)
    assert lowered(after, [end(2)]) == after, "a crash loop is no news"


def test_the_floor_that_was_reached_is_not_written_again() -> None:
    now = lowered(state({"memory": {"floor": 0.85}}), [end(1)])
    assert (now.effective, now.is_at_floor) == (0.85, True)
    assert lowered(now, [end(2)]) == now


def test_switched_off_it_remembers_nothing() -> None:
    now = state({"memory": {"autoTune": False}})
    assert lowered(now, [end()]) == now


INPUTS: dict[str, dict[str, Any]] = {
    "model": {"model": {"uri": "hostpath:///models/other"}},
    "maxModelLen": {"model": {"maxModelLen": 1024}},
    "dtype": {"model": {"dtype": "bfloat16"}},
    "utilization": {"memory": {"utilization": 0.9}},
    "autoTune": {"memory": {"autoTune": False}},
    "floor": {"memory": {"floor": 0.8}},
    "caching": {"prefixCaching": {"enabled": False}},
    "block size": {"prefixCaching": {"blockSize": 256}},
    "profile": {"accelerator": {"profile": "ascend910b"}},
    "resource": {"accelerator": {"resourceName": "huawei.com/npu"}},
    "devices": {"accelerator": {"count": 2}, "runtime": {"name": "vllm-ascend"}, "model": {"maxModelLen": 1024}},
    "image": {"runtime": {"image": "other:1"}},
    "arguments": {"runtime": {"extraArgs": ["--max-num-seqs=8"]}},
    "environment": {"runtime": {"env": [{"name": "A", "value": "1"}]}},
}


@pytest.mark.parametrize("change", INPUTS.values(), ids=INPUTS)
def test_a_change_of_an_input_forgets_the_steps(change: dict[str, Any]) -> None:
    tuned = lowered(state(), [end()])
    after = state(change, written(tuned))
    assert (after.steps, after.last) == (0, None)
    assert after.inputs_hash != tuned.inputs_hash
    # And back: it is another life of the same inputs.
    assert state(None, written(after)).steps == 0


OTHERS: dict[str, dict[str, Any]] = {
    "scale": {"replicas": 7},
    "suspend": {"suspend": True},
    "name": {"model": {"servedName": "other"}},
    "service": {"service": {"port": 80}},
    "nodes": {"podTemplate": {"nodeSelector": {"a": "b"}}},
    "key": {"auth": {"apiKeySecretRef": {"name": "keys"}}},
    "the host's memory": {"runtime": {"resources": {"limits": {"memory": "64Gi"}}}},
}


@pytest.mark.parametrize("change", OTHERS.values(), ids=OTHERS)
def test_a_change_of_anything_else_keeps_them(change: dict[str, Any]) -> None:
    tuned = lowered(lowered(state(), [end(1)]), [end(2)])
    assert state(change, written(tuned)) == tuned


def test_the_default_image_is_an_input() -> None:
    tuned = lowered(state(), [end()])
    assert state(None, written(tuned), Settings(reprise_image="newer:2")).steps == 0


def test_on_a_cpu_the_containers_memory_is_the_devices() -> None:
    def spec(memory: str) -> dict[str, Any]:
        return {"accelerator": {"profile": "cpu"}, "runtime": {"resources": {"limits": {"memory": memory}}}}

    tuned = lowered(state(spec("2Gi")), [end()])
    assert state(spec("2Gi"), written(tuned)).steps == 1
    assert state(spec("4Gi"), written(tuned)).steps == 0


def test_a_field_that_is_said_as_its_default_changes_nothing() -> None:
    """Nor would a field that a later release adds, with a default."""
    tuned = lowered(state(), [end()])
    explicit = {"memory": {"autoTune": True}, "accelerator": {"profile": "ascend910", "driver": "auto", "count": 1}}
    assert state(explicit, written(tuned)).steps == 1


@pytest.mark.parametrize(
    "memory",
    [
        {"steps": "three"},
        {"steps": -2},
        {"steps": 10**9},
        {"steps": None, "lastOutOfMemory": "yes"},
        {"steps": 1, "lastOutOfMemory": {"podUID": 7}},
        {"steps": True},
    ],
)
def test_a_status_that_somebody_edited_does_no_harm(memory: dict[str, Any]) -> None:
    found = state(None, {"inputsHash": state().inputs_hash, **memory})
    assert 0.70 <= found.effective <= 0.90
    assert found.last is None


# Invariants ---------------------------------------------------------------------------------------------------------

_memory = st.fixed_dictionaries(
    {}, optional={"utilization": st.floats(0.001, 0.98), "floor": st.floats(0.001, 0.98), "autoTune": st.booleans()}
).filter(lambda memory: memory.get("floor", 0) <= memory.get("utilization", 1))
_ends = st.lists(st.builds(end, st.integers(0, 59), pod=st.sampled_from(["a", "b", "c"])), max_size=5)


@example(memory={"utilization": 0.861328125}, length=None, revisions=[[end(number)] for number in range(6)])
@given(memory=_memory, length=st.none() | st.integers(1, 200_000), revisions=st.lists(_ends, max_size=30))
@settings(max_examples=100, deadline=None)
def test_invariants_of_every_way_down(
    memory: dict[str, Any], length: int | None, revisions: list[list[MemoryEnd]]
) -> None:
    spec = {"memory": memory, "model": {"maxModelLen": length}}
    now = first = state(spec)
    floor = memory.get("floor", 0.05)
    for ends in revisions:
        after = lowered(now, ends)
        assert after.steps - now.steps in (0, 1), "at most one step a revision"
        assert after.effective <= now.effective, "never up"
        assert after.effective >= min(first.effective, floor), "never below the floor"
        assert math.isclose(after.effective, now.effective) or now.effective - after.effective <= STEP + 2e-4, (
            "and no more than a step, but for the rounding"
        )
        if after.steps > now.steps:
            assert after.effective < now.effective, "a step is a step"
            assert memory.get("autoTune", True)
        assert lowered(after, ends) == after or any(item != after.last for item in ends)
        assert state(spec, written(after)) == after, "a new process finds the same"
        now = after
    assert now.steps <= now.most_steps <= 20, "bounded"


@given(changes=st.lists(st.sampled_from([*OTHERS.values()]), max_size=4), steps=st.integers(0, 4))
@settings(max_examples=60, deadline=None)
def test_nothing_but_an_input_forgets(changes: list[dict[str, Any]], steps: int) -> None:
    spec: dict[str, Any] = {}
    now = state()
    for number in range(steps):
        now = lowered(now, [end(number)])
    for change in changes:
        spec = merged(spec, change)
        assert state(spec, written(now)).steps == steps
