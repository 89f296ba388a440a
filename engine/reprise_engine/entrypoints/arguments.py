"""Flags of the server: vLLM's names and meanings. A flag that is not supported is an error, never ignored.

`build_parser` is what the operator's contract tests parse its argv with.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, cast, get_args

from reprise_engine.config import (
    DEFAULT_BATCHED_TOKENS,
    DEFAULT_DISK_SIZE,
    DEFAULT_MEMORY_UTILIZATION,
    DEFAULT_PIN_BUDGET,
    CacheConfig,
    EngineConfig,
    HashAlgorithm,
    ModelConfig,
    SchedulerConfig,
)
from reprise_engine.entrypoints.bench_arguments import add_bench_arguments
from reprise_engine.entrypoints.chat_arguments import add_chat_arguments
from reprise_engine.entrypoints.evaluate import add_eval_arguments
from reprise_engine.entrypoints.fetch import add_fetch_arguments
from reprise_engine.entrypoints.http_arguments import API_KEY_VARIABLES, add_http_arguments, api_keys, http_options
from reprise_engine.entrypoints.values import (
    folder,
    json_object,
    model_length,
    number_with_suffix,
    port,
    seconds,
    share_or_blocks,
    size,
)
from reprise_engine.errors import ConfigError
from reprise_engine.kv_events.config import KVEventsConfig
from reprise_engine.server.isolation import IsolationMode
from reprise_engine.server.options import ServerOptions
from reprise_engine.version import __version__

ISOLATION_VARIABLE = "REPRISE_PREFIX_CACHE_ISOLATION_SECRET"
MIN_SECRET_LENGTH = 16

_NOT_SUPPORTED = {
    "tool-parser-plugin": "the formats of tool calls are built in",
    "reasoning-parser-plugin": "the formats of reasoning are built in",
    "pipeline-parallel-size": "use --tensor-parallel-size",
    "data-parallel-size": "run several replicas instead",
    "speculative-config": "speculative decoding is not supported",
    "enable-lora": "LoRA adapters are not supported",
    "load-format": "the format is told by the model's files",
    "swap-space": "preempted sequences are computed again from the prefix cache",
    "cpu-offload-gb": "weights are not offloaded",
}
"""vLLM's flags that people bring along, each with the reason, so that the message helps."""


class ArgumentParser(argparse.ArgumentParser):
    """vLLM's reading of flags: `_` and `-` are one, and names are never abbreviated."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **{**keywords, "allow_abbrev": False})

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        if args is not None:
            args = _dashed(args)
        return super().parse_known_args(args, namespace)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self.error(_unknown(unknown))
        return parsed

    def error(self, message: str) -> NoReturn:
        """One line; the whole usage of a server is a screen that hides it."""
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def _dashed(arguments: Sequence[str]) -> list[str]:
    """`--max_model_len=8` as `--max-model-len=8`; values stay as they are."""

    def dash(argument: str) -> str:
        name, equals, value = argument.partition("=")
        return name.replace("_", "-") + equals + value if name.startswith("--") else argument

    return [dash(argument) for argument in arguments]


def _unknown(arguments: Sequence[str]) -> str:
    for argument in arguments:
        name = argument.partition("=")[0].removeprefix("--").removeprefix("no-")
        if argument.startswith("--") and name in _NOT_SUPPORTED:
            return f"--{name} is not supported: {_NOT_SUPPORTED[name]}."
    return f"unknown argument {arguments[0]!r}."


def add_serve_arguments(parser: argparse.ArgumentParser, *, positional_model: bool) -> None:
    """All flags of the server. `reprise serve` takes the model as an argument as well."""
    if positional_model:
        parser.add_argument(
            "model_tag", nargs="?", metavar="MODEL", help="folder, .gguf file, or name in the hub cache"
        )
    model = parser.add_argument_group("model")
    model.add_argument("--model", help="folder, .gguf file, or name in the local hub cache")
    model.add_argument("--tokenizer", help="where the tokenizer is, if not with the model")
    model.add_argument("--revision", help="revision of a model named in the hub cache")
    model.add_argument(
        "--served-model-name", nargs="+", metavar="NAME", help="names that requests may use; the first is shown"
    )
    model.add_argument(
        "--dtype", choices=["auto", "half", "float16", "bfloat16", "float", "float32"], default="auto", help="(auto)"
    )
    model.add_argument(
        "--quantization", "-q", metavar="METHOD", help="ascend: int8 weights and activations as msmodelslim wrote them"
    )
    model.add_argument(
        "--max-model-len", type=model_length, default=None, metavar="TOKENS", help="prompt plus output; 32k, 32K, auto"
    )
    model.add_argument(
        "--device", choices=["auto", "cpu", "npu"], default="auto", help="(auto: an NPU where there is one)"
    )
    model.add_argument(
        "--enforce-eager",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="no captured graphs on an NPU (off); a 310P and a CPU have none",
    )
    model.add_argument("--seed", type=int, default=0, help="of sampling where a request has none (0)")
    model.add_argument(
        "--tensor-parallel-size", type=int, default=1, metavar="RANKS", help="NPUs that serve the model together (1)"
    )

    cache = parser.add_argument_group("KV cache")
    cache.add_argument(
        "--enable-prefix-caching", action=argparse.BooleanOptionalAction, default=True, help="keep prefixes (on)"
    )
    cache.add_argument("--block-size", type=int, default=None, metavar="TOKENS", help="(128 on an NPU, else 16)")
    cache.add_argument(
        "--gpu-memory-utilization",
        type=float,
        default=DEFAULT_MEMORY_UTILIZATION,
        metavar="SHARE",
        help=f"of the device's memory, on every device ({DEFAULT_MEMORY_UTILIZATION})",
    )
    cache.add_argument("--num-gpu-blocks-override", type=int, default=None, metavar="BLOCKS")
    cache.add_argument("--kv-cache-memory-bytes", type=number_with_suffix, default=None, metavar="BYTES")
    cache.add_argument(
        "--prefix-caching-hash-algo",
        choices=get_args(HashAlgorithm),
        default="sha256",
        help="names of blocks (sha256); *_cbor are vLLM's, seeded by PYTHONHASHSEED (0)",
    )
    cache.add_argument(
        "--prefix-cache-pin-budget",
        type=share_or_blocks,
        default=DEFAULT_PIN_BUDGET,
        metavar="SHARE|BLOCKS",
        help=f"what may be pinned: a share such as 0.25 or 25%%, or a number of blocks ({DEFAULT_PIN_BUDGET}); one "
        "sequence of --max-model-len always fits beside it",
    )
    cache.add_argument(
        "--prefix-cache-host-memory",
        type=size,
        default=0,
        metavar="SIZE",
        help="host memory for blocks that the pool has no room for, such as 4GiB (0: none)",
    )
    cache.add_argument(
        "--prefix-cache-dir", type=folder, metavar="DIR", help="folder where blocks outlive the server (none)"
    )
    cache.add_argument(
        "--prefix-cache-disk-size",
        type=size,
        metavar="SIZE",
        help=f"what that folder may hold ({DEFAULT_DISK_SIZE // 2**30}GiB)",
    )
    cache.add_argument(
        "--prefix-cache-isolation",
        choices=get_args(IsolationMode),
        default="none",
        help="per-key: API keys share no prefixes, besides what cache_salt keeps apart (none)",
    )
    cache.add_argument(
        "--prefix-cache-isolation-secret",
        metavar="SECRET",
        help=f"refused: listings of processes show arguments; where replicas must agree, set {ISOLATION_VARIABLE}",
    )
    cache.add_argument(
        "--kv-events-config",
        type=json_object,
        default={},
        metavar="JSON",
        help="""publish what enters and leaves the prefix cache, over ZeroMQ: {"enable_kv_cache_events": true} (off)""",
    )
    cache.add_argument(
        "--warmup-prompts",
        type=Path,
        metavar="FILE",
        help="computed and pinned before readiness: a prompt a line; *.jsonl: an object a line with prompt or messages",
    )
    cache.add_argument(
        "--warmup-timeout", type=seconds, default=300.0, metavar="SECONDS", help="for all of them; failure is logged"
    )

    scheduler = parser.add_argument_group("scheduler")
    scheduler.add_argument("--max-num-seqs", type=int, default=SchedulerConfig().max_num_seqs)
    scheduler.add_argument(
        "--max-num-batched-tokens",
        type=number_with_suffix,
        default=None,
        help=f"a step ({DEFAULT_BATCHED_TOKENS}; without chunked prefill at least the longest prompt)",
    )
    scheduler.add_argument(
        "--enable-chunked-prefill", action=argparse.BooleanOptionalAction, default=True, help="split long prompts (on)"
    )

    server = parser.add_argument_group("server")
    server.add_argument("--host", default="0.0.0.0", help="address to listen on (all)")  # noqa: S104
    server.add_argument("--port", type=port, default=8000, help="(8000); 0 takes a free one")
    add_chat_arguments(server)
    server.add_argument(
        "--generation-config", default="auto", metavar="SOURCE", help="default sampling: auto, vllm (none) or a folder"
    )
    server.add_argument("--override-generation-config", type=json_object, default={}, metavar="JSON")
    server.add_argument(
        "--enable-prompt-tokens-details",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="cached tokens in the usage (always on)",
    )
    server.add_argument("--enable-force-include-usage", action=argparse.BooleanOptionalAction, default=False)
    server.add_argument(
        "--shutdown-timeout", type=seconds, default=100.0, metavar="SECONDS", help="for running requests, on SIGTERM"
    )
    server.add_argument(
        "--uvicorn-log-level",
        dest="log_level",
        choices=["debug", "info", "warning", "error", "critical"],
        default="info",
    )
    add_http_arguments(parser)


def build_parser() -> ArgumentParser:
    """The parser of the command `reprise`."""
    parser = ArgumentParser(prog="reprise", description="Prefix-caching LLM inference.")
    parser.add_argument("--version", action="version", version=f"reprise {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    serve = commands.add_parser("serve", help="an OpenAI-compatible server of one model")
    add_serve_arguments(serve, positional_model=True)
    check = commands.add_parser("check", help="whether serve would start: its flags and the model's files, no weights")
    check.add_argument("--arguments-only", action="store_true", help="leave the model's files alone")
    add_serve_arguments(check, positional_model=True)
    add_bench_arguments(commands.add_parser("bench", help="measure a server: latency, throughput, cache hits"))
    add_eval_arguments(commands.add_parser("eval", help="whether the cache changes what a model says"))
    add_fetch_arguments(commands.add_parser("fetch", help="bring a model onto a volume: resumed, verified"))
    return parser


def build_api_server_parser() -> ArgumentParser:
    """The parser of `python -m reprise_engine.entrypoints.openai.api_server`: the flags of `reprise serve`."""
    parser = ArgumentParser(
        prog="python -m reprise_engine.entrypoints.openai.api_server", description="An OpenAI-compatible server."
    )
    parser.add_argument("--version", action="version", version=f"reprise {__version__}")
    add_serve_arguments(parser, positional_model=False)
    return parser


def server_options(parsed: argparse.Namespace, environment: Mapping[str, str] = os.environ) -> ServerOptions:
    """What the flags mean together. Raises ConfigError for values that cannot be honoured."""
    keys = api_keys(parsed, environment)
    isolation: IsolationMode = parsed.prefix_cache_isolation
    if isolation == "per-key" and not keys:
        raise ConfigError(
            f"--prefix-cache-isolation is per-key, but there are no API keys; set {API_KEY_VARIABLES[0]} or "
            "--api-key-file."
        )
    return ServerOptions(
        engine=EngineConfig(
            model=ModelConfig(
                model=_model(parsed),
                tokenizer=parsed.tokenizer,
                revision=parsed.revision,
                dtype=cast(Any, {"half": "float16", "float": "float32"}.get(parsed.dtype, parsed.dtype)),
                quantization=parsed.quantization,
                max_model_len=parsed.max_model_len,
                seed=parsed.seed,
            ),
            cache=CacheConfig(
                enable_prefix_caching=parsed.enable_prefix_caching,
                block_size=parsed.block_size,
                gpu_memory_utilization=parsed.gpu_memory_utilization,
                num_gpu_blocks_override=parsed.num_gpu_blocks_override,
                kv_cache_memory_bytes=parsed.kv_cache_memory_bytes,
                prefix_caching_hash_algo=parsed.prefix_caching_hash_algo,
                prefix_cache_pin_budget=parsed.prefix_cache_pin_budget,
                prefix_cache_host_memory=parsed.prefix_cache_host_memory,
                prefix_cache_dir=parsed.prefix_cache_dir,
                prefix_cache_disk_size=parsed.prefix_cache_disk_size,
            ),
            scheduler=_scheduler(parsed),
            kv_events=KVEventsConfig.of(parsed.kv_events_config),
            device=parsed.device,
            enforce_eager=parsed.enforce_eager,
            tensor_parallel_size=parsed.tensor_parallel_size,
        ),
        host=parsed.host,
        port=parsed.port,
        served_names=tuple(parsed.served_model_name or ()),
        api_keys=keys,
        chat_template=parsed.chat_template,
        auto_tool_choice=parsed.enable_auto_tool_choice,
        tool_call_parser=parsed.tool_call_parser,
        reasoning_parser=parsed.reasoning_parser,
        generation_config=parsed.generation_config,
        override_generation_config=parsed.override_generation_config,
        force_include_usage=parsed.enable_force_include_usage,
        shutdown_timeout=parsed.shutdown_timeout,
        prefix_cache_isolation=isolation,
        prefix_cache_isolation_secret=_isolation_secret(parsed, environment),
        warmup_prompts=parsed.warmup_prompts,
        warmup_timeout=parsed.warmup_timeout,
        http=http_options(parsed),
        log_level=parsed.log_level,
    )


def _model(parsed: argparse.Namespace) -> str:
    positional = getattr(parsed, "model_tag", None)
    if positional and parsed.model and positional != parsed.model:
        raise ConfigError(f"two models are named, {positional!r} and --model {parsed.model!r}; name one.")
    model = positional or parsed.model
    if not model:
        raise ConfigError("no model is named; give a folder, a .gguf file, or a name in the local hub cache.")
    if not parsed.enable_prompt_tokens_details:
        raise ConfigError("--no-enable-prompt-tokens-details is not supported: cached tokens are always told.")
    return str(model)


def _scheduler(parsed: argparse.Namespace) -> SchedulerConfig:
    tokens = parsed.max_num_batched_tokens
    length = parsed.max_model_len
    if not parsed.enable_chunked_prefill and length is not None and tokens is not None and tokens < length:
        raise ConfigError(
            f"--max-num-batched-tokens is {tokens}; without chunked prefill a whole prompt must fit into one step, so "
            f"it must be at least --max-model-len ({length})."
        )
    return SchedulerConfig(
        max_num_seqs=parsed.max_num_seqs,
        max_num_batched_tokens=tokens,
        enable_chunked_prefill=parsed.enable_chunked_prefill,
    )


def _isolation_secret(parsed: argparse.Namespace, environment: Mapping[str, str]) -> str | None:
    if parsed.prefix_cache_isolation_secret is not None:
        raise ConfigError(
            "--prefix-cache-isolation-secret puts the secret where every listing of processes shows it; set "
            f"{ISOLATION_VARIABLE}."
        )
    secret = environment.get(ISOLATION_VARIABLE)
    if secret is not None and len(secret.strip()) < MIN_SECRET_LENGTH:
        raise ConfigError(
            f"{ISOLATION_VARIABLE} has {len(secret.strip())} characters; it needs at least {MIN_SECRET_LENGTH}, or who "
            "knows one key's salt could find the secret by trying. Or leave it out: one is drawn at each start."
        )
    return secret
