"""What the pods say: Kubernetes bodies → ObservedPod, and each ready pod's /metrics (read by exposition.py)."""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

import aiohttp

from reprise_operator.cause import without_secrets
from reprise_operator.exposition import parse_metrics
from reprise_operator.observed import ContainerFailure, EngineMetrics, ObservedPod, Termination
from reprise_operator.settings import ENGINE_PORT

Body = Mapping[str, Any]

TEMPLATE_HASH_LABEL = "pod-template-hash"
STATEFUL_SET_HASH_LABEL = "controller-revision-hash"
REVISION_ANNOTATION = "deployment.kubernetes.io/revision"

# A container that is merely being set up waits with one of these.
_STARTING = frozenset({"ContainerCreating", "PodInitializing"})

MAX_METRICS_BYTES = 8 * 1024 * 1024
FAILURE_RETRY_SECONDS = 5.0
STALE_INTERVALS = 3.0
"""Figures older than so many intervals are none."""


# Pods ---------------------------------------------------------------------------------------------------------------


def observed_pod(body: Body) -> ObservedPod:
    """A pod's body, as the API server returns it, without figures from its engine."""
    metadata, status = body["metadata"], body.get("status") or {}
    conditions = {condition["type"]: condition for condition in status.get("conditions") or ()}
    scheduled = conditions.get("PodScheduled", {})
    labels, containers = metadata.get("labels") or {}, status.get("containerStatuses") or ()
    is_scheduled = scheduled.get("status") == "True" or bool((body.get("spec") or {}).get("nodeName"))
    return ObservedPod(
        name=metadata["name"],
        uid=metadata["uid"],
        ip=status.get("podIP") or None,
        phase=status.get("phase") or "Pending",
        ready=conditions.get("Ready", {}).get("status") == "True",
        terminating="deletionTimestamp" in metadata,
        template_hash=labels.get(TEMPLATE_HASH_LABEL) or labels.get(STATEFUL_SET_HASH_LABEL),
        started_at=_seconds(status.get("startTime")),
        created_at=_seconds(metadata.get("creationTimestamp")),
        node=(body.get("spec") or {}).get("nodeName"),
        scheduled=is_scheduled,
        started=bool(containers) and all(container.get("started") for container in containers),
        unschedulable_message=None if is_scheduled else scheduled.get("message"),
        failures=_failures(status),
        terminations=_terminations(status),
        initializing=_initializing(status),
        awaits_volumes=is_scheduled and status.get("phase", "Pending") == "Pending" and _is_being_set_up(status),
    )


def current_template_hash(workload: Body | None, replica_sets: Iterable[Body]) -> str | None:
    """What pods of the present template are labelled with: the update revision of a StatefulSet, of a Deployment the
    pod-template-hash of the ReplicaSet that carries its newest revision.

    None while there is none, and while the controller has not seen the workload's present generation: what it says may
    then still be about the old template.
    """
    if workload is None:
        return None
    metadata, status = workload["metadata"], workload.get("status") or {}
    if status.get("observedGeneration") != metadata.get("generation"):
        return None
    if workload["kind"] == "StatefulSet":
        return status.get("updateRevision") or None
    owned = [replica_set["metadata"] for replica_set in replica_sets if _is_of(workload, replica_set)]
    if not owned:
        return None
    newest = max(owned, key=_revision)
    return (newest.get("labels") or {}).get(TEMPLATE_HASH_LABEL)


def templates(workload: Body | None, replica_sets: Iterable[Body]) -> dict[str, Body]:
    """pod-template-hash → pod template of each ReplicaSet of a Deployment, as the Deployment once had it."""
    found: dict[str, Body] = {}
    for replica_set in replica_sets:
        name = (replica_set["metadata"].get("labels") or {}).get(TEMPLATE_HASH_LABEL)
        if workload is None or name is None or not _is_of(workload, replica_set):
            continue
        template = replica_set["spec"]["template"]
        labels = {key: value for key, value in template["metadata"]["labels"].items() if key != TEMPLATE_HASH_LABEL}
        found[name] = {**template, "metadata": {**template["metadata"], "labels": labels}}
    return found


def _is_of(workload: Body, replica_set: Body) -> bool:
    owners = replica_set["metadata"].get("ownerReferences") or ()
    return any(owner.get("uid") == workload["metadata"]["uid"] for owner in owners)


def _revision(metadata: Body) -> int:
    try:
        return int((metadata.get("annotations") or {}).get(REVISION_ANNOTATION, 0))
    except ValueError:
        return 0


def _failures(status: Body) -> tuple[ContainerFailure, ...]:
    init = ((container, True) for container in status.get("initContainerStatuses") or ())
    main = ((container, False) for container in status.get("containerStatuses") or ())
    found = (_failure(container, init=is_init) for container, is_init in (*init, *main))
    return tuple(failure for failure in found if failure is not None)


def _is_being_set_up(status: Body) -> bool:
    """Whether no container was tried yet."""
    containers = [*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())]
    reasons = [((container.get("state") or {}).get("waiting") or {}).get("reason") for container in containers]
    tried = any(container.get("lastState") for container in containers)
    return not tried and all(reason in _STARTING for reason in reasons)


def _initializing(status: Body) -> str | None:
    running = (c["name"] for c in status.get("initContainerStatuses") or () if (c.get("state") or {}).get("running"))
    return next(running, None)


def _failure(container: Body, *, init: bool) -> ContainerFailure | None:
    """Why a container does not run, None for one that does, or ended well, or is being set up.

    One that runs again after a crash and is not ready yet keeps its last termination as its failure: else a crash loop
    would count as sound between two crashes.
    """
    state, last = container.get("state") or {}, (container.get("lastState") or {}).get("terminated")
    waiting, ended = state.get("waiting"), state.get("terminated")
    restarts = int(container.get("restartCount") or 0)
    if waiting is not None:
        reason = waiting.get("reason") or "Waiting"
        if reason in _STARTING and last is None:
            return None
        # The kubelet's own message of a crash loop is only "back-off 5m0s restarting failed container"; the
        # container's last words say why.
        words = (last or {}).get("message") or waiting.get("message") or ""
    elif ended is not None:
        if ended.get("exitCode") == 0 and (init or restarts == 0):
            return None
        reason, last = ended.get("reason") or "Error", ended
        words = ended.get("message") or ""
    elif last is not None and not container.get("ready", False) and last.get("exitCode") != 0:
        reason, words = last.get("reason") or "Error", last.get("message") or ""
    else:
        return None
    return ContainerFailure(
        container=container["name"],
        reason=reason,
        message=without_secrets(words),
        exit_code=(last or {}).get("exitCode"),
        terminated_reason=(last or {}).get("reason"),
        restart_count=restarts,
        init=init,
    )


def _terminations(status: Body) -> tuple[Termination, ...]:
    """The last run that ended of each container, and the one before it as long as no new one has been started."""
    found = []
    for container in status.get("containerStatuses") or ():
        for key in ("state", "lastState"):
            ended = (container.get(key) or {}).get("terminated")
            if ended is None:
                continue
            found.append(
                Termination(
                    container=container["name"],
                    container_id=ended.get("containerID") or f"run-{int(container.get('restartCount') or 0)}-{key}",
                    exit_code=int(ended.get("exitCode") or 0),
                    reason=ended.get("reason") or "",
                    message=ended.get("message") or "",
                    finished_at=ended.get("finishedAt") or "",
                    is_previous=key == "lastState",
                )
            )
    return tuple(found)


def _seconds(timestamp: str | None) -> float | None:
    """RFC 3339, as Kubernetes writes it, → Unix seconds."""
    return None if timestamp is None else datetime.fromisoformat(timestamp).timestamp()


# Metrics ------------------------------------------------------------------------------------------------------------


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
