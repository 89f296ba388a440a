"""The record of operator_scale.py as a page: what was measured, side by side. Pure but for the writing."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
SMOKE = FOLDER.parent / ".cache" / "bench"

_ROWS: tuple[tuple[str, str, str], ...] = (
    ("children_seconds", "last apply to all children there", "{:.1f} s"),
    ("apply_seconds", "the applies before that", "{:.1f} s"),
    ("requests_per_service", "API requests a service, until then", "{:.1f}"),
    ("settled_requests_per_service", "API requests a service, until pods are ready and all is still", "{:.1f}"),
    ("cpu_seconds", "processor time until all children are there", "{:.1f} s"),
    ("rss_mib", "memory at the end (RSS)", "{:.0f} MiB"),
    ("peak_rss_mib", "memory at most", "{:.0f} MiB"),
    ("change_p50", "one spec change to its Deployment patched, p50", "{:.3f} s"),
    ("change_p99", "the same, p99", "{:.3f} s"),
    ("idle_requests_per_minute", "idle: requests a minute", "{:.0f}"),
    ("idle_writes_per_minute", "idle: writes a minute", "{:.1f}"),
    ("idle_cpu_percent", "idle: processor, of one core", "{:.1f} %"),
)


_TRAFFIC: tuple[tuple[str, str, str], ...] = (
    ("busy_services", "services with traffic", "{:,}"),
    ("endpoints", "metrics endpoints, of all services", "{:,}"),
    ("told_seconds", "traffic begins to the last right hit rate in a status", "{:.0f} s"),
    ("scrapes_per_minute", "endpoints read a minute", "{:.0f}"),
    ("requests_per_minute", "API requests a minute", "{:.0f}"),
    ("writes_per_minute", "writes a minute", "{:.1f}"),
    ("cpu_percent", "processor, of one core", "{:.0f} %"),
    ("rss_mib", "memory (RSS)", "{:.0f} MiB"),
)


def page(
    found: Sequence[Mapping[str, Any]], traffic: Mapping[str, Any] | None, *, machine: Mapping[str, str], at: datetime
) -> str:
    """The whole of OPERATOR.md."""
    services = found[0]["services"]
    lines = [
        "# The operator at scale",
        "",
        f"{services:,} InferenceServices on a real kube-apiserver, by `make bench-operator` on {at:%Y-%m-%d}; what is",
        "measured, and how, is in [README.md](README.md#the-operator). Both systems in one run, one after the other.",
        "",
        "| | " + " | ".join(figures["system"] for figures in found) + " |",
        "|---|" + "---|" * len(found),
    ]
    for field, title, form in _ROWS:
        lines.append(f"| {title} | " + " | ".join(form.format(figures[field]) for figures in found) + " |")
    if traffic is not None:
        lines += ["", "Then, of the operator alone, with pods that have traffic:", "", "| | |", "|---|---|"]
        lines += [f"| {title} | {form.format(traffic[field])} |" for field, title, form in _TRAFFIC]
    lines += [
        "",
        f"Changes measured: {found[0]['changes']} each. Idle for {found[0]['idle_seconds']:.0f} s each.",
        "",
        "| machine | |",
        "|---|---|",
        *(f"| {name} | {value} |" for name, value in machine.items()),
        "",
    ]
    return "\n".join(lines)


def write_report(
    found: Sequence[Mapping[str, Any]], traffic: Mapping[str, Any] | None, *, machine: Mapping[str, str], for_good: bool
) -> None:
    """Into this folder, or, of a run that is not whole, into .cache/bench."""
    now = datetime.now(UTC)
    report, results = (FOLDER, FOLDER / "results") if for_good else (SMOKE, SMOKE)
    results.mkdir(parents=True, exist_ok=True)
    record = {
        "at": now.isoformat(timespec="seconds"),
        "machine": dict(machine),
        "systems": list(found),
        "traffic": traffic,
    }
    (results / "operator.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    (report / "OPERATOR.md").write_text(page(found, traffic, machine=machine, at=now), encoding="utf-8")
    print(f"written: {report / 'OPERATOR.md'}", flush=True)
