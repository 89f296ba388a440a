"""What spec.autoscaling and spec.disruption must hold beyond their types: refused with what to do. Pure."""

from __future__ import annotations

from reprise_operator.children.load import GAUGES, RESOURCES, default_target, is_series_name
from reprise_operator.resource import SpecError
from reprise_operator.spec_types import AutoscalingSpec, Spec


def check_autoscaling(spec: Spec) -> None:
    """Raises SpecError, `InvalidSpec`, where the autoscaler that the spec asks for could never work."""
    asked = spec.autoscaling
    if asked is None:
        return
    if asked.min_replicas > asked.max_replicas:
        raise _invalid(
            f"minReplicas is {asked.min_replicas}, above maxReplicas, which is {asked.max_replicas}; lower the one or "
            "raise the other."
        )
    is_keda = asked.provider == "keda"
    if asked.min_replicas == 0 and not is_keda:
        raise _invalid(
            "minReplicas is 0; a HorizontalPodAutoscaler that measures the pods themselves cannot scale to zero, since "
            "none would be left to measure. Set provider: keda, or minReplicas of at least 1."
        )
    prometheus = asked.prometheus
    if prometheus.server_address is not None or prometheus.query is not None:
        if not is_keda:
            raise _invalid("prometheus is only asked by KEDA; set provider: keda, or remove it.")
        if asked.metric in RESOURCES:
            raise _invalid(f"metric {asked.metric} is not read from Prometheus; remove prometheus, or name another.")
    if asked.metric in RESOURCES:
        _check_resource(spec, asked)
    elif prometheus.query is not None:
        if asked.target is None:
            raise _invalid("target is needed with prometheus.query: the query's value that one pod can bear.")
    else:
        _check_metric(asked, is_keda=is_keda)


def _check_resource(spec: Spec, asked: AutoscalingSpec) -> None:
    resources = spec.runtime.resources
    if asked.metric not in resources.requests and asked.metric not in resources.limits:
        raise _invalid(
            f"metric {asked.metric} is measured in percent of the container's request, and there is none; set "
            f"spec.runtime.resources.requests.{asked.metric}."
        )
    if asked.min_replicas == 0:
        raise _invalid(
            f"minReplicas is 0, and {asked.metric} of no pods wakes nobody; name another metric, or minReplicas of at "
            "least 1."
        )


def _check_metric(asked: AutoscalingSpec, *, is_keda: bool) -> None:
    if is_keda and not is_series_name(asked.metric):
        raise _invalid(
            f"metric is {asked.metric!r}, which is no name of a Prometheus series; name one, such as "
            f"{next(iter(GAUGES))}, or give prometheus.query."
        )
    if not is_keda and ("/" in asked.metric or "%" in asked.metric or asked.metric in (".", "..")):
        raise _invalid(f"metric is {asked.metric!r}; the name of a pods metric has no '/' and no '%'.")
    if asked.target is None and default_target(asked.metric) is None:
        raise _invalid(
            f"target is needed with metric {asked.metric}: the value that one pod can bear. It has a default with "
            f"{', '.join([*GAUGES, *RESOURCES])}."
        )


def check_disruption(spec: Spec) -> None:
    """Raises SpecError, `InvalidSpec`, where no PodDisruptionBudget can say what the spec asks."""
    asked = spec.disruption
    if asked is None:
        return
    given = {"minAvailable": asked.min_available, "maxUnavailable": asked.max_unavailable}
    fields = {name: value for name, value in given.items() if value is not None}
    if len(fields) != 1:
        raise SpecError("InvalidSpec", "spec.disruption needs either minAvailable or maxUnavailable, one of the two.")
    ((name, value),) = fields.items()
    is_valid = value >= 0 if isinstance(value, int) else value.endswith("%") and value[:-1].isdecimal()
    if not is_valid or (isinstance(value, str) and int(value[:-1]) > 100):
        raise SpecError(
            "InvalidSpec",
            f"spec.disruption.{name} is {value!r}; it must be a number of pods, or a percentage from 0% to 100%.",
        )


def _invalid(message: str) -> SpecError:
    return SpecError("InvalidSpec", f"spec.autoscaling.{message}")
