"""Pods without a node: the tests say what a kubelet would, and answer /metrics where the pod's address is."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from reprise_operator.settings import ENGINE_PORT
from tests.support.kubectl import Kubectl, eventually

_CONFIG = 'enable_prefix_caching="True",gpu_memory_utilization="0.9",block_size="16",num_gpu_blocks="600"'


class LoopbackEngine:
    """The counters of one engine at `ip`, and how often they were read."""

    def __init__(self, ip: str) -> None:
        self.ip = ip
        self.scrapes = 0
        self._queries = self._hits = 0
        self._lock = threading.Lock()

    def serve(self, *, queries: int, hits: int) -> None:
        """So many more tokens were looked up and found."""
        with self._lock:
            self._queries += queries
            self._hits += hits

    def metrics(self) -> str:
        with self._lock:
            self.scrapes += 1
            return (
                f"vllm:prefix_cache_queries_total {self._queries}\n"
                f"vllm:prefix_cache_hits_total {self._hits}\n"
                f"vllm:kv_cache_usage_perc 0.5\nvllm:cache_config_info{{{_CONFIG}}} 1\n"
            )


@contextmanager
def loopback_engine(ip: str) -> Iterator[LoopbackEngine]:
    """Answers GET /metrics at `ip`, at the port every engine has."""
    engine = LoopbackEngine(ip)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            text = engine.metrics().encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer((ip, ENGINE_PORT), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield engine
        finally:
            server.shutdown()
            thread.join()


def make_pods_ready(kubectl: Kubectl, *, name: str, ip: str) -> None:
    """Says of each pod of service `name` that it is ready at `ip`, until the Deployment has all it asks for."""
    stamp = "2026-01-01T00:00:00Z"
    status = {
        "phase": "Running",
        "podIP": ip,
        "podIPs": [{"ip": ip}],
        "conditions": [
            {"type": kind, "status": "True", "lastTransitionTime": stamp} for kind in ("Ready", "PodScheduled")
        ],
    }

    def available() -> bool:
        for pod in kubectl.list("pods", f"serving.reprise.io/name={name}"):
            kubectl.patch("pod", pod["metadata"]["name"], {"status": status}, "--subresource=status")
        found = kubectl.get("deployment", name)
        if found is None:
            return False
        return bool((found.get("status") or {}).get("availableReplicas", 0) == found["spec"]["replicas"])

    eventually(available, "the Deployment is available", within=60)
