"""The arithmetic of the KV pool's size, and the probes it is fed by."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from reprise_engine.config import CacheConfig
from reprise_engine.errors import InsufficientMemory, OutOfMemory
from reprise_engine.memory import BlockShape, KVPlan, MemoryFacts, plan_kv_blocks
from reprise_engine.memory_probes import cgroup_memory_limit, engine_process_bytes

MIB = 1024**2
GIB = 1024**3

# 16 tokens a block, 1 MiB a block.
SHAPE = BlockShape(block_size=16, bytes_per_block=MIB, tensor_elements_per_block=16 * 2 * 8 * 128)
POD = MemoryFacts(
    device="cpu",
    total=64 * GIB,
    limit=4 * GIB,
    free=30 * GIB,
    weights=GIB,
    process=512 * MIB,
    activations=256 * MIB,
)
MACHINE = replace(POD, limit=None)
NPU = MemoryFacts(
    device="npu", total=64 * GIB, limit=None, free=62 * GIB, weights=16 * GIB, process=GIB, activations=2 * GIB
)


def plan(
    facts: MemoryFacts,
    cache: CacheConfig = CacheConfig(),  # noqa: B008  # frozen
    *,
    max_model_len: int = 2048,
    explicit: bool = True,
    max_num_seqs: int = 64,
) -> KVPlan:
    return plan_kv_blocks(
        facts,
        SHAPE,
        cache,
        max_model_len=max_model_len,
        max_model_len_is_explicit=explicit,
        max_num_seqs=max_num_seqs,
    )


def test_on_a_cpu_utilization_is_of_the_cgroups_limit() -> None:
    # 0.9 · 4096 - 1024 - 512 - 256 MiB
    assert plan(POD, CacheConfig(gpu_memory_utilization=0.9)).num_blocks == 1894
    assert plan(POD, CacheConfig(gpu_memory_utilization=0.5)).num_blocks == 256


def test_with_a_limit_neither_free_memory_nor_the_number_of_sequences_matters() -> None:
    assert plan(replace(POD, free=GIB), max_num_seqs=1).num_blocks == 1894


@pytest.mark.parametrize(
    ("free", "max_num_seqs", "expected", "why"),
    [
        (40 * GIB, 1000, 40 * 1024 - 256, "free memory, less the activations"),
        (63 * GIB, 1000, int(0.9 * 64 * 1024) - 1792, "utilization of the machine"),
        (40 * GIB, 64, 64 * 128, "max_num_seqs sequences of max_model_len"),
    ],
)
def test_without_a_limit_the_least_of_three(free: int, max_num_seqs: int, expected: int, why: str) -> None:
    assert plan(replace(MACHINE, free=free), max_num_seqs=max_num_seqs).num_blocks == expected, why


def test_on_an_npu_utilization_is_of_the_device_and_must_be_free() -> None:
    assert plan(NPU, CacheConfig(gpu_memory_utilization=0.9)).num_blocks == int(0.9 * 64 * 1024) - 19 * 1024
    with pytest.raises(OutOfMemory, match=r"--gpu-memory-utilization is 0\.90.*57\.60 GiB.*only 30\.00 GiB") as e:
        plan(replace(NPU, free=30 * GIB))
    assert "Lower it to 0.46" in str(e.value)
    assert str(e.value).startswith("memory=npu phase=kv-cache: "), "a smaller share would have room"
    with pytest.raises(OutOfMemory, match=r"^memory=npu phase=weights: .*does not hold this model"):
        plan(replace(NPU, free=10 * GIB))


def test_an_npu_tensor_is_capped_at_int32_elements() -> None:
    big = replace(NPU, total=2048 * GIB, free=2048 * GIB)
    capped = plan(big)
    assert capped.num_blocks == (2**31 - 1) // SHAPE.tensor_elements_per_block == 65535
    assert "int32" in capped.explanation
    assert plan(replace(POD, limit=60 * GIB * 2)).num_blocks > 65535


def test_kv_cache_memory_bytes_overrides_the_utilization() -> None:
    chosen = plan(POD, CacheConfig(kv_cache_memory_bytes=200 * MIB + 1))
    assert chosen.num_blocks == 200
    assert "--gpu-memory-utilization" not in chosen.explanation


def test_an_override_without_a_length_bounds_the_length() -> None:
    chosen = plan(POD, CacheConfig(num_gpu_blocks_override=20), max_model_len=8192, explicit=False)
    assert (chosen.num_blocks, chosen.max_model_len) == (20, 320)
    roomy = plan(POD, CacheConfig(num_gpu_blocks_override=1000), max_model_len=8192, explicit=False)
    assert (roomy.num_blocks, roomy.max_model_len) == (1000, 8192)


def test_an_override_below_an_explicit_length_is_refused() -> None:
    with pytest.raises(InsufficientMemory, match="raise --num-gpu-blocks-override to 128"):
        plan(POD, CacheConfig(num_gpu_blocks_override=127))
    assert plan(POD, CacheConfig(num_gpu_blocks_override=128)).num_blocks == 128


def test_the_log_shows_the_arithmetic() -> None:
    text = plan(POD).explanation
    for part in (
        "4.00 GiB",
        "× --gpu-memory-utilization 0.90 = budget",
        "3.60 GiB",
        "1.00 GiB",
        "512.00 MiB",
        "1.85 GiB",
        "1,894 = 30,304 tokens",
        "14.8 × max_model_len 2,048",
    ):
        assert part in text


def test_too_little_memory_says_what_to_do_and_the_advice_works() -> None:
    small = replace(POD, limit=2 * GIB)
    with pytest.raises(InsufficientMemory) as caught:
        plan(small, max_model_len=4096)
    # 0.9 · 2048 - 1792 MiB = 51 blocks; 256 are needed: (1792 + 256) / 2048 = 1.0
    message = str(caught.value)
    assert "Not one sequence of max_model_len 4096" in message
    assert "lower --max-model-len to 816" in message
    assert "raise --gpu-memory-utilization to 1.00" in message
    assert "- weights" in message
    assert plan(small, max_model_len=816).num_blocks == 51
    assert plan(small, CacheConfig(gpu_memory_utilization=1.0), max_model_len=4096).num_blocks == 256


def test_negative_memory_is_told_without_a_length_to_lower_to() -> None:
    with pytest.raises(InsufficientMemory) as caught:
        plan(replace(POD, limit=GIB))
    assert "lower --max-model-len" not in str(caught.value)
    assert "give the engine 998.40 MiB more memory" in str(caught.value)


TIERED = replace(POD, host_tier=512 * MIB, host_memory=4 * GIB)


def test_on_a_cpu_the_host_tier_is_taken_from_the_kv() -> None:
    chosen = plan(TIERED)
    assert chosen.num_blocks == 1894 - 512
    assert re.search(r"- host memory of the prefix cache's tiers +512\.00 MiB", chosen.explanation)
    assert "tiers" not in plan(POD).explanation
    machine = replace(TIERED, limit=None, host_memory=64 * GIB, free=40 * GIB)
    assert plan(machine, max_num_seqs=1000).num_blocks == 40 * 1024 - 256 - 512


def test_a_host_tier_that_leaves_no_room_for_a_sequence_may_be_lowered() -> None:
    with pytest.raises(InsufficientMemory, match="lower --prefix-cache-host-memory, or raise"):
        plan(replace(TIERED, host_tier=1800 * MIB))


def test_a_host_tier_beyond_the_hosts_memory_is_refused() -> None:
    large = CacheConfig(kv_cache_memory_bytes=2 * GIB)
    assert plan(replace(TIERED, host_tier=256 * MIB), large).num_blocks == 2048
    with pytest.raises(
        InsufficientMemory, match=r"--prefix-cache-host-memory: .* ask for 512\.00 MiB .* 3\.75 GiB"
    ) as e:
        plan(TIERED, large)
    # 4096 - 2048 - 1024 - 512 - 256
    assert f"Lower it to {256 * MIB} bytes at most" in str(e.value)


def test_captured_graphs_are_charged_and_their_blocks_are_beyond_the_plan() -> None:
    captured = replace(NPU, graphs=512 * MIB, spare_blocks=1)
    without, with_graphs = plan(NPU), plan(captured)
    assert with_graphs.num_blocks == without.num_blocks - 512
    assert "captured graphs of decode steps" in with_graphs.explanation
    assert "graphs" not in without.explanation
    huge, huge_captured = (replace(facts, total=2048 * GIB, free=2048 * GIB) for facts in (NPU, captured))
    assert plan(huge_captured).num_blocks == plan(huge).num_blocks - 1, "int32"
    with pytest.raises(OutOfMemory, match="does not hold this model"):
        plan(replace(captured, free=19 * GIB))


def test_on_an_npu_the_host_tier_is_the_hosts_alone() -> None:
    beside = replace(NPU, host_tier=16 * GIB, host_memory=32 * GIB)
    assert plan(beside).num_blocks == plan(NPU).num_blocks
    with pytest.raises(InsufficientMemory, match=r"ask for 48\.00 GiB of host memory; there are 32\.00 GiB\. Lower"):
        plan(replace(beside, host_tier=48 * GIB))


def test_a_step_that_takes_all_the_memory_may_be_made_smaller() -> None:
    with pytest.raises(InsufficientMemory, match=r"lower --max-num-batched-tokens and --max-num-seqs.*3\.00 GiB"):
        plan(replace(POD, activations=3 * GIB))
    assert plan(replace(POD, activations=2 * GIB), max_model_len=1632).num_blocks == 102


@pytest.mark.parametrize(
    ("free", "advice"),
    [
        (30 * GIB, "Lower it to 0.46, or end the process"),
        (int(20.1 * GIB), "Lower it to 0.31 and --max-model-len to 13760 (at most), or end the process"),
        (GIB // 4, "What is free does not hold this model"),
    ],
)
def test_a_busy_npu_gets_advice_that_works(free: int, advice: str) -> None:
    busy = replace(NPU, free=free)
    with pytest.raises(OutOfMemory) as caught:
        plan(busy, max_model_len=20_000)
    assert advice in str(caught.value)
    assert "to 0.00" not in str(caught.value)
    if "13760" in advice:
        assert plan(busy, CacheConfig(gpu_memory_utilization=0.31), max_model_len=13760).num_blocks == 860


def test_what_other_engines_were_promised_is_not_free() -> None:
    alone = replace(MACHINE, free=20 * GIB)
    assert plan(alone, max_num_seqs=1000).num_blocks == 20 * 1024 - 256
    assert plan(replace(alone, promised=15 * GIB), max_num_seqs=1000).num_blocks == 5 * 1024 - 256
    assert "promised to other engines" in plan(replace(alone, promised=GIB)).explanation
    crowded = replace(alone, promised=25 * GIB)
    assert plan(crowded, max_num_seqs=1000, max_model_len=1632).num_blocks == 102, (
        "one sequence: it starts all the same"
    )
    assert plan(replace(POD, promised=15 * GIB)).num_blocks == plan(POD).num_blocks, "a pod shares with nobody"


def write(path: Path, content: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)


@pytest.fixture
def cgroup(tmp_path: Path) -> tuple[Path, Path]:
    """(root, membership), to be filled by the test."""
    return tmp_path / "cgroup", tmp_path / "membership"


def test_cgroup_v2_takes_the_least_limit_on_the_way_up(cgroup: tuple[Path, Path]) -> None:
    root, membership = cgroup
    write(membership, "0::/kubepods/pod1/container\n")
    write(root / "kubepods/pod1/container/memory.max", "max\n")
    write(root / "kubepods/pod1/memory.max", f"{3 * GIB}\n")
    write(root / "kubepods/memory.max", f"{5 * GIB}\n")
    assert cgroup_memory_limit(root=root, membership=membership) == 3 * GIB


def test_cgroup_v2_in_a_container_that_sees_only_its_own(cgroup: tuple[Path, Path]) -> None:
    root, membership = cgroup
    write(membership, "0::/kubepods/pod1/container\n")
    write(root / "memory.max", f"{2 * GIB}\n")
    assert cgroup_memory_limit(root=root, membership=membership) == 2 * GIB


def test_cgroup_v1_and_its_way_to_write_no_limit(cgroup: tuple[Path, Path]) -> None:
    root, membership = cgroup
    write(membership, "8:pids:/x\n4:cpu,memory:/docker/abc\n0::/\n")
    write(root / "memory/docker/abc/memory.limit_in_bytes", "9223372036854771712\n")
    assert cgroup_memory_limit(root=root, membership=membership) is None
    write(root / "memory/docker/memory.limit_in_bytes", f"{GIB}\n")
    assert cgroup_memory_limit(root=root, membership=membership) == GIB


def test_a_limit_above_the_machines_memory_is_none(cgroup: tuple[Path, Path]) -> None:
    root, membership = cgroup
    write(membership, "0::/\n")
    write(root / "memory.max", str(psutil.virtual_memory().total))
    assert cgroup_memory_limit(root=root, membership=membership) is None


def test_a_system_without_cgroups_has_no_limit(cgroup: tuple[Path, Path]) -> None:
    root, membership = cgroup
    assert cgroup_memory_limit(root=root, membership=membership) is None


def test_the_process_counts_without_its_weights_but_never_as_nothing() -> None:
    resident = psutil.Process().memory_info().rss
    assert engine_process_bytes(weights=0) == pytest.approx(max(resident, 256 * MIB) + 192 * MIB, rel=0.1)
    assert engine_process_bytes(weights=100 * GIB) == (256 + 192) * MIB
