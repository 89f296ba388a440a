"""Names, labels and annotations of the children: valid, stable and free of collisions.

A Kubernetes label value and a Service name hold at most 63 characters. A longer name is cut and ends in a hash of the
whole, so two long names that begin alike never meet in one object.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from reprise_operator.settings import FIELD_MANAGER, GROUP, KIND, VERSION

if TYPE_CHECKING:
    from reprise_operator.resource import Identity

MAX_NAME = 63
MAX_STATEFUL_SET_NAME = 52
"""A StatefulSet's pods carry a label of its name and a hash of ten characters: with more, no pod could be made."""
HASH_LENGTH = 8

NAME_LABEL = f"{GROUP}/name"
"""On every child and pod; the immutable selector. Its value is `child_name`."""
OWNER_UID_LABEL = f"{GROUP}/owner-uid"
"""On every child, not on pods: finds the children of one InferenceService, also those the Plan no longer names."""
CHECK_LABEL = f"{GROUP}/check-of"
"""On the pods of a check (children/check_job.py) instead of `NAME_LABEL`, which would bring them traffic."""
PLAN_HASH_ANNOTATION = f"{GROUP}/plan-hash"
"""On every child: `digest` of the manifest it was applied from; status tells an applied spec from one still to come."""
MANAGED_BY_LABEL = "app.kubernetes.io/managed-by"
MANAGED_BY = {MANAGED_BY_LABEL: FIELD_MANAGER}
"""On every child and pod: what is ours, whoever's InferenceService it belongs to."""
MANAGED_BY_SELECTOR = f"{MANAGED_BY_LABEL}={FIELD_MANAGER}"
"""Label selector for watches of children and pods."""

_LABEL_VALUE = re.compile(r"^[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$")


def digest(value: object, *, length: int = 16) -> str:
    """Hex digest of a JSON-able value; equal for equal values whatever the order of their keys."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:length]


def shorten(name: str, *, limit: int = MAX_NAME) -> str:
    """`name` itself where it fits, else its beginning and a hash of the whole, `limit` characters at most."""
    if len(name) <= limit:
        return name
    head = name[: limit - HASH_LENGTH - 1].rstrip("-.")
    return f"{head}-{hashlib.sha256(name.encode()).hexdigest()[:HASH_LENGTH]}"


def child_name(identity: Identity) -> str:
    """Name of the Deployment and of the Service.

    A Service name is a DNS label (RFC 1035: no dots, starts with a letter), while a custom resource may be called
    "2.5-qwen". A name that has to be changed gets a hash, so that "a.b" and "a-b" stay apart.
    """
    name = identity.name
    label = re.sub(r"[^a-z0-9-]", "-", name.lower()).strip("-")
    if not label or not label[0].isalpha():
        label = f"s-{label}"
    if label == name:
        return shorten(label)
    return shorten(f"{shorten(label, limit=MAX_NAME - HASH_LENGTH - 1)}-{digest(name, length=HASH_LENGTH)}")


def selector_labels(identity: Identity) -> dict[str, str]:
    """The labels that select the pods. They never change: a Deployment's selector is immutable."""
    return {NAME_LABEL: child_name(identity)}


def selector_string(identity: Identity) -> str:
    """`selector_labels` as status.selector wants it (labelSelectorPath of the scale subresource)."""
    return ",".join(f"{key}={value}" for key, value in sorted(selector_labels(identity).items()))


def reserved_labels(identity: Identity) -> dict[str, str]:
    """The labels no user may change: the selector, and what the watches look for."""
    return {**selector_labels(identity), **MANAGED_BY}


def pod_labels(identity: Identity) -> dict[str, str]:
    """Labels of the pods: the selector's, the recommended ones, and the one the llm-d endpoint picker looks for."""
    return {
        **reserved_labels(identity),
        "app.kubernetes.io/name": "inference-service",
        "app.kubernetes.io/instance": child_name(identity),
        "app.kubernetes.io/component": "engine",
        "app.kubernetes.io/part-of": "reprise",
        "llm-d.ai/engine-type": "vllm",
    }


def child_labels(identity: Identity) -> dict[str, str]:
    """Labels of a child object."""
    labels = pod_labels(identity)
    if _LABEL_VALUE.match(identity.uid) and len(identity.uid) <= MAX_NAME:
        labels[OWNER_UID_LABEL] = identity.uid
    return labels


def owner_reference(identity: Identity) -> dict[str, Any]:
    """The controller reference every child carries; the garbage collector deletes the children after their owner."""
    return {
        "apiVersion": f"{GROUP}/{VERSION}",
        "kind": KIND,
        "name": identity.name,
        "uid": identity.uid,
        "controller": True,
        "blockOwnerDeletion": True,
    }


def child_metadata(
    identity: Identity, *, name: str | None = None, labels: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """metadata of a child object; None takes the common name, and the labels that every child has."""
    return {
        "name": child_name(identity) if name is None else name,
        "namespace": identity.namespace,
        "labels": child_labels(identity) if labels is None else dict(labels),
        "ownerReferences": [owner_reference(identity)],
    }


def stamped(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of `manifest` that carries the digest of its own content in `PLAN_HASH_ANNOTATION`."""
    metadata = manifest["metadata"]
    annotations = {**metadata.get("annotations", {}), PLAN_HASH_ANNOTATION: digest(manifest)}
    return {**manifest, "metadata": {**metadata, "annotations": annotations}}
