"""Startup, readiness and liveness probes of one running container, with the kubelet's counting."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import aiohttp

from tests.support.node_client import Manifest

ExecCommand = Callable[[list[str], float], Awaitable[tuple[bool, str]]]
"""Runs a command in the container: (argv, timeout in seconds) → (succeeded, output)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """A probe's numbers; seconds."""

    initial_delay: float
    period: float
    timeout: float
    success_threshold: int
    failure_threshold: int

    @classmethod
    def of(cls, probe: Manifest, *, fastest: float | None) -> Timing:
        """With `fastest`, a longer period is cut to it and the failure threshold raised in proportion: things are
        noticed sooner, patience stays what the manifest says."""
        period = float(probe.get("periodSeconds") or 10)
        failures = int(probe.get("failureThreshold") or 3)
        if fastest is not None and period > fastest:
            failures = math.ceil(failures * period / fastest)
            period = fastest
        return cls(
            initial_delay=float(probe.get("initialDelaySeconds") or 0),
            period=period,
            timeout=float(probe.get("timeoutSeconds") or 1),
            success_threshold=int(probe.get("successThreshold") or 1),
            failure_threshold=failures,
        )


class Prober:
    """Runs the probes of one container from its start to its end.

    on_started: startup is over. on_ready(bool): readiness changed. on_kill(message): a startup or liveness probe gave
    up. on_failure(message): one probe failed (for an event).
    """

    def __init__(
        self,
        *,
        container: Manifest,
        address: str,
        session: aiohttp.ClientSession,
        run_command: ExecCommand,
        fastest: float | None,
        on_started: Callable[[], None],
        on_ready: Callable[[bool], None],
        on_kill: Callable[[str], None],
        on_failure: Callable[[str], None],
    ) -> None:
        self._container = container
        self._address = address
        self._session = session
        self._run_command = run_command
        self._fastest = fastest
        self._on_started = on_started
        self._on_ready = on_ready
        self._on_kill = on_kill
        self._on_failure = on_failure

    async def run(self) -> None:
        """Runs until cancelled."""
        startup, readiness, liveness = (
            self._container.get(f"{kind}Probe") for kind in ("startup", "readiness", "liveness")
        )
        if startup is not None and not await self._startup(startup):
            return
        self._on_started()
        if readiness is None:
            self._on_ready(True)
        async with asyncio.TaskGroup() as group:
            if readiness is not None:
                group.create_task(self._readiness(readiness))
            if liveness is not None:
                group.create_task(self._liveness(liveness))

    async def _startup(self, probe: Manifest) -> bool:
        timing = Timing.of(probe, fastest=self._fastest)
        await asyncio.sleep(timing.initial_delay)
        for _ in range(timing.failure_threshold):
            succeeded, message = await self._attempt(probe, timing.timeout)
            if succeeded:
                return True
            self._on_failure(f"Startup probe failed: {message}")
            await asyncio.sleep(timing.period)
        self._on_kill(f"Container {self._container['name']} failed startup probe, will be restarted")
        return False

    async def _readiness(self, probe: Manifest) -> None:
        timing = Timing.of(probe, fastest=self._fastest)
        await asyncio.sleep(timing.initial_delay)
        ready, streak = False, 0
        while True:
            succeeded, message = await self._attempt(probe, timing.timeout)
            if not succeeded:
                self._on_failure(f"Readiness probe failed: {message}")
            streak = streak + 1 if succeeded != ready else 0
            if streak >= (timing.failure_threshold if ready else timing.success_threshold):
                ready, streak = succeeded, 0
                self._on_ready(ready)
            await asyncio.sleep(timing.period)

    async def _liveness(self, probe: Manifest) -> None:
        timing = Timing.of(probe, fastest=self._fastest)
        await asyncio.sleep(timing.initial_delay)
        failures = 0
        while failures < timing.failure_threshold:
            succeeded, message = await self._attempt(probe, timing.timeout)
            failures = 0 if succeeded else failures + 1
            if not succeeded:
                self._on_failure(f"Liveness probe failed: {message}")
            await asyncio.sleep(timing.period)
        self._on_kill(f"Container {self._container['name']} failed liveness probe, will be restarted")

    def _port(self, port: int | str) -> int:
        if isinstance(port, int):
            return port
        for declared in self._container.get("ports") or ():
            if declared.get("name") == port:
                return int(declared["containerPort"])
        return int(port)

    async def _attempt(self, probe: Manifest, timeout_seconds: float) -> tuple[bool, str]:
        try:
            if http := probe.get("httpGet"):
                return await self._http(http, timeout_seconds)
            if tcp := probe.get("tcpSocket"):
                async with asyncio.timeout(timeout_seconds):
                    _, writer = await asyncio.open_connection(tcp.get("host") or self._address, self._port(tcp["port"]))
                writer.close()
                return True, ""
            if command := probe.get("exec"):
                return await self._run_command(list(command["command"]), timeout_seconds)
        except TimeoutError:
            return False, f"no answer within {timeout_seconds:g} s"
        except (OSError, aiohttp.ClientError, ValueError) as error:
            return False, str(error)
        return False, f"this node has no probe of the kind {sorted(probe)}"

    async def _http(self, http: Manifest, timeout_seconds: float) -> tuple[bool, str]:
        scheme = str(http.get("scheme") or "HTTP").lower()
        url = f"{scheme}://{http.get('host') or self._address}:{self._port(http['port'])}{http.get('path') or '/'}"
        headers = {header["name"]: header["value"] for header in http.get("httpHeaders") or ()}
        async with self._session.get(
            url, headers=headers, allow_redirects=False, timeout=aiohttp.ClientTimeout(total=timeout_seconds), ssl=False
        ) as answer:
            return 200 <= answer.status < 400, f"HTTP probe failed with statuscode: {answer.status}"
