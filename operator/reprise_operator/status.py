"""(Plan or SpecError, Observed, previous status) → status. Pure.

Times of conditions are kept and figures are quantised, so an idle service gets the same status again: no write.
Ready, Stalled and Reconciling follow kstatus: exactly one of Ready, Reconciling and Stalled is True.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from reprise_operator.conditions import (
    AVAILABLE,
    MEMORY_TUNED,
    READY,
    RECONCILING,
    STALLED,
    Condition,
    merge,
)
from reprise_operator.diagnosis import Diagnosis, State, diagnose
from reprise_operator.figures import engine_figures, prefix_cache_condition, prefix_cache_figures
from reprise_operator.hitrate import HitRateWindow
from reprise_operator.naming import selector_string
from reprise_operator.observed import Observed
from reprise_operator.plan import Plan
from reprise_operator.settings import Settings
from reprise_operator.spec import Identity, SpecError
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
) -> dict[str, Any]:
    """The whole status of one InferenceService.

    `outcome` is the Plan, or why there is none: then the running pods are left alone and go on being reported.
    `previous` is the status as last written; `window` has taken in `observed.pods`.
    """
    ours = workloads(observed)
    current = workload_of(outcome, observed) if isinstance(outcome, Plan) else next(iter(ours), None)
    figures = total(ours, current if current in ours else None)
    cache = prefix_cache_figures(observed, previous.get("prefixCache") or {}, window=window, now=now, settings=settings)
    if isinstance(outcome, SpecError):
        diagnosis = Diagnosis(state=State.STALLED, reason=outcome.reason, message=outcome.message)
        wanted = True
    else:
        diagnosis = diagnose(outcome, observed, now=now)
        wanted = outcome.service.prefix_caching
    conditions = [
        *_kstatus(diagnosis),
        _available(figures.available),
        prefix_cache_condition(observed, cache, wanted=wanted),
    ]
    status: dict[str, Any] = {
        "observedGeneration": identity.generation,
        "replicas": figures.replicas,
        "updatedReplicas": figures.updated if figures.seen else 0,
        "readyReplicas": figures.ready,
        "availableReplicas": figures.available,
        "selector": selector_string(identity),
    }
    if isinstance(outcome, Plan):
        status |= {"url": outcome.url, "model": outcome.service.served_name, "memory": _memory(outcome, diagnosis)}
        conditions.append(_memory_tuned(outcome))
    else:
        # What the running pods were started with still holds.
        status |= {key: previous[key] for key in ("url", "model", "memory") if key in previous}
    if cache:
        status["prefixCache"] = cache
    engine = engine_figures(observed, previous.get("engine") or {})
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


def _memory(plan: Plan, diagnosis: Diagnosis) -> dict[str, Any]:
    memory: dict[str, Any] = {
        "effective": plan.memory.effective,
        "reason": plan.memory.reason,
        "deviceOutOfMemory": diagnosis.reason == "DeviceOutOfMemory",
    }
    if plan.memory.requested is not None:
        memory["requested"] = plan.memory.requested
    return memory


def _memory_tuned(plan: Plan) -> Condition:
    if plan.memory.requested is not None:
        return Condition(
            type=MEMORY_TUNED, status="False", reason="Requested", message="As spec.memory.utilization asks."
        )
    return Condition(type=MEMORY_TUNED, status="False", reason="Automatic", message=plan.memory.reason)
