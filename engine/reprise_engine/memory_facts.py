"""What the memory plan is computed from, of a model that is loaded: asked of the machine, computed, or profiled."""

from __future__ import annotations

import os

import psutil
import torch

from reprise_engine.attention.npu_chip import Chip, chip_of
from reprise_engine.config import EngineConfig
from reprise_engine.cpu_activations import LargestStep, estimate_cpu_activations
from reprise_engine.memory import BlockShape, MemoryFacts
from reprise_engine.memory_probes import cgroup_memory_limit, engine_process_bytes
from reprise_engine.models.loader import LoadedModel
from reprise_engine.parallel.shard import Place
from reprise_engine.parallel.talk import for_others
from reprise_engine.runner.npu_graphs import spare_blocks, wanted_sizes
from reprise_engine.runner.profiling import NPUMemory, profile_npu
from reprise_engine.tier_setup import num_host_slots

# Of the tokenizer for structured output, which the first request that wants some brings in (measured at 850).
_GRAMMAR_BYTES_PER_TOKEN = 1024


def host_slots(config: EngineConfig, shape: BlockShape) -> int:
    """Of host memory, each with a block's parts on all ranks. `shape` is that of one part."""
    return num_host_slots(config.cache, bytes_per_block=config.tensor_parallel_size * shape.bytes_per_block)


def gather_facts(
    model: LoadedModel,
    config: EngineConfig,
    npu_memory: NPUMemory | None,
    *,
    native: bool,
    promised: int,
    shape: BlockShape,
    max_model_len: int,
    place: Place | None,
) -> MemoryFacts:
    """What the plan is computed from, as this process, of the rank at `place`, sees it. On an NPU it runs the largest
    step, as all ranks do at once."""
    weights = model.weight_bytes
    leads = place is None or place.rank == 0
    machine, limit = psutil.virtual_memory(), cgroup_memory_limit()
    host_tier = host_slots(config, shape) * shape.bytes_per_block
    host_memory = machine.total if limit is None else limit
    if npu_memory is not None:
        peak = profile_npu(
            model,
            config.scheduler,
            npu_memory,
            block_size=shape.block_size,
            max_model_len=max_model_len,
            graph_sizes=wanted_sizes(
                # Ranks meet in each layer, and what they say there is not captured.
                enforce_eager=config.enforce_eager or place is not None,
                # A mixture asks the host which experts to run, which no capture allows.
                can_capture=chip_of(model.device) is not Chip.P310 and not model.spec.expert_size,
                environment=os.environ,
                max_num_seqs=config.scheduler.max_num_seqs,
            ),
            of_rank=(lambda step: step) if leads else for_others,
        )
        num_spare = spare_blocks(peak.graph_sizes, block_size=shape.block_size)
        return MemoryFacts(
            device="npu",
            total=npu_memory.total,
            limit=None,
            free=npu_memory.free,
            weights=max(weights, peak.weights),
            process=peak.other,
            activations=peak.activations,
            host_tier=host_tier,
            host_memory=host_memory,
            graphs=peak.graphs + num_spare * shape.bytes_per_block,
            graph_sizes=peak.graph_sizes,
            spare_blocks=num_spare,
        )
    return MemoryFacts(
        device="cpu",
        total=machine.total,
        limit=limit,
        free=machine.available,
        weights=weights,
        process=engine_process_bytes(weights=weights, api_process=leads)
        + (model.spec.vocab_size * _GRAMMAR_BYTES_PER_TOKEN if leads else 0),
        activations=estimate_cpu_activations(
            model.spec,
            LargestStep.of(config.scheduler, max_model_len=max_model_len),
            native=native,
            kv_element_bytes=model.kv_dtype.itemsize,
            quantized=model.quantization is not None,
            threads=torch.get_num_threads(),
            place=place,
        ),
        host_tier=host_tier,
        host_memory=host_memory,
        promised=promised,
    )


def block_shape(model: LoadedModel, block_size: int) -> BlockShape:
    """What a block costs this rank."""
    spec = model.spec
    return BlockShape(
        block_size=block_size,
        bytes_per_block=block_size * spec.kv_bytes_per_token(bytes_per_element=model.kv_dtype.itemsize),
        tensor_elements_per_block=2 * block_size * spec.num_kv_heads * spec.head_dim,
    )
