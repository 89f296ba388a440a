"""How many KV blocks fit: pure arithmetic (`plan_kv_blocks`) over facts that probes gather.

    budget = --gpu-memory-utilization × total             total: the NPU's memory; on a CPU the cgroup's limit
    KV     = budget - weights - process - peak activations - (on a CPU) host tier - (on an NPU) captured graphs
    blocks = KV // bytes of a block

On a CPU without a cgroup limit the machine is shared with others, so KV is the least of that (with the machine's memory
as total), of the memory that is free and promised to no other engine, and of what max_num_seqs sequences of
max_model_len can ever use.
Other processes' use is never subtracted from the budget: two engines that start together do not charge each other, and
what one of them was promised the other does not take for free (memory_promises.py).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from reprise_engine.config import CacheConfig
from reprise_engine.errors import InsufficientMemory, OutOfMemory
from reprise_engine.out_of_memory import Phase

_MIB = 1024**2
_GIB = 1024**3
# NPU operators index a KV tensor by int32. Attention of CANN 9.1.0 does so by uint32, and beyond that reads from other
# blocks without a word (ops-transformer, 06be6c2cafbf, fused_block_mmad_qk.hpp, getKVOffset; cured later by 6f768e461).
_INT32_MAX = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryFacts:
    """What the probes saw, in bytes.

    total        the device's memory (on a CPU: the machine's)
    limit        the cgroup's memory limit; None without one, and on an NPU
    free         free on the device: on a CPU after loading, on an NPU before it
    weights      parameters, shared ones once
    process      what this engine holds beside weights and KV: interpreter, libraries, the API process, non-torch memory
    activations  peak of one forward pass at max_num_batched_tokens, sampling included
    promised     what other engines of this machine may still take of what is free (memory_promises.py)
    """

    device: Literal["cpu", "npu"]
    total: int
    limit: int | None
    free: int
    weights: int
    process: int
    activations: int
    host_tier: int = 0
    """What the prefix cache's tiers hold in host memory (--prefix-cache-host-memory): on a CPU beside the KV."""
    host_memory: int | None = None
    """All that this process may have of the host: the cgroup's limit, or the machine's memory. None: not known."""
    promised: int = 0
    """What other engines of this machine may still take of `free` (memory_promises.py)."""
    graphs: int = 0
    """On an NPU: what captured graphs take, and the blocks for their padded rows (runner/npu_graphs.py)."""
    graph_sizes: tuple[int, ...] = ()
    """Numbers of requests whose decode steps can be captured; () on a CPU, and where none can."""
    spare_blocks: int = 0
    """Those blocks: in the pool's tensors, beyond what is planned here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockShape:
    """What a KV block costs. `tensor_elements_per_block` is of one layer's keys and values together."""

    block_size: int
    bytes_per_block: int
    tensor_elements_per_block: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KVPlan:
    """The size of the pool, and the arithmetic that led to it in lines for the log."""

    num_blocks: int
    max_model_len: int
    explanation: str


def plan_kv_blocks(
    facts: MemoryFacts,
    shape: BlockShape,
    cache: CacheConfig,
    *,
    max_model_len: int,
    max_model_len_is_explicit: bool,
    max_num_seqs: int,
) -> KVPlan:
    """Chooses the number of blocks. Raises InsufficientMemory, with advice, when not one sequence of `max_model_len`
    fits, or the host tier does not; OutOfMemory when an NPU has less free than the share that is asked for.
    Where --num-gpu-blocks-override is given and --max-model-len is not, the length follows the pool instead.
    """
    lines = [f"KV cache on {facts.device}:"]
    if cache.num_gpu_blocks_override is not None:
        num_blocks = cache.num_gpu_blocks_override
        lines.append(_line("--num-gpu-blocks-override", f"{num_blocks:,} blocks"))
        if not max_model_len_is_explicit:
            max_model_len = min(max_model_len, num_blocks * shape.block_size)
        kv_bytes = num_blocks * shape.bytes_per_block
    else:
        if cache.kv_cache_memory_bytes is not None:
            kv_bytes = cache.kv_cache_memory_bytes
            lines.append(_line("--kv-cache-memory-bytes", _size(kv_bytes)))
        else:
            kv_bytes = _available(facts, shape, cache.gpu_memory_utilization, max_model_len, lines)
            if facts.device == "cpu" and facts.limit is None:
                kv_bytes = _share_of_machine(facts, shape, kv_bytes, max_model_len, max_num_seqs, lines)
        num_blocks = max(0, kv_bytes) // shape.bytes_per_block
        lines.append(_line(f"÷ bytes of a block ({shape.block_size} tokens)", _size(shape.bytes_per_block)))
    if facts.device == "npu":
        cap = _INT32_MAX // shape.tensor_elements_per_block - facts.spare_blocks
        if num_blocks > cap:
            num_blocks = cap
            lines.append(_line("capped: a KV tensor is indexed by int32", f"{cap:,} blocks"))

    tokens = num_blocks * shape.block_size
    lines.append(
        _line(
            "= blocks",
            f"{num_blocks:,} = {tokens:,} tokens, {tokens / max_model_len:.1f} × max_model_len {max_model_len:,}",
        )
    )
    explanation = "\n".join(lines)
    if tokens < max_model_len:
        raise InsufficientMemory(_advice(facts, shape, cache, tokens, kv_bytes, max_model_len, explanation))
    _check_host_tier(facts, kv_bytes=num_blocks * shape.bytes_per_block)
    return KVPlan(num_blocks=num_blocks, max_model_len=max_model_len, explanation=explanation)


def _available(facts: MemoryFacts, shape: BlockShape, utilization: float, max_model_len: int, lines: list[str]) -> int:
    if facts.limit is not None:
        total, name = facts.limit, "memory limit of the cgroup"
    else:
        total, name = facts.total, "memory of the NPU" if facts.device == "npu" else "memory of the machine"
    budget = int(total * utilization)
    host_tier = facts.host_tier if facts.device == "cpu" else 0
    available = budget - facts.weights - facts.process - facts.activations - facts.graphs - host_tier
    lines += [
        _line(name, _size(total)),
        _line(f"× --gpu-memory-utilization {utilization:.2f} = budget", _size(budget)),
        _line("- weights", _size(facts.weights)),
        _line("- process and libraries", _size(facts.process)),
        _line("- peak activations", _size(facts.activations)),
        *([_line("- captured graphs of decode steps", _size(facts.graphs))] if facts.graphs else []),
        *([_line("- host memory of the prefix cache's tiers", _size(host_tier))] if host_tier else []),
        _line("= available for KV", _size(available)),
    ]
    if facts.device == "npu" and facts.free < budget:
        phase, advice = _lower_utilization(facts, shape, max_model_len)
        raise OutOfMemory(
            f"memory=npu phase={phase}: --gpu-memory-utilization is {utilization:.2f}, which asks for {_size(budget)} "
            f"of the NPU's {_size(total)}, but only {_size(facts.free)} are free. {advice}"
        )
    return available


def _lower_utilization(facts: MemoryFacts, shape: BlockShape, max_model_len: int) -> tuple[Phase, str]:
    """What helps where others hold so much of the NPU that the share asked for is not free, and whether a smaller share
    would, as `out_of_memory.Phase` tells it."""
    utilization = _floor2(facts.free / facts.total)
    kv_bytes = int(facts.total * utilization) - facts.weights - facts.process - facts.activations - facts.graphs
    tokens = max(0, kv_bytes) // shape.bytes_per_block * shape.block_size
    if tokens == 0:
        instead = "end the process that uses the device, or serve a smaller model."
        return Phase.WEIGHTS, f"What is free does not hold this model: {instead}"
    also = "" if tokens >= max_model_len else f" and --max-model-len to {tokens} (at most)"
    return Phase.KV_CACHE, f"Lower it to {utilization:.2f}{also}, or end the process that uses the device."


def _share_of_machine(
    facts: MemoryFacts, shape: BlockShape, available: int, max_model_len: int, max_num_seqs: int, lines: list[str]
) -> int:
    sequence = -(-max_model_len // shape.block_size) * shape.bytes_per_block
    useful = max_num_seqs * sequence
    unused = facts.free - facts.activations - facts.host_tier
    # A promise is what another engine may take, not what it has: it keeps no engine from starting small.
    free = max(unused - facts.promised, min(unused, sequence))
    lines += [
        *([_line("no cgroup limit; promised to other engines", _size(facts.promised))] if facts.promised else []),
        _line(f"no cgroup limit; free now - peak activations{' - tiers' if facts.host_tier else ''}", _size(free)),
        _line(f"{max_num_seqs} sequences (--max-num-seqs) of {max_model_len:,}", _size(useful)),
        _line("least of the three", _size(min(available, free, useful))),
    ]
    return min(available, free, useful)


def _check_host_tier(facts: MemoryFacts, *, kv_bytes: int) -> None:
    """Raises InsufficientMemory where the tiers' host memory and what else must be there exceed the host's."""
    if not facts.host_tier or facts.host_memory is None:
        return
    rest = facts.weights + facts.process + facts.activations + kv_bytes if facts.device == "cpu" else 0
    room = facts.host_memory - rest
    if facts.host_tier > room:
        beside = f", and weights, process, activations and KV take {_size(rest)} of it" if rest else ""
        advice = f"Lower it to {room} bytes at most" if room > 0 else "Leave it out"
        raise InsufficientMemory(
            f"--prefix-cache-host-memory: the prefix cache's tiers ask for {_size(facts.host_tier)} of host memory; "
            f"there are {_size(facts.host_memory)}{beside}. {advice}, or give the engine more memory."
        )


def _advice(
    facts: MemoryFacts,
    shape: BlockShape,
    cache: CacheConfig,
    tokens: int,
    kv_bytes: int,
    max_model_len: int,
    explanation: str,
) -> str:
    needed = -(-max_model_len // shape.block_size) * shape.bytes_per_block
    if cache.num_gpu_blocks_override is not None:
        raise_it = f"raise --num-gpu-blocks-override to {-(-max_model_len // shape.block_size)}"
    elif cache.kv_cache_memory_bytes is not None:
        raise_it = f"raise --kv-cache-memory-bytes to {needed}"
    else:
        total = facts.total if facts.limit is None else facts.limit
        wanted = cache.gpu_memory_utilization + (needed - kv_bytes) / total
        raise_it = f"give the engine {_size(needed - kv_bytes)} more memory"
        if facts.promised:
            raise_it += f", or let other engines here be promised less than {_size(facts.promised)}"
        wanted = math.ceil(wanted * 100 - 1e-6) / 100
        if wanted <= 1.0 and (facts.limit is not None or facts.device == "npu"):
            raise_it = f"raise --gpu-memory-utilization to {wanted:.2f}, or {raise_it}"
    lower_it = ""
    if tokens > 0:
        lower_it = f"lower --max-model-len to {tokens} (at most), or "
    elif (
        cache.num_gpu_blocks_override is None
        and cache.kv_cache_memory_bytes is None
        and facts.activations > shape.bytes_per_block - kv_bytes
    ):
        # Nothing is left for KV at all: what can shrink is the step.
        lower_it = (
            f"lower --max-num-batched-tokens and --max-num-seqs (peak activations take {_size(facts.activations)}) "
            f"and --max-model-len, or "
        )
    if facts.device == "cpu" and 0 < needed - kv_bytes <= facts.host_tier:
        lower_it += "lower --prefix-cache-host-memory, or "
    return (
        f"Not one sequence of max_model_len {max_model_len} fits the KV cache: it needs {_size(needed)}, and there "
        f"is room for {tokens} tokens. Do one of these: {lower_it}{raise_it}.\n{explanation}"
    )


def _line(name: str, value: str) -> str:
    return f"  {name:<48}{value}"


def _size(num_bytes: int) -> str:
    if abs(num_bytes) < _GIB:
        return f"{num_bytes / _MIB:.2f} MiB"
    return f"{num_bytes / _GIB:.2f} GiB"


def _floor2(value: float) -> float:
    return int(value * 100) / 100
