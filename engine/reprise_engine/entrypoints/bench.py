"""`reprise bench`: what its flags mean together, and the run. The measuring is in reprise_engine.bench."""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from reprise_engine.entrypoints.bench_arguments import DEFAULT_CONCURRENCY, OWN_READY_SECONDS
from reprise_engine.entrypoints.http_arguments import API_KEY_VARIABLES
from reprise_engine.errors import ConfigError, RepriseError

if TYPE_CHECKING:
    from reprise_engine.bench import ClientOptions, Load, RequestRecord, Result, Summary, Workload

_T = TypeVar("_T")

EXIT_FAILED, EXIT_USAGE = 1, 2

_URL_KEYS = ("OPENAI_API_KEY", "REPRISE_API_KEY")
_CACHE_FLAGS = {"--enable-prefix-caching", "--no-enable-prefix-caching"}
_ADDRESS_FLAGS = {"--host", "--port"}


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
    try:
        if plan.json_file is not None:
            report.write_json(plan.json_file, runs, ratios)
        if plan.png_file is not None:
            from reprise_engine.bench.plots import write_png

            write_png(plan.png_file, [result for result, _ in runs])
    except OSError as error:
        print(f"reprise bench: error: cannot write {error.filename}: {error.strerror}", file=sys.stderr)
        return EXIT_FAILED
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
        concurrency = DEFAULT_CONCURRENCY
    keys = (environment.get(variable) for variable in (API_KEY_VARIABLES if starts else _URL_KEYS))
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
        ready_seconds=_default(parsed.ready_check_timeout_sec, OWN_READY_SECONDS if starts else 0.0),
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
