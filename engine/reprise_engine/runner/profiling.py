"""Peak memory of a forward pass on an NPU, and of captured graphs, measured by running and capturing some."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import psutil
import torch

from reprise_engine.attention import create_attention_backend
from reprise_engine.attention.npu_chip import Chip, chip_of
from reprise_engine.config import SchedulerConfig
from reprise_engine.models.loader import LoadedModel
from reprise_engine.npu_environment import has_310p_on_pci
from reprise_engine.request import RequestId, SamplingParams
from reprise_engine.runner.kv_cache import allocate_kv_cache
from reprise_engine.runner.model_runner import ModelRunner
from reprise_engine.runner.npu_graphs import DecodeGraphs, NPUGraphCapturer, spare_blocks
from reprise_engine.step import BlockId, ScheduledRequest, Step

# The runtime's context and communication buffers are well below this.
_MOST_OUTSIDE_TORCH = 2 * 1024**3


@dataclass(frozen=True, slots=True, kw_only=True)
class NPUMemory:
    """Bytes on the device before anything of ours was put there."""

    total: int
    free: int

    @classmethod
    def probe(cls, device: torch.device) -> NPUMemory:
        free, total = _torch_npu().mem_get_info(device)
        if device.type == "npu" and chip_of(device) is Chip.P310 and not has_310p_on_pci():
            # It shares the machine's memory, of which the driver does not know how much others have taken (vllm-ascend,
            # _310p/worker_310p.py, 182b75e).
            free = min(free, psutil.virtual_memory().available)
        return cls(total=total, free=free)


@dataclass(frozen=True, slots=True, kw_only=True)
class NPUPeak:
    """Bytes: `weights` is what the loaded model holds, `activations` torch's peak above what stays allocated, `other`
    what is taken outside torch, `graphs` what all captured graphs take. `graph_sizes` are those that can be captured.
    """

    weights: int
    activations: int
    other: int
    graphs: int
    graph_sizes: tuple[int, ...]


def profile_step(scheduler: SchedulerConfig, *, block_size: int, max_model_len: int) -> tuple[Step, int]:
    """The step with the most rows to sample, and the number of blocks it needs.

    max_num_batched_tokens new tokens, spread over as many requests as may run, each of which samples, and one of which
    has its prompt scored. With few tokens the profile would under-count.
    """
    tokens = scheduler.batched_tokens(max_model_len=max_model_len)
    num_requests = max(min(scheduler.max_num_seqs, tokens), -(-tokens // max_model_len))
    requests: list[ScheduledRequest] = []
    next_block = 0
    for index in range(num_requests):
        length = tokens // num_requests + (1 if index < tokens % num_requests else 0)
        num_blocks = -(-length // block_size)
        requests.append(
            ScheduledRequest(
                request_id=RequestId(f"profile-{index}"),
                token_ids=(0,) * length,
                start=0,
                block_table=tuple(BlockId(block) for block in range(next_block, next_block + num_blocks)),
                samples=True,
                sampling=SamplingParams(temperature=1.0, top_p=0.9, prompt_logprobs=20),
                scored=(0,) * (length - 1) if index == 0 else (),
            )
        )
        next_block += num_blocks
    return Step(step_id=0, requests=tuple(requests)), next_block


def deepest_step(scheduler: SchedulerConfig, *, block_size: int, max_model_len: int) -> tuple[Step, int]:
    """The step whose attention takes the most memory, and the number of blocks it needs: the last chunk of the longest
    prompt. Masks (310P) and workspaces grow with the keys. All earlier keys are in one block, again and again."""
    length = min(scheduler.batched_tokens(max_model_len=max_model_len), max_model_len)
    start = max_model_len - length
    context_blocks = start // block_size
    num_blocks = -(-max_model_len // block_size) - context_blocks
    request = ScheduledRequest(
        request_id=RequestId("profile"),
        token_ids=(0,) * length,
        start=start,
        block_table=(BlockId(0),) * context_blocks + tuple(BlockId(block) for block in range(num_blocks)),
        samples=True,
        sampling=SamplingParams(temperature=1.0, top_p=0.9),
    )
    return Step(step_id=1, requests=(request,)), num_blocks


def profile_npu(
    model: LoadedModel,
    scheduler: SchedulerConfig,
    before: NPUMemory,
    *,
    block_size: int,
    max_model_len: int,
    graph_sizes: tuple[int, ...] = (),
    of_rank: Callable[[Step], Step] = lambda step: step,
) -> NPUPeak:
    """Runs the largest steps on a pool that holds just one, captures graphs over it, and reads the counters. Of several
    ranks all run them together, each what `of_rank` makes of them."""
    npu = _torch_npu()
    weights = npu.memory_allocated(model.device)
    largest = [
        make(scheduler, block_size=block_size, max_model_len=max_model_len) for make in (profile_step, deepest_step)
    ]
    num_blocks = max(needed for _, needed in largest)
    num_spare = spare_blocks(graph_sizes, block_size=block_size)
    kv = allocate_kv_cache(
        num_layers=model.spec.num_layers,
        num_blocks=num_blocks + num_spare,
        block_size=block_size,
        num_kv_heads=model.spec.num_kv_heads,
        head_dim=model.spec.head_dim,
        dtype=model.kv_dtype,
        device=model.device,
    )
    npu.synchronize()
    resting = npu.memory_allocated(model.device)
    npu.reset_peak_memory_stats(model.device)
    runner = ModelRunner(model, create_attention_backend(model.device), kv, seed=0, num_spare_blocks=num_spare)
    for step, _ in largest:
        runner.run(of_rank(step))
    npu.synchronize()
    activations = npu.max_memory_allocated(model.device) - resting
    # Of engines that start on this NPU one does so at a time (npu_turns.py); what one that serves already takes in the
    # meantime cannot be told from our own runtime's share, so the share is bounded.
    free = NPUMemory.probe(model.device).free
    other = min(max(0, before.free - free - npu.memory_reserved(model.device)), _MOST_OUTSIDE_TORCH)
    graphs, graph_sizes = _profile_graphs(npu, runner, model, graph_sizes, max_model_len=max_model_len)
    del kv, runner
    npu.empty_cache()
    return NPUPeak(weights=weights, activations=activations, other=other, graphs=graphs, graph_sizes=graph_sizes)


def _profile_graphs(
    npu: Any, runner: ModelRunner, model: LoadedModel, sizes: tuple[int, ...], *, max_model_len: int
) -> tuple[int, tuple[int, ...]]:
    """Bytes that graphs of `sizes` take, and the sizes to capture: all of them, or none where that fails.

    Two are captured, the largest ones. The first takes the memory that they share, the second as much as any further
    one at most (vLLM estimates likewise, `profile_cudagraph_memory`)."""
    if not sizes:
        return 0, ()
    taken: list[int] = []
    kept: list[DecodeGraphs] = []  # what has been captured takes memory as long as it is held
    capturer = NPUGraphCapturer(npu, num_attentions=model.spec.num_layers)
    for size in sorted(sizes, reverse=True)[:2]:
        npu.empty_cache()
        free, _ = npu.mem_get_info(model.device)
        graphs = runner.capture_decode_graphs(capturer, (size,), max_model_len=max_model_len)
        if graphs is None:
            return 0, ()
        kept.append(graphs)
        npu.synchronize()
        taken.append(max(0, free - npu.mem_get_info(model.device)[0]))
    return taken[0] + sum(taken[1:]) * (len(sizes) - 1), sizes


def _torch_npu() -> Any:
    """`torch.npu`, which exists once torch_npu has been imported (device.resolve_device)."""
    return torch.npu  # type: ignore[attr-defined]
