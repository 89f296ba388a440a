"""Carries out what was decided: applies, deletes, scales, and tells of each write in an event.

An apply that is refused, or fails in a webhook, does not keep the other children from theirs; what came of each is in
the `Observed` that is returned, and in the service's memory.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from reprise_operator.api import ClusterError, Fault
from reprise_operator.bodies import observed_child
from reprise_operator.changes import told_changes
from reprise_operator.cluster import Cluster, Key
from reprise_operator.discovery import OptionalKinds
from reprise_operator.events import Happening, Recorder
from reprise_operator.handover import DeletePod, Scale
from reprise_operator.kinds import OPTIONAL_TYPES
from reprise_operator.metrics import OperatorMetrics
from reprise_operator.observed import Observed, ObservedChild
from reprise_operator.plan import Plan
from reprise_operator.references import rotated
from reprise_operator.rollout import Apply, ChildKey, Delete, applied
from reprise_operator.server_side_apply import ApplyOutcome, ApplyResult
from reprise_operator.service_memory import ServiceMemory
from reprise_operator.workloads import workload_body

logger = logging.getLogger(__name__)

Body = Mapping[str, Any]
Action = Apply | Delete | Scale | DeletePod


@dataclass(frozen=True, slots=True, kw_only=True)
class Executor:
    """Writes of one pass to the children of one service."""

    cluster: Cluster
    kinds: OptionalKinds
    recorder: Recorder
    metrics: OperatorMetrics

    async def execute(
        self, body: Body, planned: Plan, actions: Sequence[Action], observed: Observed, memory: ServiceMemory
    ) -> tuple[Observed, str | None]:
        """Carries out `actions` in their order. Returns what is observed after it, and the conflict it met, if any.

        Raises ClusterError.
        """
        children = {ChildKey(kind=child.kind, name=child.name): child for child in observed.children}
        conflict: str | None = None
        faults: dict[str, str] = {}
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
        workload = workload_body(planned, replace(observed, children=after))
        changed = workload is not workload_body(planned, observed)
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
        self, body: Body, action: Apply, result: ApplyResult, present: ObservedChild | None, memory: ServiceMemory
    ) -> None:
        """Remembers the answer to an apply, and tells what it changed."""
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


def _is_settled(workload: Body | None) -> bool:
    """Whether its controller has seen the present generation."""
    if workload is None:
        return False
    return bool((workload.get("status") or {}).get("observedGeneration") == workload["metadata"].get("generation"))


def _child(action: Apply, result: ApplyResult) -> ObservedChild:
    assert result.body is not None
    return observed_child(result.body, api_version=action.manifest["apiVersion"], kind=action.key.kind, owned=True)
