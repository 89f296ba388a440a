"""Configuration of the engine: frozen, validated once, free of torch. Flags are parsed in entrypoints/arguments.py."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from reprise_engine.errors import ConfigError
from reprise_engine.kv_events.config import KVEventsConfig

Device = Literal["auto", "cpu", "npu"]
DType = Literal["auto", "float32", "bfloat16", "float16"]
Quantization = Literal["ascend"]
HashAlgorithm = Literal["sha256", "sha256_cbor", "xxhash", "xxhash_cbor"]

DEFAULT_BLOCK_SIZE = 16
NPU_BLOCK_SIZE = 128
DEFAULT_MEMORY_UTILIZATION = 0.90
DEFAULT_PIN_BUDGET = 0.25
DEFAULT_BATCHED_TOKENS = 2048
DEFAULT_DISK_SIZE = 16 * 2**30
MAX_TENSOR_PARALLEL_SIZE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Which model to load. `model` is a local folder or a .gguf file, or the name of one in the local hub cache."""

    model: str
    tokenizer: str | None = None
    revision: str | None = None
    dtype: DType = "auto"
    quantization: Quantization | None = None
    """How the weights are quantised: "ascend" reads what msmodelslim writes. None serves float weights only."""
    max_model_len: int | None = None
    """Tokens of prompt plus output; None takes the model's own limit."""
    trust_remote_code: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        _check_choice("--dtype", self.dtype, get_args(DType))
        if self.quantization not in (None, *get_args(Quantization)):
            raise ConfigError(
                f"--quantization is {self.quantization!r}; it must be ascend (weights that msmodelslim wrote). Other "
                "quantised weights are read from GGUF files only, without this flag."
            )


def cache_folder(given: str | Path | None) -> Path | None:
    """`prefix_cache_dir` as a path. Raises ConfigError for an empty text: Path takes it for the working directory."""
    if given == "":
        raise ConfigError("prefix_cache_dir is empty; give a folder, or None for no disk tier.")
    return None if given is None else Path(given)


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """The paged KV cache and its prefix index."""

    enable_prefix_caching: bool = True
    block_size: int | None = None
    """Tokens a block; None takes the device's: 128 on an NPU, else 16."""
    gpu_memory_utilization: float = DEFAULT_MEMORY_UTILIZATION
    """Share of the device's memory (on a CPU: of the cgroup's limit) for weights, activations and KV together."""
    num_gpu_blocks_override: int | None = None
    kv_cache_memory_bytes: int | None = None
    prefix_caching_hash_algo: HashAlgorithm = "sha256"
    """How blocks are named to the outside (kv/hash_algorithms.py); a match never rests on it."""

    prefix_cache_pin_budget: float | int = DEFAULT_PIN_BUDGET
    """How much of the pool may be pinned: a share from 0.0 to 1.0 (float), or a number of blocks (int)."""

    prefix_cache_host_memory: int = 0
    """Bytes of host memory for blocks that leave the pool; 0 for none."""
    prefix_cache_dir: Path | None = None
    """A folder of its own where blocks outlive the engine; None for none."""
    prefix_cache_disk_size: int | None = None
    """Bytes that the folder may hold, whoever else uses it; None takes DEFAULT_DISK_SIZE."""

    @property
    def has_tiers(self) -> bool:
        """Whether blocks go anywhere below the pool."""
        return self.prefix_cache_host_memory > 0 or self.prefix_cache_dir is not None

    @property
    def disk_size(self) -> int:
        return DEFAULT_DISK_SIZE if self.prefix_cache_disk_size is None else self.prefix_cache_disk_size

    def __post_init__(self) -> None:
        self._check_tiers()
        _check_choice("--prefix-caching-hash-algo", self.prefix_caching_hash_algo, get_args(HashAlgorithm))
        budget = self.prefix_cache_pin_budget
        if budget < 0 or (isinstance(budget, float) and not budget <= 1.0):
            raise ConfigError(
                f"--prefix-cache-pin-budget is {budget}; it must be a share from 0.0 to 1.0, or a number of blocks."
            )
        if not 0.0 < self.gpu_memory_utilization <= 1.0:
            raise ConfigError(
                f"--gpu-memory-utilization is {self.gpu_memory_utilization}; it must be above 0 and at most 1."
            )
        if self.block_size is not None and (self.block_size < 1 or self.block_size > 512):
            raise ConfigError(f"--block-size is {self.block_size}; it must be from 1 to 512.")
        if self.num_gpu_blocks_override is not None and self.num_gpu_blocks_override < 1:
            raise ConfigError(f"--num-gpu-blocks-override is {self.num_gpu_blocks_override}; it must be at least 1.")
        if self.kv_cache_memory_bytes is not None and self.kv_cache_memory_bytes < 1:
            raise ConfigError(f"--kv-cache-memory-bytes is {self.kv_cache_memory_bytes}; it must be at least 1.")

    def _check_tiers(self) -> None:
        if self.prefix_cache_host_memory < 0:
            raise ConfigError(
                f"--prefix-cache-host-memory is {self.prefix_cache_host_memory}; it must be a size such as 4GiB, or 0."
            )
        if self.prefix_cache_disk_size is not None:
            if self.prefix_cache_dir is None:
                raise ConfigError(
                    f"--prefix-cache-disk-size is {self.prefix_cache_disk_size}, but there is no --prefix-cache-dir; "
                    "give the folder, or leave the size out."
                )
            if self.prefix_cache_disk_size < 1:
                raise ConfigError(
                    f"--prefix-cache-disk-size is {self.prefix_cache_disk_size}; it must be a size such as 16GiB."
                )
        if not self.enable_prefix_caching:
            for flag, value in (
                ("--prefix-cache-host-memory", self.prefix_cache_host_memory),
                ("--prefix-cache-dir", self.prefix_cache_dir),
            ):
                if value:
                    raise ConfigError(
                        f"{flag} is {value}, but the prefix cache is off; leave out --no-enable-prefix-caching or "
                        f"{flag}."
                    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """What one step may hold."""

    max_num_seqs: int = 64
    max_num_batched_tokens: int | None = None
    """Tokens a step; None takes the default, and without chunked prefill as many as the longest prompt has."""
    enable_chunked_prefill: bool = True

    def __post_init__(self) -> None:
        if self.max_num_seqs < 1:
            raise ConfigError(f"--max-num-seqs is {self.max_num_seqs}; it must be at least 1.")
        if self.max_num_batched_tokens is not None and self.max_num_batched_tokens < 1:
            raise ConfigError(f"--max-num-batched-tokens is {self.max_num_batched_tokens}; it must be at least 1.")

    def batched_tokens(self, *, max_model_len: int) -> int:
        """Tokens that one step of a model with this context may hold."""
        if self.max_num_batched_tokens is not None:
            return self.max_num_batched_tokens
        # Without chunked prefill a whole prompt must fit into one step.
        return DEFAULT_BATCHED_TOKENS if self.enable_chunked_prefill else max(DEFAULT_BATCHED_TOKENS, max_model_len)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """All that the engine process is told at its start; picklable."""

    model: ModelConfig
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    kv_events: KVEventsConfig = field(default_factory=KVEventsConfig)
    device: Device = "auto"
    enforce_eager: bool = False
    """No captured graphs on an NPU; a 310P and a CPU have none anyway."""
    tensor_parallel_size: int = 1
    """Ranks that compute together, one NPU each; on a CPU one process each."""

    def __post_init__(self) -> None:
        _check_choice("--device", self.device, get_args(Device))
        size = self.tensor_parallel_size
        if not 1 <= size <= MAX_TENSOR_PARALLEL_SIZE:
            raise ConfigError(
                f"--tensor-parallel-size is {size}; it must be from 1 to {MAX_TENSOR_PARALLEL_SIZE}, "
                "the NPUs of one pod."
            )
        if self.kv_events.active and not self.cache.enable_prefix_caching:
            raise ConfigError("--kv-events-config enables events of the prefix cache, but prefix caching is off.")


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedConfig:
    """What the engine settled on after loading: told to the API process, shown in metrics and logs.

    `eos_token_ids` come from generation_config.json, else config.json, else the tokenizer's.
    """

    block_size: int
    num_gpu_blocks: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    enable_prefix_caching: bool
    enable_chunked_prefill: bool
    gpu_memory_utilization: float
    device: Literal["cpu", "npu"]
    dtype: str
    prefix_cache_pin_blocks: int = 0
    """Blocks that may be pinned."""
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    version: str


def _check_choice(flag: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{flag} is {value!r}; it must be one of {', '.join(choices)}.")
