"""(Plan or SpecError, Observed, previous status) → status. Pure.

Times of conditions are kept and figures are quantised, so an idle service gets the same status again: no write.
Ready, Stalled and Reconciling follow kstatus: exactly one of Ready, Reconciling and Stalled is True.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from reprise_operator.attachments import attachment_conditions
from reprise_operator.autoscaling import autoscaling_condition
from reprise_operator.cache_effect import prefix_cache_condition
from reprise_operator.conditions import (
    AVAILABLE,
    MEMORY_TUNED,
    READY,
    RECONCILING,
    REFERENCES_RESOLVED,
    STALLED,
    Condition,
    merge,
)
from reprise_operator.diagnosis import Diagnosis, State
from reprise_operator.figures import engine_figures, prefix_cache_figures, serving_pods
from reprise_operator.hitrate import HitRateWindow
from reprise_operator.naming import selector_string
from reprise_operator.observed import Observed
from reprise_operator.plan import Plan
from reprise_operator.readiness import diagnose
from reprise_operator.references import unresolved
from reprise_operator.release import Release
from reprise_operator.release_state import state_status
from reprise_operator.settings import Settings
from reprise_operator.spec import Identity, SpecError
from reprise_operator.specified import specified_condition
from reprise_operator.tuning import memory_status
from reprise_operator.workloads import total, workload_of, workloads


def build_status(
    identity: Identity,
    outcome: Plan | SpecError,
    observed: Observed,
    previous: Mapping[str, Any],
    *,
    window: HitRateWindow,
    now: float,
    settings: Settings,
    release: Release | None = None,
) -> dict[str, Any]:
    """The whole status of one InferenceService.

    `release` says what became of the Plan's pod template, where there is a Plan.

    `outcome` is the Plan, or why there is none: then the running pods are left alone and go on being reported.
    `previous` is the status as last written; `window` has taken in `observed.pods`.
    """
    ours = workloads(observed)
    current = workload_of(outcome, observed) if isinstance(outcome, Plan) else next(iter(ours), None)
    figures = total(ours, current if current in ours else None)
    held = None if release is None else release.held
    cache = prefix_cache_figures(observed, previous.get("prefixCache") or {}, window=window, now=now, settings=settings)
    engine = engine_figures(observed, previous.get("engine") or {})
    wanted: bool | None = None
    if isinstance(outcome, SpecError):
        diagnosis = Diagnosis(state=State.STALLED, reason=outcome.reason, message=outcome.message)
    else:
        diagnosis = diagnose(outcome, observed, now=now, held=held)
        wanted = outcome.service.prefix_caching
    conditions = [
        *_kstatus(diagnosis),
        _available(figures.available),
        prefix_cache_condition(
            cache, serving=bool(serving_pods(observed)), wanted=wanted, block_size=engine.get("blockSize")
        ),
    ]
    status: dict[str, Any] = {
        "observedGeneration": identity.generation,
        "replicas": figures.replicas,
        "updatedReplicas": figures.updated if figures.seen and held is None else 0,
        "readyReplicas": figures.ready,
        "availableReplicas": figures.available,
        "selector": selector_string(identity),
    }
    if isinstance(outcome, Plan):
        status |= {"url": outcome.url, "model": outcome.service.served_name, "memory": _memory(outcome, diagnosis)}
        conditions += [_memory_tuned(outcome), *attachment_conditions(outcome, observed)]
        conditions += [specified_condition(outcome, observed), *autoscaling_condition(outcome, observed)]
        if outcome.references:
            conditions.append(_references_resolved(outcome, observed))
    else:
        # What the running pods were started with still holds.
        status |= {key: previous[key] for key in ("url", "model", "memory") if key in previous}
        conditions += _kept(previous, MEMORY_TUNED)
    rollout = previous.get("rollout") if release is None else state_status(release.state)
    if rollout:
        status["rollout"] = rollout
    if cache:
        status["prefixCache"] = cache
    if engine:
        status["engine"] = engine
    status["conditions"] = merge(conditions, previous.get("conditions") or (), generation=identity.generation, now=now)
    return status


def _kstatus(diagnosis: Diagnosis) -> list[Condition]:
    states = ((READY, State.READY), (RECONCILING, State.PROGRESSING), (STALLED, State.STALLED))
    return [
        Condition(
            type=kind,
            status="True" if diagnosis.state is state else "False",
            reason=diagnosis.reason,
            message=diagnosis.message,
        )
        for kind, state in states
    ]


def _available(available: int) -> Condition:
    if available > 0:
        return Condition(type=AVAILABLE, status="True", reason="Serving", message="At least one pod serves requests.")
    return Condition(type=AVAILABLE, status="False", reason="NoReadyPod", message="No pod serves requests.")


def _references_resolved(plan: Plan, observed: Observed) -> Condition:
    """Informational: pods that run have what they read at their start, and go on without it."""
    missing = unresolved(plan, observed)
    if missing:
        told = " ".join(item.message(plan.identity.namespace) for item in missing)
        message = f"{told} Running pods are left alone; none can be started until it is there."
        return Condition(type=REFERENCES_RESOLVED, status="False", reason=missing[0].reason, message=message)
    unseen = [str(item.object) for item in plan.references if item.object not in observed.references]
    if unseen:
        message = f"The operator may not read {', '.join(unseen)}: a change of it does not roll the pods."
        return Condition(type=REFERENCES_RESOLVED, status="Unknown", reason="NotReadable", message=message)
    names = ", ".join(str(item.object) for item in plan.references)
    return Condition(
        type=REFERENCES_RESOLVED, status="True", reason="Resolved", message=f"A change of {names} rolls the pods."
    )


def _memory(plan: Plan, diagnosis: Diagnosis) -> dict[str, Any]:
    return memory_status(plan.tuning) | {"deviceOutOfMemory": diagnosis.reason == "DeviceOutOfMemory"}


def _memory_tuned(plan: Plan) -> Condition:
    state = plan.tuning
    if state.is_at_floor:
        return Condition(
            type=MEMORY_TUNED,
            status="True" if state.steps else "False",
            reason="FloorReached",
            message=f"{_sentence(plan.memory.reason)} {state.effective:g} is the floor.",
        )
    if state.steps:
        return Condition(
            type=MEMORY_TUNED,
            status="True",
            reason="LoweredAfterOutOfMemory",
            message=f"Now {state.effective:g}: {plan.memory.reason}. The floor is {state.floor:g}.",
        )
    if plan.memory.requested is not None:
        return Condition(
            type=MEMORY_TUNED, status="False", reason="Requested", message="As spec.memory.utilization asks."
        )
    return Condition(type=MEMORY_TUNED, status="False", reason="Automatic", message=plan.memory.reason)


def _kept(previous: Mapping[str, Any], kind: str) -> list[Condition]:
    return [
        Condition(type=kind, status=item["status"], reason=item["reason"], message=item["message"])
        for item in previous.get("conditions") or ()
        if item["type"] == kind
    ]


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."
