"""What happens to one InferenceService each time it is looked at: `reconcile` reads like the list of its steps.

Level-triggered: the pass compares what is with what should be and does not know why it was woken. It may be cut off
anywhere and run again. What it remembers between passes (`_Memory`) only saves work or holds the moving window of the
hit rate; a new process starts without it and comes to the same end.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

from reprise_operator.api import ClusterError, Fault
from reprise_operator.changes import told_changes
from reprise_operator.cluster import ApplyOutcome, ApplyResult, Cluster, Key
from reprise_operator.directory import Directory
from reprise_operator.discovery import OptionalKinds
from reprise_operator.events import Happening, Recorder, transitions
from reprise_operator.handover import DeletePod, Scale, hand_over, replace_pods
from reprise_operator.hitrate import HitRateWindow
from reprise_operator.hostnames import Hostnames, claim_of
from reprise_operator.kinds import OPTIONAL_TYPES, ResourceType
from reprise_operator.log_tails import LogTails
from reprise_operator.metrics import OperatorMetrics
from reprise_operator.mounts import MountReader
from reprise_operator.naming import OWNER_UID_LABEL, selector_labels
from reprise_operator.observe import Scraper, current_template_hash, observed_pod, templates
from reprise_operator.observed import Observed, ObservedChild
from reprise_operator.out_of_memory import memory_ends
from reprise_operator.plan import Plan, plan
from reprise_operator.recall import Recall
from reprise_operator.references import ObjectRef, ObservedReference, followed, rotated
from reprise_operator.release import Release
from reprise_operator.release_state import state_status
from reprise_operator.releasing import CHECK_POLL_SECONDS, Releaser, awaits_check
from reprise_operator.replicas import leaving
from reprise_operator.rollout import Applied, Apply, ChildKey, Delete, applied, decide, key_of
from reprise_operator.rotation import ReferenceReader
from reprise_operator.settings import Settings
from reprise_operator.spec import Identity, SpecError, gateway_of, identity_of, parse
from reprise_operator.spec_types import Runtime
from reprise_operator.status import build_status
from reprise_operator.tuning import MemoryState, carried, lowered, memory_status
from reprise_operator.watch import WatchHealth, watched_objects
from reprise_operator.workloads import workload_of, workloads
from reprise_operator.workqueue import Retry

logger = logging.getLogger(__name__)

Body = Mapping[str, Any]

LEAVING_SECONDS = 1.0
"""How soon to look again whether an autoscaler that was deleted is gone: no event tells."""


@dataclass(slots=True, kw_only=True)
class _Memory:
    """What this process remembers of one service."""

    uid: str
    window: HitRateWindow
    applied: dict[ChildKey, Applied] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    """"Kind/name" → why the API server refused the last apply."""
    pods: frozenset[str] = frozenset()
    asks: frozenset[ResourceType] = frozenset()
    """The optional kinds the last Plan asked for."""
    ignored_replicas: int | None = None
    """spec.replicas of the last pass, where an autoscaler decided instead."""


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

    def __post_init__(self) -> None:
        self._memories: dict[Key, _Memory] = {}
        self._hostnames = Hostnames()
        self._logs = LogTails()

    async def __call__(self, key: Key) -> float | None:
        """The work queue's handler: `reconcile`, its faults turned into a retry, both counted."""
        with self.metrics.reconcile_seconds.time():
            try:
                with nullcontext() if self.recall is None else self.recall.passing(key):
                    pause = await self.reconcile(key)
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

    async def reconcile(self, key: Key) -> float | None:
        """One pass. Returns after how many seconds to look again without any news; None leaves it to events.

        Raises ClusterError when a request failed, Retry when the pass met somebody else's write: both are tried again.
        """
        body = await self.cluster.get_service(key)
        if body is None or "deletionTimestamp" in body["metadata"]:
            self._forget(key)  # the garbage collector ends the children: they carry our owner reference
            return None
        self.health.read(key, body["metadata"].get("resourceVersion"))
        identity = identity_of(body)
        self.directory.learn(identity)
        memory = self._recall(key, identity)

        self._claim(key, body)
        planned = self._plan(key, body)
        if isinstance(planned, Plan):
            memory.asks = planned.asks
            await self._tell_of_scaling(body, planned, memory)
        observed = await self._observe(identity, planned, memory)
        if isinstance(planned, Plan):
            body, planned = await self._tune(key, body, planned, observed)
        if isinstance(planned, Plan):
            planned = followed(planned, observed)
        conflict: str | None = None
        release: Release | None = None
        if isinstance(planned, Plan):  # a spec that cannot be honoured leaves the running pods alone
            releaser = Releaser(cluster=self.cluster, settings=self.settings)
            release, before = await releaser.decide(body, planned, observed), body
            if release.rejects:
                # Before the workload: its pods go, and with them the cause.
                body = await self._remember(body, release)
            observed, conflict = await self._execute(body, planned, release, observed, memory)
            if conflict is None:
                await releaser.prune(before, planned, release)
        memory.window = memory.window.observe(observed.pods)

        await self._write_status(body, planned, release, observed, memory)
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

    async def _observe(self, identity: Identity, planned: Plan | SpecError, memory: _Memory) -> Observed:
        namespace, labels = identity.namespace, selector_labels(identity)
        wanted = planned if isinstance(planned, Plan) else None
        children = await self.cluster.children(
            namespace,
            owner_uid=identity.uid,
            selector={OWNER_UID_LABEL: identity.uid},
            planned=[(key.kind, key.name) for key in map(key_of, wanted.children if wanted else ())],
            optional=self._optional_kinds(identity, wanted, memory),
        )
        pod_bodies = await self.cluster.pods(namespace, labels)
        self.health.read_all(Key(namespace, identity.name), watched_objects(children, pod_bodies))
        pods = await self.mounts.look(self.cluster, namespace, [observed_pod(body) for body in pod_bodies])
        uids = frozenset(pod.uid for pod in pods)
        references = await self.references.read(self.cluster, namespace, wanted.references if wanted else ())
        # Of an object that is read whether it is there is known by that.
        names = (wanted.secret_names, wanted.config_map_names) if wanted else ((), ())
        secrets = [name for name in names[0] if ObjectRef("Secret", name) not in references]
        config_maps = [name for name in names[1] if ObjectRef("ConfigMap", name) not in references]
        absent = tuple(name for name in names[1] if _is_absent(references.get(ObjectRef("ConfigMap", name))))
        self.scraper.forget(memory.pods - uids)
        self._logs.forget(memory.pods - uids)
        self.mounts.forget(memory.pods - uids)
        memory.pods = uids
        if wanted is not None and wanted.service.spec.runtime.name is Runtime.VLLM_ASCEND:
            pods = await self._logs.observe(namespace, pods, read=self.cluster.log_tail)
        workload = _workload(wanted, Observed(at=self.clock(), children=children))
        # Only Deployments have them.
        replica_sets = await self.cluster.replica_sets(namespace, labels) if _makes_replica_sets(workload) else ()
        return Observed(
            at=self.clock(),
            children=children,
            pods=await self.scraper.observe(pods),
            missing_secrets=await self.cluster.missing_secrets(namespace, secrets),
            references=references,
            missing_claims=await self.cluster.missing_claims(namespace, wanted.claim_names if wanted else ()),
            missing_config_maps=(*absent, *await self.cluster.missing_config_maps(namespace, config_maps)),
            template_hash=current_template_hash(workload, replica_sets),
            templates=templates(workload, replica_sets),
            apply_errors=dict(memory.refused),
        )

    def _optional_kinds(self, identity: Identity, wanted: Plan | None, memory: _Memory) -> frozenset[ResourceType]:
        """Those of which this service has an object, or may have: only these cost a request."""
        applied = {key.kind for key in memory.applied}
        kinds = self.kinds.held_by(identity.uid) | {kind for kind in OPTIONAL_TYPES if kind.kind in applied}
        return (kinds | (wanted.asks if wanted else memory.asks)) & self.kinds.available

    async def _tune(self, key: Key, body: Body, planned: Plan, observed: Observed) -> tuple[Body, Plan | SpecError]:
        """Gives the engine a smaller share where memory has run out. Returns the resource as written, and the new Plan.

        The step is written before the Deployment is touched: a process that ends between the two leaves it to be found.
        """
        state = lowered(planned.tuning, memory_ends(planned, observed))
        if state == planned.tuning:
            return body, planned
        if state.steps > planned.tuning.steps:
            previous = body.get("status") or {}
            memory = {**(previous.get("memory") or {}), **memory_status(state)}
            written = await self.cluster.patch_status(body, {**previous, "memory": memory})
            if written is None:
                raise Retry(f"{key} was deleted meanwhile")
            body = written
            self.metrics.writes.labels("InferenceService", "status").inc()
            logger.info("%s: memory ran out; utilization goes down to %g", key, state.effective)
        return body, self._plan(key, body, tuning=state)

    async def _remember(self, body: Body, release: Release) -> Body:
        """Writes what a release is to remember. Returns the service as written."""
        status = {**(body.get("status") or {}), "rollout": state_status(release.state)}
        written = await self.cluster.patch_status(body, status)
        return body if written is None else written

    async def _execute(
        self, body: Body, planned: Plan, release: Release, observed: Observed, memory: _Memory
    ) -> tuple[Observed, str | None]:
        """Does what `decide` decides, with the workload of the release. Returns what is observed after it, and the
        conflict it met, if any."""
        children = {ChildKey(kind=child.kind, name=child.name): child for child in observed.children}
        conflict: str | None = None
        faults: dict[str, str] = {}
        # A child that was deleted is known until it was seen gone, since its kind is looked at as long.
        named = {*children, *map(key_of, planned.children)}
        memory.applied = {key: record for key, record in memory.applied.items() if key in named}
        given = planned.workload if release.workload is None else release.workload
        decided = decide(replace(planned, workload=given), observed, applied=memory.applied)
        if release.workload is None:
            decided = tuple(action for action in decided if action.key != key_of(given))
        actions = (*decided, *hand_over(planned, observed), *replace_pods(planned, observed))
        # What was refused and is not asked for any more, since the spec was taken back, holds nothing up.
        asked = {str(action.key) for action in actions if isinstance(action, Apply)}
        memory.refused = {child: message for child, message in memory.refused.items() if child in asked}
        for action in actions:
            if not isinstance(action, Apply):
                await self._take_away(body, action)
                continue
            present = children.get(action.key)
            try:
                result = await self.cluster.apply(action.manifest, present=present, hand_over=action.hand_over)
            except ClusterError as error:
                if error.fault is Fault.NOT_FOUND and action.key.kind in {kind.kind for kind in OPTIONAL_TYPES}:
                    self.kinds.look_again()  # its CRD may have been deleted since the last poll
                elif error.status != 500:
                    raise
                # The API server is there, but a webhook, say, is not, and may not be for long: the status says so.
                faults[str(action.key)] = error.message
                conflict = f"{action.key}: {error.message}"
                continue
            match result.outcome:
                case ApplyOutcome.CONFLICT:
                    conflict = f"{action.key}: {result.message}"
                case ApplyOutcome.REFUSED:
                    memory.refused[str(action.key)] = result.message
                case _:
                    memory.refused.pop(str(action.key), None)
                    await self._applied(body, action, result, present, memory)
                    children[action.key] = _child(action, result)
        after = tuple(children.values())
        workload = _workload(planned, replace(observed, children=after))
        changed = workload is not _workload(planned, observed)
        return (
            replace(
                observed,
                children=after,
                apply_errors=dict(memory.refused),
                apply_faults=faults,
                # A workload that was just changed has its newest revision still to come.
                template_hash=observed.template_hash if not changed or _is_settled(workload) else None,
            ),
            conflict,
        )

    async def _applied(
        self, body: Body, action: Apply, result: ApplyResult, present: ObservedChild | None, memory: _Memory
    ) -> None:
        assert result.body is not None
        before = memory.applied.get(action.key)
        memory.applied[action.key] = record = applied(action.manifest, result.body)
        for kind in OPTIONAL_TYPES:
            if kind.kind == action.key.kind:
                self.kinds.applied(kind, result.body)
        if result.outcome is ApplyOutcome.UNCHANGED:
            return
        self.metrics.writes.labels(action.key.kind, result.outcome.value).inc()
        logger.info(
            "%s: %s %s", Key(body["metadata"]["namespace"], body["metadata"]["name"]), result.outcome.value, action.key
        )
        if result.outcome is ApplyOutcome.CREATED:
            happening = Happening(type="Normal", reason="Created", action="Apply", note=f"Created {action.key}")
        elif before is not None and before.manifest_digest == record.manifest_digest and present is not None:
            note = f"{action.key} was changed by somebody else in a field that this operator sets; it was set back"
            note += told_changes(present.body, result.body)
            happening = Happening(type="Warning", reason="DriftRepaired", action="Apply", note=note)
        else:
            changed = rotated(present.body, action.manifest) if present is not None else ()
            told = told_changes(present.body, result.body) if present is not None else ""
            why = f": {', '.join(changed)} changed" if changed else told
            happening = Happening(type="Normal", reason="Updated", action="Apply", note=f"Updated {action.key}{why}")
        await self.recorder.record(body, happening)

    async def _take_away(self, body: Body, action: Delete | Scale | DeletePod) -> None:
        namespace = body["metadata"]["namespace"]
        match action:
            case Delete(key=key, uid=uid):
                done = await self.cluster.delete(namespace, kind=key.kind, name=key.name, uid=uid)
                note = f"Deleted {key}, which is not needed any more"
                kind, outcome, reason = key.kind, "deleted", "Deleted"
            case Scale(key=key, uid=uid, replicas=replicas):
                done = await self.cluster.scale(namespace, kind=key.kind, name=key.name, uid=uid, replicas=replicas)
                note = f"Scaled {key} to {replicas}: others have taken over from its pods"
                kind, outcome, reason = key.kind, "scaled", "HandedOver"
            case DeletePod(name=name, uid=uid, broken=broken):
                done = await self.cluster.delete(namespace, kind="Pod", name=name, uid=uid)
                state = "not ready" if broken else "the next to be replaced"
                note = f"Deleted Pod/{name}, which is of an older template and {state}"
                kind, outcome, reason = "Pod", "deleted", "BrokenPodDeleted" if broken else "PodReplaced"
        if done:
            self.metrics.writes.labels(kind, outcome).inc()
            verb = "Scale" if isinstance(action, Scale) else "Delete"
            await self.recorder.record(body, Happening(type="Normal", reason=reason, action=verb, note=note))

    async def _tell_of_scaling(self, body: Body, planned: Plan, memory: _Memory) -> None:
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
        self, body: Body, planned: Plan | SpecError, release: Release | None, observed: Observed, memory: _Memory
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
        if await self.cluster.patch_status(body, wanted) is None:
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
        return tuple(key for key, memory in self._memories.items() if not memory.asks.isdisjoint(kinds))

    # Memory ---------------------------------------------------------------------------------------------------------

    def _recall(self, key: Key, identity: Identity) -> _Memory:
        memory = self._memories.get(key)
        if memory is None or memory.uid != identity.uid:
            # What the watch has delivered stays: of a service that idles it will not deliver it again.
            self._drop(key)
            window = HitRateWindow(seconds=self.settings.hit_rate_window_seconds, started_at=self.clock())
            memory = self._memories[key] = _Memory(uid=identity.uid, window=window)
            self.metrics.services.set(len(self._memories))
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
        memory = self._memories.pop(key, None)
        if memory is not None:
            self.scraper.forget(memory.pods)
            self._logs.forget(memory.pods)
            self.mounts.forget(memory.pods)
        self.metrics.services.set(len(self._memories))


def _workload(plan: Plan | None, observed: Observed) -> Body | None:
    """The workload that the Plan names; without a Plan the one that is there."""
    child = next(iter(workloads(observed)), None) if plan is None else workload_of(plan, observed)
    return child.body if child is not None and child.owned else None


def _is_absent(reference: ObservedReference | None) -> bool:
    return reference is not None and not reference.present


def _makes_replica_sets(workload: Body | None) -> bool:
    return workload is not None and workload["kind"] == "Deployment"


def _is_settled(workload: Body | None) -> bool:
    """Whether its controller has seen the present generation."""
    if workload is None:
        return False
    return bool((workload.get("status") or {}).get("observedGeneration") == workload["metadata"].get("generation"))


def _child(action: Apply, result: ApplyResult) -> ObservedChild:
    assert result.body is not None
    metadata = result.body["metadata"]
    return ObservedChild(
        api_version=action.manifest["apiVersion"],
        kind=action.key.kind,
        name=action.key.name,
        uid=metadata["uid"],
        owned=True,
        generation=metadata.get("generation", 0),
        terminating="deletionTimestamp" in metadata,
        body=result.body,
    )
