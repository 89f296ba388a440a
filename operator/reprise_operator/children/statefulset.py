"""The StatefulSet of engine pods that have a volume each. Pure.

Which pod is replaced when is the operator's to say (handover.py): a StatefulSet's own rolling update takes the last pod
first, also where it is the one that serves and another one is broken.

A StatefulSet's volumeClaimTemplates can never change. So its name ends in a hash of them: another size or class is
another StatefulSet, which takes over from the one before pod by pod (handover.py), and serving pods are not dropped for
a volume. The claims hold a cache, from which prompts can be guessed: they are deleted with their StatefulSet, and
kept when it is only scaled down.
"""

from __future__ import annotations

from typing import Any

from reprise_operator.children.memory import MemoryPlan
from reprise_operator.children.pod import build_pod_template
from reprise_operator.children.prefix_cache import CACHE_VOLUME
from reprise_operator.naming import (
    HASH_LENGTH,
    MAX_STATEFUL_SET_NAME,
    child_metadata,
    child_name,
    digest,
    reserved_labels,
    selector_labels,
    shorten,
    stamped,
)
from reprise_operator.quantity import whole
from reprise_operator.resource import InferenceService
from reprise_operator.settings import Settings
from reprise_operator.spec_types import PersistenceSpec


def build_stateful_set(
    service: InferenceService, settings: Settings, *, replicas: int | None, memory: MemoryPlan
) -> dict[str, Any]:
    """The StatefulSet's manifest; `persistence.size` is set. `replicas` None leaves their number out, for somebody else
    to decide."""
    identity, persistence = service.identity, service.persistence
    assert persistence is not None
    return stamped(
        {
            "apiVersion": "apps/v1",
            "kind": "StatefulSet",
            "metadata": child_metadata(identity, name=stateful_set_name(service)),
            "spec": {
                # Pods need no names of their own: the Service with the address of all is enough.
                "serviceName": child_name(identity),
                **({} if replicas is None else {"replicas": replicas}),
                "selector": {"matchLabels": selector_labels(identity)},
                # No pod waits for another one: they know nothing of each other.
                "podManagementPolicy": "Parallel",
                "updateStrategy": {"type": "OnDelete"},
                "persistentVolumeClaimRetentionPolicy": {"whenDeleted": "Delete", "whenScaled": "Retain"},
                "revisionHistoryLimit": 3,
                "template": build_pod_template(service, settings, memory),
                "volumeClaimTemplates": [_claim(service, persistence)],
            },
        }
    )


def stateful_set_name(service: InferenceService) -> str:
    """The service's name and a hash of its claims: what can never change in place is in the name."""
    persistence = service.persistence
    assert persistence is not None
    assert persistence.size is not None
    parts = [whole(persistence.size), persistence.storage_class_name, _access_modes(persistence)]
    head = shorten(child_name(service.identity), limit=MAX_STATEFUL_SET_NAME - HASH_LENGTH - 1)
    return f"{head}-{digest(parts, length=HASH_LENGTH)}"


def _claim(service: InferenceService, persistence: PersistenceSpec) -> dict[str, Any]:
    spec: dict[str, Any] = {
        "accessModes": _access_modes(persistence),
        "resources": {"requests": {"storage": persistence.size}},
    }
    if persistence.storage_class_name is not None:  # "" is a value: no class, a volume that an admin has made
        spec["storageClassName"] = persistence.storage_class_name
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": CACHE_VOLUME, "labels": reserved_labels(service.identity)},
        "spec": spec,
    }


def _access_modes(persistence: PersistenceSpec) -> list[str]:
    """In one order: to the API server another order is another claim, and a claim can never change."""
    return sorted(set(persistence.access_modes)) or ["ReadWriteOnce"]
