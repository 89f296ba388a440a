"""Settings of one operator process: from flags and environment, frozen, passed down explicitly."""

from __future__ import annotations

from dataclasses import dataclass

GROUP = "serving.reprise.io"
VERSION = "v1alpha1"
PLURAL = "inferenceservices"
KIND = "InferenceService"
FIELD_MANAGER = "reprise-operator"

ENGINE_PORT = 8000
"""The container port of every engine pod, named "http"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """`namespace` None means all namespaces. Seconds everywhere. Images are the defaults where the spec names none."""

    namespace: str | None = None
    reprise_image: str = "ghcr.io/reprise/reprise-engine:0.1.0"
    vllm_ascend_image: str = "quay.io/ascend/vllm-ascend:v0.23.0"
    endpoint_picker_image: str = "ghcr.io/llm-d/llm-d-router-endpoint-picker:v0.9.0"
    endpoint_picker_service_account: str = "reprise-endpoint-picker"
    """Of managed endpoint pickers, in the namespace of each: the chart, or the administrator, makes it."""
    fetch_image: str | None = None
    """Of the init container that fetches a model. None: the engine's own image, which the node needs anyway, where that
    is ours, else `reprise_image`."""
    workers: int = 16
    """A pass waits, it does not compute: a consistent listing takes the API server up to 100 ms while anything else
    is written (KEP-2340). Four workers took eight services a second."""
    resync_seconds: float = 300.0
    discovery_seconds: float = 60.0
    """How often optional kinds are looked for, and our objects of them for edits."""
    scrape_seconds: float = 30.0
    scrape_concurrency: int = 16
    scrape_timeout_seconds: float = 5.0
    hit_rate_window_seconds: float = 300.0
    status_min_interval_seconds: float = 60.0
    """Cache figures of one service are written at most this often (conditions are written at once)."""
    prometheus_url: str | None = None
    """Where KEDA asks for the load of services that name no server of their own."""
    read_nodes: bool = False
    """Whether nodes, and the pods of all namespaces, may be read to find free devices: then a change of an NPU service
    may add a pod before it takes one."""
    watch_inactivity_seconds: float = 70.0
    """A watch's stream that brings nothing for so long is opened anew; the API server's bookmarks come each minute."""
    watch_patience_seconds: float = 120.0
    """A watch that owes an event for so long is dead, and the liveness probe says so."""
    metrics_port: int = 8080
    health_port: int = 8081
