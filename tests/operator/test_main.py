"""The command line, and the operator as its own process: it starts, repairs within seconds, and stops at once."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from reprise_operator.kinds import POD_MONITORS
from reprise_operator.options import parse_options
from tests.operator.operator_process import Process, ended
from tests.operator.optional_crds import install, none_left, remove
from tests.support.kubectl import Kubectl, eventually

SERVICE: dict[str, Any] = {
    "apiVersion": "serving.reprise.io/v1alpha1",
    "kind": "InferenceService",
    "metadata": {"name": "qwen"},
    "spec": {"model": {"uri": "hostpath:///m"}, "accelerator": {"profile": "cpu"}},
}


def test_flags_and_environment() -> None:
    environment = {
        "REPRISE_OPERATOR_NAMESPACE": "models",
        "REPRISE_OPERATOR_SCRAPE_SECONDS": "2.5",
        "REPRISE_OPERATOR_WORKERS": "9",
    }
    options = parse_options(["run", "--workers", "2", "--reprise-image=r:1", "--log-level=debug"], environment)
    assert (options.settings.namespace, options.settings.scrape_seconds, options.settings.workers) == ("models", 2.5, 2)
    assert (options.settings.reprise_image, options.log_level, options.lease_namespace) == ("r:1", "debug", None)
    assert parse_options(["run", "-A"], {}).settings.namespace is None
    assert parse_options(["run", "-A"], {}).settings.prometheus_url is None
    assert parse_options(["run", "-A", "--prometheus-url=http://p:9090"], {}).settings.prometheus_url == "http://p:9090"
    assert parse_options(["run", "-A"], {}).settings.read_nodes is False
    assert parse_options(["run", "-A", "--read-nodes"], {}).settings.read_nodes is True
    assert parse_options(["run", "-A"], {"REPRISE_OPERATOR_READ_NODES": "true"}).settings.read_nodes is True
    assert parse_options(["run", "-n", "x"], {}).settings.namespace == "x"
    assert parse_options(["run"], {"REPRISE_OPERATOR_ALL_NAMESPACES": "true"}).settings.namespace is None


def test_the_key_of_the_hashes_comes_from_a_file_and_shows_nowhere(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "key"
    file.write_text("0123456789abcdef\n")
    options = parse_options(["run", "-A", f"--reference-key-file={file}"], {})
    assert options.reference_key == b"0123456789abcdef"
    assert "0123456789abcdef" not in repr(options)
    assert parse_options(["run", "-A"], {}).reference_key is None
    file.write_text("short")
    for path, words in ((file, "holds 5 bytes; at least 16"), (tmp_path / "none", "No such file or directory")):
        with pytest.raises(SystemExit) as exited:
            parse_options(["run", "-A", f"--reference-key-file={path}"], {})
        assert exited.value.code == 2
        assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "environment", "message"),
    [
        ([], {}, "required: command"),
        (["run"], {}, "either --namespace NAME or --all-namespaces"),
        (["run", "-A", "-n", "x"], {}, "either --namespace NAME or --all-namespaces"),
        (["run", "-n", "x", "--read-nodes"], {}, "--read-nodes needs --all-namespaces"),
        (["run", "-A", "--workers", "0"], {}, "--workers is 0; it must be above 0"),
        (
            ["run", "-A", "--hit-rate-window-seconds", "50"],
            {},
            "--hit-rate-window-seconds is 50; it must be at least twice --scrape-seconds, which is 30",
        ),
        (["run", "-A", "--work", "2"], {}, "unrecognized arguments: --work 2"),
        (["run", "-A"], {"REPRISE_OPERATOR_WORKERS": "many"}, "--workers: invalid int value: 'many'"),
        (["run", "-A", "--log-format", "xml"], {}, "--log-format is 'xml'; it must be one of json, text"),
    ],
)
def test_a_bad_command_line_is_one_clear_message(
    arguments: list[str], environment: dict[str, str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        parse_options(arguments, environment)
    assert left.value.code == 2
    assert message in capsys.readouterr().err


def test_without_a_cluster_it_says_so(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "reprise_operator", "run", "-A", "--metrics-port=0", "--health-port=0"],
        env={**os.environ, "KUBECONFIG": str(tmp_path / "absent")},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert "no cluster to connect to" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.fixture
def started(kubectl: Kubectl, tmp_path: Path) -> Iterator[Process]:
    arguments = ("-n", kubectl.namespace, "--lease-namespace", kubectl.namespace)
    with ended(Process(kubectl.kubeconfig, tmp_path / "operator.log", *arguments)) as process:
        process.wait_ready()
        yield process


def test_a_process_from_start_to_end(started: Process, kubectl: Kubectl) -> None:
    assert started.get("probes", "/healthz") == (200, "ok")
    kubectl.apply(SERVICE)
    deployment = eventually(lambda: kubectl.get("deployment", "qwen"), "the Deployment", within=10)

    # Drift: a field of ours edited by somebody else is back within 5 s, with a resync an hour away.
    for edit, look in (
        ({"spec": {"replicas": 3}}, lambda live: live["spec"]["replicas"] == 1),
        ({"metadata": {"labels": {"app.kubernetes.io/managed-by": None}}}, _is_labelled),
        ({"metadata": {"ownerReferences": None}}, lambda live: bool(live["metadata"].get("ownerReferences"))),
    ):
        kubectl.patch("deployment", "qwen", edit)
        eventually(partial(_looks, kubectl, look), f"{edit} is set back", within=5)
    kubectl.delete("deployment", "qwen", "--cascade=orphan")
    again = eventually(lambda: kubectl.get("deployment", "qwen"), "the deleted Deployment is back", within=5)
    assert again["metadata"]["uid"] != deployment["metadata"]["uid"]

    # Idle: nothing is written.
    eventually(lambda: _steady(kubectl), "it comes to rest", within=30)

    _, metrics = started.get("metrics", "/metrics")
    assert 'reprise_operator_watch_last_event_timestamp_seconds{resource="deployments"}' in metrics
    assert 'reprise_operator_reconcile_total{outcome="error"} 0.0' in metrics
    assert "reprise_operator_services 1.0" in metrics

    lease = kubectl.get("lease", "reprise-operator")
    assert lease is not None
    assert lease["spec"]["holderIdentity"]
    assert started.stop() < 5
    assert started.process.returncode == 0
    assert "Traceback" not in started.log()
    lease = kubectl.get("lease", "reprise-operator")
    assert lease is not None
    assert not lease["spec"].get("holderIdentity"), "the next operator leads at once"

    # Nothing of the operator is in the way of a deletion while it is away.
    kubectl.delete("risvc", "qwen", "--timeout=10s")
    eventually(lambda: not kubectl.list("deployments"), "the children go with their owner")


def test_a_kind_that_appears_and_goes_while_it_runs(kubectl: Kubectl, tmp_path: Path) -> None:
    with none_left(kubectl):
        process = Process(
            kubectl.kubeconfig, tmp_path / "operator.log", "-n", kubectl.namespace, "--discovery-seconds=0.5"
        )
        try:
            monitored = {**SERVICE["spec"], "monitoring": {"podMonitor": {}}}
            kubectl.apply({**SERVICE, "spec": monitored})
            eventually(lambda: kubectl.get("deployment", "qwen"), "the Deployment", within=20)
            install(kubectl, POD_MONITORS)
            eventually(lambda: kubectl.get("podmonitor", "qwen"), "the PodMonitor", within=10)
            kubectl.delete("podmonitor", "qwen")
            eventually(lambda: kubectl.get("podmonitor", "qwen"), "the deleted PodMonitor is back", within=10)
            remove(kubectl, POD_MONITORS)
            eventually(lambda: "PodMonitor (monitoring.coreos.com/v1): not installed" in process.log(), "it is told")
            kubectl.delete("deployment", "qwen")
            eventually(lambda: kubectl.get("deployment", "qwen"), "and it goes on working", within=10)
            assert process.stop() < 5
            assert "Traceback" not in process.log()
        finally:
            process.process.kill()
            process.process.wait()


def _looks(kubectl: Kubectl, look: Callable[[Any], bool]) -> bool:
    return look(kubectl.get("deployment", "qwen"))


def _is_labelled(live: dict[str, Any]) -> bool:
    return "reprise-operator" in live["metadata"]["labels"].get("app.kubernetes.io/managed-by", "")


def _steady(kubectl: Kubectl) -> bool:
    """Whether a second passes without a write to anything of ours."""

    def versions() -> list[str]:
        kinds = ("risvc", "deployments", "services")
        return [item["metadata"]["resourceVersion"] for kind in kinds for item in kubectl.list(kind)]

    before = versions()
    time.sleep(1.0)
    return versions() == before


def test_a_change_made_while_no_operator_ran_is_seen_by_the_next(kubectl: Kubectl, tmp_path: Path) -> None:
    kubectl.apply(SERVICE)
    kubectl.apply({**SERVICE, "metadata": {"name": "other"}})
    with ended(Process(kubectl.kubeconfig, tmp_path / "operator.log", "-n", kubectl.namespace)):
        for name in ("qwen", "other"):
            eventually(partial(kubectl.get, "deployment", name), f"the Deployment of {name}", within=20)


def test_it_does_not_work_before_it_leads(started: Process, kubectl: Kubectl, tmp_path: Path) -> None:
    arguments = ("-n", kubectl.namespace, "--lease-namespace", kubectl.namespace)
    with ended(Process(kubectl.kubeconfig, tmp_path / "second.log", *arguments)) as second:
        eventually(lambda: "another operator holds lease" in second.log(), "the second waits")
        assert second.get("probes", "/readyz")[0] == 200, "ready to take over: a rollout of two must come to an end"
        assert second.get("probes", "/healthz")[0] == 200
        assert second.metric("reprise_operator_leader") == 0.0
        started.stop()
        second.wait_leading(within=10)
        second.stop()
        assert second.process.returncode == 0
