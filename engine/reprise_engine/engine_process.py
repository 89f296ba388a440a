"""Starts the engine process. Free of HTTP and asyncio: a server starts it first, and imports the rest meanwhile."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from contextlib import suppress
from multiprocessing.connection import Connection

from reprise_engine.messages import Start
from reprise_engine.npu_environment import npu_settings

_SHORT_SPIN = ("GOMP_SPINCOUNT", "500")
"""OpenMP's threads wait for each other dozens of times a token. By default they spin for milliseconds, and where a
neighbour wants a processor, decoding falls to a fraction (docs/cpu-performance.md). This is some microseconds."""


def process_environment() -> dict[str, str]:
    """For a process that computes, on top of what this one has."""
    environment = dict(os.environ)
    if not sys.stderr.isatty():
        environment.setdefault("TQDM_DISABLE", "1")  # libraries' progress bars make a mess of a log
    environment.update(npu_settings(environment))
    if "OMP_WAIT_POLICY" not in environment:
        environment.setdefault(*_SHORT_SPIN)
    return environment


class EngineProcess:
    """A process that has been told what to load. It ends by itself when this one does."""

    def __init__(self, start: Start) -> None:
        """Raises OSError where no process can be started."""
        ours, theirs = socket.socketpair()
        lifeline_read, lifeline = os.pipe()
        self._lifeline: int | None = lifeline
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "reprise_engine.process", str(theirs.fileno()), str(lifeline_read)],
                pass_fds=(theirs.fileno(), lifeline_read),
                stdin=subprocess.DEVNULL,
                env=process_environment(),
            )
        finally:
            theirs.close()
            os.close(lifeline_read)
        self.connection = Connection(ours.detach())
        with suppress(BrokenPipeError, ConnectionResetError):  # it is gone already: whoever reads is told
            self.connection.send(start)

    def kill(self) -> None:
        """By force, at once; its messages come to an end."""
        self.process.kill()

    def let_go(self) -> None:
        """To be called when the process has ended: closes the pipe by whose end it would learn that this one ended."""
        if self._lifeline is not None:
            os.close(self._lifeline)
            self._lifeline = None
