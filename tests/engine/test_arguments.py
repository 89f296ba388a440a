"""The flags of the server: vLLM's names, defaults and meanings."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

from reprise_engine.entrypoints.arguments import (
    build_api_server_parser,
    build_parser,
    server_options,
)
from reprise_engine.entrypoints.values import number_with_suffix
from reprise_engine.errors import ConfigError
from reprise_engine.server.options import ServerOptions


def options(*arguments: str, environment: dict[str, str] | None = None) -> ServerOptions:
    return server_options(build_parser().parse_args(["serve", *arguments]), environment or {})


def test_the_defaults_are_vllms() -> None:
    default = options("m")
    assert default.engine.model.model == "m"
    assert (default.host, default.port) == ("0.0.0.0", 8000)
    assert default.engine.cache.enable_prefix_caching is True
    assert default.engine.scheduler.enable_chunked_prefill is True
    assert default.engine.cache.gpu_memory_utilization == 0.9
    assert default.engine.model.max_model_len is None
    assert (default.engine.model.dtype, default.engine.device) == ("auto", "auto")
    assert default.api_keys == ()
    # Not vLLM's: there both are off. The chat template says whether there is anything to parse.
    assert (default.auto_tool_choice, default.tool_call_parser, default.reasoning_parser) == (True, "auto", "auto")


def test_every_flag_reaches_its_field() -> None:
    made = options(
        *("m", "--served-model-name", "a", "b", "--port=9", "--host", "::1", "--tokenizer", "t", "--revision", "r"),
        *("--dtype", "float16", "--max-model-len", "32k", "--device", "cpu", "--seed", "7", "--block-size", "32"),
        *("--no-enable-prefix-caching", "--gpu-memory-utilization", "0.5", "--num-gpu-blocks-override", "9"),
        *("--kv-cache-memory-bytes", "1.5G", "--max-num-seqs", "3", "--max-num-batched-tokens", "4K"),
        *("--enable-chunked-prefill", "--chat-template", "c", "--generation-config", "vllm"),
        *("--override-generation-config", '{"temperature": 0.5}', "--enable-force-include-usage"),
        *("--shutdown-timeout", "3", "--uvicorn-log-level", "debug", "--prefix-caching-hash-algo", "sha256_cbor"),
        *("--prefix-cache-pin-budget", "12", "--warmup-prompts", "w.jsonl", "--warmup-timeout", "7"),
        *("--enable-prompt-tokens-details", "--tensor-parallel-size", "1"),
        *("--no-enable-auto-tool-choice", "--tool-call-parser", "hermes", "--reasoning_parser=qwen3"),
        environment={"REPRISE_API_KEY": "k1\nk2"},
    )
    assert (made.auto_tool_choice, made.tool_call_parser, made.reasoning_parser) == (False, "hermes", "qwen3")
    model, cache, scheduler = made.engine.model, made.engine.cache, made.engine.scheduler
    assert (model.tokenizer, model.revision, model.dtype, model.max_model_len, model.seed) == (
        *("t", "r", "float16"),
        *(32_000, 7),
    )
    assert (cache.enable_prefix_caching, cache.block_size, cache.gpu_memory_utilization) == (False, 32, 0.5)
    assert (cache.num_gpu_blocks_override, cache.kv_cache_memory_bytes) == (9, 1.5 * 2**30)
    assert (cache.prefix_caching_hash_algo, cache.prefix_cache_pin_budget) == ("sha256_cbor", 12)
    assert (made.warmup_prompts, made.warmup_timeout) == (Path("w.jsonl"), 7.0)
    assert (scheduler.max_num_seqs, scheduler.max_num_batched_tokens) == (3, 4096)
    assert (made.served_names, made.host, made.port, made.engine.device) == (("a", "b"), "::1", 9, "cpu")
    assert (made.api_keys, made.chat_template, made.generation_config) == (("k1", "k2"), "c", "vllm")
    assert (made.override_generation_config, made.force_include_usage) == ({"temperature": 0.5}, True)
    assert (made.shutdown_timeout, made.log_level) == (3.0, "debug")


def test_underscores_are_dashes_and_values_stay_as_they_are() -> None:
    made = options("--model=my_model", "--max_model_len=5", "--served_model_name", "a_b", "--no_enable_prefix_caching")
    assert (made.engine.model.model, made.engine.model.max_model_len) == ("my_model", 5)
    assert (made.served_names, made.engine.cache.enable_prefix_caching) == (("a_b",), False)


def test_the_module_of_vllms_name_takes_the_same_flags() -> None:
    parsed = build_api_server_parser().parse_args(["--model=facebook/opt-125m", "--no-enable-prefix-caching"])
    made = server_options(parsed, {})
    assert (made.engine.model.model, made.engine.cache.enable_prefix_caching) == ("facebook/opt-125m", False)


@pytest.mark.parametrize(("text", "budget"), [("0.5", 0.5), ("25%", 0.25), ("1.0", 1.0), ("1", 1), ("400", 400)])
def test_a_pin_budget_is_a_share_or_a_number_of_blocks(text: str, budget: float | int) -> None:
    found = options("m", "--prefix-cache-pin-budget", text).engine.cache.prefix_cache_pin_budget
    assert (found, type(found)) == (budget, type(budget))


@pytest.mark.parametrize(
    ("text", "number"), [("4096", 4096), ("1k", 1000), ("32K", 32768), ("25.6k", 25600), ("2M", 2097152), ("1g", 10**9)]
)
def test_numbers_have_suffixes(text: str, number: int) -> None:
    assert number_with_suffix(text) == number


@pytest.mark.parametrize("text", ["", "k", "1.5", "-3", "1kk", "0x10", "1 k"])
def test_other_numbers_are_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        number_with_suffix(text)


def test_max_model_len_may_be_automatic() -> None:
    assert options("m", "--max-model-len", "auto").engine.model.max_model_len is None


def test_without_chunked_prefill_a_whole_prompt_fits_into_one_step() -> None:
    made = options("m", "--no-enable-chunked-prefill", "--max-model-len", "9000")
    assert made.engine.scheduler.batched_tokens(max_model_len=9000) == 9000
    with pytest.raises(ConfigError, match=r"--max-num-batched-tokens is 512; .* at least --max-model-len \(9000\)"):
        options("m", "--no-enable-chunked-prefill", "--max-model-len", "9000", "--max-num-batched-tokens", "512")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "no model is named"),
        (["m", "--model", "n"], "two models are named, 'm' and --model 'n'"),
        (["m", "--gpu-memory-utilization", "1.5"], "--gpu-memory-utilization is 1.5"),
        (["m", "--gpu-memory-utilization", "nan"], "--gpu-memory-utilization is nan"),
        (["m", "--block-size", "0"], "--block-size is 0"),
        (["m", "--max-num-seqs", "0"], "--max-num-seqs is 0"),
        (["m", "--tensor-parallel-size", "0"], "--tensor-parallel-size is 0; it must be from 1 to 16"),
        (["m", "--no-enable-prompt-tokens-details"], "cached tokens are always told"),
        (["m", "--kv-events-config", '{"publisher": "nats"}'], """publisher is 'nats'; it must be "null" or "zmq"."""),
        (["m", "--kv-events-config", '{"endpoints": "x"}'], "--kv-events-config has the unknown key 'endpoints'"),
        (
            ["m", "--no-enable-prefix-caching", "--kv-events-config", '{"enable_kv_cache_events": true}'],
            "prefix caching is off",
        ),
    ],
)
def test_values_that_cannot_be_honoured_are_config_errors(arguments: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words.replace("(", r"\(")):
        options(*arguments)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["m", "--no-such-flag"], "unknown argument '--no-such-flag'"),
        (["m", "extra"], "unknown argument 'extra'"),
        (["m", "--enable-prefix"], "unknown argument '--enable-prefix'"),  # no abbreviations
        (["m", "--max-num-batched", "5"], "unknown argument"),
        (["m", "--tool-call-parser", "mistral"], "argument --tool-call-parser: invalid choice: 'mistral'"),
        (["m", "--reasoning_parser=r1"], "argument --reasoning-parser: invalid choice: 'r1'"),
        (["m", "--tool-parser-plugin", "x.py"], "--tool-parser-plugin is not supported: the formats"),
        (["m", "--kv-events-config", "on"], "'on' is not valid JSON"),
        (["m", "--port", "70000"], "'70000' is not a port"),
        (["m", "--dtype", "int3"], "invalid choice: 'int3'"),
        (["m", "--max-model-len", "0"], "'0' must be at least 1, or auto"),
        (["m", "--max-model-len", "many"], "'many' is not a number such as"),
        (["m", "--override-generation-config", "[]"], "is not a JSON object"),
        (["m", "--prefix-caching-hash-algo", "md5"], "invalid choice: 'md5'"),
        (["m", "--shutdown-timeout", "-1"], "not a number of seconds"),
    ],
)
def test_wrong_flags_exit_with_2_and_one_line(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        build_parser().parse_args(["serve", *arguments])
    assert ended.value.code == 2
    errors: Any = capsys.readouterr().err
    assert words in errors
    assert errors.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "expected"),
    [("4GiB", 4 * 2**30), ("1.5TiB", 3 * 2**39), ("512MiB", 2**29), ("64KiB", 2**16), ("4G", 2**32), ("7", 7)],
)
def test_a_size_has_a_unit_or_is_in_bytes(text: str, expected: int) -> None:
    assert options("m", "--prefix-cache-host-memory", text).engine.cache.prefix_cache_host_memory == expected


@pytest.mark.parametrize("text", ["4GB", "x", "-1", "4 GiB of it", ""])
def test_what_is_no_size_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        options("m", f"--prefix-cache-host-memory={text}")
    assert caught.value.code == 2
    assert "is not a size such as 4GiB" in capsys.readouterr().err


def test_the_tiers_flags_reach_their_fields() -> None:
    cache = options("m", "--prefix-cache-dir", "/c", "--prefix-cache-disk-size", "3GiB").engine.cache
    assert (cache.prefix_cache_dir, cache.prefix_cache_disk_size, cache.disk_size) == (Path("/c"), 3 << 30, 3 << 30)
    cache = options("m", "--prefix-cache-dir", "/c").engine.cache
    assert (cache.prefix_cache_disk_size, cache.disk_size) == (None, 16 << 30)
    cache = options("m").engine.cache
    assert (cache.prefix_cache_dir, cache.prefix_cache_host_memory) == (None, 0)


def test_an_empty_cache_folder_is_not_the_working_directory(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        options("m", "--prefix-cache-dir", "")
    assert ended.value.code == 2
    assert "--prefix-cache-dir: is empty" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--no-enable-prefix-caching", "--prefix-cache-host-memory=1GiB"), "--prefix-cache-host-memory is 1073741824"),
        (("--no-enable-prefix-caching", "--prefix-cache-dir=/c"), "--prefix-cache-dir is /c, but the prefix cache is"),
        (("--prefix-cache-disk-size=1GiB",), "there is no --prefix-cache-dir"),
        (("--prefix-cache-dir=/c", "--prefix-cache-disk-size=0"), "--prefix-cache-disk-size is 0"),
    ],
)
def test_tiers_that_cannot_be_are_refused(flags: tuple[str, ...], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        options("m", *flags)
