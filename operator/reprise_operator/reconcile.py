"""What happens to one InferenceService each time it is looked at: `reconcile` reads like the list of its steps.

Level-triggered: the pass compares what is with what should be and does not know why it was woken. It may be cut off
anywhere and run again. What it remembers between passes is in service_memory.py; observe.py reads, executor.py writes.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from reprise_operator.api import ClusterError
from reprise_operator.cluster import Cluster, Key
from reprise_operator.directory import Directory
from reprise_operator.discovery import OptionalKinds
from reprise_operator.events import Happening, Recorder, transitions
from reprise_operator.executor import Action, Executor
from reprise_operator.handover import hand_over, replace_pods
from reprise_operator.hitrate import HitRateWindow
from reprise_operator.hostnames import Hostnames, claim_of
from reprise_operator.kinds import ResourceType
from reprise_operator.log_tails import LogTails
from reprise_operator.metrics import OperatorMetrics
from reprise_operator.mounts import MountReader
from reprise_operator.observe import Observer
from reprise_operator.observed import Observed
from reprise_operator.out_of_memory import memory_ends
from reprise_operator.plan import Plan, plan
from reprise_operator.recall import Recall
from reprise_operator.references import followed
from reprise_operator.release import Release
from reprise_operator.release_state import state_status
from reprise_operator.releasing import CHECK_POLL_SECONDS, Releaser, awaits_check
from reprise_operator.replicas import leaving
from reprise_operator.rollout import ChildKey, decide, key_of
from reprise_operator.rotation import ReferenceReader
from reprise_operator.scraper import Scraper
from reprise_operator.service_memory import ServiceMemories, ServiceMemory
from reprise_operator.settings import Settings
from reprise_operator.spec import Identity, SpecError, gateway_of, identity_of, parse
from reprise_operator.status import build_status
from reprise_operator.tuning import MemoryState, carried, lowered, memory_status
from reprise_operator.watch import WatchHealth
from reprise_operator.workqueue import Retry

logger = logging.getLogger(__name__)

Body = Mapping[str, Any]

LEAVING_SECONDS = 1.0
"""How soon to look again whether an autoscaler that was deleted is gone: no event tells."""


@dataclass(kw_only=True)
class Reconciler:
    cluster: Cluster
    kinds: OptionalKinds
    scraper: Scraper
    recorder: Recorder
    settings: Settings
    metrics: OperatorMetrics
    health: WatchHealth
    wake: Callable[[Key], None]
    """Asks for a pass of another service: one whose host names it has, or had."""
    directory: Directory = field(default_factory=Directory)
    recall: Recall | None = None
    """None reads everything in each pass; with one, events must spoil what is remembered."""
    clock: Callable[[], float] = time.time
    random_unit: Callable[[], float] = random.random
    references: ReferenceReader = field(default_factory=ReferenceReader)
    mounts: MountReader = field(default_factory=MountReader)
    logs: LogTails = field(default_factory=LogTails)
    memories: ServiceMemories = field(default_factory=ServiceMemories)

    def __post_init__(self) -> None:
        self._hostnames = Hostnames()

    async def __call__(self, key: Key) -> float | None:
        """The work queue's handler: `reconcile`, its faults turned into a retry, both counted."""
        with self.metrics.reconcile_seconds.time():
            try:
                with self._passing(key) as cluster:
                    pause = await self.reconcile(key, cluster)
            except ClusterError as error:
                self.metrics.reconciles.labels("retry").inc()
                raise Retry(f"{error.fault.value}: {error.message}", after=error.retry_after) from error
            except Retry:
                self.metrics.reconciles.labels("retry").inc()
                raise
            except Exception:
                self.metrics.reconciles.labels("error").inc()
                raise
        self.metrics.reconciles.labels("success").inc()
        return pause

    async def reconcile(self, key: Key, cluster: Cluster) -> float | None:
        """One pass, which reads and writes through `cluster`. Returns after how many seconds to look again without any
        news; None leaves it to events.

        Raises ClusterError when a request failed, Retry when the pass met somebody else's write: both are tried again.
        """
        body = await cluster.get_service(key)
        if body is None or "deletionTimestamp" in body["metadata"]:
            self._forget(key)  # the garbage collector ends the children: they carry our owner reference
            return None
        self.health.read(key, body["metadata"].get("resourceVersion"))
        identity = identity_of(body)
        self.directory.learn(identity)
        memory = self._memory(key, identity)

        self._claim(key, body)
        planned = self._plan(key, body)
        if isinstance(planned, Plan):
            memory.asks = planned.asks
            await self._tell_of_scaling(body, planned, memory)
        wanted = planned if isinstance(planned, Plan) else None
        observed = await self._observer(cluster).observe(identity, wanted, memory)
        if isinstance(planned, Plan):
            body, planned = await self._tune(cluster, key, body, planned, observed)
        if isinstance(planned, Plan):
            planned = followed(planned, observed)
        conflict: str | None = None
        release: Release | None = None
        if isinstance(planned, Plan):  # a spec that cannot be honoured leaves the running pods alone
            releaser = Releaser(cluster=cluster, settings=self.settings)
            release, before = await releaser.decide(body, planned, observed), body
            if release.rejects:
                # Before the workload: its pods go, and with them the cause.
                body = await self._remember(cluster, body, release)
            actions = self._decide(planned, release, observed, memory)
            executor = Executor(cluster=cluster, kinds=self.kinds, recorder=self.recorder, metrics=self.metrics)
            observed, conflict = await executor.execute(body, planned, actions, observed, memory)
            if conflict is None:
                await releaser.prune(before, planned, release)
        memory.window = memory.window.observe(observed.pods)

        await self._write_status(cluster, body, planned, release, observed, memory)
        if conflict is not None:
            raise Retry(conflict)
        return CHECK_POLL_SECONDS if awaits_check(release) else self._pause(planned, observed)

    # The steps ------------------------------------------------------------------------------------------------------

    def _claim(self, key: Key, body: Body | None) -> None:
        """Notes which host names the service wants, and wakes whom that concerns."""
        claim = None if body is None else claim_of(body["metadata"], gateway_of(body))
        for namespace, name in self._hostnames.put((key.namespace, key.name), claim):
            self.wake(Key(namespace, name))

    def _plan(self, key: Key, body: Body, tuning: MemoryState | None = None) -> Plan | SpecError:
        """`tuning` None: what the status says of it."""
        taken = self._hostnames.taken((key.namespace, key.name))
        previous = (body.get("status") or {}).get("memory") or {}
        try:
            service = parse(body)
            tuning = tuning or carried(service, self.settings, previous)
            return plan(service, self.settings, available=self.kinds.available, taken=taken, tuning=tuning)
        except SpecError as error:
            return error

    async def _tune(
        self, cluster: Cluster, key: Key, body: Body, planned: Plan, observed: Observed
    ) -> tuple[Body, Plan | SpecError]:
        """Gives the engine a smaller share where memory has run out. Returns the resource as written, and the new Plan.

        The step is written before the Deployment is touched: a process that ends between the two leaves it to be found.
        """
        state = lowered(planned.tuning, memory_ends(planned, observed))
        if state == planned.tuning:
            return body, planned
        if state.steps > planned.tuning.steps:
            previous = body.get("status") or {}
            memory = {**(previous.get("memory") or {}), **memory_status(state)}
            written = await cluster.patch_status(body, {**previous, "memory": memory})
            if written is None:
                raise Retry(f"{key} was deleted meanwhile")
            body = written
            self.metrics.writes.labels("InferenceService", "status").inc()
            logger.info("%s: memory ran out; utilization goes down to %g", key, state.effective)
        return body, self._plan(key, body, tuning=state)

    async def _remember(self, cluster: Cluster, body: Body, release: Release) -> Body:
        """Writes what a release is to remember. Returns the service as written."""
        status = {**(body.get("status") or {}), "rollout": state_status(release.state)}
        written = await cluster.patch_status(body, status)
        return body if written is None else written

    def _decide(self, planned: Plan, release: Release, observed: Observed, memory: ServiceMemory) -> Sequence[Action]:
        """What to do, with the workload of the release; one without leaves the workload as it is."""
        # A child that was deleted is known until it was seen gone, since its kind is looked at as long.
        present = (ChildKey(kind=child.kind, name=child.name) for child in observed.children)
        named = {*present, *map(key_of, planned.children)}
        memory.applied = {key: record for key, record in memory.applied.items() if key in named}
        given = planned.workload if release.workload is None else release.workload
        decided = decide(replace(planned, workload=given), observed, applied=memory.applied)
        if release.workload is None:
            decided = tuple(action for action in decided if action.key != key_of(given))
        return (*decided, *hand_over(planned, observed), *replace_pods(planned, observed))

    async def _tell_of_scaling(self, body: Body, planned: Plan, memory: ServiceMemory) -> None:
        """`kubectl scale` of a service whose pods an autoscaler counts changes nothing, but not in silence."""
        replicas = planned.service.spec.replicas
        before, memory.ignored_replicas = memory.ignored_replicas, replicas if planned.autoscaled else None
        if before is None or not planned.autoscaled or before == replicas:
            return
        note = (
            f"spec.replicas was set to {replicas}, which changes nothing: spec.autoscaling leaves the number of pods "
            "to an autoscaler. Change its minReplicas and maxReplicas, or remove it."
        )
        await self.recorder.record(body, Happening(type="Warning", reason="ReplicasIgnored", action="Scale", note=note))

    async def _write_status(
        self,
        cluster: Cluster,
        body: Body,
        planned: Plan | SpecError,
        release: Release | None,
        observed: Observed,
        memory: ServiceMemory,
    ) -> None:
        previous = body.get("status") or {}
        wanted = build_status(
            identity_of(body),
            planned,
            observed,
            previous,
            window=memory.window,
            now=observed.at,
            settings=self.settings,
            release=release,
        )
        self.metrics.served.tell(body["metadata"]["namespace"], body["metadata"]["name"], wanted)
        if await cluster.patch_status(body, wanted) is None:
            return
        self.metrics.writes.labels("InferenceService", "status").inc()
        for happening in transitions(previous, wanted):
            await self.recorder.record(body, happening)

    def _pause(self, planned: Plan | SpecError, observed: Observed) -> float | None:
        """Figures are read, and what has no event (a Secret that appears, a quota that is raised) is looked for, each
        `scrape_seconds` less up to a tenth. A service that is switched off only has the slow resync."""
        if isinstance(planned, Plan) and leaving(planned, observed):
            return LEAVING_SECONDS
        if isinstance(planned, SpecError) and not observed.pods:
            return None
        if isinstance(planned, Plan) and planned.replicas == 0 and not observed.pods and not observed.apply_errors:
            return None
        return self.settings.scrape_seconds * (1.0 - 0.1 * self.random_unit())

    def prime(self, services: Collection[Body]) -> None:
        """Takes note of all services before any of them is looked at: the first pass of one must know the others'
        host names."""
        for body in services:
            claim = claim_of(body["metadata"], gateway_of(body))
            self._hostnames.put((body["metadata"]["namespace"], body["metadata"]["name"]), claim)

    def concerned(self, kinds: Collection[ResourceType]) -> tuple[Key, ...]:
        """The services that ask for one of the optional `kinds`."""
        return self.memories.asking_for(kinds)

    # What the process remembers -------------------------------------------------------------------------------------

    @contextmanager
    def _passing(self, key: Key) -> Iterator[Cluster]:
        """The cluster as one pass sees it: what it has read is recalled where nothing has happened since."""
        if self.recall is None:
            yield self.cluster
        else:
            with self.recall.passing(key) as memo:
                yield self.cluster.remembering(memo)

    def _observer(self, cluster: Cluster) -> Observer:
        return Observer(
            cluster=cluster,
            kinds=self.kinds,
            scraper=self.scraper,
            logs=self.logs,
            mounts=self.mounts,
            references=self.references,
            health=self.health,
            clock=self.clock,
        )

    def _memory(self, key: Key, identity: Identity) -> ServiceMemory:
        memory = self.memories.of(key, identity.uid)
        if memory is None:
            # What the watch has delivered stays: of a service that idles it will not deliver it again.
            self._drop(key)
            window = HitRateWindow(seconds=self.settings.hit_rate_window_seconds, started_at=self.clock())
            memory = ServiceMemory(uid=identity.uid, window=window)
            self.memories.put(key, memory)
            self.metrics.services.set(len(self.memories))
        return memory

    def _forget(self, key: Key) -> None:
        """The service is gone."""
        self._drop(key)
        self._claim(key, None)
        self.health.forget(key)
        self.directory.forget(key)
        self.metrics.served.forget(key.namespace, key.name)
        self.health.read_all(key, ())
        if self.recall is not None:
            self.recall.spoil(key)

    def _drop(self, key: Key) -> None:
        memory = self.memories.drop(key)
        if memory is not None:
            self._observer(self.cluster).forget(memory.pods)
        self.metrics.services.set(len(self.memories))
