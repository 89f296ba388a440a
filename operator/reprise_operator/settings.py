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
    workers: int = 4
    resync_seconds: float = 300.0
    scrape_seconds: float = 30.0
    scrape_concurrency: int = 16
    scrape_timeout_seconds: float = 5.0
    hit_rate_window_seconds: float = 300.0
    status_min_interval_seconds: float = 60.0
    """Cache figures of one service are written at most this often (conditions are written at once)."""
    watch_inactivity_seconds: float = 70.0
    """A watch's stream that brings nothing for so long is opened anew; the API server's bookmarks come each minute."""
    watch_patience_seconds: float = 120.0
    """A watch that owes an event for so long is dead, and the liveness probe says so."""
    metrics_port: int = 8080
    health_port: int = 8081
