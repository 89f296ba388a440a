"""One run of one container as a local process: start, output to a file, signals, last words."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO

from tests.support.node_client import Manifest
from tests.support.node_spec import Launch

TERMINATION_MESSAGE_BYTES = 4096
LOG_TAIL_BYTES = 2048
LOG_TAIL_LINES = 80


def timestamp(at: datetime | None = None) -> str:
    """Time as the API writes it."""
    return (at or datetime.now(UTC)).strftime("%Y-%m-%dT%H:%M:%SZ")


class ContainerProcess:
    """A started container. Its processes form one group, which ends with its first process, as in a PID namespace."""

    def __init__(
        self, *, process: asyncio.subprocess.Process, container_id: str, log: Path, termination_log: Path
    ) -> None:
        self._process = process
        self._log = log
        self._termination_log = termination_log
        self._exit: asyncio.Task[int] = asyncio.create_task(self._wait())
        self.container_id = container_id
        self.started_at = timestamp()

    @classmethod
    async def start(cls, launch: Launch, *, container_id: str, log: Path, termination_log: Path) -> ContainerProcess:
        """Raises OSError where the program cannot be executed."""
        with _open_files(launch, log=log, termination_log=termination_log) as output:
            process = await asyncio.create_subprocess_exec(
                *launch.argv,
                cwd=launch.cwd,
                env=dict(launch.env),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        return cls(process=process, container_id=container_id, log=log, termination_log=termination_log)

    async def _wait(self) -> int:
        code = await self._process.wait()
        self.signal(signal.SIGKILL)  # what the first process leaves behind
        return code

    async def wait(self) -> int:
        """The exit code, as the kubelet shows it: 128 + n for signal n. Cancelling the caller ends nothing."""
        code = await asyncio.shield(self._exit)
        return code if code >= 0 else 128 - code

    def signal(self, number: signal.Signals) -> None:
        """Signals the whole group; the group may be gone."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)

    async def stop(self, grace_seconds: float) -> int:
        """SIGTERM to the first process, after the grace SIGKILL to all; the exit code."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(grace_seconds):
                return await self.wait()
        except TimeoutError:
            self.signal(signal.SIGKILL)
            return await self.wait()

    def terminated(self, exit_code: int, *, policy: str) -> Manifest:
        """state.terminated of the container's status. `policy` is its terminationMessagePolicy."""
        message = self._termination_log.read_bytes()[:TERMINATION_MESSAGE_BYTES].decode(errors="replace")
        if not message and exit_code != 0 and policy == "FallbackToLogsOnError":
            tail = self._log.read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace")
            message = "".join(tail.splitlines(keepends=True)[-LOG_TAIL_LINES:])
        state: Manifest = {
            "exitCode": exit_code,
            "reason": "Completed" if exit_code == 0 else "Error",
            "startedAt": self.started_at,
            "finishedAt": timestamp(),
            "containerID": self.container_id,
        }
        if message:
            state["message"] = message
        return state


def _open_files(launch: Launch, *, log: Path, termination_log: Path) -> BinaryIO:
    for folder in (log.parent, termination_log.parent, launch.cwd):
        folder.mkdir(parents=True, exist_ok=True)
    termination_log.write_bytes(b"")
    return log.open("ab")


async def run_to_end(argv: list[str], *, launch: Launch, timeout_seconds: float) -> tuple[bool, str]:
    """A command inside the container (exec probe, exec hook): whether it exited with 0, and its output."""
    process = await asyncio.create_subprocess_exec(
        *argv,
        cwd=launch.cwd,
        env=dict(launch.env),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        async with asyncio.timeout(timeout_seconds):
            output, _ = await process.communicate()
    except TimeoutError:
        process.kill()
        await process.wait()
        return False, f"command timed out after {timeout_seconds:g} s"
    return process.returncode == 0, output.decode(errors="replace")
