"""vLLM's cache bookkeeping alone, measured as cache_core.py measures ours. Runs in vLLM's own environment, alone.

    python benchmarks/vllm_cache_core.py [--block-size 16]

The same prompts, the same pool, the same five lines, through vLLM's public KVCacheManager and Request; prints one JSON
object of milliseconds. What is timed:

    hash       the request's block hasher (sha256, the default) over one prompt
    lookup     get_computed_blocks
    allocate   allocate_slots for the whole prompt, which also enters its full blocks into the cache
    step       for all requests: allocate_slots for one token, append_output_token_ids (which hashes full blocks)
    free       free

The garbage collector's heap is frozen first, as vLLM's engine does.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import sys
import time
from statistics import fmean, median
from typing import Any

import torch
from vllm.sampling_params import SamplingParams  # type: ignore[import-not-found, unused-ignore]  # not in our environment
from vllm.utils.hashing import sha256  # type: ignore[import-not-found, unused-ignore]
from vllm.v1.core.kv_cache_manager import KVCacheManager  # type: ignore[import-not-found, unused-ignore]
from vllm.v1.core.kv_cache_utils import (  # type: ignore[import-not-found, unused-ignore]
    get_request_block_hasher,
    init_none_hash,
)
from vllm.v1.kv_cache_interface import (  # type: ignore[import-not-found, unused-ignore]
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
)
from vllm.v1.request import Request  # type: ignore[import-not-found, unused-ignore]

# As in cache_core.py, which this environment cannot import.
NUM_BLOCKS = 100_000
REQUESTS = 256
PROMPT = 8_192
STEPS = 64


def make_prompts() -> list[list[int]]:
    draw = random.Random(0)
    shared = [draw.randrange(150_000) for _ in range(PROMPT // 2)]
    return [[*shared, *(draw.randrange(150_000) for _ in range(PROMPT - len(shared)))] for _ in range(REQUESTS)]


def make_manager(block_size: int) -> Any:
    spec = FullAttentionSpec(block_size=block_size, num_kv_heads=8, head_size=128, dtype=torch.bfloat16)
    config = KVCacheConfig(
        num_blocks=NUM_BLOCKS * 16 // block_size,
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
    )
    return KVCacheManager(config, max_model_len=2 * PROMPT, scheduler_block_size=block_size, hash_block_size=block_size)


def make_request(name: str, prompt: list[int], hasher: Any) -> Any:
    sampling = SamplingParams(max_tokens=4 * STEPS, ignore_eos=True)
    return Request(name, prompt, sampling, None, block_hasher=hasher)


def measure(block_size: int) -> dict[str, float]:
    """Milliseconds: of steps the mean, of the rest the median over requests."""
    init_none_hash(sha256)
    hasher = get_request_block_hasher(block_size, sha256)
    manager = make_manager(block_size)
    prompts = make_prompts()
    gc.collect()
    gc.freeze()
    seconds: dict[str, list[float]] = {name: [] for name in ("hash", "lookup", "allocate", "step", "free")}

    def timed(name: str, function: Any, *arguments: Any) -> Any:
        begun = time.thread_time()
        result = function(*arguments)
        seconds[name].append(time.thread_time() - begun)
        return result

    first = make_request("first", prompts[0][: PROMPT // 2], hasher)
    assert manager.allocate_slots(first, first.num_tokens) is not None
    manager.free(first)

    running = []
    for number, prompt in enumerate(prompts):
        timed("hash", hasher, make_request("unhashed", prompt, None))
        request = make_request(str(number), prompt, hasher)
        blocks, computed, *_ = timed("lookup", manager.get_computed_blocks, request)
        assert computed == PROMPT // 2, "the first half is cached"
        assert timed("allocate", manager.allocate_slots, request, PROMPT - computed, computed, blocks) is not None
        request.num_computed_tokens = PROMPT
        request.append_output_token_ids(7)
        running.append(request)

    def step(token: int) -> None:
        for request in running:
            assert manager.allocate_slots(request, 1) is not None
            request.num_computed_tokens += 1
            request.append_output_token_ids(token)

    for number in range(STEPS):
        timed("step", step, number)
    for request in running:
        timed("free", manager.free, request)
    assert manager.usage == 0.0
    return {name: 1000 * (fmean(values) if name == "step" else median(values)) for name, values in seconds.items()}


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description="vLLM's cache bookkeeping alone.")
    parser.add_argument("--block-size", type=int, default=16, choices=[16, 128])
    print(json.dumps(measure(parser.parse_args(arguments).block_size)))


if __name__ == "__main__":
    main(sys.argv[1:])
