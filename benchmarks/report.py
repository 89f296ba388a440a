"""A record as a report: every figure beside its goal, with the run it comes from. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.record import Figure, Record
from benchmarks.rows import ROWS, SUBJECT_TITLES, SUBJECTS, Goal, Row, Subject, is_met

_REUSED = 0.9
"""A row about cached tokens counts as such where at least this share of the best one's was cached."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """One goal of one row. `ratio` is ours through `against`'s, or our value where the goal is a value; None where one
    of the two is missing, and then `met` is None and `why` says which."""

    row: Row
    goal: Goal
    ours: float | None
    theirs: float | None
    ratio: float | None
    met: bool | None
    why: str = ""


def verdicts(record: Record) -> list[Verdict]:
    """In the order of the rows."""
    return [_judge(record, row, goal) for row in ROWS.values() for goal in row.goals]


def _judge(record: Record, row: Row, goal: Goal) -> Verdict:
    ours = record.value("reprise", row.name)
    other = goal.row or row.name
    theirs = None if goal.against is None else record.value(goal.against, other)
    why = ""
    if ours is None:
        why = _why_missing(record.figure("reprise", row.name), "Reprise")
    elif goal.against is not None and theirs is None:
        why = _why_missing(record.figure(goal.against, other), SUBJECT_TITLES[goal.against])
    if why:
        return Verdict(row=row, goal=goal, ours=ours, theirs=theirs, ratio=None, met=None, why=why)
    assert ours is not None
    ratio = ours if theirs is None else ours / theirs
    met = is_met(better=row.better, value=ratio, limit=goal.limit)
    return Verdict(row=row, goal=goal, ours=ours, theirs=theirs, ratio=ratio, met=met)


def _why_missing(figure: Figure | None, title: str) -> str:
    return f"{title}: {figure.missing if figure is not None and figure.missing else 'not part of this run'}"


def number(value: float) -> str:
    """Three significant digits, no exponent."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}" if value >= 1 else f"{value:.3f}"


def _measured(figure: Figure, unit: str) -> str:
    assert figure.median is not None
    low, high = min(figure.values), max(figure.values)
    spread = f" ({number(low)} – {number(high)}, n = {len(figure.values)})" if len(figure.values) > 1 else " (n = 1)"
    return f"{number(figure.median)} {unit}{spread}"


def _goal_words(verdict: Verdict) -> str:
    sign = "≤" if verdict.row.better == "lower" else "≥"
    goal = verdict.goal
    if goal.against is None:
        return f"{sign} {goal.limit:g} {verdict.row.unit}"
    of = SUBJECT_TITLES[goal.against] if goal.against != "reprise" else "itself"
    what = "" if goal.row is None else ", " + ROWS[goal.row].title
    return f"{sign} {goal.limit:g} of {of}{what}"


def _met_words(met: bool | None) -> str:
    return "not measured" if met is None else "met" if met else "**missed**"


def table(record: Record) -> str:
    """For a terminal: one line a goal."""
    lines = [f"{'':<76}{'Reprise':>10}{'beside':>10}{'ratio':>8}  goal"]
    for verdict in verdicts(record):
        ours, theirs, ratio = (
            "" if value is None else number(value) for value in (verdict.ours, verdict.theirs, verdict.ratio)
        )
        words = f"{_goal_words(verdict)}: {_met_words(verdict.met).strip('*')}"
        lines.append(f"{verdict.row.title:<76}{ours:>10}{theirs:>10}{ratio:>8}  {words}")
    return "\n".join(lines)


def render(record: Record, *, notes: str, plots: Sequence[str] = ()) -> str:
    """RESULTS.md. `notes` are written by hand and go in as they are; `plots` are paths relative to the report."""
    parts = ["# Results\n"]
    if record.smoke:
        parts.append("**A smoke run: a few tokens on a busy machine. The figures mean nothing.**\n")
    parts.append(_run_facts(record))
    parts.append(_goals(record))
    parts.append(_figures(record))
    parts.extend(f"![{plot}]({plot})\n" for plot in plots)
    if notes.strip():
        parts.append(notes.strip() + "\n")
    parts.append(_commands(record))
    parts.append("Written by `python -m benchmarks.run`; what is written by hand is in NOTES.md.\n")
    return "\n".join(parts)


def _run_facts(record: Record) -> str:
    titles = {str(subject): title for subject, title in SUBJECT_TITLES.items()}
    facts = [
        ("command", f"`{record.command}`"),
        ("run", f"{record.begun} to {record.ended} (UTC)"),
        *record.machine.items(),
        *((titles.get(name, name), version) for name, version in record.versions.items()),
    ]
    return "\n".join(["| the run | |", "|---|---|", *(f"| {name} | {value} |" for name, value in facts)]) + "\n"


def _goals(record: Record) -> str:
    judged = verdicts(record)
    count = {met: sum(verdict.met is met for verdict in judged) for met in (True, False, None)}
    lines = [
        "## Goals\n",
        f"{count[True]} met, {count[False]} missed, {count[None]} not measured. A ratio is Reprise's median through "
        "the other's, of the same run.\n",
        "| | Reprise | beside it | ratio | goal | |",
        "|---|---|---|---|---|---|",
    ]
    for verdict in judged:
        against, unit = verdict.goal.against, verdict.row.unit
        ours = "" if verdict.ours is None else f"{number(verdict.ours)} {unit}"
        theirs = (
            ""
            if verdict.theirs is None or against is None
            else f"{SUBJECT_TITLES[against]} {number(verdict.theirs)} {unit}"
        )
        ratio = "" if verdict.ratio is None or against is None else number(verdict.ratio)
        met = _met_words(verdict.met) + (f" ({verdict.why})" if verdict.why else "")
        lines.append(f"| {verdict.row.title} | {ours} | {theirs} | {ratio} | {_goal_words(verdict)} | {met} |")
    return "\n".join(lines) + "\n"


def _figures(record: Record) -> str:
    shown = [subject for subject in SUBJECTS if any(key[0] == subject for key in record.figures)]
    lines = [
        "## All figures\n",
        "Medians (least – greatest, samples). Reprise's samples lie before and after the peers'.\n",
        "| | " + " | ".join(SUBJECT_TITLES[subject] for subject in shown) + " |",
        "|---" * (len(shown) + 1) + "|",
    ]
    for row in ROWS.values():
        cells = [_cell(record, subject, row) for subject in shown]
        if any(cells):
            lines.append(f"| {row.title} | " + " | ".join(cells) + " |")
    noted = [
        f"- {row.title}: {note}"
        for row in ROWS.values()
        for subject in shown
        if (figure := record.figure(subject, row.name)) is not None
        for note in figure.notes
    ]
    return "\n".join([*lines, *([""] if noted else []), *noted]) + "\n"


def _cell(record: Record, subject: Subject, row: Row) -> str:
    figure = record.figure(subject, row.name)
    if figure is None:
        return ""
    if not figure.values:
        return f"not measured: {figure.missing}"
    told = [cached for cached in figure.cached if cached is not None]
    reused = f"; {min(told):,} tokens reused" if told else ""
    best = max((cached or 0 for other in SUBJECTS for cached in _cached(record, other, row)), default=0)
    if told and subject != "reprise-cache-off" and min(told) < _REUSED * best:
        reused = f"; **only {min(told):,} tokens reused**"
    return _measured(figure, row.unit) + reused


def _cached(record: Record, subject: Subject, row: Row) -> tuple[int | None, ...]:
    figure = record.figure(subject, row.name)
    return () if figure is None else figure.cached


def _commands(record: Record) -> str:
    lines = ["## How each server was started\n"]
    lines += [f"- {name}: `{command}`" for name, command in record.launches.items()]
    return "\n".join(lines) + "\n"
