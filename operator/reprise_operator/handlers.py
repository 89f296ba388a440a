"""kopf's decorators, and nothing else: an event wakes the InferenceService it concerns.

What kopf is used for is its watches. Handlers of `on.event` return nothing, keep no state in the objects (no finalizer,
no annotation), and decide nothing: an exception in them would be logged and lost, so all work is in the queue, whose
reconcile compares what is with what should be.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import kopf
from kubernetes.aio.client import Configuration

from reprise_operator.api import load_connection
from reprise_operator.cluster import Key
from reprise_operator.directory import Directory
from reprise_operator.kinds import (
    CHILD_TYPES,
    CONFIG_MAPS,
    DEPLOYMENTS,
    INFERENCE_SERVICES,
    PODS,
    SERVICES,
    STATEFUL_SETS,
    ResourceType,
)
from reprise_operator.metrics import OperatorMetrics
from reprise_operator.naming import CHECK_LABEL, MANAGED_BY_SELECTOR, NAME_LABEL
from reprise_operator.newest import Newest
from reprise_operator.settings import GROUP, KIND
from reprise_operator.spec import identity_of
from reprise_operator.watch import WatchHealth, object_key

Body = Mapping[str, Any]

COALESCE_SECONDS = 0.05
"""A change comes as a burst of events (Deployment, ReplicaSet, pods): one reconcile answers them."""


class Waker:
    """Event → key of the InferenceService it concerns → the queue."""

    def __init__(
        self,
        wake: Callable[[Key, float], None],
        *,
        health: WatchHealth,
        metrics: OperatorMetrics,
        directory: Directory,
        newest: Newest,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`wake` is given a key and after how many seconds it is due."""
        self._wake = wake
        self._health = health
        self._metrics = metrics
        self._directory = directory
        self._newest = newest
        self._clock = clock

    def service_event(self, body: Body, *, deleted: bool) -> None:
        metadata = body["metadata"]
        key = Key(metadata["namespace"], metadata["name"])
        self._metrics.on_watch_event(INFERENCE_SERVICES.plural, self._clock())
        if deleted:
            self._directory.forget(key)
            self._health.forget(key)
        else:
            self._directory.learn(identity_of(body))
            self._health.delivered(key, metadata.get("resourceVersion"))
        self._wake(key, 0.0)

    def child_event(self, body: Body, resource: ResourceType, *, deleted: bool = False) -> None:
        self._delivered(body, resource, deleted=deleted)
        metadata = body["metadata"]
        for owner in metadata.get("ownerReferences") or ():
            if owner.get("kind") == KIND and str(owner.get("apiVersion", "")).startswith(f"{GROUP}/"):
                self._wake(Key(metadata["namespace"], owner["name"]), COALESCE_SECONDS)
                return
        self._wake_by_label(metadata)  # somebody has taken the owner reference away

    def pod_event(self, body: Body, *, deleted: bool = False) -> None:
        self._delivered(body, PODS, deleted=deleted)
        self._wake_by_label(body["metadata"])

    def _delivered(self, body: Body, resource: ResourceType, *, deleted: bool) -> None:
        self._metrics.on_watch_event(resource.plural, self._clock())
        self._newest.seen(resource, body["metadata"].get("resourceVersion"))
        if deleted:
            self._health.forget(object_key(body), resource=resource)
        else:
            version = body["metadata"].get("resourceVersion")
            self._health.delivered(object_key(body), version, resource=resource)

    def _wake_by_label(self, metadata: Body) -> None:
        labels = metadata.get("labels") or {}
        key = self._directory.owner(metadata["namespace"], labels.get(NAME_LABEL) or labels.get(CHECK_LABEL))
        if key is not None:
            self._wake(key, COALESCE_SECONDS)


def register(registry: kopf.OperatorRegistry, waker: Waker) -> None:
    """Adds our handlers to `registry`. They are coroutines, so they run in the event loop, as the queue needs it."""

    @kopf.on.login(registry=registry)
    async def login(**_: Any) -> kopf.ConnectionInfo:
        return connection_info(await load_connection())

    @kopf.on.event(GROUP, INFERENCE_SERVICES.plural, registry=registry)
    async def service_changed(event: kopf.RawEvent, **_: Any) -> None:
        waker.service_event(event["object"], deleted=event["type"] == "DELETED")

    @kopf.on.event("apps", "deployments", registry=registry)
    async def deployment_changed(event: kopf.RawEvent, **_: Any) -> None:
        waker.child_event(event["object"], DEPLOYMENTS, deleted=event["type"] == "DELETED")

    @kopf.on.event("", "v1", "services", registry=registry)
    async def network_service_changed(event: kopf.RawEvent, **_: Any) -> None:
        waker.child_event(event["object"], SERVICES, deleted=event["type"] == "DELETED")

    @kopf.on.event("apps", "statefulsets", registry=registry)
    async def stateful_set_changed(event: kopf.RawEvent, **_: Any) -> None:
        waker.child_event(event["object"], STATEFUL_SETS, deleted=event["type"] == "DELETED")

    @kopf.on.event("", "v1", "configmaps", registry=registry)
    async def config_map_changed(event: kopf.RawEvent, **_: Any) -> None:
        waker.child_event(event["object"], CONFIG_MAPS, deleted=event["type"] == "DELETED")

    @kopf.on.event("", "v1", "pods", registry=registry)
    async def pod_changed(event: kopf.RawEvent, **_: Any) -> None:
        waker.pod_event(event["object"], deleted=event["type"] == "DELETED")


def kopf_settings(*, namespaced: bool, inactivity_seconds: float = 70.0) -> kopf.OperatorSettings:
    """kopf as we run it: it only watches, and of other people's objects it never sees any.

    A stream that brings nothing for `inactivity_seconds` is opened anew where it ended; the API server sends a bookmark
    each minute.
    """
    settings = kopf.OperatorSettings()
    settings.peering.standalone = True
    settings.posting.enabled = False  # events are ours (events.py)
    settings.scanning.disabled = namespaced  # CRDs and namespaces may not be read then
    for resource in (*CHILD_TYPES, PODS):
        settings.watching.label_selectors[resource.group, resource.plural] = MANAGED_BY_SELECTOR
    # A connection that was dropped in silence is found by the bookmarks that do not come.
    settings.watching.inactivity_timeout = inactivity_seconds
    settings.watching.connect_timeout = 10.0
    settings.watching.server_timeout = 300  # sent as it is, and the API server takes whole seconds only
    return settings


def connection_info(configuration: Configuration) -> kopf.ConnectionInfo:
    """The connection of kubernetes.aio as kopf takes it: both halves of the operator are one user."""
    scheme, _, token = (configuration.api_key.get("BearerToken") or "").rpartition(" ")
    return kopf.ConnectionInfo(
        server=configuration.host,
        ca_path=configuration.ssl_ca_cert,
        insecure=not configuration.verify_ssl,
        certificate_path=configuration.cert_file,
        private_key_path=configuration.key_file,
        scheme=scheme or None,
        token=token or None,
        proxy_url=configuration.proxy,
    )
