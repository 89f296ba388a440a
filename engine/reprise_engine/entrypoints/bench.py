"""`reprise bench`: flags, and what they mean. The measuring is in reprise_engine.bench, imported when it is asked for.

Where a flag means what one of `vllm bench serve` means, vLLM's name is understood too.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from reprise_engine.errors import ConfigError, RepriseError

if TYPE_CHECKING:
    from reprise_engine.bench import ClientOptions, Load, RequestRecord, Result, Summary, Workload

_T = TypeVar("_T")

EXIT_FAILED, EXIT_USAGE = 1, 2

_URL_KEYS = ("OPENAI_API_KEY", "REPRISE_API_KEY")
_OWN_KEYS = ("REPRISE_API_KEY", "VLLM_API_KEY")
_DEFAULT_CONCURRENCY = 8
_OWN_READY_SECONDS = 600.0
_CACHE_FLAGS = {"--enable-prefix-caching", "--no-enable-prefix-caching"}
_ADDRESS_FLAGS = {"--host", "--port"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
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
        help=f"to wait for the server (0; {_OWN_READY_SECONDS:g} for one that is started)",
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
        help=f"conversations under way at most ({_DEFAULT_CONCURRENCY}; unbounded with --rate)",
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
        "--extra-body", type=_json_object, default={}, metavar="JSON", help="fields to add to every request"
    )

    output = parser.add_argument_group("output")
    output.add_argument("--json", "--result-filename", type=Path, metavar="FILE", help="everything, every request")
    output.add_argument("--png", type=Path, metavar="FILE", help="plots (needs the extra `bench`)")
    output.add_argument(
        "--metric-percentiles", type=_percentiles, default=(50.0, 90.0, 99.0), metavar="P,P…", help="(50,90,99)"
    )
    output.add_argument("--label", default=None, help="name of the run in table, JSON and plots")
    output.add_argument("--disable-tqdm", "--no-progress", action="store_true", help="no progress bar")


def _json_object(text: str) -> Mapping[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object")
    return value


def _percentiles(text: str) -> tuple[float, ...]:
    try:
        values = tuple(float(part) for part in text.split(","))
    except ValueError:
        values = ()
    if not values or not all(0 <= value <= 100 for value in values):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of percentiles from 0 to 100, such as 50,90,99")
    return values


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What the flags mean together."""

    workload: Workload
    load: Load
    options: ClientOptions
    token_ids: Sequence[int]
    base_url: str | None
    model: str | None
    label: str
    engine_flags: tuple[str, ...] = ()
    compare_off: bool = False
    ready_seconds: float = 0.0
    percentiles: tuple[float, ...] = (50.0, 90.0, 99.0)
    json_file: Path | None = None
    png_file: Path | None = None
    show_progress: bool = True


def main(parsed: argparse.Namespace, environment: Mapping[str, str] = os.environ) -> int:
    """0; 1 where a request failed or the server could not be started; 2 for a flag, or a URL with no server."""
    from reprise_engine.bench import report

    try:
        plan = make_plan(parsed, environment)
        runs = asyncio.run(measure(plan))
    except RepriseError as error:
        print(f"reprise bench: error: {error}", file=sys.stderr)
        return EXIT_USAGE if isinstance(error, ConfigError) else EXIT_FAILED
    except KeyboardInterrupt:
        print("reprise bench: interrupted", file=sys.stderr)
        return 130
    ratios = _show(plan, runs)
    if plan.json_file is not None:
        report.write_json(plan.json_file, runs, ratios)
    if plan.png_file is not None:
        from reprise_engine.bench.plots import write_png

        write_png(plan.png_file, [result for result, _ in runs])
    return EXIT_FAILED if any(summary.completed < summary.requests for _, summary in runs) else 0


def _show(plan: Plan, runs: Sequence[tuple[Result, Summary]]) -> dict[str, float] | None:
    from rich.console import Console

    from reprise_engine.bench import compare, report

    # A table that is read from a file or a pipe must not be cut at 80 columns.
    console = Console() if sys.stdout.isatty() else Console(width=120)
    for result, summary in runs:
        report.print_report(console, result, summary)
    if len(runs) != 2:
        return None
    ratios = compare(runs[0][1], runs[1][1])
    report.print_ratios(console, ratios)
    return ratios


def make_plan(parsed: argparse.Namespace, environment: Mapping[str, str]) -> Plan:
    """Raises ConfigError or ModelError; nothing has been sent or started by then."""
    from reprise_engine.bench import ClientOptions, Load, make_workload
    from reprise_engine.bench.plots import check_plotting
    from reprise_engine.bench.text import PromptText, ordinary_ids, word_ids
    from reprise_engine.bench.workloads import COMMON_TOKEN_IDS
    from reprise_engine.text import load_tokenizer

    starts = parsed.base_url is None
    _check_server(parsed)
    if parsed.png is not None:
        check_plotting()
    for option, path in (("--json", parsed.json), ("--png", parsed.png)):
        if path is not None and not path.absolute().parent.is_dir():
            raise ConfigError(f"{option} is {path}, whose folder does not exist.")
    prompt_format = parsed.prompt_format or ("text" if parsed.backend == "openai-chat" else "token-ids")
    if parsed.backend == "openai-chat" and prompt_format != "text":
        raise ConfigError("--prompt-format is token-ids, which --backend openai-chat does not take; use text.")
    source = parsed.tokenizer or (parsed.model if starts else None)
    tokenizer = None if source is None else load_tokenizer(source)
    if prompt_format == "text" and tokenizer is None:
        raise ConfigError("--prompt-format is text, which needs --tokenizer FOLDER, to count the tokens of a prompt.")
    token_ids: Sequence[int] = COMMON_TOKEN_IDS
    if tokenizer is not None:
        token_ids = word_ids(tokenizer) if prompt_format == "text" else ordinary_ids(tokenizer)

    name = parsed.workload
    workload = make_workload(
        name,
        num_prompts=parsed.num_prompts,
        input_len=_default(parsed.input_len, {"shared-prefix": 32, "multi-turn": 100, "random": 1024}[name]),
        output_len=parsed.output_len,
        prefix_len=_default(parsed.prefix_len, 1024 if name == "shared-prefix" else 0),
        num_prefixes=parsed.num_prefixes,
        turns=_default(parsed.turns, 4 if name == "multi-turn" else 1),
        range_ratio=parsed.range_ratio,
        seed=parsed.seed,
        token_ids=token_ids,
    )
    concurrency = parsed.concurrency
    if concurrency is None and math.isinf(parsed.rate):
        concurrency = _DEFAULT_CONCURRENCY
    keys = (environment.get(variable) for variable in (_OWN_KEYS if starts else _URL_KEYS))
    return Plan(
        workload=workload,
        load=Load(
            concurrency=concurrency,
            rate=parsed.rate,
            seed=parsed.seed,
            num_warmups=parsed.warmup,
            reset_prefix_cache=parsed.reset_prefix_cache,
        ),
        options=ClientOptions(
            api="chat" if parsed.backend == "openai-chat" else "completions",
            text=PromptText(tokenizer) if tokenizer is not None and prompt_format == "text" else None,
            api_key=next((key for key in keys if key), None),
            temperature=parsed.temperature,
            ignore_eos=parsed.ignore_eos,
            extra_body=parsed.extra_body,
            timeout=parsed.timeout,
        ),
        token_ids=token_ids,
        base_url=parsed.base_url,
        model=parsed.model,
        label=parsed.label or ("cache on" if parsed.compare else ""),
        engine_flags=tuple(parsed.engine_flags),
        compare_off=parsed.compare == "off",
        ready_seconds=_default(parsed.ready_check_timeout_sec, _OWN_READY_SECONDS if starts else 0.0),
        percentiles=parsed.metric_percentiles,
        json_file=parsed.json,
        png_file=parsed.png,
        show_progress=not parsed.disable_tqdm,
    )


def _default(value: _T | None, default: _T) -> _T:
    return default if value is None else value


def _check_server(parsed: argparse.Namespace) -> None:
    flags = [flag.partition("=")[0].replace("_", "-") for flag in parsed.engine_flags]
    if parsed.base_url is None:
        if parsed.model is None:
            raise ConfigError("there is nothing to measure; give --base-url URL, or --model FOLDER to start a server.")
        if parsed.compare and _CACHE_FLAGS & set(flags):
            raise ConfigError("--compare off sets the cache itself; leave --[no-]enable-prefix-caching out.")
        if _ADDRESS_FLAGS & set(flags):
            raise ConfigError("--host and --port are chosen by the measurement; leave them out.")
        _check_engine_flags(parsed.model, parsed.engine_flags)
        return
    if parsed.engine_flags:
        raise ConfigError(
            f"{parsed.engine_flags[0]!r} is a flag of a server to start, but --base-url names one that runs already."
        )
    if parsed.compare:
        raise ConfigError("--compare off starts its servers itself; give --model FOLDER without --base-url.")


def _check_engine_flags(model: str, flags: Sequence[str]) -> None:
    """With the parser of `reprise serve`: a wrong one exits with 2 here, not in a child's log."""
    from reprise_engine.entrypoints.arguments import build_parser, server_options

    server_options(build_parser().parse_args(["serve", model, *flags]))


async def measure(plan: Plan) -> list[tuple[Result, Summary]]:
    """One run, or two with --compare. Raises ConfigError or ServerFailed."""
    if plan.base_url is not None:
        return [await _measure_at(plan, plan.base_url, plan.model, plan.label, None)]
    runs = [await _measure_own(plan, plan.label, ())]
    if plan.compare_off:
        runs.append(await _measure_own(plan, "cache off", ("--no-enable-prefix-caching",)))
    return runs


async def _measure_own(plan: Plan, label: str, extra: Sequence[str]) -> tuple[Result, Summary]:
    from reprise_engine.bench.own_server import own_server

    assert plan.model is not None
    flags = (*plan.engine_flags, *extra)
    print(f"starting: reprise serve {plan.model} {' '.join(flags)}".rstrip(), file=sys.stderr)
    async with own_server(plan.model, flags, ready_seconds=plan.ready_seconds) as url:
        return await _measure_at(plan, url, None, label, flags)


async def _measure_at(
    plan: Plan, base_url: str, model: str | None, label: str, flags: Sequence[str] | None
) -> tuple[Result, Summary]:
    from reprise_engine.bench import run, summarize
    from reprise_engine.bench.client import server_root, wait_ready

    if plan.ready_seconds:
        await wait_ready(server_root(base_url), seconds=plan.ready_seconds)
    with _ProgressBar(plan.workload.num_requests, label or plan.workload.name, shown=plan.show_progress) as bar:
        result = await run(
            plan.workload,
            base_url,
            model,
            load=plan.load,
            options=plan.options,
            token_ids=plan.token_ids,
            label=label,
            engine_flags=flags,
            progress=bar.advance,
        )
    return result, summarize(result, plan.percentiles)


class _ProgressBar:
    """Requests done, on a terminal's stderr."""

    def __init__(self, total: int, label: str, *, shown: bool) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
            TimeRemainingColumn(),
            console=Console(file=sys.stderr),
            disable=not shown or not sys.stderr.isatty(),
        )
        self._task = self._progress.add_task(label, total=total, figures="")
        self._prompt_tokens = self._cached_tokens = self._failed = 0

    def __enter__(self) -> _ProgressBar:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def advance(self, record: RequestRecord) -> None:
        self._failed += not record.ok
        self._prompt_tokens += record.prompt_tokens or record.sent_prompt_tokens
        self._cached_tokens += record.cached_tokens or 0
        figures = f"{self._cached_tokens / self._prompt_tokens:.0%} cached" if self._prompt_tokens else ""
        if self._failed:
            figures += f", [red]{self._failed} failed[/]"
        self._progress.update(self._task, advance=1, figures=figures)
