"""Whole engines as core.py builds them, for a process that has an emulated NPU: test_npu_emulation_device.py runs this
file in one for each chip."""

from __future__ import annotations

import fcntl
import gc
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
import torch_npu  # type: ignore[import-not-found]  # noqa: F401  # the stand-in, which only that process finds

from reprise_engine.attention.npu import NPUAttention
from reprise_engine.attention.npu_310p import NPU310PAttention
from reprise_engine.attention.npu_chip import Chip, chip_of
from reprise_engine.config import CacheConfig, EngineConfig, ModelConfig, ResolvedConfig, SchedulerConfig
from reprise_engine.core import build_core
from reprise_engine.errors import OutOfMemory, RepriseError
from reprise_engine.memory_facts import block_shape, gather_facts
from reprise_engine.models.loader import load_model
from reprise_engine.models.npu_layers import NPUDecoderLayer, NPUExperts
from reprise_engine.models.npu_w8a8 import NPUW8A8DynamicLinear, NPUW8A8StaticLinear
from reprise_engine.parallel.shard import Place
from reprise_engine.runner import profiling, transfer
from reprise_engine.runner.model_runner import ModelRunner
from reprise_engine.runner.profiling import NPUMemory
from reprise_engine.runner.transfer import DeviceTransfer
from tests.engine.npu_engine import Engine, Judge, prompt_of
from tests.support.npu.device.tensor import NpuTensor
from tests.support.tiny_models import tiny_model_path
from tests.support.w8a8 import quantize_model

NPU = torch.device("npu", 0)
CHIP = chip_of(NPU)
PROMPTS = (prompt_of(150, seed=1), prompt_of(20, seed=2))


@dataclass
class Built:
    engine: Engine
    runner: ModelRunner
    resolved: ResolvedConfig

    def count(self, kind: type[torch.nn.Module]) -> int:
        return sum(isinstance(module, kind) for module in self.runner._model.module.modules())


Build = Callable[..., Built]


@pytest.fixture
def build() -> Iterator[Build]:
    """Of a family's tiny model, or of a folder; with options of any of the configurations. Closed afterwards."""
    kept: list[Built] = []

    def made(model: str | Path, **options: Any) -> Built:
        def some(*names: str) -> dict[str, Any]:
            return {name: options.pop(name) for name in names if name in options}

        runners: list[ModelRunner] = []

        def keep(runner: ModelRunner) -> ModelRunner:
            runners.append(runner)
            return runner

        progress = some("progress")
        folder = tiny_model_path(model) if isinstance(model, str) else model
        config = EngineConfig(
            model=ModelConfig(model=str(folder), max_model_len=512, **some("dtype", "quantization")),
            cache=CacheConfig(**some("block_size", "num_gpu_blocks_override", "prefix_cache_host_memory")),
            scheduler=SchedulerConfig(**{"max_num_seqs": 4, "max_num_batched_tokens": 96} | some("max_num_seqs")),
            device="npu",
            **options,
        )
        core, resolved = build_core(config, wrap_runner=keep, **progress)
        kept.append(Built(Engine(core, []), runners[0], resolved))
        return kept[-1]

    yield made
    for built in kept:
        built.engine.core.close()
    kept.clear()
    gc.collect()


def quantised(folder: Path, *, dynamic: tuple[str, ...]) -> Path:
    return quantize_model(
        tiny_model_path("qwen3"), folder / "q", dynamic=dynamic, calibration=[list(prompt_of(200, seed=3))]
    )


def say_twice(built: Built) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(prompt, tokens) of two rounds, of which the second finds all of the first one's prompts."""
    first, second = built.engine.generate(PROMPTS), built.engine.generate(PROMPTS)
    assert [cached for _, cached in first] == [0, 0]
    assert [cached for _, cached in second] == [len(prompt) - 1 for prompt in PROMPTS]
    return [(prompt, tokens) for prompt, (tokens, _) in zip(2 * PROMPTS, [*first, *second], strict=True)]


@pytest.mark.parametrize("family", ["qwen3", "qwen3-moe"])
def test_a_model_is_served_by_the_chip_s_own_operators(family: str, build: Build) -> None:
    built = build(family, dtype="float16", num_gpu_blocks_override=16)
    judge = Judge(family, torch.float16)
    for prompt, tokens in say_twice(built):
        judge.check(prompt, tokens)
    assert built.count(NPUDecoderLayer) == 3
    assert built.count(NPUExperts) == (3 if family == "qwen3-moe" else 0)
    assert type(built.runner._backend) is (NPU310PAttention if CHIP is Chip.P310 else NPUAttention)
    assert {layer.layout for layer in built.runner._kv} == {CHIP.kv_layout}
    graphs = built.runner._graphs
    captured = CHIP is Chip.A2 and family == "qwen3"  # a mixture is not captured, nor is anything on a 310P
    assert (None if graphs is None else graphs.sizes) == ((1, 2, 4) if captured else None)
    assert (built.resolved.block_size, built.resolved.device) == (128, "npu")


def test_blocks_come_back_from_host_memory(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    unpinned = partial(DeviceTransfer, pinned=False)  # the emulated device pins no memory
    monkeypatch.setattr(transfer, "DeviceTransfer", lambda kv, *, pinned, **rest: unpinned(kv, **rest))
    built = build("qwen3", dtype="float16", num_gpu_blocks_override=4, prefix_cache_host_memory=16 * 1024**2)
    judge, prompt = Judge("qwen3", torch.float16), prompt_of(300, seed=4)
    [(cold, _)] = built.engine.generate([prompt])
    built.engine.generate([prompt_of(400, seed=5)])
    [(again, cached)] = built.engine.generate([prompt])
    assert cached == 256, "nothing came up"
    judge.check(prompt, cold)
    judge.check(prompt, again)


def test_the_dtype_is_one_that_the_chip_has(build: Build) -> None:
    assert build("llama", enforce_eager=True, num_gpu_blocks_override=16).resolved.dtype == (
        "float16" if CHIP is Chip.P310 else "bfloat16"
    )


def test_quantised_weights_are_served_by_int8_operators(build: Build, tmp_path: Path) -> None:
    dynamic = () if CHIP is Chip.P310 else ("*.o_proj",)
    built = build(
        quantised(tmp_path, dynamic=dynamic), quantization="ascend", dtype="float16", num_gpu_blocks_override=16
    )
    say_twice(built)
    # Seven in each of three layers: queries, keys, values, output, gate, up, down.
    assert built.count(NPUW8A8DynamicLinear) == 3 * len(dynamic)
    assert built.count(NPUW8A8StaticLinear) == 3 * (7 - len(dynamic))


def test_an_engine_that_starts_keeps_others_off_its_npu(
    build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def is_taken() -> bool:
        with (tmp_path / f"reprise-{os.getuid()}" / "npu-0.lock").open() as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
            return False

    stages: list[bool] = []
    build("qwen3", enforce_eager=True, num_gpu_blocks_override=16, progress=lambda _progress: stages.append(is_taken()))
    assert len(stages) > 2
    assert all(stages)
    assert not is_taken()


def test_several_ranks_run_eagerly() -> None:
    """What they say to each other in a layer is not captured."""
    config = EngineConfig(model=ModelConfig(model=str(tiny_model_path("qwen3")), dtype="float16"), device="npu")
    model = load_model(config.model, device=NPU)

    def sizes(place: Place | None, **options: Any) -> tuple[int, ...]:
        facts = gather_facts(
            model,
            replace(config, scheduler=SchedulerConfig(max_num_seqs=2), **options),
            NPUMemory.probe(NPU),
            native=False,
            promised=0,
            shape=block_shape(model, 128),
            max_model_len=256,
            place=place,
        )
        return facts.graph_sizes

    alone = () if CHIP is Chip.P310 else (1, 2)
    assert sizes(None) == alone
    assert sizes(None, enforce_eager=True) == ()
    assert sizes(Place(rank=0, size=2)) == ()


@pytest.mark.skipif(CHIP is Chip.P310, reason="it takes them")
def test_heads_are_judged_as_a_rank_has_them() -> None:
    """Four ranks have a query head and a key head each, which the operator takes of 64 or 128 only."""
    config = ModelConfig(model=str(tiny_model_path("qwen3")), dtype="float16")
    with pytest.raises(RepriseError, match="1 query heads and 1 key heads of 32; with as many"):
        load_model(config, device=NPU, place=Place(rank=1, size=4))


REFUSED: dict[Chip, dict[str, dict[str, Any]]] = {
    Chip.A2: {
        "--block-size is 16; on an NPU 910B or 910C it must be": {"block_size": 16},
        "--max-num-seqs is 4097; on an NPU 910B or 910C at most 4096": {"max_num_seqs": 4097},
        "--dtype is float32, but the attention operators of an NPU": {"dtype": "float32"},
        "4 query heads and 4 key heads of 16; with as many": {"model": "opt"},
        "--tensor-parallel-size is 2, but 1 NPUs are visible": {"tensor_parallel_size": 2},
    },
    Chip.P310: {
        "--block-size is 256; on an NPU 310P it must be 128": {"block_size": 256},
        "--max-num-seqs is 2049; on an NPU 310P at most 2048": {"max_num_seqs": 2049},
        "--dtype is bfloat16, but the attention operators of an NPU 310P": {"dtype": "bfloat16"},
    },
}


@pytest.mark.parametrize("words", REFUSED[CHIP])
def test_what_the_chip_does_not_take_is_told_before_weights_are_loaded(words: str, build: Build) -> None:
    before = torch.npu.memory_allocated()  # type: ignore[attr-defined]  # of torch_npu
    options = {"model": "qwen3"} | REFUSED[CHIP][words]
    with pytest.raises(RepriseError, match=words):
        build(options.pop("model"), **options)
    assert torch.npu.memory_allocated() == before  # type: ignore[attr-defined]


@pytest.mark.skipif(CHIP is Chip.A2, reason="it has the operator")
def test_a_310p_does_not_quantise_by_token(build: Build, tmp_path: Path) -> None:
    with pytest.raises(RepriseError, match=r"W8A8_DYNAMIC, .* 310P has no operator"):
        build(quantised(tmp_path, dynamic=("*.o_proj",)), quantization="ascend")


def test_a_310p_inside_the_machine_has_what_the_machine_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """An emulated one is on no bus."""
    free, total = torch.npu.mem_get_info()  # type: ignore[attr-defined]  # of torch_npu
    for available in (free // 2, 2 * total):
        monkeypatch.setattr(psutil, "virtual_memory", lambda available=available: SimpleNamespace(available=available))
        expected = min(free, available) if CHIP is Chip.P310 else free
        assert NPUMemory.probe(NPU) == NPUMemory(total=total, free=expected)
    monkeypatch.setattr(profiling, "has_310p_on_pci", lambda: True)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1))
    assert NPUMemory.probe(NPU).free == free


def test_memory_that_runs_out_is_told_as_the_operator_reads_it(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = NpuTensor.state.memory
    monkeypatch.setattr(memory, "taken_by_others", memory.total // 2)
    with pytest.raises(OutOfMemory, match=r"^memory=npu phase=kv-cache: .*--gpu-memory-utilization"):
        build("qwen3")
    monkeypatch.setattr(memory, "taken_by_others", memory.total - memory.allocated - 64 * 1024)
    with pytest.raises(OutOfMemory, match=r"^memory=npu phase=weights: NPU out of memory\. Tried to allocate"):
        build("qwen3")
