"""Whether the engines run as the spec asks: what the pods report beside what they were told. Informational. Pure.

An engine may settle on something else: a device that forces its block size, an image that turns a feature off, an
environment variable of the user's. That is no failure, but whoever reads the spec must not be deceived by it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from reprise_operator.conditions import AS_SPECIFIED, Condition
from reprise_operator.observed import EngineMetrics, Observed, ObservedPod
from reprise_operator.plan import Plan

TOLERANCE = 0.001
"""Of the memory's share, which the engine is told with six digits."""
_MAX_NAMED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """`field` is a path in the spec, `asked` and `runs` are values for people."""

    field: str
    asked: str
    runs: str


def specified_condition(plan: Plan, observed: Observed) -> Condition:
    """AsSpecified, of the ready pods of the present template: what an older one does, the older spec had asked for."""
    pods = sorted((pod for pod in observed.current_pods if pod.ready), key=lambda pod: pod.name)
    told = [pod for pod in pods if pod.metrics is not None and _tells(pod.metrics)]
    if not told:
        message = "No ready pod of the present template reports what it runs with."
        return Condition(type=AS_SPECIFIED, status="Unknown", reason="NotReported", message=message)
    found: dict[Difference, list[ObservedPod]] = {}
    for pod in told:
        assert pod.metrics is not None
        for difference in differences(plan, pod.metrics):
            found.setdefault(difference, []).append(pod)
    if not found:
        message = "Every pod that reports runs with what the spec asks for."
        return Condition(type=AS_SPECIFIED, status="True", reason="AsSpecified", message=message)
    parts = (
        f"{one.field} asks for {one.asked}, and {_names(pods, of=len(told))} with {one.runs}"
        for one, pods in found.items()
    )
    return Condition(type=AS_SPECIFIED, status="False", reason="EngineDiffers", message="; ".join(parts) + ".")


def differences(plan: Plan, metrics: EngineMetrics) -> Iterator[Difference]:
    """What one engine reports otherwise than it was told. What it does not report is no difference."""
    spec = plan.service.spec
    asked_caching = plan.service.prefix_caching
    if metrics.enable_prefix_caching is not None and metrics.enable_prefix_caching != asked_caching:
        yield Difference(
            field="spec.prefixCaching.enabled",
            asked=str(asked_caching).lower(),
            runs=str(metrics.enable_prefix_caching).lower(),
        )
    for field, asked, runs in (
        ("spec.prefixCaching.blockSize", spec.prefix_caching.block_size, metrics.block_size),
        ("spec.model.maxModelLen", spec.model.max_model_len, metrics.max_model_len),
    ):
        if asked is not None and runs is not None and asked != runs:
            yield Difference(field=field, asked=str(asked), runs=str(runs))
    share, runs_with = plan.memory.effective, metrics.gpu_memory_utilization
    if runs_with is not None and abs(runs_with - share) > TOLERANCE:
        field = "spec.memory.utilization" if plan.memory.requested == share else "status.memory.effective"
        yield Difference(field=field, asked=f"{share:g}", runs=f"{runs_with:g}")


def _tells(metrics: EngineMetrics) -> bool:
    told = (metrics.enable_prefix_caching, metrics.block_size, metrics.max_model_len, metrics.gpu_memory_utilization)
    return any(figure is not None for figure in told)


def _names(pods: Sequence[ObservedPod], *, of: int) -> str:
    if len(pods) == of and of > 1:
        return f"all {of} pods that report run"
    named = ", ".join(pod.name for pod in pods[:_MAX_NAMED])
    more = f" and {len(pods) - _MAX_NAMED} more" if len(pods) > _MAX_NAMED else ""
    return f"{named}{more} run{'s' if len(pods) == 1 else ''}"
