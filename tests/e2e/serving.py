"""Waits during which a service must go on serving."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx

from tests.e2e.site import Deployed
from tests.support.kubectl import eventually


class Serving:
    """Looks, whenever it is asked to, that the service serves."""

    def __init__(self, service: Deployed, url: str | None) -> None:
        self.service = service
        self.url = url

    def while_waiting_for(self, look: Callable[[], Any], what: str, *, within: float = 240) -> Any:
        def guarded() -> Any:
            self.check()
            return look()

        return eventually(guarded, what, within=within)

    def check(self) -> None:
        ready = [
            pod["metadata"]["name"]
            for pod in self.service.pods()
            for condition in pod.get("status", {}).get("conditions") or ()
            if (condition["type"], condition["status"]) == ("Ready", "True")
        ]
        assert ready, f"no pod serves: {self.service.status().get('conditions')}"
        if self.url is not None:
            assert httpx.get(f"{self.url}/v1/models", timeout=30).status_code == 200


def serving(service: Deployed, url: str) -> Serving:
    # A port-forward holds on to one pod; the proxy of our own cluster goes by the endpoints, as kube-proxy does.
    return Serving(service, url if service.site.requests is not None else None)
