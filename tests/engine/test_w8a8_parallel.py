"""W8A8 on two and four ranks, as processes: cold, from the cache, chunked, preempted, sampled, the tokens are those of
one process that quantises rows as the ranks do. Layer by layer: test_w8a8_ranks.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import nn

from reprise_engine import LLM, SamplingParams, core
from reprise_engine.errors import ConfigError, RankDied
from reprise_engine.parallel.group import Group
from reprise_engine.parallel.layers import connect_ranks
from reprise_engine.runner.model_runner import ModelRunner
from tests.engine.test_parallel import PROMPTS, SHARED, story, tokens, told
from tests.support.tiny_models import tiny_model_path
from tests.support.w8a8 import DESCRIPTION, quantize_model
from tests.support.w8a8_slices import quantise_by_slices


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def quantized(target: Path, family: str, *, dynamic: tuple[str, ...], dtype: torch.dtype = torch.float32) -> Path:
    return quantize_model(
        tiny_model_path(family, dtype=dtype), target / "quantised", dynamic=dynamic, calibration=[*PROMPTS, SHARED]
    )


def make(folder: Path, ranks: int, **options: Any) -> LLM:
    options = {"num_gpu_blocks_override": 20, "max_model_len": 256, "max_num_batched_tokens": 21} | options
    return LLM(
        model=str(folder), quantization="ascend", tensor_parallel_size=ranks, skip_tokenizer_init=True, **options
    )


def alone(folder: Path, *, slices: int, sliced_layers: int) -> dict[str, Any]:
    """The story of one process, which quantises rows by slices where that many ranks would."""
    llm = make(folder, 1)
    runner = llm._core._runner
    assert isinstance(runner, ModelRunner)
    assert quantise_by_slices(runner._model.module, slices) == sliced_layers
    told_by_one = story(llm)
    llm.close()
    assert told_by_one["hit"][1] == len(SHARED)
    assert told_by_one["preemptions"] > 0
    return told_by_one


@pytest.mark.parametrize(
    ("family", "dtype", "ranks", "dynamic", "sliced_layers"),
    [
        ("qwen2", torch.float32, 2, (), 0),  # static: equal to one process's own
        ("qwen3", torch.bfloat16, 4, (), 0),
        ("qwen3", torch.bfloat16, 2, ("*.down_proj",), 3),
        ("qwen3-moe", torch.bfloat16, 2, ("*",), 6),  # o_proj and the experts of each layer
        ("qwen3-moe", torch.float32, 4, (), 3),
    ],
)
def test_ranks_generate_what_one_process_generates(
    family: str, dtype: torch.dtype, ranks: int, dynamic: tuple[str, ...], sliced_layers: int, tmp_path: Path
) -> None:
    folder = quantized(tmp_path, family, dynamic=dynamic, dtype=dtype)
    expected = alone(folder, slices=ranks, sliced_layers=sliced_layers)
    llm = make(folder, ranks)
    try:
        assert story(llm) == expected
    finally:
        llm.close()


def test_kv_on_disk_is_of_one_number_of_ranks(tmp_path: Path) -> None:
    """Also where the weights are the same: dynamic layers quantise otherwise."""
    folder = quantized(tmp_path, "qwen3", dynamic=("*",))
    prompt = tokens(100, seed=9)
    greedy = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    options: dict[str, Any] = {"prefix_cache_host_memory": 2**20, "prefix_cache_dir": tmp_path / "cache"}

    def generate(ranks: int) -> tuple[list[tuple[int, ...]], int]:
        llm = make(folder, ranks, **options)
        outputs = llm.generate([prompt], greedy)
        llm.close()
        return told(outputs), outputs[0].num_cached_tokens

    cold, cached = generate(2)
    assert cached == 0
    warm, cached = generate(2)
    assert (warm, cached >= 96) == (cold, True)
    assert generate(1)[1] == 0


def test_a_rank_that_ends_while_biases_are_shared_out_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = quantized(tmp_path, "qwen3", dynamic=())

    def connect_without_the_other(model: nn.Module, group: Group) -> None:
        [other] = (child for child in psutil.Process().children() if "parallel.worker" in " ".join(child.cmdline()))
        other.kill()
        connect_ranks(model, group)

    monkeypatch.setattr(core, "connect_ranks", connect_without_the_other)
    with pytest.raises(RankDied, match=r"Rank 1 of 2 \(process \d+\) was killed by SIGKILL"):
        make(folder, 2)


def test_a_number_that_does_not_divide_the_model_is_told_of_quantised_ones_too(tmp_path: Path) -> None:
    """Before any weight is read; here the description is part of the configuration."""
    folder = quantized(tmp_path, "qwen3", dynamic=("*",))
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = json.loads((folder / DESCRIPTION).read_text())
    (folder / "config.json").write_text(json.dumps(config))
    (folder / DESCRIPTION).unlink()
    with pytest.raises(ConfigError, match="--tensor-parallel-size is 3, but the model has 4 attention heads"):
        make(folder, 3)
