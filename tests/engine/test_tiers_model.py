"""The tiers under a real model: the same tokens cold, warm, from host memory, from the disk, with damaged records."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest

from reprise_engine import LLM, SamplingParams
from reprise_engine.cache_report import Tier
from reprise_engine.entrypoints.prompts import Prompt
from reprise_engine.errors import ConfigError, InsufficientMemory
from tests.support.tiny_models import VOCAB_SIZE, tiny_model_path

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
BLOCK = 8
PROMPT = [3 + i * 7 % (VOCAB_SIZE - 3) for i in range(45)]
"""Five blocks and a half."""


def make_llm(family: str = "qwen3", **options: Any) -> LLM:
    defaults: dict[str, Any] = {"num_gpu_blocks_override": 12, "block_size": BLOCK, "max_model_len": 96}
    return LLM(model=str(tiny_model_path(family)), skip_tokenizer_init=True, **(defaults | options))


def run(llm: LLM, prompt: list[int]) -> tuple[tuple[int, ...], int]:
    [output] = llm.generate({"prompt_token_ids": prompt}, GREEDY)
    return output.outputs[0].token_ids, output.num_cached_tokens


def push_out(llm: LLM) -> None:
    """Fills the pool with something else."""
    run(llm, [5 + i * 11 % (VOCAB_SIZE - 5) for i in range(84)])


@pytest.fixture(params=["qwen3", "opt", "qwen2-sliding"])
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def tokens_from(llm: LLM, tier: Tier) -> int:
    return next(one.hit_tokens for one in llm.stats.tiers if one.tier is tier)


def test_what_was_evicted_comes_up_from_host_memory(family: str) -> None:
    cold, _ = run(make_llm(family, enable_prefix_caching=False), PROMPT)
    llm = make_llm(family, prefix_cache_host_memory=64 * 2**20)
    assert run(llm, PROMPT) == (cold, 0)
    assert run(llm, PROMPT) == (cold, 44)
    push_out(llm)
    assert run(llm, PROMPT) == (cold, 40)
    assert tokens_from(llm, Tier.HOST) == 40
    # The answer too: 45 + 11 computed tokens are seven blocks.
    push_out(llm)
    assert run(llm, [*PROMPT, *cold])[1] == 56
    llm.close()


@pytest.mark.parametrize("host_memory", [0, 64 * 2**20])
def test_a_restart_finds_what_was_cached(family: str, host_memory: int, tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    before = make_llm(family, prefix_cache_dir=folder, prefix_cache_host_memory=host_memory)
    cold, _ = run(before, PROMPT)
    longer, _ = run(before, [*PROMPT, *cold, 9])
    before.close()
    after = make_llm(family, prefix_cache_dir=folder, prefix_cache_host_memory=host_memory)
    assert run(after, PROMPT) == (cold, 40)
    assert tokens_from(after, Tier.DISK) == 40
    assert run(after, [*PROMPT, *cold, 9]) == (longer, 56)
    after.close()
    # Other arithmetic or another block size is another cache.
    other = make_llm(family, prefix_cache_dir=folder, block_size=2 * BLOCK, num_gpu_blocks_override=6)
    assert run(other, PROMPT) == (cold, 0)
    other.close()


def test_an_llm_that_nobody_closes_writes_when_it_is_collected(tmp_path: Path) -> None:
    before = make_llm(prefix_cache_dir=tmp_path / "cache")
    cold, _ = run(before, PROMPT)
    del before
    gc.collect()
    after = make_llm(prefix_cache_dir=tmp_path / "cache")
    assert run(after, PROMPT) == (cold, 40)
    after.close()


def test_a_damaged_record_is_computed_again(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    before = make_llm(prefix_cache_dir=folder)
    cold, _ = run(before, PROMPT)
    before.close()
    records = sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size > 10_000)
    assert len(records) == 7
    for path in records:
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    after = make_llm(prefix_cache_dir=folder)
    assert run(after, PROMPT) == (cold, 0)
    assert next(one.failures for one in after.stats.tiers if one.tier is Tier.DISK) > 0
    after.close()
    # What was found damaged was written anew; what was not looked at may still be damaged.
    again = make_llm(prefix_cache_dir=folder)
    tokens, cached = run(again, PROMPT)
    assert tokens == cold
    assert cached >= BLOCK
    again.close()


def test_a_folder_or_a_size_that_cannot_be_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(ConfigError, match=r"--prefix-cache-dir is .*, which is not a folder"):
        make_llm(prefix_cache_dir=tmp_path / "file")
    with pytest.raises(ConfigError, match="--prefix-cache-host-memory is 100 bytes, but the KV of one block takes"):
        make_llm(prefix_cache_host_memory=100)
    with pytest.raises(ConfigError, match="--prefix-cache-disk-size is 100 bytes"):
        make_llm(prefix_cache_dir=tmp_path / "cache", prefix_cache_disk_size=100)
    with pytest.raises(InsufficientMemory, match="--prefix-cache-host-memory: the prefix cache's tiers ask for"):
        make_llm(prefix_cache_host_memory=2**50)


def test_requests_that_load_and_requests_that_run_do_not_disturb_each_other(tmp_path: Path) -> None:
    """Many at once on a small pool: everything evicts, stores, loads and preempts, and the tokens are the cold ones."""
    prompts: list[Prompt] = [[*PROMPT[: 8 * (i % 6)], *range(9 + i, 30 + i)] for i in range(12)]
    plain = make_llm(enable_prefix_caching=False, num_gpu_blocks_override=200)
    cold = [output.outputs[0].token_ids for output in plain.generate(prompts, GREEDY)]
    for _ in range(2):
        llm = make_llm(prefix_cache_dir=tmp_path / "cache", num_gpu_blocks_override=20)
        for _ in range(3):
            outputs = llm.generate(prompts, GREEDY)
            assert [output.outputs[0].token_ids for output in outputs] == cold
        assert sum(tier.hit_tokens for tier in llm.stats.tiers) > 0
        llm.close()
