"""Two and four ranks, as processes, generate what one generates: cold, from the cache, chunked, preempted, sampled."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from reprise_engine import LLM, SamplingParams
from reprise_engine.entrypoints.outputs import GenerationOutput
from reprise_engine.errors import ConfigError, RankDied
from reprise_engine.parallel.group import HcclGroup
from reprise_engine.parallel.launch import Ranks
from reprise_engine.parallel.shard import Place
from reprise_engine.parallel.talk import for_others
from reprise_engine.request import RequestId
from reprise_engine.step import BlockId, ScheduledRequest, Step
from tests.support.process_ends import have_ended
from tests.support.tiny_models import VOCAB_SIZE, tiny_model_path

PATIENCE = 20.0
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.8, top_p=0.9, seed=5, max_tokens=24, ignore_eos=True, logprobs=2)


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    """An engine of several ranks leaves this process, rank 0, with its share of the processors."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def tokens(length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist()


SHARED = tokens(75, seed=1)
PROMPTS = [SHARED + tokens(length, seed=length) for length in (6, 17, 30)] + [tokens(64, seed=2)]


def make(family: str, ranks: int, *, dtype: torch.dtype = torch.float32, **options: Any) -> LLM:
    """Chunks of 21 tokens end inside blocks; four sequences of up to 130 tokens do not fit 20 blocks of 16."""
    options = {"num_gpu_blocks_override": 20, "max_model_len": 256, "max_num_batched_tokens": 21} | options
    return LLM(
        model=str(tiny_model_path(family, dtype=dtype)), tensor_parallel_size=ranks, skip_tokenizer_init=True, **options
    )


def told(outputs: list[GenerationOutput]) -> list[tuple[int, ...]]:
    return [tuple(output.outputs[0].token_ids) for output in outputs]


def story(llm: LLM) -> dict[str, Any]:
    """What an engine says to the same prompts in every situation, and what it found in its cache."""
    cold = llm.generate(PROMPTS[:1], GREEDY)
    hit = llm.generate(PROMPTS[1:2], GREEDY)
    together = llm.generate(PROMPTS, GREEDY)
    sampled = llm.generate(PROMPTS[2:], SAMPLED)
    return {
        "cold": told(cold),
        "hit": (told(hit), hit[0].num_cached_tokens),
        "together": told(together),
        "preemptions": llm.stats.num_preemptions,
        "sampled": told(sampled),
    }


def alone(family: str, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """The story of one process, with all the situations in it."""
    llm = make(family, 1, dtype=dtype)
    told_by_one = story(llm)
    llm.close()
    assert told_by_one["hit"][1] == len(SHARED)
    assert told_by_one["preemptions"] > 0
    return told_by_one


@pytest.mark.parametrize(
    ("family", "dtype"), [("qwen2", torch.float32), ("qwen3-moe", torch.bfloat16), ("llama", torch.float32)]
)
def test_two_ranks_generate_what_one_process_generates(family: str, dtype: torch.dtype) -> None:
    expected = alone(family, dtype)
    llm = make(family, 2, dtype=dtype)
    try:
        assert story(llm) == expected
    finally:
        llm.close()


def test_four_ranks_generate_the_same_and_the_one_that_is_killed_is_named() -> None:
    """There are two key/value heads, so two ranks hold each."""
    expected = alone("qwen3-moe")
    llm = make("qwen3-moe", 4)
    ranks = llm._core._ranks
    assert isinstance(ranks, Ranks)
    processes = [psutil.Process(pid) for pid in ranks.pids.values()]
    assert story(llm) == expected

    # In the middle of a step: the others wait for it in a sum, which fails for all of them when it is gone.
    psutil.Process(ranks.pids[2]).suspend()
    with ThreadPoolExecutor(1) as elsewhere:
        generating = elsewhere.submit(llm.generate, PROMPTS, GREEDY)
        while not llm._core.has_work():
            assert not generating.done()
        psutil.Process(ranks.pids[2]).kill()
        died = generating.exception(PATIENCE)
    assert isinstance(died, RankDied)
    assert f"Rank 2 of 4 (process {ranks.pids[2]}) was killed by SIGKILL; SIGKILL is what the kernel" in str(died)
    assert "--tensor-parallel-size compute together, so the engine ends with it; start it again." in str(died)
    with pytest.raises(RankDied, match="Rank 2 of 4"):
        llm.generate(PROMPTS, GREEDY)
    llm.close()
    assert have_ended(processes)


def test_blocks_of_two_ranks_go_to_host_memory_and_disk_and_come_back(tmp_path: Path) -> None:
    expected = alone("qwen3", torch.bfloat16)
    tiers: dict[str, Any] = {"prefix_cache_host_memory": 2**20, "prefix_cache_dir": tmp_path / "cache"}
    llm = make("qwen3", 2, dtype=torch.bfloat16, **tiers)
    assert story(llm) == expected
    # The pool holds 20 blocks: the five others' 35 push this prompt's out of it.
    prompt, *others = (tokens(100, seed=seed) for seed in range(10, 16))
    [cold] = told(llm.generate([prompt], GREEDY))
    for other in others:
        llm.generate([other], GREEDY)
    before = llm.stats.tiers[0].hit_tokens
    assert told(llm.generate([prompt], GREEDY)) == [cold]
    assert llm.stats.tiers[0].hit_tokens - before >= 96
    llm.close()

    again = make("qwen3", 2, dtype=torch.bfloat16, **tiers)
    [warm] = again.generate([prompt], GREEDY)
    again.close()
    assert told([warm]) == [cold]
    assert warm.num_cached_tokens >= 96

    # Another number of ranks rounds otherwise, and has other parts.
    one = make("qwen3", 1, dtype=torch.bfloat16, **tiers)
    assert one.generate([prompt], GREEDY)[0].num_cached_tokens == 0
    one.close()


def test_a_size_that_does_not_divide_the_model_starts_no_process() -> None:
    with pytest.raises(ConfigError, match="--tensor-parallel-size is 3, but the model has 4 attention heads"):
        make("qwen3", 3)
    assert not [child for child in psutil.Process().children() if "parallel.worker" in " ".join(child.cmdline())]


STARTER = """
import sys
from reprise_engine.config import EngineConfig, ModelConfig
from reprise_engine.parallel.launch import Ranks
ranks = Ranks(EngineConfig(model=ModelConfig(model=sys.argv[1]), tensor_parallel_size=3), on_stuck=print)
print(*ranks.pids.values(), flush=True)
sys.stdin.read()
"""


def test_ranks_end_with_the_process_that_started_them() -> None:
    model = str(tiny_model_path("qwen3"))
    with subprocess.Popen(
        [sys.executable, "-c", STARTER, model], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as starter:
        assert starter.stdout is not None
        ranks = [psutil.Process(int(pid)) for pid in starter.stdout.readline().split()]
        assert len(ranks) == 2
        starter.kill()
        assert have_ended(ranks)


def test_what_goes_to_the_other_ranks_is_only_what_they_need() -> None:
    request = ScheduledRequest(
        request_id=RequestId("a"),
        token_ids=(5, 6),
        start=16,
        block_table=(BlockId(3), BlockId(1)),
        samples=True,
        sampling=SAMPLED,
        forbidden_token_ids=(1,),
        history=tuple(range(18)),
        output=(5,),
        scored=(6,),
        prompt_length=17,
        output_index=1,
    )
    [sent] = for_others(Step(step_id=4, requests=(request,))).requests
    assert (sent.token_ids, sent.start, sent.block_table) == ((5, 6), 16, (3, 1))
    assert not sent.samples
    assert (sent.history, sent.output, sent.scored, sent.forbidden_token_ids) == (None, None, (), ())
    assert sent.sampling == SamplingParams()


def test_npus_meet_as_the_default_group_of_the_backend_hccl(tmp_path: Path) -> None:
    """gloo stands in for HCCL, under its name; what is tested is how torch.distributed is asked for it."""

    gloo: Any = dist.ProcessGroupGloo

    def create(store: Any, rank: int, size: int, _timeout: object) -> Any:
        return gloo(store, rank, size)

    dist.Backend.register_backend("hccl", create, devices=["cpu"])
    group = HcclGroup(Place(rank=0, size=1), tmp_path / "meeting-point", torch.device("cpu"))
    try:
        assert dist.get_backend() == "hccl"
        assert group.sum(torch.tensor([1.0, 2.0])).tolist() == [1.0, 2.0]
        group.barrier()
        with pytest.raises(ConfigError, match=r"uses torch\.distributed already"):
            HcclGroup(Place(rank=0, size=1), tmp_path / "other", torch.device("cpu"))
    finally:
        group.close()
    assert not dist.is_initialized()
