"""The kinds of object the operator touches, and every permission it needs: the chart's RBAC is tested against this
table, and api.py refuses to send a request that the table does not list."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from reprise_operator.settings import GROUP, KIND, PLURAL, VERSION


@dataclass(frozen=True, slots=True)
class ResourceType:
    """One kind of object at the API server; all of ours live in namespaces."""

    api_version: str
    kind: str
    plural: str

    @property
    def group(self) -> str:
        """The API group, "" for the core group."""
        group, slash, _ = self.api_version.rpartition("/")
        return group if slash else ""

    def path(self, namespace: str | None, name: str | None = None, subresource: str | None = None) -> str:
        """The URL path of a collection, an object or its subresource; namespace None lists all namespaces."""
        parts = ["/apis" if self.group else "/api", self.api_version]
        if namespace is not None:
            parts += ["namespaces", namespace]
        parts += [part for part in (self.plural, name, subresource) if part is not None]
        return "/".join(parts)


INFERENCE_SERVICES = ResourceType(f"{GROUP}/{VERSION}", KIND, PLURAL)
DEPLOYMENTS = ResourceType("apps/v1", "Deployment", "deployments")
STATEFUL_SETS = ResourceType("apps/v1", "StatefulSet", "statefulsets")
REPLICA_SETS = ResourceType("apps/v1", "ReplicaSet", "replicasets")
SERVICES = ResourceType("v1", "Service", "services")
PODS = ResourceType("v1", "Pod", "pods")
SECRETS = ResourceType("v1", "Secret", "secrets")
CONFIG_MAPS = ResourceType("v1", "ConfigMap", "configmaps")
CLAIMS = ResourceType("v1", "PersistentVolumeClaim", "persistentvolumeclaims")
EVENTS = ResourceType("v1", "Event", "events")
JOBS = ResourceType("batch/v1", "Job", "jobs")
NODES = ResourceType("v1", "Node", "nodes")
LEASES = ResourceType("coordination.k8s.io/v1", "Lease", "leases")

INFERENCE_POOLS = ResourceType("inference.networking.k8s.io/v1", "InferencePool", "inferencepools")
HTTP_ROUTES = ResourceType("gateway.networking.k8s.io/v1", "HTTPRoute", "httproutes")
POD_MONITORS = ResourceType("monitoring.coreos.com/v1", "PodMonitor", "podmonitors")
SCALED_OBJECTS = ResourceType("keda.sh/v1alpha1", "ScaledObject", "scaledobjects")
HORIZONTAL_POD_AUTOSCALERS = ResourceType("autoscaling/v2", "HorizontalPodAutoscaler", "horizontalpodautoscalers")
DISRUPTION_BUDGETS = ResourceType("policy/v1", "PodDisruptionBudget", "poddisruptionbudgets")

CHILD_TYPES = (DEPLOYMENTS, SERVICES, STATEFUL_SETS, CONFIG_MAPS)
"""What a Plan may contain: applied, watched, repaired, pruned."""

WORKLOAD_KINDS = (DEPLOYMENTS.kind, STATEFUL_SETS.kind)
"""What makes the engine pods (workloads.py knows which). One that the Plan does not name any more is handed over, not
pruned (handover.py)."""

FOREIGN_TYPES = (INFERENCE_POOLS, HTTP_ROUTES, POD_MONITORS, SCALED_OBJECTS)
"""The same, of kinds that another project's CRD defines: they may be absent, appear and go while the operator runs."""

OPTIONAL_TYPES = (*FOREIGN_TYPES, HORIZONTAL_POD_AUTOSCALERS, DISRUPTION_BUDGETS)
"""Kinds that are polled (discovery.py), not watched: the foreign ones, and those of Kubernetes' own that few services
have. Of a service without them they cost no request, and an autoscaler's status, rewritten all the time, wakes
nobody."""

AUTOSCALER_TYPES = (HORIZONTAL_POD_AUTOSCALERS, SCALED_OBJECTS)
"""Those that write the number of pods of the workload they target."""

ALL_CHILD_TYPES = (*CHILD_TYPES, *OPTIONAL_TYPES)

Permission = tuple[str, str]
"""API group and resource, the latter with its subresource: ("apps", "deployments")."""


def _table(entries: Mapping[Permission, set[str]]) -> Mapping[Permission, frozenset[str]]:
    return MappingProxyType({permission: frozenset(verbs) for permission, verbs in entries.items()})


PERMISSIONS: Mapping[Permission, frozenset[str]] = _table(
    {
        (GROUP, PLURAL): {"get", "list"},
        (GROUP, f"{PLURAL}/status"): {"patch"},
        ("apps", "deployments"): {"get", "list", "create", "patch", "delete"},
        ("apps", "statefulsets"): {"get", "list", "create", "patch", "delete"},
        ("apps", "replicasets"): {"list"},
        ("", "services"): {"get", "list", "create", "patch", "delete"},
        # Listed: ours. By name those that a service refers to, as below.
        ("", "configmaps"): {"get", "list", "create", "patch", "delete"},
        # Deleted are pods of a StatefulSet that are of an older template (handover.py).
        ("", "pods"): {"list", "delete"},
        # The end of a container's log, where its last words do not tell why it ended.
        ("", "pods/log"): {"get"},
        # The check of a change before the last serving pod is taken for it.
        ("batch", "jobs"): {"get", "create", "delete"},
        # By name only, those that a service refers to: whether they exist (imagePullSecrets, by a request for metadata)
        # and whether what the pods read of them has changed.
        ("", "secrets"): {"get"},
        ("", "persistentvolumeclaims"): {"get"},
        **{(kind.group, kind.plural): {"get", "list", "create", "patch", "delete"} for kind in OPTIONAL_TYPES},
        # Listed: those about one pod that waits for its volumes, or one Job that may not create its pod.
        ("", "events"): {"list", "create", "patch"},
    }
)
"""What cluster.py sends for the resources it serves, in the namespaces it serves."""

WATCH_PERMISSIONS: Mapping[Permission, frozenset[str]] = _table(
    {
        (GROUP, PLURAL): {"list", "watch"},
        ("apps", "deployments"): {"list", "watch"},
        ("apps", "statefulsets"): {"list", "watch"},
        ("", "services"): {"list", "watch"},
        ("", "configmaps"): {"list", "watch"},
        ("", "pods"): {"list", "watch"},
    }
)
"""What kopf sends for the handlers in handlers.py."""

WATCHED_TYPES = tuple(
    resource
    for resource in (INFERENCE_SERVICES, *CHILD_TYPES, PODS)
    if (resource.group, resource.plural) in WATCH_PERMISSIONS
)

ADMISSION_PERMISSIONS: Mapping[Permission, frozenset[str]] = _table({(GROUP, f"{PLURAL}/finalizers"): {"update"}})
"""Never sent, but asked for by the admission plugin OwnerReferencesPermissionEnforcement when a child's owner reference
blocks the owner's deletion."""

CLUSTER_PERMISSIONS: Mapping[Permission, frozenset[str]] = _table(
    {("apiextensions.k8s.io", "customresourcedefinitions"): {"list", "watch"}}
)
"""kopf's, when all namespaces are served: it notices the CRD's appearance and change."""

NODE_PERMISSIONS: Mapping[Permission, frozenset[str]] = _table({("", "nodes"): {"list"}})
"""Of all namespaces and with --read-nodes only: which devices are free (devices.py)."""

LEASE_PERMISSIONS: Mapping[Permission, frozenset[str]] = _table(
    {("coordination.k8s.io", "leases"): {"get", "create", "update"}}
)
"""In the operator's own namespace only: leader.py's lock."""
