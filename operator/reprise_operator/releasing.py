"""The I/O of a release: the answers to its questions, the Job of its check, and what is remembered before it acts.

What is decided is in release.py: `Releaser.decide` asks it before the workload is applied, `Releaser.prune` clears up
after it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from reprise_operator.api import ClusterError, Fault
from reprise_operator.bodies import observed_pod
from reprise_operator.checks import Check, CheckState, outcome_of
from reprise_operator.children.accelerator import resource_name
from reprise_operator.children.check_job import check_job_name
from reprise_operator.cluster import Cluster
from reprise_operator.devices import free_pods
from reprise_operator.diagnosis import Diagnosis, State
from reprise_operator.mounts import MountReader
from reprise_operator.naming import CHECK_LABEL, child_name, selector_labels
from reprise_operator.observed import Observed
from reprise_operator.plan import Plan
from reprise_operator.release import Evidence, Release, decide_release, questions
from reprise_operator.release_manifests import template_hash
from reprise_operator.release_state import read_state
from reprise_operator.server_side_apply import ApplyOutcome
from reprise_operator.settings import Settings

logger = logging.getLogger(__name__)

Body = Mapping[str, Any]

CHECK_POLL_SECONDS = 3.0
"""The pods of a check wake its service by themselves; its Job's verdict follows theirs, and has no watch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Releaser:
    """Carries one release out."""

    cluster: Cluster
    settings: Settings

    async def decide(self, body: Body, plan: Plan, observed: Observed) -> Release:
        """Looks up what is to be known, decides, and creates the Job of a check that is to begin."""
        state = read_state(body.get("status") or {})
        asked = questions(plan, observed, state, now=observed.at, read_nodes=self.settings.read_nodes)
        namespace = plan.identity.namespace
        log = None
        if asked.log is not None:
            log = await self.cluster.pod_log(namespace, asked.log.pod, asked.log.container, previous=asked.log.previous)
        evidence = Evidence(
            free_pods=await self._free_pods(plan) if asked.devices else None,
            check=await self._check(plan, now=observed.at) if asked.check else None,
            log=log,
        )
        release = decide_release(plan, observed, state, evidence, now=observed.at)
        return await self._begin_check(release) if release.check is not None else release

    async def prune(self, body: Body, plan: Plan, release: Release) -> None:
        """Deletes the Job that `body`, as it was when decided on, had a check by, once nobody waits for it any more."""
        before = read_state(body.get("status") or {}).check_job
        if before is not None and before != release.state.check_job:
            await self.cluster.delete_job(plan.identity.namespace, before)

    async def _free_pods(self, plan: Plan) -> int | None:
        device = resource_name(plan.service)
        found = await self.cluster.nodes_and_pods() if device is not None else None
        if device is None or found is None:
            return None
        nodes, pods = found
        template = plan.workload["spec"]["template"]
        return free_pods(template, nodes, pods, device=device, ours=selector_labels(plan.identity))

    async def _check(self, plan: Plan, *, now: float) -> Check | None:
        """What has come of the check of this template; None where it has not begun."""
        namespace = plan.identity.namespace
        name = check_job_name(plan.service, template_hash(plan))
        job = await self.cluster.job(namespace, name)
        if job is None:
            return None
        owners = job["metadata"].get("ownerReferences") or ()
        if "deletionTimestamp" in job["metadata"] or not any(o.get("uid") == plan.identity.uid for o in owners):
            # One that goes, or is left of a service that had our name, says nothing about us.
            return Check(state=CheckState.RUNNING, reason="Checking", message=f"for Job/{name} of before to go")
        bodies = await self.cluster.pods(namespace, {CHECK_LABEL: child_name(plan.identity)})
        uid = job["metadata"]["uid"]
        own = [pod for pod in bodies if any(o.get("uid") == uid for o in pod["metadata"].get("ownerReferences") or ())]
        if not own:
            return outcome_of(job, [], await self._events(namespace, uid))
        # A check is over in minutes, so what its pod waits for is asked anew each time, and remembered nowhere.
        mounts = MountReader(clock=lambda: now)
        return outcome_of(job, await mounts.look(self.cluster, namespace, [observed_pod(pod) for pod in own]))

    async def _events(self, namespace: str, uid: str) -> tuple[Body, ...]:
        """About one object; none where they may not be read."""
        try:
            return await self.cluster.events_about(namespace, uid)
        except ClusterError as error:
            if error.fault is not Fault.FORBIDDEN:
                raise
            return ()

    async def _begin_check(self, release: Release) -> Release:
        assert release.check is not None
        result = await self.cluster.create_job(release.check)
        name = release.check["metadata"]["name"]
        if result.outcome is not ApplyOutcome.REFUSED:
            logger.info("%s: created Job/%s", release.check["metadata"]["namespace"], name)
            return release
        held = Diagnosis(
            state=State.STALLED,
            reason="ApplyRefused",
            message=f"The API server refused Job/{name}, which is to check the change before the last serving pod is "
            f"replaced: {result.message}",
        )
        return replace(release, held=held, state=replace(release.state, check_job=None, check_waits=None))


def awaits_check(release: Release | None) -> bool:
    """Whether the service is to be looked at again soon."""
    return release is not None and release.state.check_job is not None
