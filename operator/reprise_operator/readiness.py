"""(Plan, Observed, now) → how the service is doing, as one Diagnosis. Pure.

The questions are asked in order, and the first answer counts:
taken names, refused applies → applied at all? → every pod of the present template ready? → what stops them → a host
name that is an older service's → progress.
"""

from __future__ import annotations

from collections.abc import Sequence

from reprise_operator.children.deployment import progress_deadline_seconds
from reprise_operator.children.fetch import FETCH_CONTAINER
from reprise_operator.diagnosis import Diagnosis, State, stalled
from reprise_operator.kinds import SCALED_OBJECTS
from reprise_operator.observed import Observed, ObservedChild
from reprise_operator.plan import Manifest, Plan
from reprise_operator.pod_failures import failure_of_pods
from reprise_operator.references import unresolved
from reprise_operator.replicas import unplanned_autoscalers, wanted_replicas
from reprise_operator.rollout import conflicts, find_child, key_of
from reprise_operator.workloads import WorkloadCounts, counts, predecessors, total, workload_of, workloads

UNSCHEDULABLE_SECONDS = 600.0
"""A pod without a node for so long needs a person: until then a cluster autoscaler or a finished job may help."""


def diagnose(plan: Plan, observed: Observed, *, now: float, held: Diagnosis | None = None) -> Diagnosis:
    """How the service is doing now. `held`: why the present spec's template is not given to the workload (yet)."""
    taken = conflicts(plan, observed)
    for_good = [conflict.message for conflict in taken if not conflict.leaving]
    if for_good:
        return stalled("NameTaken", " ".join(for_good))
    if taken:
        return Diagnosis(state=State.PROGRESSING, reason="Applying", message=" ".join(each.message for each in taken))
    refused = [
        f"{child}: {message}"
        for child, message in sorted(observed.apply_errors.items())
        if child in {str(key_of(manifest)) for manifest in plan.children}
    ]
    if refused:
        return stalled("ApplyRefused", f"The API server refused {'; '.join(refused)}")
    if held is not None:
        return held
    workload = workload_of(plan, observed)
    hostname = _hostname_taken(plan)
    if hostname is None and _is_ready(plan, observed, workload):
        return _ready(plan, observed, workload)
    failure = _missing_objects(plan, observed) or failure_of_pods(plan, observed) or _failure_of(workload)
    if failure is not None:
        return failure
    if hostname is not None:
        return hostname
    waiting = _unschedulable(observed, total(workloads(observed), workload), now) or _first_crash(observed)
    if _has_enough(plan, observed, workload):
        return _growing(plan, workload, waiting)
    deadline = _deadline(plan, observed, workload, now)
    if waiting is not None:
        return Diagnosis(state=State.STALLED, reason=waiting.reason, message=waiting.message) if deadline else waiting
    if deadline is not None:
        return stalled("ProgressDeadlineExceeded", deadline)
    return _progress(plan, observed, workload)


def why_not_ready(plan: Plan, observed: Observed, *, now: float) -> Diagnosis | None:
    """What stops the pods of the present template; None where nothing is seen to."""
    workload = workload_of(plan, observed)
    return (
        _missing_objects(plan, observed)
        or failure_of_pods(plan, observed)
        or _failure_of(workload)
        or _unschedulable(observed, total(workloads(observed), workload), now)
        or _first_crash(observed)
    )


def _is_applied(manifest: Manifest, child: ObservedChild | None) -> bool:
    return child is not None and not child.terminating and child.is_applied_from(manifest)


def _is_ready(plan: Plan, observed: Observed, workload: ObservedChild | None) -> bool:
    figures = counts(workload)
    wanted = wanted_replicas(plan, workload)
    # No pod of an older template may be left, and every one of the present must be ready: old ones do not count. The
    # figures are its controller's and may lag behind; the pods are asked too.
    ready = sum(pod.ready and not pod.failures for pod in observed.current_pods)
    settled = figures.seen and figures.replicas == figures.updated == figures.ready == figures.available == wanted
    return _all_applied(plan, observed) and not predecessors(plan, observed) and settled and ready >= wanted


def _all_applied(plan: Plan, observed: Observed) -> bool:
    return all(_is_applied(manifest, find_child(observed, key_of(manifest))) for manifest in plan.children)


def _has_enough(plan: Plan, observed: Observed, workload: ObservedChild | None) -> bool:
    """Whether an autoscaled service has all pods that it must have. More are a matter of load, and take minutes to
    start: a service is not out of order for it, nor because no node has room for a peak."""
    asked, figures = plan.service.spec.autoscaling, counts(workload)
    if asked is None or not plan.autoscaled or not _all_applied(plan, observed) or not figures.seen:
        return False
    if predecessors(plan, observed):
        return False
    return figures.replicas == figures.updated and figures.available >= max(asked.min_replicas, 1)


def _ready(plan: Plan, observed: Observed, workload: ObservedChild | None) -> Diagnosis:
    wanted = wanted_replicas(plan, workload)
    if plan.service.spec.suspend:
        return Diagnosis(state=State.READY, reason="Suspended", message="spec.suspend is true; no pod runs.")
    if wanted == 0:
        who = "The autoscaler found no load" if plan.autoscaled else "spec.replicas is 0"
        return Diagnosis(state=State.READY, reason="ScaledToZero", message=f"{who}; no pod runs.")
    message = f"{wanted} of {wanted} pods are ready."
    for name in plan.config_map_names:
        if name in observed.missing_config_maps:
            message += (
                f" ConfigMap {name} of spec.prefixCaching.warmup does not exist: pods start without their warm-up."
            )
    return Diagnosis(state=State.READY, reason="Ready", message=message)


def _growing(plan: Plan, workload: ObservedChild | None, waiting: Diagnosis | None) -> Diagnosis:
    figures, wanted = counts(workload), wanted_replicas(plan, workload)
    message = f"{figures.available} of {wanted} pods are ready; the autoscaler asked for more than there are."
    if waiting is not None:
        message += f" {waiting.message}"
    return Diagnosis(state=State.READY, reason="Ready", message=message)


def _hostname_taken(plan: Plan) -> Diagnosis | None:
    taken = plan.gateway.taken if plan.gateway is not None else None
    return None if taken is None else stalled("HostnameTaken", taken.message)


def missing_for_pods(plan: Plan, observed: Observed) -> Diagnosis | None:
    """What no pod of the present spec can be started without, and what is known not to be there."""
    missing = unresolved(plan, observed)
    if missing:
        told = " ".join(item.message(plan.identity.namespace) for item in missing)
        return stalled(missing[0].reason, f"{told} The pods start once it is there.")
    claims = [name for name in plan.claim_names if name in observed.missing_claims]
    if claims:
        return _not_found("PersistentVolumeClaim", claims, plan, reason="ClaimNotFound")
    return None


def _missing_objects(plan: Plan, observed: Observed) -> Diagnosis | None:
    # What is not read by its content: those of image registries.
    secrets = [name for name in plan.secret_names if name in observed.missing_secrets]
    if secrets:
        return _not_found("Secret", secrets, plan, reason="SecretNotFound")
    return missing_for_pods(plan, observed)


def _not_found(kind: str, names: Sequence[str], plan: Plan, *, reason: str) -> Diagnosis:
    namespace = plan.identity.namespace
    return stalled(
        reason, f"{kind} {', '.join(names)} does not exist in namespace {namespace}. The pods start once it is created."
    )


def _first_crash(observed: Observed) -> Diagnosis | None:
    for pod in observed.current_pods:
        for failure in pod.failures:
            return Diagnosis(
                state=State.PROGRESSING,
                reason="ContainerRestarting",
                message=f"Pod {pod.name}, container {failure.container} ended ({failure.reason}) and is started again.",
            )
    return None


def _failure_of(workload: ObservedChild | None) -> Diagnosis | None:
    """The ReplicaSet may not create pods: quota, Pod Security, a webhook. A StatefulSet says so in its events only."""
    condition = _condition(workload, "ReplicaFailure")
    if condition.get("status") != "True":
        return None
    return stalled("PodsRefused", condition.get("message", "The API server refuses the pods."))


def _unschedulable(observed: Observed, figures: WorkloadCounts, now: float) -> Diagnosis | None:
    for pod in sorted(observed.current_pods, key=lambda pod: pod.name):
        if pod.scheduled or not pod.unschedulable_message:
            continue
        waited = pod.created_at is not None and now - pod.created_at >= UNSCHEDULABLE_SECONDS
        return Diagnosis(
            state=State.STALLED if waited else State.PROGRESSING,
            reason="Unschedulable",
            message=f"Pod {pod.name} has no node: {pod.unschedulable_message} {figures.ready} other pods are ready.",
        )
    return None


def _deadline(plan: Plan, observed: Observed, workload: ObservedChild | None, now: float) -> str | None:
    if plan.workload["kind"] == "StatefulSet":
        return _late_pod(plan, observed, now)
    condition = _condition(workload, "Progressing")
    if condition.get("reason") != "ProgressDeadlineExceeded":
        return None
    return condition.get("message", "The rollout made no progress for too long.")


def _late_pod(plan: Plan, observed: Observed, now: float) -> str | None:
    """A StatefulSet knows no deadline: a pod of it that is not ready by then is late."""
    seconds = progress_deadline_seconds(plan.service)
    for pod in sorted(observed.current_pods, key=lambda pod: pod.name):
        if not pod.ready and not pod.started and pod.created_at is not None and now - pod.created_at > seconds:
            return f"Pod {pod.name} has not become ready within {seconds} s."
    return None


def _condition(workload: ObservedChild | None, kind: str) -> dict[str, str]:
    if workload is None or int(workload.status.get("observedGeneration", 0)) < workload.generation:
        return {}
    found = (item for item in workload.status.get("conditions") or () if item.get("type") == kind)
    return dict(next(found, {}))


def _progress(plan: Plan, observed: Observed, workload: ObservedChild | None) -> Diagnosis:
    for manifest in plan.children:
        if not _is_applied(manifest, find_child(observed, key_of(manifest))):
            fault = observed.apply_faults.get(str(key_of(manifest)))
            leaving = unplanned_autoscalers(plan, observed) if manifest is plan.autoscaler else ()
            if leaving:
                message = _waits_for(leaving[0])
                return Diagnosis(state=State.PROGRESSING, reason="Applying", message=f"{key_of(manifest)} {message}")
            message = "is being applied." if fault is None else f"is not applied yet, and tried again: {fault}"
            return Diagnosis(state=State.PROGRESSING, reason="Applying", message=f"{key_of(manifest)} {message}")
    fetching = sorted(pod.name for pod in observed.current_pods if pod.initializing == FETCH_CONTAINER)
    if fetching:
        message = (
            f"{', '.join(fetching)}: {plan.service.spec.model.uri} is being fetched; "
            f"`kubectl logs {fetching[0]} -c {FETCH_CONTAINER}` tells how far it is."
        )
        return Diagnosis(state=State.PROGRESSING, reason="FetchingModel", message=message)
    figures = counts(workload)
    if not figures.seen:
        message = f"The {plan.workload['kind']} controller has not seen the present template yet."
        return Diagnosis(state=State.PROGRESSING, reason="Progressing", message=message)
    old = figures.replicas - figures.updated
    ready = sum(pod.ready for pod in observed.current_pods)
    wanted = wanted_replicas(plan, workload)
    message = f"{min(ready, figures.updated)} of {wanted} pods of the present template are ready"
    message += f", {old} of an older one to be replaced." if old > 0 else "."
    before = predecessors(plan, observed)
    if before:
        names = ", ".join(f"{child.kind}/{child.name}" for child in before)
        message += f" {names} gives up a pod for each that serves, {total(before, None).available} serve there."
    elif plan.workload["kind"] == "StatefulSet" and figures.replicas < wanted:
        message += f" `kubectl describe {key_of(plan.workload)}` says why a pod is not made."
    return Diagnosis(state=State.PROGRESSING, reason="Progressing", message=message)


def _waits_for(leaving: ObservedChild) -> str:
    message = f"waits until {leaving.kind}/{leaving.name} is gone."
    if leaving.terminating and leaving.kind == SCALED_OBJECTS.kind:
        message += " KEDA ends its deletion, so KEDA has to run for it."
    return message
