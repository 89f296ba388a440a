"""What can only be shown where every request is seen and every model is at hand: on the cluster of our own."""

from __future__ import annotations

import time

import pytest

from tests.e2e.site import Site
from tests.support.kubectl import eventually

pytestmark = pytest.mark.e2e

IDLE_SECONDS = 12.0
"""A dozen scrapes, with the operator's arguments of these tests."""


def test_an_idle_service_causes_no_write(site: Site) -> None:
    recorder = site.requests
    assert recorder is not None
    with site.deployed("idle") as service:
        service.wait_ready()
        eventually(lambda: service.status().get("prefixCache", {}).get("enabled"), "the first figures", within=30)
        time.sleep(3)  # what the last event brings along
        mark = len(recorder.requests())
        time.sleep(IDLE_SECONDS)
        assert recorder.writes(since=mark) == []
        # The recorder is no wall: a change is seen through it.
        service.patch({"service": {"sessionAffinity": "ClientIP"}})
        eventually(lambda: recorder.writes(since=mark), "the change is written", within=10)


def test_a_multimodal_model_is_refused_by_name(site: Site) -> None:
    with site.deployed("multimodal", {"model": {"uri": site.model_uris["multimodal"]}}) as service:
        message = service.wait_condition("Stalled", "True", "UnsupportedModel", within=120)
        assert "LlavaForConditionalGeneration" in message
