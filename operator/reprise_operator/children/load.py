"""What load autoscalers measure: the engine's gauges, cpu and memory, or what a user names. Pure.

Names of series are vLLM's, which both engines export. Units are those of `spec.autoscaling.target`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

WAITING = "vllm:num_requests_waiting"
RUNNING = "vllm:num_requests_running"
KV_CACHE = "vllm:kv_cache_usage_perc"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gauge:
    """One of the engine's gauges."""

    target: int
    """Load of one pod to hold where the spec names none."""
    is_share: bool = False
    """Whether it goes from 0 to 1 and its target is in percent."""


GAUGES: Mapping[str, Gauge] = MappingProxyType(
    {
        WAITING: Gauge(target=4),
        RUNNING: Gauge(target=32),
        KV_CACHE: Gauge(target=80, is_share=True),
    }
)

RESOURCES: Mapping[str, int] = MappingProxyType({"cpu": 80, "memory": 80})
"""Resources of the engine container → default target, in percent of its request."""

RATE_WINDOW = "2m"
_ACTIVITY_WEIGHT = "0.001"
# A ReplicaSet's name is the Deployment's and a hash; a pod's is that and five characters, cut at 63 in all.
_POD_SUFFIX_LENGTH = 5
_POD_HASH_LENGTH = 10
_POD_NAME_LIMIT = 63


def default_target(metric: str) -> int | None:
    """Of a known metric; None for others, whose target must be named."""
    return GAUGES[metric].target if metric in GAUGES else RESOURCES.get(metric)


def load_query(metric: str, *, namespace: str, workload: str, to_zero: bool) -> str:
    """PromQL for the load of all pods of one workload together, in the units of its target.

    Pods are told apart by the labels `namespace` and `pod`, as Prometheus sets them when it scrapes pods. With
    `to_zero` a pod that is busy without being loaded (requests run, none waits) still counts as active, or a service in
    use would be scaled to zero.
    """
    pods = f'namespace="{namespace}",pod=~"{_pod_pattern(workload)}"'
    if metric.endswith("_total"):
        load = f"sum(rate({metric}{{{pods}}}[{RATE_WINDOW}]))"
    elif metric in GAUGES and GAUGES[metric].is_share:
        load = f"100 * sum({metric}{{{pods}}})"
    else:
        load = f"sum({metric}{{{pods}}})"
    if not to_zero:
        return load
    return f'{load} + {_ACTIVITY_WEIGHT} * sum({{__name__=~"{WAITING}|{RUNNING}",{pods}}})'


def _pod_pattern(workload: str) -> str:
    """RE2 pattern of the pods' names: of a Deployment (name-hash-suffix) or of a StatefulSet (name-ordinal), and of no
    other service whose name begins alike."""
    room = _POD_NAME_LIMIT - _POD_SUFFIX_LENGTH
    if len(workload) + len("--") + _POD_HASH_LENGTH <= room:
        return f"{workload}-([a-z0-9]+-[a-z0-9]{{{_POD_SUFFIX_LENGTH}}}|[0-9]+)"
    return f"{workload[:room]}[a-z0-9-]+"


def is_series_name(metric: str) -> bool:
    """Whether Prometheus may have a series of this name."""
    return re.fullmatch(r"[a-zA-Z_:][a-zA-Z0-9_:]*", metric) is not None
