"""The demo's cluster in a process of its own, so that it can outlive the demo (make demo KEEP=1).

    python -m tests.support.demo_cluster FOLDER

When it is up it prints one line of JSON, an `Up`. It ends, and everything in it, when its standard input is closed;
after a line "keep" it stays until SIGTERM or SIGINT instead, and removes FOLDER then.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

from tests.support.apiserver import start_api_server
from tests.support.cluster import PROJECT, ClusterConfig, start_cluster
from tests.support.models import smollm2_path

OPERATOR_ARGS = ("--scrape-seconds", "2", "--status-min-interval-seconds", "2")
"""Figures are shown within seconds: a demo is not a cluster that is watched for months."""
START_SECONDS = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Up:
    """What the demo needs to know of a cluster that is up."""

    pid: int
    kubeconfig: str
    api_server: str
    folder: str

    def service_url(self, namespace: str, name: str) -> str | None:
        """http://address:port of a Service; None while it is not there."""
        path = Path(self.folder, "services.json")
        addresses: dict[str, str] = json.loads(path.read_text()) if path.exists() else {}
        return addresses.get(f"{namespace}/{name}")


class ClusterDidNotStart(Exception):
    """The message holds what the process said last."""


class ClusterProcess:
    """The demo's end of the process."""

    def __init__(self, process: subprocess.Popen[str], commands: IO[str], up: Up) -> None:
        self._process = process
        self._commands = commands
        self._kept = False
        self.up = up

    def keep(self) -> None:
        """Lets it run on when the demo ends."""
        self._commands.write("keep\n")
        self._commands.flush()
        self._kept = True

    def close(self) -> None:
        """Ends it, and waits until it is gone, unless it is kept."""
        self._commands.close()
        if not self._kept:
            self._process.wait()


@contextlib.contextmanager
def cluster_process(folder: Path) -> Iterator[ClusterProcess]:
    """Starts the cluster; it is gone at the end unless `keep` was called. Raises ClusterDidNotStart."""
    folder.mkdir(parents=True)
    log = folder / "cluster.log"
    with log.open("w") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(folder)],
            cwd=PROJECT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,  # Ctrl-C is for the demo, which then ends the cluster in good order
        )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
    except BaseException:
        process.stdin.close()
        process.wait()
        raise
    finally:
        process.stdout.close()
    if not line:
        process.stdin.close()
        process.wait()
        raise ClusterDidNotStart(log.read_text()[-3000:])
    running = ClusterProcess(process, process.stdin, Up(**json.loads(line)))
    try:
        yield running
    finally:
        running.close()


def main(folder: Path) -> None:
    """The process itself."""
    stop = threading.Event()
    kept = threading.Event()

    def listen() -> None:
        for line in sys.stdin:
            if line.strip() == "keep":
                kept.set()
        if not kept.is_set():
            stop.set()

    def on_services(addresses: Mapping[str, str]) -> None:
        partial = folder / "services.json.new"
        partial.write_text(json.dumps(addresses))
        partial.replace(folder / "services.json")

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    threading.Thread(target=listen, name="commands", daemon=True).start()
    config = ClusterConfig(
        folder=folder, host_paths={"/models/smollm2": smollm2_path()}, operator_args=OPERATOR_ARGS, npus=2
    )
    with start_api_server() as api, start_cluster(api, config, on_services=on_services):
        up = Up(
            pid=os.getpid(),
            kubeconfig=str(api.kubeconfig_path),
            api_server=api.version_line,
            folder=str(folder),
        )
        print(json.dumps(asdict(up)), flush=True)
        stop.wait()
    if kept.is_set():
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
