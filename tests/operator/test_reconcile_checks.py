"""A check's Job whose pod does not come to run: what it waits for is said while it waits, not after half an hour."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from tests.operator.reconcile_bench import Bench
from tests.operator.test_reconcile_release import CHANGE, NPU, READY, pods, set_status, settle_on, the_check
from tests.support.kubectl import eventually

VOLUME: Mapping[str, Any] = {"name": "certificates", "secret": {"secretName": "absent"}}
NOT_MOUNTED = 'MountVolume.SetUp failed for volume "certificates" : secret "absent" not found'


def event_about(bench: Bench, pod: Mapping[str, Any], message: str) -> dict[str, Any]:
    stamp = "2026-01-01T00:00:30Z"
    about = {key: pod["metadata"][key] for key in ("name", "namespace", "uid")}
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": "refused", "namespace": bench.kubectl.namespace},
        "type": "Warning",
        "involvedObject": {"apiVersion": "v1", "kind": "Pod", **about},
        "reason": "FailedMount",
        "message": message,
        "firstTimestamp": stamp,
        "lastTimestamp": stamp,
        "count": 3,
    }


async def test_a_volume_that_cannot_be_mounted(bench: Bench) -> None:
    bench.apply(dict(NPU))
    await bench.make_ready()
    bench.apply({**NPU, **CHANGE, "podTemplate": {"volumes": [VOLUME]}})
    await bench.settle()
    check = pods(bench, checks=True)[the_check(bench)]
    set_status(bench, check["metadata"]["name"], phase="Pending", conditions=[READY[1]])
    bench.kubectl.apply(event_about(bench, check, NOT_MOUNTED))
    bench.clock.now = datetime.fromisoformat(check["metadata"]["creationTimestamp"]).timestamp() + 5
    await bench.settle()
    assert bench.condition("Stalled")[0] == "False", "one that is being attached fails to mount a few times first"
    bench.clock.now += 60
    await bench.settle()
    assert bench.condition("Stalled")[1] == "VolumeMountFailed"
    assert bench.condition("Stalled")[2].endswith(f"It waits: {NOT_MOUNTED}")
    assert bench.condition("Available")[0] == "True"


async def test_a_pod_that_may_not_be_created(bench: Bench, controller_manager: None) -> None:
    """A quota; Pod Security and webhooks are alike."""
    bench.apply(dict(NPU))
    await bench.make_ready()
    before = pods(bench).keys()
    quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "models"}, "spec": {"hard": {"pods": 1}}}
    bench.kubectl.apply(quota)
    eventually(lambda: (bench.kubectl.get("resourcequota", "models") or {}).get("status", {}).get("used"), "the quota")
    bench.apply({**NPU, **CHANGE})
    await settle_on(bench, lambda: bench.condition("Stalled")[1] == "PodsRefused", "the refusal")
    message = bench.condition("Stalled")[2]
    assert "its pod is forbidden: exceeded quota: models" in message
    await asyncio.sleep(2.0)
    await bench.settle()
    assert bench.condition("Stalled")[2] == message, "the next try is no news"
    assert pods(bench).keys() == before
    bench.apply({**NPU, "runtime": {}})
    await bench.settle()
    assert bench.condition("Ready")[0] == "True"
