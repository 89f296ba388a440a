"""Reads each ready pod's /metrics: how often, how many at a time, and for how long an answer stands."""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import aiohttp

from reprise_operator.exposition import parse_metrics
from reprise_operator.observed import EngineMetrics, ObservedPod
from reprise_operator.settings import ENGINE_PORT

MAX_METRICS_BYTES = 8 * 1024 * 1024
FAILURE_RETRY_SECONDS = 5.0
STALE_INTERVALS = 3.0
"""Figures older than so many intervals are none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scrape:
    metrics: EngineMetrics | None
    """Of the last attempt that succeeded."""
    error: str | None
    at: float
    next_at: float


class _Unreadable(Exception):
    """/metrics gave no figures, and why: the same words for the same fault, since they are written into the status."""


class Scraper:
    """Reads /metrics of ready pods: each at most every `interval` seconds, with jitter so that a thousand pods do not
    answer in one moment, `concurrency` at a time over all services. In between the last answer stands, so a wake-up by
    an event costs no scrape; it also stands for `STALE_INTERVALS` while attempts fail, so a hiccup is no news."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        *,
        interval: float,
        concurrency: int,
        timeout: float,
        clock: Callable[[], float] = time.time,
        random_unit: Callable[[], float] = random.random,
        port: int = ENGINE_PORT,
    ) -> None:
        self._session = session
        self._interval = interval
        self._limit = asyncio.Semaphore(concurrency)
        self._timeout = aiohttp.ClientTimeout(total=timeout)
        self._clock = clock
        self._random_unit = random_unit
        self._port = port
        self._last: dict[str, _Scrape] = {}

    async def observe(self, pods: Sequence[ObservedPod]) -> tuple[ObservedPod, ...]:
        """The pods, those that are ready with their engine's figures or with why there are none."""
        # A pod that is not ready may come back as another process: its old figures say nothing then.
        self.forget(pod.uid for pod in pods if not _is_scrapable(pod))
        now = self._clock()
        due = [pod for pod in pods if _is_scrapable(pod) and self._is_due(pod, now)]
        scrapes = await asyncio.gather(*(self._scrape(pod) for pod in due))
        self._last.update({pod.uid: scrape for pod, scrape in zip(due, scrapes, strict=True)})
        now = self._clock()
        return tuple(self._with_figures(pod, now) for pod in pods)

    def forget(self, uids: Iterable[str]) -> None:
        """Drops what is known of pods that are gone."""
        for uid in uids:
            self._last.pop(uid, None)

    def _is_due(self, pod: ObservedPod, now: float) -> bool:
        last = self._last.get(pod.uid)
        # A clock that was set back would keep a scrape from being due for as long as it went back.
        return last is None or now >= last.next_at or now < last.at

    def _with_figures(self, pod: ObservedPod, now: float) -> ObservedPod:
        last = self._last.get(pod.uid)
        if last is None:
            return pod
        metrics = last.metrics
        if metrics is not None and abs(now - metrics.scraped_at) > STALE_INTERVALS * self._interval:
            metrics = None
        return replace(pod, metrics=metrics, metrics_error=last.error)

    async def _scrape(self, pod: ObservedPod) -> _Scrape:
        try:
            async with self._limit:
                text = await self._fetch(str(pod.ip))
                now = self._clock()
                metrics = _parsed(text, now)
        except _Unreadable as fault:
            last = self._last.get(pod.uid)
            now = self._clock()
            return _Scrape(
                metrics=last.metrics if last else None, error=str(fault), at=now, next_at=now + FAILURE_RETRY_SECONDS
            )
        # Early rather than late: a reconcile that comes each `interval` seconds must find its pods due.
        next_at = now + self._interval * (0.8 + 0.1 * self._random_unit())
        return _Scrape(metrics=metrics, error=None, at=now, next_at=next_at)

    async def _fetch(self, ip: str) -> str:
        """Raises _Unreadable."""
        host = f"[{ip}]" if ":" in ip else ip
        try:
            async with self._session.get(f"http://{host}:{self._port}/metrics", timeout=self._timeout) as response:
                if response.status in (401, 403):
                    raise _Unreadable(
                        f"/metrics answers {response.status}: it asks for credentials, and scrapers have none"
                    )
                if response.status != 200:
                    raise _Unreadable(f"/metrics answers {response.status}")
                content = await response.content.read(MAX_METRICS_BYTES + 1)
                while len(content) <= MAX_METRICS_BYTES and not response.content.at_eof():
                    content += await response.content.read(MAX_METRICS_BYTES + 1 - len(content))
        except TimeoutError:
            raise _Unreadable(
                f"/metrics does not answer within {self._timeout.total:g} s; a NetworkPolicy must let the operator in"
            ) from None
        except (aiohttp.ClientConnectorError, OSError) as error:
            cause = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
            raise _Unreadable(f"port {self._port} cannot be reached: {_words(cause.errno)}") from error
        except (aiohttp.ClientError, ValueError) as error:
            raise _Unreadable(f"/metrics breaks off or is no HTTP ({type(error).__name__})") from error
        if len(content) > MAX_METRICS_BYTES:
            raise _Unreadable(f"/metrics is longer than {MAX_METRICS_BYTES} bytes")
        return content.decode("utf-8", errors="replace")


def _parsed(text: str, now: float) -> EngineMetrics:
    try:
        return parse_metrics(text, scraped_at=now)
    except ValueError as error:
        # The parser quotes what it could not read, which may be another number each time.
        raise _Unreadable("/metrics is no valid exposition of Prometheus") from error


def _words(errno: int | None) -> str:
    return os.strerror(errno) if errno else "the connection failed"


def _is_scrapable(pod: ObservedPod) -> bool:
    return pod.ready and pod.ip is not None and not pod.terminating
