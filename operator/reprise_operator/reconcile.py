"""What happens to one InferenceService each time it is looked at: `reconcile` reads like the list of its steps.

Level-triggered: the pass compares what is with what should be and does not know why it was woken. It may be cut off
anywhere and run again. What it remembers between passes (`_Memory`) only saves work or holds the moving window of the
hit rate; a new process starts without it and comes to the same end.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from reprise_operator.api import ClusterError
from reprise_operator.cluster import ApplyOutcome, ApplyResult, Cluster, Key
from reprise_operator.events import Happening, Recorder, transitions
from reprise_operator.handover import DeletePod, Scale, hand_over, replace_pods
from reprise_operator.hitrate import HitRateWindow
from reprise_operator.metrics import OperatorMetrics
from reprise_operator.naming import OWNER_UID_LABEL, selector_labels
from reprise_operator.observe import Scraper, current_template_hash, observed_pod
from reprise_operator.observed import Observed, ObservedChild
from reprise_operator.plan import Plan, plan
from reprise_operator.rollout import Applied, Apply, ChildKey, Delete, applied, decide, key_of
from reprise_operator.settings import Settings
from reprise_operator.spec import Identity, SpecError, identity_of, parse
from reprise_operator.status import build_status
from reprise_operator.watch import WatchHealth
from reprise_operator.workloads import workload_of, workloads
from reprise_operator.workqueue import Retry

logger = logging.getLogger(__name__)

Body = Mapping[str, Any]


@dataclass(slots=True, kw_only=True)
class _Memory:
    """What this process remembers of one service."""

    uid: str
    window: HitRateWindow
    applied: dict[ChildKey, Applied] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    """"Kind/name" → why the API server refused the last apply."""
    pods: frozenset[str] = frozenset()


@dataclass(kw_only=True)
class Reconciler:
    cluster: Cluster
    scraper: Scraper
    recorder: Recorder
    settings: Settings
    metrics: OperatorMetrics
    health: WatchHealth
    clock: Callable[[], float] = time.time
    random_unit: Callable[[], float] = random.random

    def __post_init__(self) -> None:
        self._memories: dict[Key, _Memory] = {}

    async def __call__(self, key: Key) -> float | None:
        """The work queue's handler: `reconcile`, its faults turned into a retry, both counted."""
        with self.metrics.reconcile_seconds.time():
            try:
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
        self.health.read(key, body["metadata"].get("resourceVersion"), now=self.clock())
        identity = identity_of(body)
        memory = self._recall(key, identity)

        planned = self._plan(body)
        observed = await self._observe(identity, planned, memory)
        conflict: str | None = None
        if isinstance(planned, Plan):  # a spec that cannot be honoured leaves the running pods alone
            observed, conflict = await self._execute(body, planned, observed, memory)
        memory.window = memory.window.observe(observed.pods)

        await self._write_status(body, planned, observed, memory)
        if conflict is not None:
            raise Retry(conflict)
        return self._pause(planned, observed)

    # The steps ------------------------------------------------------------------------------------------------------

    def _plan(self, body: Body) -> Plan | SpecError:
        try:
            return plan(parse(body), self.settings)
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
        )
        pods = [observed_pod(body) for body in await self.cluster.pods(namespace, labels)]
        uids = frozenset(pod.uid for pod in pods)
        self.scraper.forget(memory.pods - uids)
        memory.pods = uids
        workload = _workload(wanted, Observed(at=self.clock(), children=children))
        # Only Deployments have them.
        sets = await self.cluster.replica_sets(namespace, labels) if _makes_replica_sets(workload) else ()
        return Observed(
            at=self.clock(),
            children=children,
            pods=await self.scraper.observe(pods),
            missing_secrets=await self.cluster.missing_secrets(namespace, wanted.secret_names if wanted else ()),
            missing_claims=await self.cluster.missing_claims(namespace, wanted.claim_names if wanted else ()),
            missing_config_maps=await self.cluster.missing_config_maps(
                namespace, wanted.config_map_names if wanted else ()
            ),
            template_hash=current_template_hash(workload, sets),
            apply_errors=dict(memory.refused),
        )

    async def _execute(
        self, body: Body, planned: Plan, observed: Observed, memory: _Memory
    ) -> tuple[Observed, str | None]:
        """Does what `decide` decides. Returns what is observed after it, and the conflict it met, if any."""
        children = {ChildKey(kind=child.kind, name=child.name): child for child in observed.children}
        conflict: str | None = None
        faults: dict[str, str] = {}
        actions = (
            *decide(planned, observed, applied=memory.applied),
            *hand_over(planned, observed),
            *replace_pods(planned, observed),
        )
        # What was refused and is not asked for any more, since the spec was taken back, holds nothing up.
        asked = {str(action.key) for action in actions if isinstance(action, Apply)}
        memory.refused = {child: message for child, message in memory.refused.items() if child in asked}
        for action in actions:
            if not isinstance(action, Apply):
                await self._take_away(body, action)
                continue
            present = children.get(action.key)
            try:
                result = await self.cluster.apply(action.manifest, present=present)
            except ClusterError as error:
                if error.status != 500:
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
            happening = Happening(type="Warning", reason="DriftRepaired", action="Apply", note=note)
        else:
            happening = Happening(type="Normal", reason="Updated", action="Apply", note=f"Updated {action.key}")
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

    async def _write_status(self, body: Body, planned: Plan | SpecError, observed: Observed, memory: _Memory) -> None:
        previous = body.get("status") or {}
        wanted = build_status(
            identity_of(body),
            planned,
            observed,
            previous,
            window=memory.window,
            now=observed.at,
            settings=self.settings,
        )
        if await self.cluster.patch_status(body, wanted) is None:
            return
        self.metrics.writes.labels("InferenceService", "status").inc()
        for happening in transitions(previous, wanted):
            await self.recorder.record(body, happening)

    def _pause(self, planned: Plan | SpecError, observed: Observed) -> float | None:
        """Figures are read, and what has no event (a Secret that appears, a quota that is raised) is looked for, each
        `scrape_seconds` less up to a tenth. A service that is switched off only has the slow resync."""
        if isinstance(planned, SpecError) and not observed.pods:
            return None
        if isinstance(planned, Plan) and planned.replicas == 0 and not observed.pods and not observed.apply_errors:
            return None
        return self.settings.scrape_seconds * (1.0 - 0.1 * self.random_unit())

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
        self.health.forget(key)

    def _drop(self, key: Key) -> None:
        memory = self._memories.pop(key, None)
        if memory is not None:
            self.scraper.forget(memory.pods)
        self.metrics.services.set(len(self._memories))


def _workload(plan: Plan | None, observed: Observed) -> Body | None:
    """The workload that the Plan names; without a Plan the one that is there."""
    child = next(iter(workloads(observed)), None) if plan is None else workload_of(plan, observed)
    return child.body if child is not None and child.owned else None


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
