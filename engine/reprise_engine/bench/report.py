"""A run as tables for a person, and as JSON for everything else."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from reprise_engine.bench.result import Result
from reprise_engine.bench.statistics import Distribution, Summary

SCHEMA = "reprise-bench/1"

_LATE_SHARE = 0.05
_LATE_SECONDS = 0.01

_TIMES = (
    ("ttft", "time to first token (TTFT)"),
    ("ttft_from_schedule", "TTFT from when it was due"),
    ("tpot", "time per output token (TPOT)"),
    ("itl", "inter-token latency (ITL), by chunk"),
    ("latency", "whole request"),
    ("latency_from_schedule", "whole request, from when it was due"),
)
_FROM_SCHEDULE = {"ttft_from_schedule", "latency_from_schedule"}


def print_report(console: Console, result: Result, summary: Summary) -> None:
    title = f"{result.label}: {result.workload}" if result.label else result.workload
    console.print(_totals(result, summary, title))
    if summary.ttft is not None or summary.latency is not None:
        console.print(_latencies(result, summary))
    for line in warnings(result, summary):
        console.print(f"[yellow]note[/]  {line}", highlight=False)


def _totals(result: Result, summary: Summary, title: str) -> Table:
    table = Table(title=title, title_justify="left", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    failed = summary.requests - summary.completed
    table.add_row("requests", f"{summary.completed:,} of {summary.requests:,} completed")
    if failed:
        table.add_row("[red]failed[/]", ", ".join(f"{count} x {kind}" for kind, count in summary.errors.items()))
    table.add_row("duration", f"{summary.duration:.2f} s")
    table.add_row("prompt tokens", f"{summary.prompt_tokens:,}")
    table.add_row("  of them cached", _cached(summary))
    if summary.hit_rate_counters is not None:
        table.add_row("  by the server's counters", f"{summary.hit_rate_counters:.1%}")
    table.add_row("output tokens", f"{summary.output_tokens:,}")
    table.add_row("requests a second", f"{summary.request_throughput:.2f}")
    table.add_row("output tokens a second", f"{summary.output_throughput:.1f}")
    table.add_row("all tokens a second", f"{summary.total_throughput:.1f}")
    return table


def _cached(summary: Summary) -> str:
    if summary.cached_tokens is None or summary.hit_rate is None:
        return "not told by this server"
    return f"{summary.cached_tokens:,} ({summary.hit_rate:.1%})"


def _latencies(result: Result, summary: Summary) -> Table:
    table = Table(title="milliseconds", title_justify="left")
    table.add_column("")
    rows = [(name, text, getattr(summary, name)) for name, text in _TIMES]
    names: list[str] = next((list(row.percentiles) for _, _, row in rows if row is not None), [])
    for column in ("mean", *names, "max"):
        table.add_column(column, justify="right")
    for name, text, row in rows:
        if row is None or (name in _FROM_SCHEDULE and result.settings.get("rate") is None):
            continue
        assert isinstance(row, Distribution)
        values = (row.mean, *(row.percentiles[key] for key in names), row.max)
        table.add_row(text, *(f"{1000 * value:,.1f}" for value in values))
    return table


def warnings(result: Result, summary: Summary) -> list[str]:
    """What makes a figure mean less than it seems to."""
    lines = []
    lag = result.client.loop_lag_p99
    shortest = summary.itl.percentiles.get("p50", summary.itl.mean) if summary.itl is not None else None
    if lag > _LATE_SECONDS or (shortest is not None and shortest > 0 and lag > max(0.002, _LATE_SHARE * shortest)):
        lines.append(
            f"the client itself was late: its event loop by {1000 * lag:.1f} ms at p99, at most "
            f"{1000 * result.client.loop_lag_max:.1f} ms, while it used {result.client.cpu_share:.0%} of a core. Times "
            "are exact to that, no better; give it a core of its own."
        )
    delay = summary.send_delay
    if result.settings.get("rate") is not None and delay is not None and delay.max > 10 * _LATE_SECONDS:
        lines.append(
            f"requests were sent up to {delay.max:.2f} s after they were due (--concurrency holds them back): "
            "the rows “from when it was due” are what users would have seen."
        )
    if "chunks" in summary.counted_by:
        lines.append(
            "this server tells no usage in its streams: output tokens are the chunks that carried text, and cached "
            "tokens are unknown."
        )
    if summary.tokens_per_chunk is not None and summary.tokens_per_chunk > 1.05:
        lines.append(
            f"chunks carried {summary.tokens_per_chunk:.2f} tokens on average: ITL is between chunks, TPOT between "
            "tokens."
        )
    short = [record for record in result.records if record.ok and record.finish_reason not in ("length", None)]
    if short and result.settings.get("ignore_eos"):
        lines.append(f"{len(short)} answers ended before their length although ignore_eos was asked for.")
    return lines


def print_ratios(console: Console, ratios: Mapping[str, float]) -> None:
    table = Table(title="cache on compared with cache off", title_justify="left")
    table.add_column("times: off / on, rates: on / off")
    table.add_column("ratio", justify="right")
    for name, ratio in ratios.items():
        table.add_row(name.replace("_", " "), f"{ratio:.2f}")
    console.print(table)


def write_json(path: Path, runs: Sequence[tuple[Result, Summary]], ratios: Mapping[str, float] | None = None) -> None:
    """One object: `runs`, each with its settings, versions, `requests` and `summary`; `ratios` of two runs, or null."""
    content = {
        "schema": SCHEMA,
        "runs": [result.as_json() | {"summary": summary.as_json()} for result, summary in runs],
        "ratios": ratios,
    }
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
        json.dump(content, file, indent=1)
        file.write("\n")
