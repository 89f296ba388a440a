"""The engine as a server has it, driven in this process: scheduler, prefix index, paging, attention, sampler."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from reprise_engine.config import (
    DEFAULT_BLOCK_SIZE,
    CacheConfig,
    Device,
    DType,
    EngineConfig,
    ModelConfig,
    Quantization,
    SchedulerConfig,
)
from reprise_engine.core import build_core
from reprise_engine.loop import Runner
from reprise_engine.request import EngineRequest, RequestId, SamplingParams, TokenId, TokenLogprobs
from reprise_engine.runner.model_runner import ModelRunner

RunnerWrapper = Callable[[ModelRunner], Runner]

_SPARE_BLOCKS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """What both the engine with the cache and the one without are built from."""

    model: str
    revision: str | None = None
    dtype: DType = "auto"
    quantization: Quantization | None = None
    device: Device = "auto"
    block_size: int | None = None
    max_num_batched_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Generated:
    """`logprobs` has one entry a token: the engine's likeliest tokens there."""

    token_ids: tuple[TokenId, ...]
    logprobs: tuple[TokenLogprobs, ...]
    cached_tokens: int


def engine_config(options: EngineOptions, *, caching: bool, lengths: Sequence[int]) -> EngineConfig:
    """A pool that holds sequences of these lengths all at once, so that nothing is evicted."""
    block_size = options.block_size or DEFAULT_BLOCK_SIZE  # a device's own is larger, and then the pool as well
    return EngineConfig(
        model=ModelConfig(
            model=options.model,
            revision=options.revision,
            dtype=options.dtype,
            quantization=options.quantization,
            max_model_len=max(lengths),
        ),
        cache=CacheConfig(
            enable_prefix_caching=caching,
            block_size=options.block_size,
            num_gpu_blocks_override=sum(-(-length // block_size) + 1 for length in lengths) + _SPARE_BLOCKS,
        ),
        scheduler=SchedulerConfig(max_num_batched_tokens=options.max_num_batched_tokens),
        device=options.device,
    )


class InProcessEngine:
    """Greedy generation. Raises what `build_core` raises."""

    def __init__(self, config: EngineConfig, *, wrap_runner: RunnerWrapper = lambda runner: runner) -> None:
        self._core, self.resolved = build_core(config, wrap_runner=wrap_runner)
        self._count = 0

    def generate(
        self, prompts: Sequence[Sequence[TokenId]], *, max_tokens: int, logprobs: int | None = None
    ) -> list[Generated]:
        """All prompts at once, each answered with exactly `max_tokens` tokens."""
        requests = [self._request(prompt, max_tokens, logprobs) for prompt in prompts]
        for refused in self._core.submit(requests):
            assert refused.error is not None
            raise refused.error
        token_ids: dict[RequestId, list[TokenId]] = {request.request_id: [] for request in requests}
        top: dict[RequestId, list[TokenLogprobs]] = {request.request_id: [] for request in requests}
        cached: dict[RequestId, int] = {}
        while self._core.has_work():
            for output in self._core.step():
                token_ids[output.request_id] += output.new_token_ids
                top[output.request_id] += output.new_logprobs
                cached[output.request_id] = output.cached_tokens
        return [Generated(tuple(token_ids[id_]), tuple(top[id_]), cached[id_]) for id_ in token_ids]

    def _request(self, prompt: Sequence[TokenId], max_tokens: int, logprobs: int | None) -> EngineRequest:
        self._count += 1
        return EngineRequest(
            request_id=RequestId(f"eval-{self._count}"),
            prompt_token_ids=tuple(prompt),
            sampling=SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, logprobs=logprobs),
            arrival_time=time.monotonic(),
        )

    @property
    def next_request_id(self) -> RequestId:
        """Of the request that `generate` makes next."""
        return RequestId(f"eval-{self._count + 1}")
