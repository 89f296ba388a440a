"""The operator as its own process, as a person starts it, and what can be asked of it over HTTP."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from tests.support.kubectl import eventually


class Process:
    """`python -m reprise_operator run`, started at once. A resync is an hour away unless `arguments` say otherwise."""

    def __init__(self, kubeconfig: Path, log: Path, *arguments: str) -> None:
        self._log = log
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "reprise_operator", "run", "--host=127.0.0.1", "--log-format=text"),
                    *("--metrics-port=0", "--health-port=0", "--resync-seconds=3600", *arguments),
                ],
                env={**os.environ, "PYTHONUNBUFFERED": "1", "KUBECONFIG": str(kubeconfig)},
                stdout=output,
                stderr=output,
            )

    def log(self) -> str:
        return self._log.read_text()

    def port(self, what: str) -> int:
        match = eventually(lambda: re.search(rf"{what} on port (\d+)", self.log()), f"the port of the {what}")
        return int(match[1])

    def get(self, what: str, path: str) -> tuple[int, str]:
        """Status and body of a GET to the probes' or the metrics' server."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port(what)}{path}", timeout=5) as response:
                return response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def metric(self, series: str) -> float:
        """The value of one series, named as in the exposition; 0 where there is none yet."""
        _, text = self.get("metrics", "/metrics")
        match = re.search(rf"^{re.escape(series)} (\S+)$", text, re.MULTILINE)
        return float(match[1]) if match else 0.0

    def metric_sum(self, name: str, **labels: str) -> float:
        """Over all series of that name which carry these labels."""
        _, text = self.get("metrics", "/metrics")
        found = re.findall(rf"^{re.escape(name)}(\{{.*\}})? (\S+)$", text, re.MULTILINE)
        wanted = [f'{key}="{value}"' for key, value in labels.items()]
        return sum(float(value) for given, value in found if all(label in given for label in wanted))

    def wait_ready(self, *, within: float = 60.0) -> None:
        eventually(
            lambda: self.get("probes", "/readyz")[0] == 200, f"the operator is ready: {self.log()}", within=within
        )

    def wait_leading(self, *, within: float = 60.0) -> None:
        eventually(
            lambda: self.metric("reprise_operator_leader") == 1.0, f"the operator leads: {self.log()}", within=within
        )

    def stop(self) -> float:
        """SIGTERM; how many seconds it took to end."""
        begin = time.monotonic()
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(20)
        return time.monotonic() - begin


@contextlib.contextmanager
def ended(process: Process) -> Iterator[Process]:
    """Kills it at the end, if it still runs then."""
    try:
        yield process
    finally:
        process.process.send_signal(signal.SIGCONT)
        process.process.kill()
        process.process.wait()
