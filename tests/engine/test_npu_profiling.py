"""What the profiling run charges on an NPU, from counters that a script moves as torch_npu's move."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from reprise_engine.attention.cpu import CPUAttention
from reprise_engine.attention.npu import NPUAttention
from reprise_engine.config import ModelConfig, SchedulerConfig
from reprise_engine.models.loader import LoadedModel, load_model
from reprise_engine.runner import profiling
from reprise_engine.runner.profiling import NPUMemory, NPUPeak, profile_npu
from tests.support.fake_npu_graphs import FakeNPU
from tests.support.npu_device import NPUUnderTest
from tests.support.tiny_models import tiny_model_path

MIB = 2**20
GIB = 2**30
SCHEDULER = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64)


@dataclass
class MeteredNPU(FakeNPU):
    """`outside` is what the runtime takes beside torch once something runs, `others` what other processes hold."""

    outside: int = 0
    others: int = 0
    weights: int = 3 * GIB
    kv: int = GIB
    """Of the pool that the profile runs on."""
    peak: int = 700 * MIB
    first_graph: int = 300 * MIB
    further_graph: int = 50 * MIB
    ran: bool = False
    asked: list[str] = field(default_factory=list)

    def memory_allocated(self, _device: torch.device) -> int:
        self.asked.append("allocated")
        return self.weights if self.asked.count("allocated") == 1 else self.weights + self.kv

    def reset_peak_memory_stats(self, _device: torch.device) -> None:
        self.ran = True

    def max_memory_allocated(self, _device: torch.device) -> int:
        return self.weights + self.kv + self.peak

    def memory_reserved(self, _device: torch.device) -> int:
        return self.weights + self.kv + self.peak

    def mem_get_info(self, _device: torch.device) -> tuple[int, int]:
        graphs = (self.first_graph if self.captures else 0) + self.further_graph * max(0, self.captures - 1)
        free = 64 * GIB - self.others - graphs
        if self.ran:
            free -= self.memory_reserved(_device) + self.outside
        return free, 64 * GIB

    def empty_cache(self) -> None:
        pass


@pytest.fixture
def model() -> LoadedModel:
    return load_model(ModelConfig(model=str(tiny_model_path("qwen3")), dtype="float32"), device=torch.device("cpu"))


def profiled(model: LoadedModel, device: MeteredNPU, monkeypatch: pytest.MonkeyPatch, **given: Any) -> NPUPeak:
    monkeypatch.setattr(torch, "npu", device, raising=False)
    before = NPUMemory.probe(model.device)
    return profile_npu(model, SCHEDULER, before, block_size=128, max_model_len=256, **given)


def test_what_a_step_takes(model: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    found = profiled(model, MeteredNPU(outside=400 * MIB, others=8 * GIB), monkeypatch)
    assert found == NPUPeak(weights=3 * GIB, activations=700 * MIB, other=400 * MIB, graphs=0, graph_sizes=()), (
        "what others hold is not charged"
    )


def test_the_largest_steps_are_run(model: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Masks and workspaces of attention are largest at the end of the longest prompt, samplers with most requests."""
    seen: list[tuple[tuple[int, ...], tuple[int, ...]]] = []

    class Watched(CPUAttention):
        def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            metadata = args[4]
            if (lengths := (metadata.query_lens, metadata.kv_lens)) not in seen:
                seen.append(lengths)
            return super().forward(*args, **kwargs)

    monkeypatch.setattr(profiling, "create_attention_backend", lambda _device: Watched())
    profiled(model, MeteredNPU(), monkeypatch)
    assert seen == [((16,) * 4, (16,) * 4), ((64,), (256,))]


def test_what_graphs_take(ascend: NPUUnderTest, model: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    if ascend.real:
        pytest.skip("its counters are its own")
    monkeypatch.setattr(profiling, "create_attention_backend", NPUAttention)
    device = MeteredNPU()
    found = profiled(model, device, monkeypatch, graph_sizes=(1, 2, 4))
    assert device.captures == 2, "the largest two tell of the others"
    assert (found.graphs, found.graph_sizes) == (300 * MIB + 2 * 50 * MIB, (1, 2, 4))
    assert found.activations == 700 * MIB


def test_graphs_that_cannot_be_captured_cost_nothing(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Here no attention operator has lengths that could be set anew."""
    monkeypatch.setattr(profiling, "create_attention_backend", lambda _device: CPUAttention())
    with caplog.at_level(logging.WARNING):
        found = profiled(model, MeteredNPU(), monkeypatch, graph_sizes=(1, 2, 4))
    assert (found.graphs, found.graph_sizes) == (0, ())
    assert len(caplog.messages) == 1, "and one warning says that steps run eagerly"
