"""The offline interface: the same engine core as the server's, in this process.

from reprise_engine import LLM, SamplingParams

llm = LLM(model="path/to/Qwen3-0.6B", enable_prefix_caching=True)
[output] = llm.generate("The capital of France is", SamplingParams(temperature=0, max_tokens=16))
print(output.outputs[0].text, output.num_cached_tokens)
"""

from __future__ import annotations

import sys
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from reprise_engine.cache_report import CacheExplanation
from reprise_engine.config import (
    DEFAULT_MEMORY_UTILIZATION,
    CacheConfig,
    Device,
    DType,
    EngineConfig,
    HashAlgorithm,
    ModelConfig,
    Quantization,
    ResolvedConfig,
    SchedulerConfig,
    cache_folder,
)
from reprise_engine.core import build_core
from reprise_engine.entrypoints.outputs import Completion, GenerationOutput
from reprise_engine.entrypoints.prompts import (
    ChatMessage,
    Prompt,
    as_conversations,
    as_params,
    as_prompts,
    complete_params,
)
from reprise_engine.errors import ContextLengthExceeded, RequestError
from reprise_engine.kv_events.config import KVEventsConfig
from reprise_engine.loop import EngineCore
from reprise_engine.messages import SchedulerStats
from reprise_engine.request import EngineRequest, RequestId, RequestOutput, SamplingParams, TokenId, TokenLogprobs
from reprise_engine.text import OutputText, Tokenizer, load_tokenizer

# OpenAI's and vLLM's length of a completion that names none. A chat goes on to the end of its turn.
DEFAULT_COMPLETION_TOKENS = 16


@dataclass(slots=True)
class _Generation:
    """A request that is under way."""

    prompt: str | None
    request: EngineRequest
    text: OutputText | None
    parts: list[str] = field(default_factory=list)
    token_ids: list[TokenId] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    cached_tokens: int = 0
    cache_explanation: CacheExplanation | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None


class LLM:
    """A model loaded for batch inference. Arguments carry vLLM's names; an unknown one is a TypeError."""

    def __init__(
        self,
        model: str,
        *,
        tokenizer: str | None = None,
        skip_tokenizer_init: bool = False,
        revision: str | None = None,
        dtype: DType = "auto",
        quantization: Quantization | None = None,
        device: Device = "auto",
        enforce_eager: bool = False,
        tensor_parallel_size: int = 1,
        seed: int = 0,
        trust_remote_code: bool = False,
        max_model_len: int | None = None,
        enable_prefix_caching: bool = True,
        block_size: int | None = None,
        gpu_memory_utilization: float = DEFAULT_MEMORY_UTILIZATION,
        num_gpu_blocks_override: int | None = None,
        kv_cache_memory_bytes: int | None = None,
        prefix_caching_hash_algo: HashAlgorithm = "sha256",
        prefix_cache_host_memory: int = 0,
        prefix_cache_dir: str | Path | None = None,
        prefix_cache_disk_size: int | None = None,
        max_num_seqs: int = 64,
        max_num_batched_tokens: int | None = None,
        enable_chunked_prefill: bool = True,
        chat_template: str | None = None,
        kv_events_config: KVEventsConfig | Mapping[str, Any] | None = None,
    ) -> None:
        """Loads the model. Raises ConfigError, DeviceError, ModelError, InsufficientMemory or OutOfMemory.

        `prefix_cache_*` are the flags of the server, sizes in bytes. With `skip_tokenizer_init` prompts are token ids
        and completions have no text. This process is the first of `tensor_parallel_size` ranks. `kv_events_config` is
        what the server takes as `--kv-events-config`.
        """
        if not isinstance(kv_events_config, KVEventsConfig):
            kv_events_config = KVEventsConfig.of(kv_events_config or {})
        self._tokenizer: Tokenizer | None = None
        if not skip_tokenizer_init:
            self._tokenizer = load_tokenizer(model, tokenizer=tokenizer, revision=revision, chat_template=chat_template)
        self._core, self._config = build_core(
            EngineConfig(
                model=ModelConfig(
                    model=model,
                    tokenizer=tokenizer,
                    revision=revision,
                    dtype=dtype,
                    quantization=quantization,
                    max_model_len=max_model_len,
                    trust_remote_code=trust_remote_code,
                    seed=seed,
                ),
                cache=CacheConfig(
                    enable_prefix_caching=enable_prefix_caching,
                    block_size=block_size,
                    gpu_memory_utilization=gpu_memory_utilization,
                    num_gpu_blocks_override=num_gpu_blocks_override,
                    kv_cache_memory_bytes=kv_cache_memory_bytes,
                    prefix_caching_hash_algo=prefix_caching_hash_algo,
                    prefix_cache_host_memory=prefix_cache_host_memory,
                    prefix_cache_dir=cache_folder(prefix_cache_dir),
                    prefix_cache_disk_size=prefix_cache_disk_size,
                ),
                scheduler=SchedulerConfig(
                    max_num_seqs=max_num_seqs,
                    max_num_batched_tokens=max_num_batched_tokens,
                    enable_chunked_prefill=enable_chunked_prefill,
                ),
                kv_events=kv_events_config,
                device=device,
                enforce_eager=enforce_eager,
                tensor_parallel_size=tensor_parallel_size,
            )
        )
        # Also when the interpreter ends: the last events are published, the last blocks written.
        self._finalizer = weakref.finalize(self, _end, self._core)
        self._num_requests = 0

    @property
    def config(self) -> ResolvedConfig:
        """What the engine settled on: blocks, lengths, device."""
        return self._config

    @property
    def stats(self) -> SchedulerStats:
        """Gauges of now and counters since the start, those of the prefix cache among them."""
        return self._core.stats()

    def get_tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            raise RequestError("The LLM was made with skip_tokenizer_init; prompts must be token ids.", param="prompt")
        return self._tokenizer

    def reset_prefix_cache(self) -> bool:
        """Forgets all cached prefixes; False where some were still in use."""
        success, _ = self._core.reset_prefix_cache()
        self._core.reset_tiers()
        return success

    def close(self) -> None:
        """Writes what the cache still has for `prefix_cache_dir`, for some seconds, and ends all threads.

        Nothing can be generated afterwards. Where it is not called, this happens when the LLM is collected.
        """
        self._finalizer()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[GenerationOutput]:
        """Completes every prompt, all together, and returns them in order.

        A prompt is a text, a list of token ids, {"prompt": text} or {"prompt_token_ids": ids}. `max_tokens` None is 16;
        in any case generation ends at max_model_len. Raises RequestError, before anything runs, for a prompt that
        cannot be served. `use_tqdm` shows progress on a terminal when there are several prompts.
        """
        prompt_list = as_prompts(prompts)
        params_list = as_params(sampling_params, len(prompt_list))
        encoded = [self._encode(prompt) for prompt in prompt_list]
        return self._run(encoded, params_list, default_tokens=DEFAULT_COMPLETION_TOKENS, show_progress=use_tqdm)

    def chat(
        self,
        messages: Sequence[ChatMessage] | Sequence[Sequence[ChatMessage]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        use_tqdm: bool = True,
    ) -> list[GenerationOutput]:
        """Answers one conversation, or each of several. `max_tokens` None goes on to the end of the turn."""
        conversations = as_conversations(messages)
        params_list = as_params(sampling_params, len(conversations))
        tokenizer = self.get_tokenizer()
        encoded: list[tuple[str | None, tuple[TokenId, ...]]] = []
        for conversation in conversations:
            text = tokenizer.render_chat(
                conversation,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                variables=chat_template_kwargs,
            )
            encoded.append((text, tokenizer.encode(text, add_special_tokens=False)))
        return self._run(encoded, params_list, default_tokens=None, show_progress=use_tqdm)

    def _encode(self, prompt: Prompt) -> tuple[str | None, tuple[TokenId, ...]]:
        content: object = prompt
        if isinstance(content, Mapping):
            content = content.get("prompt_token_ids", content.get("prompt"))
            if content is None:
                raise RequestError(
                    f"A prompt given as a mapping needs `prompt` or `prompt_token_ids`; it has {sorted(prompt)}.",
                    param="prompt",
                )
        if isinstance(content, str):
            return content, self.get_tokenizer().encode(content)
        assert isinstance(content, Sequence)
        return None, tuple(content)

    def _run(
        self,
        encoded: Sequence[tuple[str | None, tuple[TokenId, ...]]],
        params_list: Sequence[SamplingParams],
        *,
        default_tokens: int | None,
        show_progress: bool,
    ) -> list[GenerationOutput]:
        generations = [
            self._prepare(prompt, token_ids, params, default_tokens)
            for (prompt, token_ids), params in zip(encoded, params_list, strict=True)
        ]
        by_id = {generation.request.request_id: generation for generation in generations}
        with _progress_bar(len(generations), enabled=show_progress) as (progress, task):
            try:
                self._take(self._core.submit([generation.request for generation in generations]), by_id)
                done = 0
                while self._core.has_work():
                    self._take(self._core.step(), by_id)
                    finished = sum(generation.finish_reason is not None for generation in generations)
                    progress.advance(task, finished - done)
                    done = finished
            finally:
                # After an error or Ctrl-C the next call must not find this one's requests.
                self._core.abort([id_ for id_, generation in by_id.items() if generation.finish_reason is None])
        return [_output_of(generation) for generation in generations]

    def _prepare(
        self,
        prompt: str | None,
        token_ids: tuple[TokenId, ...],
        params: SamplingParams,
        default_tokens: int | None,
    ) -> _Generation:
        if not token_ids:
            raise RequestError("The prompt is empty; at least one token is needed.", param="prompt")
        outside = [token for token in token_ids if not 0 <= token < self._config.vocab_size]
        if outside:
            raise RequestError(
                f"The prompt holds token id {outside[0]}; the model's vocabulary goes from 0 to "
                f"{self._config.vocab_size - 1}.",
                param="prompt",
            )
        params = complete_params(params, vocab_size=self._config.vocab_size, tokenizer=self._tokenizer)
        room = self._config.max_model_len - len(token_ids)
        if room < 1:
            raise ContextLengthExceeded(
                f"The prompt has {len(token_ids)} tokens; with at least one to generate it must be below max_model_len "
                f"{self._config.max_model_len}. Shorten it or raise max_model_len.",
                param="prompt",
                code="context_length_exceeded",
            )
        max_tokens = params.max_tokens if params.max_tokens is not None else default_tokens
        sampling = replace(params, max_tokens=room if max_tokens is None else min(max_tokens, room))
        request = EngineRequest(
            request_id=RequestId(f"llm-{self._num_requests}"),
            prompt_token_ids=token_ids,
            sampling=sampling,
            eos_token_ids=self._eos_token_ids(),
            explain_cache=True,
            arrival_time=time.monotonic(),
        )
        self._num_requests += 1
        text = None
        if self._tokenizer is not None:
            text = OutputText(self._tokenizer, prompt_token_ids=token_ids, sampling=sampling)
        elif sampling.stop:
            raise RequestError("`stop` strings need a tokenizer, but skip_tokenizer_init is set.", param="stop")
        return _Generation(prompt=prompt, request=request, text=text)

    def _eos_token_ids(self) -> tuple[TokenId, ...]:
        if self._config.eos_token_ids:
            return self._config.eos_token_ids
        eos = self._tokenizer.eos_token_id if self._tokenizer is not None else None
        return () if eos is None else (eos,)

    def _take(self, outputs: Sequence[RequestOutput], by_id: Mapping[RequestId, _Generation]) -> None:
        for output in outputs:
            generation = by_id[output.request_id]
            if output.error is not None:
                raise output.error
            if generation.finish_reason is not None:
                continue  # a stop string ended it; the engine had one more token under way
            generation.prompt_logprobs += output.prompt_logprobs
            generation.cached_tokens = output.cached_tokens
            generation.cache_explanation = output.cache_explanation
            if generation.text is None:
                generation.token_ids += output.new_token_ids
                generation.logprobs += output.new_logprobs
                finish_reason, stop_reason = output.finish_reason, output.stop_token_id
                if stop_reason not in generation.request.sampling.stop_token_ids:
                    stop_reason = None
                generation.stop_reason = stop_reason
            else:
                delta = generation.text.push(output)
                generation.parts.append(delta.text)
                generation.token_ids += delta.token_ids
                generation.logprobs += delta.logprobs
                finish_reason = delta.finish_reason
                generation.stop_reason = delta.stop_reason
            if finish_reason is not None:
                generation.finish_reason = finish_reason.value
                if output.finish_reason is None:
                    self._core.abort([output.request_id])


def _end(core: EngineCore) -> None:
    try:
        core.flush()
    finally:
        core.close()


def _output_of(generation: _Generation) -> GenerationOutput:
    assert generation.finish_reason is not None
    sampling = generation.request.sampling
    return GenerationOutput(
        request_id=generation.request.request_id,
        prompt=generation.prompt,
        prompt_token_ids=generation.request.prompt_token_ids,
        outputs=(
            Completion(
                index=0,
                text="".join(generation.parts),
                token_ids=tuple(generation.token_ids),
                finish_reason=generation.finish_reason,
                stop_reason=generation.stop_reason,
                logprobs=None if sampling.logprobs is None else tuple(generation.logprobs),
            ),
        ),
        prompt_logprobs=None if sampling.prompt_logprobs is None else (None, *generation.prompt_logprobs),
        num_cached_tokens=generation.cached_tokens,
        cache_explanation=generation.cache_explanation,
    )


@contextmanager
def _progress_bar(total: int, *, enabled: bool) -> Iterator[tuple[Progress, TaskID]]:
    """A bar on stderr for several requests on a terminal; otherwise it shows nothing."""
    progress = Progress(
        TextColumn("Generating"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=Console(file=sys.stderr),
        disable=not enabled or total < 2 or not sys.stderr.isatty(),
    )
    with progress:
        yield progress, progress.add_task("generating", total=total)
