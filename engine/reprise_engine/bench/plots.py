"""Four plots of a run as one PNG, by matplotlib (the extra `bench`)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reprise_engine.bench.result import RequestRecord, Result
from reprise_engine.bench.statistics import hit_rate_over_time
from reprise_engine.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_STYLES = (("#1f5fa8", "o", "-"), ("#d1641b", "s", "--"))


def check_plotting() -> None:
    """Raises ConfigError where matplotlib is not installed: better before a run of an hour than behind it."""
    try:
        import matplotlib.figure  # noqa: F401  (its presence is what is asked)
    except ImportError as error:
        raise ConfigError(
            f"--png needs matplotlib, which cannot be imported ({error}); install it with "
            "pip install 'reprise-engine[bench]', or leave --png out."
        ) from error


def write_png(path: Path, runs: Sequence[Result]) -> None:
    """Up to two runs, drawn together. Raises ConfigError without matplotlib."""
    check_plotting()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 8.5), layout="constrained")
    first, times, gaps, hits = figure.subplots(2, 2).flat
    figure.suptitle(_title(runs), fontsize=12)
    _ttft_over_index(figure, first, runs)
    _cumulative(times, [(run.label, [r.ttft for r in run.records if r.ok]) for run in runs], "time to first token")
    _cumulative(
        gaps, [(run.label, [g for r in run.records if r.ok for g in r.itl]) for run in runs], "inter-token latency"
    )
    _hit_rate(hits, runs)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        figure.savefig(file, format="png", dpi=120)


def _title(runs: Sequence[Result]) -> str:
    run = runs[0]
    settings = run.settings
    load = f"concurrency {settings['concurrency'] or 'unbounded'}"
    if settings["rate"] is not None:
        load = f"{settings['rate']:g} conversations/s, {load}"
    lengths = f"{settings['input_len']} new tokens, {settings['output_len']} out"
    if settings.get("prefix_len"):
        lengths = f"{settings['prefix_len']} shared + {lengths}"
    if "turns" in settings:
        lengths = f"{settings['turns']} turns, {lengths}"
    return f"{run.server.model}: {run.workload}, {len(run.records)} requests ({lengths}), {load}"


def _style(axes: Axes, *, title: str, x: str, y: str) -> None:
    axes.set_title(title, loc="left", fontsize=10)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(visible=True, alpha=0.25)


def _ttft_over_index(figure: Any, axes: Axes, runs: Sequence[Result]) -> None:
    points = None
    for run, (_, marker, _line) in zip(runs, _STYLES, strict=False):
        done = [record for record in run.records if record.ok and record.ttft is not None]
        if not done:
            continue
        points = axes.scatter(
            [record.index for record in done],
            [record.ttft or 0.0 for record in done],
            c=[_share(record) for record in done],
            cmap="viridis",
            vmin=0,
            vmax=1,
            marker=marker,
            s=22,
            label=run.label or None,
        )
    failed = [record.index for run in runs for record in run.records if not record.ok]
    if failed:
        axes.scatter(failed, [0.0] * len(failed), marker="x", color="crimson", s=22, label="failed")
    if points is not None:
        figure.colorbar(points, ax=axes, label="share of the prompt that was cached")
    _legend(axes)
    axes.set_ylim(bottom=0)
    _style(axes, title="time to first token, request by request", x="request", y="seconds")


def _share(record: RequestRecord) -> float:
    prompt = record.prompt_tokens or record.sent_prompt_tokens
    return (record.cached_tokens or 0) / prompt if prompt else 0.0


def _cumulative(axes: Axes, series: Sequence[tuple[str, Sequence[float | None]]], what: str) -> None:
    for (label, values), (color, _, line) in zip(series, _STYLES, strict=False):
        measured = [1000 * value for value in values if value is not None]
        if measured:
            axes.ecdf(measured, color=color, linestyle=line, label=label or None)
            if max(measured) > 20 * min(measured) > 0:
                axes.set_xscale("log")
    axes.set_ylim(0, 1.02)
    _legend(axes)
    _style(axes, title=f"{what}, cumulative", x="milliseconds", y="share of all that took at most this")


def _hit_rate(axes: Axes, runs: Sequence[Result]) -> None:
    for run, (color, _, line) in zip(runs, _STYLES, strict=False):
        points = hit_rate_over_time(run.records)
        if points:
            axes.step(
                *zip(*((at, 100 * share) for at, share in points), strict=True),
                where="post",
                color=color,
                linestyle=line,
                marker=".",
                label=run.label or None,
            )
    axes.set_ylim(-2, 102)
    _legend(axes)
    _style(axes, title="prompt tokens cached, of all so far", x="seconds since the start", y="per cent")


def _legend(axes: Axes) -> None:
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8)
