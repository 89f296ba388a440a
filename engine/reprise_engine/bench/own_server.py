"""A `reprise serve` of our own for the time of a measurement."""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from reprise_engine.bench.client import wait_ready
from reprise_engine.errors import RepriseError

_STOP_SECONDS = 30.0
_SHOWN_LINES = 5


class ServerFailed(RepriseError):
    """The server did not become ready."""


@asynccontextmanager
async def own_server(model: str, flags: Sequence[str], *, ready_seconds: float) -> AsyncIterator[str]:
    """Its URL, once it serves; it is stopped behind the block. Raises ServerFailed with the end of its log."""
    port = _free_port()
    url = f"http://127.0.0.1:{port}"
    command = ["-m", "reprise_engine.entrypoints.cli", "serve", model, *flags]
    with tempfile.TemporaryDirectory(prefix="reprise-bench-") as folder:
        log = Path(folder) / "server.log"
        with log.open("wb") as output:
            process = await asyncio.create_subprocess_exec(
                sys.executable, *command, "--host", "127.0.0.1", "--port", str(port), stdout=output, stderr=output
            )
            try:
                await _until_ready(process, url, log, ready_seconds)
                yield url
            finally:
                await _stop(process)


async def _until_ready(process: asyncio.subprocess.Process, url: str, log: Path, seconds: float) -> None:
    ready = asyncio.create_task(wait_ready(url, seconds=seconds))
    ended = asyncio.create_task(process.wait())
    try:
        await asyncio.wait((ready, ended), return_when=asyncio.FIRST_COMPLETED)
        if ended.done():
            raise ServerFailed(f"the server ended with exit code {ended.result()}:\n{_tail(log)}")
        if not ready.result():
            raise ServerFailed(
                f"the server was not ready within {seconds:g} s (--ready-check-timeout-sec):\n{_tail(log)}"
            )
    finally:
        ready.cancel()
        ended.cancel()
        await asyncio.gather(ready, ended, return_exceptions=True)


async def _stop(process: asyncio.subprocess.Process) -> None:
    for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGKILL):  # drain, end at once, end
        if process.returncode is not None:
            return
        process.send_signal(number)
        try:
            await asyncio.wait_for(process.wait(), _STOP_SECONDS / 2)
        except TimeoutError:
            continue


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
    return port


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-_SHOWN_LINES:])
