"""Fault operator 17: an idle service causes no write. Counted in front of the API server, by what arrives there."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.operator.engine_pods import LoopbackEngine, loopback_engine, make_pods_ready
from tests.operator.operator_process import Process
from tests.operator.reconcile_bench import NAME, open_bench
from tests.support.kubectl import Kubectl, eventually
from tests.support.request_recorder import RequestRecorder, recording

IDLE_SCRAPES = 60
"""As many passes as half an hour has with the defaults. In real time four a second."""
SERVICE = {
    "apiVersion": "serving.reprise.io/v1alpha1",
    "kind": "InferenceService",
    "metadata": {"name": NAME},
    "spec": {"model": {"uri": "hostpath:///m"}, "accelerator": {"profile": "cpu"}},
}


@pytest.fixture
def recorder(kubectl: Kubectl, tmp_path: Path) -> Iterator[RequestRecorder]:
    with recording(kubectl.kubeconfig, folder=tmp_path) as recorder:
        yield recorder


@pytest.fixture
def engine() -> Iterator[LoopbackEngine]:
    # A loopback address of its own: the operator asks port 8000 of the pod's address.
    with loopback_engine(f"127.{random.randrange(64, 128)}.{random.randrange(256)}.{random.randrange(1, 255)}") as made:
        yield made


async def test_an_idle_hour_of_passes_writes_nothing(
    kubectl: Kubectl, recorder: RequestRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock is the test's, so the hour takes seconds."""
    monkeypatch.setenv("KUBECONFIG", str(recorder.kubeconfig))
    assert os.environ["KUBECONFIG"]
    async with open_bench(kubectl) as bench:
        bench.apply()
        bench.engine.queries, bench.engine.hits = 100, 50
        await bench.make_ready()
        bench.clock.now += 300  # the window passes
        await bench.settle()
        mark = len(recorder.requests())
        for _ in range(120):
            bench.clock.now += 30
            await bench.reconcile()
        assert len(recorder.requests()) - mark >= 5 * 120, "the passes were seen"
        assert recorder.writes(since=mark) == []
        bench.engine.queries, bench.engine.hits = 300, 250
        bench.clock.now += 30
        await bench.reconcile()
        assert [request.method for request in recorder.writes(since=mark)] == ["PATCH"], "and a change would be, too"


@pytest.mark.e2e
def test_a_whole_operator_that_idles_writes_nothing(
    kubectl: Kubectl, recorder: RequestRecorder, engine: LoopbackEngine, tmp_path: Path
) -> None:
    """Real time and a real process: watches, queue and resync too. The resync comes six times meanwhile."""
    process = Process(
        recorder.kubeconfig,
        tmp_path / "operator.log",
        *("-n", kubectl.namespace, "--scrape-seconds=0.25", "--hit-rate-window-seconds=5", "--resync-seconds=2.5"),
        "--status-min-interval-seconds=1",
    )
    try:
        process.wait_ready()
        kubectl.apply(SERVICE)
        make_pods_ready(kubectl, name=NAME, ip=engine.ip)
        served = eventually(lambda: _figures(kubectl), "the engine's figures are in the status", within=60)
        assert served["enabled"] is True
        engine.serve(queries=2000, hits=1500)
        eventually(lambda: _figures(kubectl).get("hitRatePercent") == 75, "the traffic is seen", within=30)
        eventually(lambda: "hitRatePercent" not in _figures(kubectl), "and its end", within=30)
        time.sleep(3.0)  # what the last event brings along
        mark, scraped = len(recorder.requests()), engine.scrapes
        eventually(lambda: engine.scrapes - scraped >= IDLE_SCRAPES, "it looks all the time", within=60)
        assert recorder.writes(since=mark) == []
        engine.serve(queries=100, hits=100)
        eventually(lambda: recorder.writes(since=mark), "a change is written, and seen by the recorder", within=15)
    finally:
        process.stop()
    assert "Traceback" not in process.log()


def _figures(kubectl: Kubectl) -> dict[str, object]:
    body = kubectl.get("inferenceservice", NAME) or {}
    return dict((body.get("status") or {}).get("prefixCache") or {})
