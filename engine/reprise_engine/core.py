"""Builds an engine core from its configuration: device → model → memory → runner → scheduler.

Used by the engine process and by `LLM` alike.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from functools import partial
from typing import Literal

import llguidance
import torch

from reprise_engine import __version__
from reprise_engine.allocator import return_freed_memory
from reprise_engine.attention import create_attention_backend
from reprise_engine.attention.base import LayerKV
from reprise_engine.attention.npu_chip import chip_of
from reprise_engine.attention.npu_limits import check_npu_flags
from reprise_engine.config import (
    DEFAULT_BLOCK_SIZE,
    NPU_BLOCK_SIZE,
    CacheConfig,
    EngineConfig,
    ResolvedConfig,
)
from reprise_engine.device import limit_cpu_threads, npu_number, resolve_device
from reprise_engine.errors import ModelError, RepriseError, RequestError
from reprise_engine.kv.hash_algorithms import block_hasher
from reprise_engine.kv.pins import pin_budget_blocks
from reprise_engine.kv_events.config import KVEventsConfig
from reprise_engine.loop import EngineCore, KVEventSink, Runner
from reprise_engine.memory_facts import block_shape, gather_facts, host_slots
from reprise_engine.memory_probes import cgroup_memory_limit
from reprise_engine.memory_promises import MemoryPromises
from reprise_engine.messages import LoadProgress
from reprise_engine.models.files import find_weights, weight_file_bytes
from reprise_engine.models.loader import LoadedModel, Progress, load_model
from reprise_engine.models.quantization import read_quantization
from reprise_engine.models.spec import read_spec
from reprise_engine.native import load_kernels
from reprise_engine.npu_turns import npu_turn
from reprise_engine.out_of_memory import Phase, naming_phase
from reprise_engine.parallel.group import Group, LostRank, open_group
from reprise_engine.parallel.launch import Ranks
from reprise_engine.parallel.layers import connect_ranks
from reprise_engine.parallel.runner import LeadingRunner
from reprise_engine.parallel.shard import check_size
from reprise_engine.parallel.sizing import plan_for_ranks
from reprise_engine.parallel.slots import SharedSlots
from reprise_engine.parallel.talk import Allocate, Allocated, Loaded, Meet, Sized
from reprise_engine.runner.kv_cache import allocate_kv_cache
from reprise_engine.runner.model_runner import ModelRunner
from reprise_engine.runner.npu_graphs import NPUGraphCapturer
from reprise_engine.runner.profiling import NPUMemory
from reprise_engine.scheduler import Scheduler
from reprise_engine.structured.masks import Grammars
from reprise_engine.structured.vocabulary import grammar_tokenizer
from reprise_engine.text import load_tokenizer
from reprise_engine.tier_setup import build_tiers, check_folder

logger = logging.getLogger(__name__)


def build_core(
    config: EngineConfig,
    *,
    progress: Progress = lambda _progress: None,
    wrap_runner: Callable[[ModelRunner], Runner] = lambda runner: runner,
    on_stuck: Callable[[RepriseError], None] = lambda _error: None,
) -> tuple[EngineCore, ResolvedConfig]:
    """Loads the model and allocates the KV pool. Raises ConfigError, DeviceError, ModelError, InsufficientMemory or
    OutOfMemory.

    The core is to be closed. `wrap_runner` lets an evaluation see, or spoil, what the runner computes. `on_stuck` is
    called by a thread where another rank has ended and this one waits for it all the same.
    """
    with ExitStack() as turn, ExitStack() as undo:
        # First: an endpoint that is taken is told before a model is loaded.
        kv_events = _open_kv_events(config.kv_events)
        if kv_events is not None:
            undo.callback(kv_events.close)
        size = config.tensor_parallel_size
        if size > 1:
            files = find_weights(config.model.model, revision=config.model.revision)
            plan = read_quantization(files, requested=config.model.quantization)
            check_size(read_spec(files, quantized=plan is not None), size)
        device = resolve_device(config.device, size=size)
        if device.type == "npu":
            # Of all ranks, in one order for all engines, and before a rank looks at the memory of its NPU.
            for number in sorted(npu_number(torch.device("npu", rank)) for rank in range(size)):
                turn.enter_context(npu_turn(number))
        ranks = None
        if size > 1:
            ranks = Ranks(config, on_stuck=on_stuck)
            undo.callback(ranks.close)
        built = _build(config, device, kv_events, ranks, progress, wrap_runner)
        undo.pop_all()
    return built


def build_process_core(config: EngineConfig, *, progress: Progress) -> tuple[EngineCore, ResolvedConfig]:
    """`build_core` in a process of its own, which it may end."""
    return build_core(config, progress=progress, on_stuck=lambda _error: os._exit(1))


def _open_kv_events(config: KVEventsConfig) -> KVEventSink | None:
    if not config.active:
        return None
    # Only here: who wants no events needs no ZeroMQ.
    from reprise_engine.kv_events.publisher import open_publisher
    from reprise_engine.kv_events.wire import WireFormat, int_hashes

    publisher = open_publisher(config, WireFormat(config.encoding, int_hashes=int_hashes()))
    logger.info(
        "KV events: %s %s, %s",
        "published at" if config.binds else "sent to",
        config.endpoint,
        f"replayed at {config.replay_endpoint}" if config.replay_endpoint else "no replay",
    )
    return publisher


def _build(
    config: EngineConfig,
    device: torch.device,
    kv_events: KVEventSink | None,
    ranks: Ranks | None,
    progress: Progress,
    wrap_runner: Callable[[ModelRunner], Runner],
) -> tuple[EngineCore, ResolvedConfig]:
    size = config.tensor_parallel_size
    place = None if ranks is None else ranks.place
    device_type: Literal["cpu", "npu"] = "npu" if device.type == "npu" else "cpu"
    block_size = choose_block_size(config.cache, device_type)
    if device_type == "npu":
        check_npu_flags(chip_of(device), block_size=block_size, max_num_seqs=config.scheduler.max_num_seqs)
    npu_memory = NPUMemory.probe(device) if device_type == "npu" else None
    if device_type == "cpu":
        logger.info("%d threads", limit_cpu_threads(sharing=size))
        if not return_freed_memory():
            logger.info("the C library's allocator keeps its own thresholds: a step may take more memory than computed")

    check_folder(config.cache)
    promises = make_promises(device_type)
    if promises is not None:
        with promises.sharing_out():
            promises.promise(weight_file_bytes(config.model.model, revision=config.model.revision))
    kernels = load_kernels() if device_type == "cpu" else None
    with naming_phase(Phase.WEIGHTS):
        model = load_model(config.model, device=device, kernels=kernels, place=place, progress=progress)
    group = None if ranks is None else _meet(ranks, model)
    max_model_len = model.spec.choose_max_model_len(config.model.max_model_len)

    progress(LoadProgress("Sizing the KV cache"))
    shared: SharedSlots | None = None
    shape = block_shape(model, block_size)
    with naming_phase(Phase.PROFILING), nullcontext(0) if promises is None else promises.sharing_out() as promised:
        facts = gather_facts(
            model,
            config,
            npu_memory,
            native=kernels is not None,
            promised=promised,
            shape=shape,
            max_model_len=max_model_len,
            place=place,
        )
        plan = plan_for_ranks(
            [facts] if ranks is None else [facts, *(said.facts for said in ranks.hear(Sized))],
            shape,
            config.cache,
            max_model_len=max_model_len,
            max_model_len_is_explicit=config.model.max_model_len is not None,
            max_num_seqs=config.scheduler.max_num_seqs,
        )
        if promises is not None:
            promises.promise(facts.activations + facts.host_tier + plan.num_blocks * shape.bytes_per_block)
        if ranks is not None:
            shared = ranks.share_slots(host_slots(config, shape), part_bytes=shape.bytes_per_block)
            # Their promises are theirs, and nobody else may plan before they are made.
            ranks.tell(Allocate(num_blocks=plan.num_blocks, num_slots=host_slots(config, shape)))
            ranks.hear(Allocated)
    logger.info("%s", plan.explanation)

    progress(LoadProgress("Allocating the KV cache"))
    with naming_phase(Phase.KV_CACHE):
        kv = make_kv_cache(model, num_blocks=plan.num_blocks + facts.spare_blocks, block_size=block_size)
    if config.cache.prefix_cache_dir is not None:
        progress(LoadProgress("Opening the prefix cache's folder"))
    tiers = build_tiers(
        config.cache,
        model,
        kv,
        block_size=block_size,
        bytes_per_block=size * shape.bytes_per_block,
        kernels=kernels,
        shared=shared,
        num_ranks=size,
    )
    grammars = Grammars(
        partial(_grammar_tokenizer, config, model),
        vocab_size=model.spec.vocab_size,
        max_sequences=config.scheduler.max_num_seqs,
    )
    runner = ModelRunner(
        model,
        create_attention_backend(device, kernels),
        kv,
        seed=config.model.seed,
        transfer=None if tiers is None else tiers.transfer,
        grammars=grammars,
        num_spare_blocks=facts.spare_blocks,
    )
    if facts.graph_sizes:
        progress(LoadProgress("Capturing graphs"))
        capturer = NPUGraphCapturer(
            torch.npu,  # type: ignore[attr-defined]  # of torch_npu
            num_attentions=model.spec.num_layers,
        )
        runner.capture_decode_graphs(capturer, facts.graph_sizes, max_model_len=plan.max_model_len)
    pin_budget = pin_budget_blocks(
        config.cache.prefix_cache_pin_budget,
        num_blocks=plan.num_blocks,
        block_size=block_size,
        max_model_len=plan.max_model_len,
    )
    scheduler = Scheduler(
        config.scheduler,
        num_blocks=plan.num_blocks,
        block_size=block_size,
        enable_prefix_caching=config.cache.enable_prefix_caching,
        max_model_len=plan.max_model_len,
        hasher=block_hasher(config.cache.prefix_caching_hash_algo),
        pin_budget=pin_budget,
        tiering=None if tiers is None else tiers.tiering,
        record_kv_events=kv_events is not None,
    )
    resolved = ResolvedConfig(
        block_size=block_size,
        num_gpu_blocks=plan.num_blocks,
        max_model_len=plan.max_model_len,
        max_num_seqs=config.scheduler.max_num_seqs,
        max_num_batched_tokens=config.scheduler.batched_tokens(max_model_len=plan.max_model_len),
        enable_prefix_caching=config.cache.enable_prefix_caching,
        enable_chunked_prefill=config.scheduler.enable_chunked_prefill,
        gpu_memory_utilization=config.cache.gpu_memory_utilization,
        device=device_type,
        dtype=model.dtype,
        prefix_cache_pin_blocks=pin_budget,
        vocab_size=model.spec.vocab_size,
        eos_token_ids=model.eos_token_ids,
        version=__version__,
    )
    inner = wrap_runner(runner)
    core = EngineCore(
        scheduler,
        inner if ranks is None or group is None else LeadingRunner(inner, ranks, group),
        kv_events=kv_events,
        grammars=grammars,
        ranks=ranks,
    )
    if promises is not None:
        weakref.finalize(core, promises.close)
    return core, resolved


def _grammar_tokenizer(config: EngineConfig, model: LoadedModel) -> llguidance.LLTokenizer:
    """Raises RequestError where this model's tokenizer cannot be had, or is not one that grammars go with."""
    try:
        tokenizer = load_tokenizer(config.model.model, tokenizer=config.model.tokenizer, revision=config.model.revision)
    except ModelError as error:
        raise RequestError(f"Structured output needs the model's tokenizer: {error}") from error
    return grammar_tokenizer(tokenizer, vocab_size=model.spec.vocab_size, eos_token_ids=model.eos_token_ids)


def make_promises(device: Literal["cpu", "npu"]) -> MemoryPromises | None:
    """Only a machine's memory is shared out among engines; a cgroup's limit, or an NPU, is this engine's own."""
    return MemoryPromises() if device == "cpu" and cgroup_memory_limit() is None else None


def _meet(ranks: Ranks, model: LoadedModel) -> Group:
    """With the others, when all have loaded. Raises RankDied, or what one of them failed with."""
    ranks.hear(Loaded)
    ranks.tell(Meet())
    group = open_group(ranks.place, ranks.meeting_point, model.device)
    ranks.when_closed(group.close)
    try:
        connect_ranks(model.module, group)
    except LostRank as error:
        raise ranks.explain(error) from error
    return group


def make_kv_cache(model: LoadedModel, *, num_blocks: int, block_size: int) -> tuple[LayerKV, ...]:
    """The pool, on the model's device."""
    return allocate_kv_cache(
        num_layers=model.spec.num_layers,
        num_blocks=num_blocks,
        block_size=block_size,
        num_kv_heads=model.spec.num_kv_heads,
        head_dim=model.spec.head_dim,
        dtype=model.kv_dtype,
        device=model.device,
    )


def choose_block_size(cache: CacheConfig, device: Literal["cpu", "npu"]) -> int:
    """Tokens a block. Raises ConfigError."""
    if device == "cpu":
        return cache.block_size or DEFAULT_BLOCK_SIZE
    return cache.block_size or NPU_BLOCK_SIZE
