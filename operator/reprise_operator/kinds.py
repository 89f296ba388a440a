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
CONFIG_MAPS = ResourceType("v1", "ConfigMap", "configmaps")
SECRETS = ResourceType("v1", "Secret", "secrets")
CLAIMS = ResourceType("v1", "PersistentVolumeClaim", "persistentvolumeclaims")
EVENTS = ResourceType("v1", "Event", "events")
LEASES = ResourceType("coordination.k8s.io/v1", "Lease", "leases")

CHILD_TYPES = (DEPLOYMENTS, SERVICES, STATEFUL_SETS, CONFIG_MAPS)
"""What a Plan may contain: applied, watched, repaired, pruned."""

WORKLOAD_KINDS = (DEPLOYMENTS.kind, STATEFUL_SETS.kind)
"""What makes pods. One that the Plan does not name any more is handed over, not pruned (handover.py)."""

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
        ("", "configmaps"): {"get", "list", "create", "patch", "delete"},
        # Deleted are pods of a StatefulSet that are of an older template (handover.py).
        ("", "pods"): {"list", "delete"},
        # Whether it exists, by a metadata-only request: the content is never read.
        ("", "secrets"): {"get"},
        ("", "persistentvolumeclaims"): {"get"},
        ("", "events"): {"create", "patch"},
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

ADMISSION_PERMISSIONS: Mapping[Permission, frozenset[str]] = _table({(GROUP, f"{PLURAL}/finalizers"): {"update"}})
"""Never sent, but asked for by the admission plugin OwnerReferencesPermissionEnforcement when a child's owner reference
blocks the owner's deletion."""

CLUSTER_PERMISSIONS: Mapping[Permission, frozenset[str]] = _table(
    {("apiextensions.k8s.io", "customresourcedefinitions"): {"list", "watch"}}
)
"""kopf's, when all namespaces are served: it notices the CRD's appearance and change."""

LEASE_PERMISSIONS: Mapping[Permission, frozenset[str]] = _table(
    {("coordination.k8s.io", "leases"): {"get", "create", "update"}}
)
"""In the operator's own namespace only: leader.py's lock."""
