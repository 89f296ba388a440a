"""(Plan, Observed, what status remembers, evidence, now) → which template the workload gets, what to remember. Pure.

A *release* is the way of a changed pod template to the workload. The questions are asked in order:
no workload yet? → this template rejected before? → given already: did it become good, or miss its deadline? → may it be
given now: is something missing without which no pod of it starts? would it take the last serving pod? Then a Job checks
it first (children/check_job.py).

Level-triggered like all of it: an edit that is taken back before it was given leaves no trace, and one that was given
is replaced by the Deployment controller, which takes the pods that do not serve first.

Of a Deployment only. A StatefulSet gets each template at once: its controller replaces one pod at a time and waits for
it, so a bad change takes one pod, and a good one after it begins with that pod (handover.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from reprise_operator.checks import Check, CheckState
from reprise_operator.children.check_job import DEADLINE_SECONDS, build_check_job, check_job_name
from reprise_operator.children.deployment import progress_deadline_seconds
from reprise_operator.children.strategy import (
    Strategy,
    default_strategy,
    fewest_replicas,
    is_zero,
    may_surge,
    needs_free_devices,
    surge_strategy,
)
from reprise_operator.conditions import timestamp
from reprise_operator.diagnosis import Diagnosis, State
from reprise_operator.kinds import DEPLOYMENTS
from reprise_operator.observed import Observed, ObservedChild, ObservedPod
from reprise_operator.plan import Manifest, Plan
from reprise_operator.readiness import missing_for_pods
from reprise_operator.rejection import LogSource, cause_of, clipped, log_source
from reprise_operator.release_manifests import template_hash, with_strategy, with_template
from reprise_operator.release_state import LastGood, Rejected, ReleaseState, started
from reprise_operator.replicas import wanted_replicas
from reprise_operator.rollout import find_child, key_of
from reprise_operator.workloads import counts


@dataclass(frozen=True, slots=True, kw_only=True)
class Questions:
    """What has to be looked up before `decide_release`: nothing in a service that is at rest."""

    devices: bool = False
    check: bool = False
    log: LogSource | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """The answers. None where it was not asked, or may not be known."""

    free_pods: int | None = None
    """More pods that the free devices have room for."""
    check: Check | None = None
    """The check's Job; None also where there is none yet."""
    log: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """The decision."""

    workload: Manifest | None
    """What to apply; None leaves the workload as it is."""
    state: ReleaseState
    held: Diagnosis | None = None
    """Why the present template is not given to the workload; None when it is."""
    check: Mapping[str, Any] | None = None
    """A Job to create."""
    rejects: bool = False
    """`state` holds a new rejection: it is written before anything is applied, or its cause would be lost."""


def questions(plan: Plan, observed: Observed, state: ReleaseState, *, now: float, read_nodes: bool) -> Questions:
    """What `decide_release` will want to know."""
    if not _is_released(plan):
        return Questions()
    live = _workload(plan, observed)
    if live is None or _is_rejected(plan, state) or plan.replicas == 0:
        return Questions()
    given = _is_given(plan, live, state)
    if given and not _is_stuck_surging(plan, live, observed):
        source = log_source(observed) if _is_overdue(plan, live, observed, state, now) else None
        return Questions(log=source)
    if not given and _missing(plan, observed) is not None:
        return Questions()
    devices = read_nodes and may_surge(plan.service)
    return Questions(devices=devices, check=_takes_the_last(plan, observed, default_strategy(plan.service)))


def decide_release(plan: Plan, observed: Observed, state: ReleaseState, evidence: Evidence, *, now: float) -> Release:
    """What the workload gets now. `evidence` answers `questions` of the same arguments."""
    if not _is_released(plan):
        return Release(workload=plan.workload, state=ReleaseState())
    live = _workload(plan, observed)
    if live is None:
        return Release(workload=plan.workload, state=_begun(plan, state, now))
    state = _adopted(observed, live, state)
    if _is_rejected(plan, state):
        return _stay(plan, observed, state)
    if _is_given(plan, live, state):
        return _go_on(plan, live, observed, state, evidence, now)
    return _begin(plan, observed, state, evidence, now)


# The questions, one by one ------------------------------------------------------------------------------------------


def _stay(plan: Plan, observed: Observed, state: ReleaseState) -> Release:
    """A rejected template is not given again until the spec asks for another one. Everything but it is applied."""
    assert state.rejected is not None
    rejected = state.rejected
    live = _workload(plan, observed)
    # Where its ReplicaSet is not known (any more), that of the workload: its replicas are the spec's all the same.
    as_it_is = None if live is None else live.body["spec"]["template"]
    template = observed.templates.get(rejected.pod_template_hash or "") or as_it_is
    held = Diagnosis(state=State.STALLED, reason=rejected.reason, message=rejected.message)
    kept = replace(state, check_job=None, check_waits=None)
    return Release(workload=with_template(plan, template), state=kept, held=held)


def _go_on(
    plan: Plan, live: ObservedChild, observed: Observed, state: ReleaseState, evidence: Evidence, now: float
) -> Release:
    """The template is on the workload: it becomes good, takes its time, or has missed its deadline."""
    wanted = template_hash(plan)
    # Of a template that was applied by a process which ended before it could write so, its time begins now.
    begun = state.started_at if state.template_hash == wanted else None
    state = replace(state, template_hash=wanted, rejected=None, started_at=begun or timestamp(now))
    if _is_stuck_surging(plan, live, observed) and not _fits(evidence):
        return _without_surge(plan, live, observed, state, evidence)
    state = replace(state, check_job=None, check_waits=None)
    if _is_complete(live):
        if observed.template_hash is not None and live.is_applied_from(plan.workload):
            good = LastGood(template_hash=wanted, pod_template_hash=observed.template_hash)
            state = replace(state, last_good=good)
        return Release(workload=plan.workload, state=state)
    if _is_overdue(plan, live, observed, state, now):
        return _roll_back(plan, observed, state, evidence, now)
    return Release(workload=with_strategy(plan, _live_surge(plan, live)), state=state)


def _roll_back(plan: Plan, observed: Observed, state: ReleaseState, evidence: Evidence, now: float) -> Release:
    good = state.last_good
    assert good is not None
    rejected = Rejected(
        template_hash=template_hash(plan),
        reason="RolledBack",
        message=clipped(
            f"The change made no progress for {progress_deadline_seconds(plan.service)} s and was taken back; the pods "
            "have the last good template again. Change the spec to try anew. "
            f"Cause: {cause_of(plan, observed, evidence.log, now=now)}"
        ),
        pod_template_hash=good.pod_template_hash,
    )
    after = ReleaseState(template_hash=good.template_hash, started_at=timestamp(now), last_good=good, rejected=rejected)
    return replace(_stay(plan, observed, after), rejects=True)


def _begin(plan: Plan, observed: Observed, state: ReleaseState, evidence: Evidence, now: float) -> Release:
    """The template is new to the workload: whether it may be given now."""
    missing = _missing(plan, observed)
    if missing is not None:
        kept = replace(state, check_job=None, check_waits=None)
        return Release(workload=with_template(plan, _live_template(observed)), state=kept, held=missing)
    strategy = default_strategy(plan.service)
    if _fits(evidence):
        wanted = wanted_replicas(plan, _workload(plan, observed))
        broken = max(0, wanted - len(_serving(observed)))
        strategy = surge_strategy(plan.service, wanted, free=evidence.free_pods or 0, broken=broken) or strategy
    elif needs_free_devices(plan.service) and plan.replicas > 0 and _serving(observed):
        held = Diagnosis(
            state=State.PROGRESSING,
            reason="WaitingForDevices",
            message="spec.rollout.maxUnavailable is 0 and no device is free for a pod more: the change begins when one "
            "is. The pods serve as they are. Set maxUnavailable to 1 to go on without.",
        )
        return Release(workload=with_template(plan, _live_template(observed)), state=state, held=held)
    given = Release(workload=with_strategy(plan, strategy), state=_begun(plan, state, now))
    if not _takes_the_last(plan, observed, strategy):
        return given
    return _checked(plan, observed, state, evidence, passed=given, meanwhile=None)


def _without_surge(
    plan: Plan, live: ObservedChild, observed: Observed, state: ReleaseState, evidence: Evidence
) -> Release:
    """The device that was free when the change began is taken: it goes on with what the pods have."""
    meanwhile = with_strategy(plan, _live_surge(plan, live))
    given = Release(workload=plan.workload, state=state)
    if not _takes_the_last(plan, observed, default_strategy(plan.service)):
        return given
    return _checked(plan, observed, state, evidence, passed=given, meanwhile=meanwhile)


def _checked(
    plan: Plan,
    observed: Observed,
    state: ReleaseState,
    evidence: Evidence,
    *,
    passed: Release,
    meanwhile: Manifest | None,
) -> Release:
    """`passed` once the check has passed, `meanwhile` while it runs."""
    wanted = template_hash(plan)
    name = check_job_name(plan.service, wanted)
    check = evidence.check
    waiting = replace(state, check_job=name, check_waits=(check.message or None) if check else None)
    told = f"Job/{name} checks the change (image, arguments, model) before the last serving pod is replaced."
    if check is None:
        node = next((pod.node for pod in _serving(observed) if pod.node), None)
        job = build_check_job(plan.service, plan.workload["spec"]["template"], template_hash=wanted, node=node)
        held = Diagnosis(state=State.PROGRESSING, reason="Checking", message=told)
        return Release(workload=meanwhile, state=waiting, held=held, check=job)
    match check.state:
        case CheckState.PASSED:
            return passed
        case CheckState.RUNNING:
            stalled = check.reason != "Checking"
            held = Diagnosis(
                state=State.STALLED if stalled else State.PROGRESSING,
                reason=check.reason,
                message=f"{told} It waits: {check.message}" if check.message else told,
            )
            return Release(workload=meanwhile, state=waiting, held=held)
        case CheckState.FAILED:
            seen = f" It was seen to wait: {state.check_waits}" if state.check_waits else ""
            words = check.message or f"the check did not end within {DEADLINE_SECONDS} s.{seen}"
            rejected = Rejected(
                template_hash=wanted,
                reason=check.reason,
                message=clipped(
                    "The change would not start, so the serving pod was left as it is. Change the spec to try anew. "
                    f"Cause: {words}"
                ),
                pod_template_hash=observed.template_hash,
            )
            after = replace(state, rejected=rejected)
            return replace(_stay(plan, observed, after), rejects=True)


# What is seen -------------------------------------------------------------------------------------------------------


def _workload(plan: Plan, observed: Observed) -> ObservedChild | None:
    child = find_child(observed, key_of(plan.workload))
    return None if child is None or not child.owned or child.terminating else child


def _is_released(plan: Plan) -> bool:
    """Whether templates are checked, remembered and taken back: what a ReplicaSet keeps can be."""
    return bool(plan.workload["kind"] == DEPLOYMENTS.kind)


def _is_rejected(plan: Plan, state: ReleaseState) -> bool:
    return state.rejected is not None and state.rejected.template_hash == template_hash(plan)


def _is_given(plan: Plan, live: ObservedChild, state: ReleaseState) -> bool:
    """Whether the workload has the template: as remembered, or since it was applied from this very manifest."""
    return state.template_hash == template_hash(plan) or live.is_applied_from(plan.workload)


def _is_complete(live: ObservedChild) -> bool:
    """Whether there are pods, all of the workload's present template, and all serve."""
    figures = counts(live)
    wanted = live.body["spec"].get("replicas", 1)
    return figures.seen and 0 < wanted == figures.replicas == figures.updated == figures.ready == figures.available


def _is_overdue(plan: Plan, live: ObservedChild, observed: Observed, state: ReleaseState, now: float) -> bool:
    """Whether the template missed its deadline, and there is a better one to go back to.

    The Deployment's condition alone may still be that of the template before.
    """
    good = state.last_good
    if good is None or good.template_hash == template_hash(plan) or good.pod_template_hash not in observed.templates:
        return False
    if good.pod_template_hash == observed.template_hash or not counts(live).seen:
        return False
    if not live.is_applied_from(plan.workload):
        return False
    conditions = {condition["type"]: condition for condition in live.status.get("conditions") or ()}
    late = conditions.get("Progressing", {}).get("reason") == "ProgressDeadlineExceeded"
    since = state.seconds_since_start(now)
    return late and (since is None or since >= progress_deadline_seconds(plan.service))


def _is_stuck_surging(plan: Plan, live: ObservedChild, observed: Observed) -> bool:
    """Whether a pod that was added for a free device did not get it."""
    if _live_surge(plan, live) is None or needs_free_devices(plan.service) or _is_complete(live):
        return False
    return any(not pod.scheduled and pod.unschedulable_message for pod in observed.current_pods)


def _live_surge(plan: Plan, live: ObservedChild) -> Strategy | None:
    """The workload's strategy where it is one for free devices."""
    limits = (live.body["spec"].get("strategy") or {}).get("rollingUpdate") or {}
    if not may_surge(plan.service) or "maxSurge" not in limits or is_zero(limits["maxSurge"]):
        return None
    return Strategy(surge=limits["maxSurge"], unavailable=limits.get("maxUnavailable", 0))


def _serving(observed: Observed) -> tuple[ObservedPod, ...]:
    return tuple(pod for pod in observed.pods if pod.ready and not pod.terminating)


def _takes_the_last(plan: Plan, observed: Observed, strategy: Strategy) -> bool:
    """Whether the Deployment controller may end the last pod that serves before another one does."""
    return (
        plan.replicas > 0 and bool(_serving(observed)) and strategy.least_available(fewest_replicas(plan.service)) == 0
    )


def _missing(plan: Plan, observed: Observed) -> Diagnosis | None:
    """What is known to keep every pod of the template from starting: no pod that serves goes for one of these."""
    found = missing_for_pods(plan, observed)
    if found is None or plan.replicas == 0 or not _serving(observed):
        return None
    return replace(found, message=f"{found.message} Those that serve are left as they are until then.")


def _fits(evidence: Evidence) -> bool:
    return evidence.free_pods is not None and evidence.free_pods > 0


def _live_template(observed: Observed) -> Mapping[str, Any] | None:
    return observed.templates.get(observed.template_hash or "")


def _adopted(observed: Observed, live: ObservedChild, state: ReleaseState) -> ReleaseState:
    """What serves is good, also where it was applied by an operator that did not remember it."""
    if state.last_good is not None or not _is_complete(live) or observed.template_hash is None:
        return state
    return replace(state, last_good=LastGood(template_hash=None, pod_template_hash=observed.template_hash))


def _begun(plan: Plan, state: ReleaseState, now: float) -> ReleaseState:
    wanted = template_hash(plan)
    if state.template_hash == wanted and state.rejected is None:
        return replace(state, check_job=None, check_waits=None)
    return started(wanted, now, last_good=state.last_good)
