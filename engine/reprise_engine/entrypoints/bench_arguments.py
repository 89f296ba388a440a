"""Flags of `reprise bench`. Where one means what a flag of `vllm bench serve` means, vLLM's name is understood too."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from reprise_engine.entrypoints.values import json_object

DEFAULT_CONCURRENCY = 8
OWN_READY_SECONDS = 600.0


def add_bench_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Measures an OpenAI-compatible server: one that runs (--base-url), or a `reprise serve` that is started for "
        "the time of the measurement (--model alone; its flags come last, behind --)."
    )
    server = parser.add_argument_group("server")
    server.add_argument("--base-url", metavar="URL", help="of a server that runs, with or without /v1")
    server.add_argument(
        "--model",
        help="with --base-url its name there (the first); alone the folder or .gguf file to serve and measure",
    )
    server.add_argument(
        "--backend",
        choices=["openai", "openai-chat"],
        default="openai",
        help="/v1/completions or /v1/chat/completions (openai)",
    )
    server.add_argument("--tokenizer", help="folder of the tokenizer; prompts of text need one (the model's own)")
    server.add_argument(
        "--prompt-format",
        choices=["token-ids", "text"],
        default=None,
        help="(token-ids; text with openai-chat)",
    )
    server.add_argument(
        "--ready-check-timeout-sec",
        type=float,
        default=None,
        metavar="SECONDS",
        help=f"to wait for the server (0; {OWN_READY_SECONDS:g} for one that is started)",
    )
    server.add_argument(
        "--compare", choices=["off"], help="measure a second server with the cache off, and print the ratios"
    )
    server.add_argument(
        "engine_flags", nargs="*", metavar="-- FLAG …", help="of `reprise serve`, where --model is to be started"
    )

    work = parser.add_argument_group("workload, lengths in tokens")
    work.add_argument(
        "--workload",
        "--dataset-name",
        choices=["shared-prefix", "multi-turn", "random"],
        default="shared-prefix",
        help="(shared-prefix)",
    )
    work.add_argument(
        "--num-prompts", "--num-requests", type=int, default=32, help="requests; of multi-turn conversations (32)"
    )
    work.add_argument(
        "--prefix-len",
        "--random-prefix-len",
        "--prefix-repetition-prefix-len",
        type=int,
        default=None,
        metavar="TOKENS",
        help="shared (1024; of multi-turn the system prompt, 0)",
    )
    work.add_argument(
        "--num-prefixes",
        "--prefix-repetition-num-prefixes",
        type=int,
        default=1,
        help="different shared prefixes, taken in turn (1)",
    )
    work.add_argument(
        "--input-len",
        "--random-input-len",
        "--prefix-repetition-suffix-len",
        type=int,
        default=None,
        metavar="TOKENS",
        help="of its own (32; a turn of multi-turn 100; random 1024)",
    )
    work.add_argument(
        "--output-len",
        "--random-output-len",
        "--prefix-repetition-output-len",
        type=int,
        default=64,
        metavar="TOKENS",
        help="to generate (64)",
    )
    work.add_argument(
        "--range-ratio",
        "--random-range-ratio",
        type=float,
        default=0.0,
        metavar="R",
        help="input and output lengths from (1 - R) to (1 + R) times what is given (0)",
    )
    work.add_argument("--turns", type=int, default=None, help="of a conversation of multi-turn (4)")
    work.add_argument("--seed", type=int, default=0, help="of the prompts and of the schedule (0)")

    load = parser.add_argument_group("load")
    load.add_argument(
        "--rate",
        "--request-rate",
        type=float,
        default=math.inf,
        metavar="PER_SECOND",
        help="conversations started a second, as a Poisson process; inf: as soon as one has ended (inf)",
    )
    load.add_argument(
        "--concurrency",
        "--max-concurrency",
        type=int,
        default=None,
        help=f"conversations under way at most ({DEFAULT_CONCURRENCY}; unbounded with --rate)",
    )
    load.add_argument(
        "--warmup", "--num-warmups", type=int, default=1, metavar="REQUESTS", help="not measured, nothing shared (1)"
    )
    load.add_argument("--reset-prefix-cache", action="store_true", help="before measuring, by POST /reset_prefix_cache")
    load.add_argument("--timeout", type=float, default=3600.0, metavar="SECONDS", help="of a request (3600)")

    sampling = parser.add_argument_group("sampling")
    sampling.add_argument("--temperature", type=float, default=0.0, help="(0)")
    sampling.add_argument(
        "--ignore-eos", action=argparse.BooleanOptionalAction, default=True, help="answers of exact length (on)"
    )
    sampling.add_argument(
        "--extra-body", type=json_object, default={}, metavar="JSON", help="fields to add to every request"
    )

    output = parser.add_argument_group("output")
    output.add_argument("--json", "--result-filename", type=Path, metavar="FILE", help="everything, every request")
    output.add_argument("--png", type=Path, metavar="FILE", help="plots (needs the extra `bench`)")
    output.add_argument(
        "--metric-percentiles", type=_percentiles, default=(50.0, 90.0, 99.0), metavar="P,P…", help="(50,90,99)"
    )
    output.add_argument("--label", default=None, help="name of the run in table, JSON and plots")
    output.add_argument("--disable-tqdm", "--no-progress", action="store_true", help="no progress bar")


def _percentiles(text: str) -> tuple[float, ...]:
    try:
        values = tuple(float(part) for part in text.split(","))
    except ValueError:
        values = ()
    if not values or not all(0 <= value <= 100 for value in values):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of percentiles from 0 to 100, such as 50,90,99")
    return values
