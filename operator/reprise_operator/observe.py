"""What the pods say: Kubernetes bodies → ObservedPod, and the few lines of each ready pod's /metrics that are needed.

Reads both engines, ours and vllm-ascend: the metric names are vLLM's, and `reprise:engine_info` is our addition.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

import aiohttp
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from reprise_operator.observed import ContainerFailure, EngineMetrics, ObservedPod
from reprise_operator.settings import ENGINE_PORT

Body = Mapping[str, Any]

TEMPLATE_HASH_LABEL = "pod-template-hash"
STATEFUL_SET_HASH_LABEL = "controller-revision-hash"
REVISION_ANNOTATION = "deployment.kubernetes.io/revision"

# A container that is merely being set up waits with one of these.
_STARTING = frozenset({"ContainerCreating", "PodInitializing"})

QUERIES = "vllm:prefix_cache_queries_total"
HITS = "vllm:prefix_cache_hits_total"
USAGE = "vllm:kv_cache_usage_perc"
CACHE_CONFIG = "vllm:cache_config_info"
ENGINE_INFO = "reprise:engine_info"
_NEEDED = (QUERIES, HITS, USAGE, CACHE_CONFIG, ENGINE_INFO)

MAX_METRICS_BYTES = 8 * 1024 * 1024
FAILURE_RETRY_SECONDS = 5.0


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
        scheduled=is_scheduled,
        started=bool(containers) and all(container.get("started") for container in containers),
        unschedulable_message=None if is_scheduled else scheduled.get("message"),
        failures=_failures(status),
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
    owned = [
        replica_set["metadata"]
        for replica_set in replica_sets
        if any(owner.get("uid") == metadata["uid"] for owner in replica_set["metadata"].get("ownerReferences") or ())
    ]
    if not owned:
        return None
    newest = max(owned, key=_revision)
    return (newest.get("labels") or {}).get(TEMPLATE_HASH_LABEL)


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
        message=words,
        exit_code=(last or {}).get("exitCode"),
        terminated_reason=(last or {}).get("reason"),
        restart_count=restarts,
        init=init,
    )


def _seconds(timestamp: str | None) -> float | None:
    """RFC 3339, as Kubernetes writes it, → Unix seconds."""
    return None if timestamp is None else datetime.fromisoformat(timestamp).timestamp()


# Metrics ------------------------------------------------------------------------------------------------------------


def parse_metrics(text: str, *, scraped_at: float) -> EngineMetrics:
    """The figures in an exposition. Counters of several engines in one pod (data parallel) are added up, the usage is
    the fullest engine's, of the infos the first counts. What is missing or malformed is None.

    Raises ValueError when a needed line is no valid exposition.
    """
    needed = "\n".join(line for line in text.splitlines() if line.startswith(_NEEDED)) + "\n"
    samples = [sample for family in text_string_to_metric_families(needed) for sample in family.samples]
    config = _labels(samples, CACHE_CONFIG)
    engine = _labels(samples, ENGINE_INFO)
    usages = [sample.value for sample in samples if sample.name == USAGE]
    return EngineMetrics(
        scraped_at=scraped_at,
        enable_prefix_caching={"true": True, "false": False}.get(config.get("enable_prefix_caching", "").lower()),
        prefix_cache_queries=_sum(samples, QUERIES),
        prefix_cache_hits=_sum(samples, HITS),
        kv_cache_usage=max(usages) if usages else None,
        gpu_memory_utilization=_number(config.get("gpu_memory_utilization")),
        block_size=_integer(config.get("block_size")),
        num_gpu_blocks=_integer(config.get("num_gpu_blocks")),
        max_model_len=_integer(engine.get("max_model_len")),
        version=engine.get("version") or None,
    )


def _labels(samples: Sequence[Sample], name: str) -> Mapping[str, str]:
    return next((sample.labels for sample in samples if sample.name == name), {})


def _sum(samples: Sequence[Sample], name: str) -> float | None:
    values = [sample.value for sample in samples if sample.name == name]
    return sum(values) if values else None


def _number(text: str | None) -> float | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        return None


def _integer(text: str | None) -> int | None:
    value = _number(text)
    return int(value) if value is not None and value.is_integer() else None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scrape:
    metrics: EngineMetrics | None
    error: str | None
    next_at: float


class Scraper:
    """Reads /metrics of ready pods: each at most every `interval` seconds, with jitter so that a thousand pods do not
    answer in one moment, `concurrency` at a time over all services. In between the last answer stands, so a wake-up by
    an event costs no scrape."""

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
        now = self._clock()
        due = [pod for pod in pods if _is_scrapable(pod) and self._is_due(pod, now)]
        scrapes = await asyncio.gather(*(self._scrape(pod) for pod in due))
        self._last.update({pod.uid: scrape for pod, scrape in zip(due, scrapes, strict=True)})
        return tuple(self._with_figures(pod) for pod in pods)

    def forget(self, uids: Iterable[str]) -> None:
        """Drops what is known of pods that are gone."""
        for uid in uids:
            self._last.pop(uid, None)

    def _is_due(self, pod: ObservedPod, now: float) -> bool:
        last = self._last.get(pod.uid)
        return last is None or now >= last.next_at

    def _with_figures(self, pod: ObservedPod) -> ObservedPod:
        last = self._last.get(pod.uid)
        if last is None or not _is_scrapable(pod):
            return pod
        return replace(pod, metrics=last.metrics, metrics_error=last.error)

    async def _scrape(self, pod: ObservedPod) -> _Scrape:
        try:
            async with self._limit:
                text = await self._fetch(str(pod.ip))
                now = self._clock()
                metrics = parse_metrics(text, scraped_at=now)
        except (aiohttp.ClientError, TimeoutError, ValueError, OSError) as error:
            detail = str(error) or type(error).__name__
            return _Scrape(metrics=None, error=detail, next_at=self._clock() + FAILURE_RETRY_SECONDS)
        # Early rather than late: a reconcile that comes each `interval` seconds must find its pods due.
        return _Scrape(metrics=metrics, error=None, next_at=now + self._interval * (0.8 + 0.1 * self._random_unit()))

    async def _fetch(self, ip: str) -> str:
        host = f"[{ip}]" if ":" in ip else ip
        async with self._session.get(f"http://{host}:{self._port}/metrics", timeout=self._timeout) as response:
            if response.status != 200:
                raise ValueError(f"/metrics answered {response.status}")
            content = await response.content.read(MAX_METRICS_BYTES + 1)
            while len(content) <= MAX_METRICS_BYTES and not response.content.at_eof():
                content += await response.content.read(MAX_METRICS_BYTES + 1 - len(content))
        if len(content) > MAX_METRICS_BYTES:
            raise ValueError(f"/metrics is longer than {MAX_METRICS_BYTES} bytes")
        return content.decode("utf-8", errors="replace")


def _is_scrapable(pod: ObservedPod) -> bool:
    return pod.ready and pod.ip is not None and not pod.terminating
