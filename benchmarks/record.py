"""A run as it is written down: figures with their samples, the machine, the versions. One JSON file, saved after each
sample, so that a run that was cut short can be taken up again."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, cast

from benchmarks.rows import RowName, Subject

FORMAT = 1


class RecordError(Exception):
    """The file is not one that this program can go on with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """`values` are in the row's unit. `missing` says why there is none. `cached` is what the server says it reused of
    each measured prompt, in tokens, where the row is about that and the server tells. `notes` go with samples."""

    subject: Subject
    row: RowName
    values: tuple[float, ...] = ()
    cached: tuple[int | None, ...] = ()
    notes: tuple[str, ...] = ()
    missing: str | None = None
    begun: str | None = None
    ended: str | None = None

    @property
    def median(self) -> float | None:
        return median(self.values) if self.values else None


@dataclass(slots=True, kw_only=True)
class Record:
    """One run. Times are UTC, ISO 8601."""

    command: str
    begun: str
    smoke: bool
    machine: Mapping[str, str]
    versions: dict[str, str] = field(default_factory=dict)
    launches: dict[str, str] = field(default_factory=dict)
    """How each server was started, without paths."""
    figures: dict[tuple[Subject, RowName], Figure] = field(default_factory=dict)

    def figure(self, subject: Subject, row: RowName) -> Figure | None:
        return self.figures.get((subject, row))

    def value(self, subject: Subject, row: RowName) -> float | None:
        figure = self.figure(subject, row)
        return None if figure is None else figure.median

    def count(self, subject: Subject, row: RowName) -> int:
        figure = self.figure(subject, row)
        return 0 if figure is None else len(figure.values)

    def add(
        self,
        subject: Subject,
        row: RowName,
        value: float,
        *,
        at: str,
        cached: int | None = None,
        note: str | None = None,
    ) -> None:
        """One more sample; a reason why there was none is forgotten."""
        known = self.figure(subject, row) or Figure(subject=subject, row=row)
        self.figures[subject, row] = Figure(
            subject=subject,
            row=row,
            values=(*known.values, value),
            cached=(*known.cached, cached),
            notes=known.notes if note is None else (*known.notes, note),
            begun=known.begun or at,
            ended=at,
        )

    def miss(self, subject: Subject, row: RowName, reason: str) -> None:
        """Says why there is no figure, in one line without paths or addresses; samples that there are stay."""
        if not self.count(subject, row):
            self.figures[subject, row] = Figure(subject=subject, row=row, missing=_public(reason))

    def drop(self, row: RowName) -> None:
        for key in [key for key in self.figures if key[1] == row]:
            del self.figures[key]

    @property
    def ended(self) -> str:
        return max((figure.ended for figure in self.figures.values() if figure.ended), default=self.begun)

    def save(self, path: Path) -> None:
        """Whole or not at all."""
        path.parent.mkdir(parents=True, exist_ok=True)
        content = {
            "format": FORMAT,
            "command": self.command,
            "begun": self.begun,
            "smoke": self.smoke,
            "machine": dict(self.machine),
            "versions": self.versions,
            "launches": self.launches,
            "figures": [_rounded(asdict(figure)) for figure in self.figures.values()],
        }
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        os.replace(temporary, path)


def _public(reason: str) -> str:
    """Error messages and logs name folders and ports of the machine, which are nobody's business."""
    without_urls = re.sub(r"https?://\S+", "its address", reason)
    return " ".join(re.sub(r"(?<![\w…])/(?:[^\s/'\"]+/)+", "…/", without_urls).replace("|", "/").split())


def _rounded(figure: dict[str, Any]) -> dict[str, Any]:
    return figure | {"values": [round(value, 6) for value in figure["values"]]}


def load_record(path: Path) -> Record:
    """Raises RecordError."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["format"] != FORMAT:
            raise RecordError(f"{path.name} has format {content['format']}, this program writes {FORMAT}; begin anew.")
        # A record from before there were notes has none.
        lists = {"values": (), "cached": (), "notes": ()}
        figures = [
            Figure(**(entry | {name: tuple(entry.get(name, none)) for name, none in lists.items()}))
            for entry in content["figures"]
        ]
        return Record(
            command=content["command"],
            begun=content["begun"],
            smoke=content["smoke"],
            machine=cast(dict[str, str], content["machine"]),
            versions=content["versions"],
            launches=content["launches"],
            figures={(figure.subject, figure.row): figure for figure in figures},
        )
    except FileNotFoundError:
        raise RecordError(f"there is no {path.name} to go on with; begin a run without --resume.") from None
    except (KeyError, TypeError, ValueError) as error:
        raise RecordError(f"{path.name} is no record of a run ({error!r}); begin anew.") from error
