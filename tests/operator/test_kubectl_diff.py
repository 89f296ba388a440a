"""`kubectl diff` of an applied manifest finds nothing, however it was applied and whatever was scaled since."""

from __future__ import annotations

import asyncio
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from reprise_operator.cluster import Key
from reprise_operator.workqueue import Retry
from tests.operator.reconcile_bench import NAME, WRITES, Bench
from tests.operator.workload_controllers import caught_up

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SIDES = pytest.mark.parametrize("side", ["client", "server"])

Manifest = dict[str, Any]


def manifests(path: Path) -> list[Manifest]:
    return [document for document in yaml.safe_load_all(path.read_text()) if document]


def services(path: Path) -> list[str]:
    """Names of the InferenceServices in a file of manifests."""
    return [found["metadata"]["name"] for found in manifests(path) if found["kind"] == "InferenceService"]


FILES = [path for path in sorted(EXAMPLES.rglob("*.yaml")) if services(path)]


def flags(side: str) -> tuple[str, ...]:
    return ("--server-side",) if side == "server" else ()


def difference(bench: Bench, side: str, path: str, stdin: str | None = None) -> str:
    """What `kubectl diff` prints; it exits with 0 without a difference, with 1 with one, and anything else fails."""
    done = subprocess.run(
        [bench.kubectl.program, "--namespace", bench.kubectl.namespace, "diff", *flags(side), "-f", path],
        input=stdin,
        env=bench.kubectl.environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode in (0, 1), done.stderr
    assert bool(done.stdout) == bool(done.returncode)
    return done.stdout


async def come_to_rest(bench: Bench, *names: str) -> None:
    """Passes over all of them until a round writes nothing though the controllers, whose answers cause writes, are
    done. Their pods are said to be ready meanwhile."""
    ends = time.monotonic() + 40
    while time.monotonic() < ends:
        done = caught_up(bench.kubectl)
        if any("podIP" not in pod["status"] for pod in bench.pods()):
            make_ready(bench)
        bench.requests.clear()
        refused = False
        for name in names:
            try:
                await bench.reconciler(Key(bench.kubectl.namespace, name))
            except Retry:
                refused = True
        written = [request for request in bench.requests if request[0] in WRITES]
        if done and not (written or refused):
            return
        await asyncio.sleep(0.1)
    raise AssertionError(f"the controllers are {'' if done else 'not '}done; written: {written}")


def make_ready(bench: Bench) -> None:
    since = "2026-01-01T00:00:00Z"
    bench.kubelet_says(
        phase="Running",
        podIP="127.0.0.1",
        podIPs=[{"ip": "127.0.0.1"}],
        conditions=[
            {"type": kind, "status": "True", "lastTransitionTime": since} for kind in ("Ready", "PodScheduled")
        ],
    )


FOLDERS = (EXAMPLES, EXAMPLES / "ascend")
"""Applied as they are: a manifest a file, all of the namespace one works in."""


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
@SIDES
async def test_the_folders_of_examples(bench: Bench, folder: Path, side: str) -> None:
    names = [name for path in FILES if path.parent == folder for name in services(path)]
    assert len(names) >= 3
    bench.kubectl("apply", *flags(side), "-f", str(folder))
    await come_to_rest(bench, *names)
    assert difference(bench, side, str(folder)) == ""


@pytest.mark.parametrize(
    "path", [path for path in FILES if path.parent not in FOLDERS], ids=lambda path: str(path.relative_to(EXAMPLES))
)
@SIDES
async def test_services_in_folders_below(bench: Bench, path: Path, side: str) -> None:
    """The trees of Argo CD and Flux hold services too; the namespace is the test's."""
    documents = [document for document in manifests(path) if document["kind"] != "Namespace"]
    for document in documents:
        document["metadata"].pop("namespace", None)
    text = yaml.safe_dump_all(documents)
    bench.kubectl("apply", *flags(side), "-f", "-", stdin=text)
    await come_to_rest(bench, *services(path))
    assert difference(bench, side, "-", stdin=text) == ""


def manifest(spec: Manifest) -> str:
    return yaml.safe_dump(
        {
            "apiVersion": "serving.reprise.io/v1alpha1",
            "kind": "InferenceService",
            "metadata": {"name": NAME},
            "spec": {"model": {"uri": "hostpath:///m"}, "accelerator": {"profile": "cpu"}, **spec},
        }
    )


@pytest.mark.parametrize("provider", ["hpa", "keda"])
@SIDES
async def test_an_autoscaled_service(bench: Bench, side: str, provider: str) -> None:
    """The autoscaler moves the workload between its bounds; the manifest says only the bounds."""
    text = manifest({})
    bench.kubectl("apply", *flags(side), "-f", "-", stdin=text)
    await come_to_rest(bench, NAME)
    text = manifest({"autoscaling": {"minReplicas": 1, "maxReplicas": 4, "provider": provider}})
    bench.kubectl("apply", *flags(side), "-f", "-", stdin=text)
    await come_to_rest(bench, NAME)
    assert difference(bench, side, "-", stdin=text) == ""
    bench.kubectl("scale", "deployment", NAME, "--replicas=3")
    await come_to_rest(bench, NAME)
    assert bench.child("deployment")["spec"]["replicas"] == 3
    assert difference(bench, side, "-", stdin=text) == ""


@SIDES
async def test_a_service_that_somebody_elses_autoscaler_scales(bench: Bench, side: str) -> None:
    """Through /scale of the resource. A manifest that leaves `replicas` out has no say in it, and no difference."""
    text = manifest({})
    bench.kubectl("apply", *flags(side), "-f", "-", stdin=text)
    await come_to_rest(bench, NAME)
    bench.kubectl("scale", "inferenceservice", NAME, "--replicas=3")
    await come_to_rest(bench, NAME)
    assert bench.child("deployment")["spec"]["replicas"] == 3
    assert difference(bench, side, "-", stdin=text) == ""
    bench.kubectl("apply", *flags(side), "-f", "-", stdin=text)
    await come_to_rest(bench, NAME)
    assert bench.child("deployment")["spec"]["replicas"] == 3, "applying the manifest again takes nothing back"


@SIDES
async def test_a_change_in_git_is_a_difference_until_it_is_applied(bench: Bench, side: str) -> None:
    """The tests above can fail."""
    text = manifest({"replicas": 1})
    bench.kubectl("apply", *flags(side), "-f", "-", stdin=text)
    await come_to_rest(bench, NAME)
    assert "+  replicas: 2" in difference(bench, side, "-", stdin=manifest({"replicas": 2}))
