"""The real scheduler and prefix cache for engines that stand in for a model."""

from __future__ import annotations

from collections.abc import Sequence

from reprise_engine import __version__
from reprise_engine.config import EngineConfig, ResolvedConfig
from reprise_engine.kv.pins import pin_budget_blocks
from reprise_engine.loop import EngineCore, Runner
from reprise_engine.request import TokenId
from reprise_engine.scheduler import Scheduler


def modelless_core(
    config: EngineConfig,
    runner: Runner,
    *,
    num_blocks: int,
    block_size: int,
    max_model_len: int,
    vocab_size: int,
    eos_token_ids: Sequence[TokenId],
) -> tuple[EngineCore, ResolvedConfig]:
    """What `core.build_core` returns, with `runner` in the place of a model."""
    pin_budget = pin_budget_blocks(
        config.cache.prefix_cache_pin_budget, num_blocks=num_blocks, block_size=block_size, max_model_len=max_model_len
    )
    scheduler = Scheduler(
        config.scheduler,
        num_blocks=num_blocks,
        block_size=block_size,
        enable_prefix_caching=config.cache.enable_prefix_caching,
        max_model_len=max_model_len,
        pin_budget=pin_budget,
    )
    resolved = ResolvedConfig(
        block_size=block_size,
        num_gpu_blocks=num_blocks,
        max_model_len=max_model_len,
        max_num_seqs=config.scheduler.max_num_seqs,
        max_num_batched_tokens=config.scheduler.batched_tokens(max_model_len=max_model_len),
        enable_prefix_caching=config.cache.enable_prefix_caching,
        enable_chunked_prefill=config.scheduler.enable_chunked_prefill,
        gpu_memory_utilization=config.cache.gpu_memory_utilization,
        device="cpu",
        dtype="float32",
        prefix_cache_pin_blocks=pin_budget,
        vocab_size=vocab_size,
        eos_token_ids=tuple(eos_token_ids),
        version=__version__,
    )
    return EngineCore(scheduler, runner), resolved
