"""The node that runs pods as local processes, on whichever API server there is: a kubelet's work, seen from kubectl."""

from __future__ import annotations

import json
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.apiserver import start_api_server
from tests.support.kubectl import Kubectl, eventually, secret
from tests.support.node import NodeConfig
from tests.support.node_client import Manifest
from tests.support.node_spec import Image
from tests.support.node_thread import RunningNode, running_node

pytestmark = pytest.mark.e2e

PYTHON = "test.local/python:3"

WEB = """
import http.server, os, pathlib, signal, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        sick = pathlib.Path(os.environ["STATE"], self.path.strip("/")).exists()
        self.send_response(503 if sick else 200); self.end_headers(); self.wfile.write(os.environ["POD"].encode())
    def log_message(self, *_): pass
signal.signal(signal.SIGTERM, lambda *_: (print("terminated politely", flush=True), sys.exit(0)))
http.server.ThreadingHTTPServer((os.environ["IP"], 8000), Handler).serve_forever()
"""


class Place:
    """The API server, its node and a folder that pods know as /shared."""

    def __init__(self, *, kubectl: Kubectl, node: RunningNode, shared: Path) -> None:
        self.kubectl = kubectl
        self.node = node
        self.shared = shared

    def pod(self, name: str, **spec: Any) -> Manifest:
        self.kubectl.apply(_pod(name, **spec))
        found = self.kubectl.get("pod", name)
        assert found is not None
        return found

    def status(self, name: str) -> Manifest:
        pod = self.kubectl.get("pod", name) or {}
        return pod.get("status") or {}

    def container(self, name: str) -> Manifest:
        """The status of the pod's one container, {} before there is one."""
        statuses: list[Manifest] = self.status(name).get("containerStatuses") or [{}]
        return statuses[0]

    def waiting(self, name: str) -> Manifest:
        return (self.container(name).get("state") or {}).get("waiting") or {}

    def wait_phase(self, name: str, phase: str) -> None:
        eventually(lambda: self.status(name).get("phase") == phase, f"{name} is {phase}", within=20)

    def log(self, name: str, **which: Any) -> str:
        return self.node.pod_log(name, container="main", **which)


def _pod(name: str, *, script: str = "", labels: dict[str, str] | None = None, **fields: Any) -> Manifest:
    pod_fields = ("volumes", "restartPolicy", "initContainers", "terminationGracePeriodSeconds")
    container = {key: value for key, value in fields.items() if key not in pod_fields}
    main = {"name": "main", "image": PYTHON, "args": ["-c", textwrap.dedent(script)], **container}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": labels or {}},
        "spec": {
            "containers": [main],
            "terminationGracePeriodSeconds": 1,
            **{key: value for key, value in fields.items() if key in pod_fields},
        },
    }


def _web(name: str, *, app: str, **fields: Any) -> Manifest:
    return _pod(
        name,
        script=WEB,
        labels={"app": app},
        ports=[{"name": "http", "containerPort": 8000}],
        env=[
            {"name": "IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
            {"name": "POD", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
            {"name": "STATE", "value": f"/shared/{name}"},
        ],
        volumes=[{"name": "shared", "hostPath": {"path": "/shared"}}],
        volumeMounts=[{"name": "shared", "mountPath": "/shared"}],
        **fields,
    )


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    # An API server of its own: on a shared one two nodes would compete for the pods.
    folder = tmp_path_factory.mktemp("node")
    shared = folder / "shared"
    shared.mkdir()
    config = NodeConfig(
        folder=folder / "node",
        images={"test.local/python": Image(entrypoint=(sys.executable,))},
        host_paths={"/shared": shared},
        extended_resources={"huawei.com/Ascend910": "2"},
        back_off_seconds=0.5,
        back_off_limit_seconds=2.0,
        fastest_probe_seconds=0.2,
    )
    with start_api_server() as api, running_node(api.kubeconfig_path, config) as node:
        kubectl = Kubectl(kubeconfig=api.kubeconfig_path)
        eventually(
            lambda: kubectl.get("serviceaccount", "default") or not api.has_controller_manager, "default account"
        )
        yield Place(kubectl=kubectl, node=node, shared=shared)


SURROUNDINGS = """
import json, os, pathlib, sys
names = ("PLAIN", "JOINED", "TOKEN", "X_mode", "ME", "IP", "LIMIT")
files = {p.name: p.read_text() for p in pathlib.Path(sys.argv[1]).iterdir()}
pathlib.Path(sys.argv[2], "out").write_text("written")
print(json.dumps({"env": {n: os.environ.get(n) for n in names}, "files": files, "args": sys.argv[3:]}))
"""


def test_environment_arguments_and_volumes(place: Place) -> None:
    place.kubectl.apply(secret("keys", token="s3cret"))
    settings = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "settings"}, "data": {"mode": "fast"}}
    place.kubectl.apply(settings)
    place.pod(
        "surroundings",
        restartPolicy="Never",
        args=["-c", SURROUNDINGS, "/keys", "/scratch", "$(PLAIN)", '{"json": true}'],
        env=[
            {"name": "PLAIN", "value": "a b"},
            {"name": "JOINED", "value": "$(PLAIN)!"},
            {"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "keys", "key": "token"}}},
            {"name": "ME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
            {"name": "IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
            {"name": "LIMIT", "valueFrom": {"resourceFieldRef": {"resource": "limits.memory"}}},
        ],
        envFrom=[{"configMapRef": {"name": "settings"}, "prefix": "X_"}],
        resources={"limits": {"memory": "2Mi"}},
        volumes=[{"name": "keys", "secret": {"secretName": "keys"}}, {"name": "scratch", "emptyDir": {}}],
        volumeMounts=[{"name": "keys", "mountPath": "/keys"}, {"name": "scratch", "mountPath": "/scratch"}],
    )
    place.wait_phase("surroundings", "Succeeded")
    seen = json.loads(place.log("surroundings"))
    assert seen == {
        "env": {
            "PLAIN": "a b",
            "JOINED": "a b!",
            "TOKEN": "s3cret",
            "X_mode": "fast",
            "ME": "surroundings",
            "IP": place.status("surroundings")["podIP"],
            "LIMIT": str(2 * 2**20),
        },
        "files": {"token": "s3cret"},
        "args": ["a b", '{"json": true}'],
    }


def test_a_missing_secret_is_named_and_waited_for(place: Place) -> None:
    reference = {"secretKeyRef": {"name": "later", "key": "token"}}
    place.pod("patient", script="import time; time.sleep(60)", env=[{"name": "TOKEN", "valueFrom": reference}])
    eventually(lambda: place.waiting("patient").get("reason") == "CreateContainerConfigError", "says why", within=10)
    assert place.waiting("patient")["message"] == 'secret "later" not found'
    place.kubectl.apply(secret("later", other="x"))
    wrong = "couldn't find key token in Secret default/later"
    eventually(lambda: place.waiting("patient").get("message") == wrong, "names the key", within=10)
    place.kubectl.apply(secret("later", token="x"))
    place.wait_phase("patient", "Running")


def test_an_unknown_image_backs_off(place: Place) -> None:
    place.pod("stranger", image="test.local/nothing:1")

    def backing_off() -> Manifest | None:
        waiting = place.waiting("stranger")  # alternates with ErrImagePull, as on a real node
        return waiting if waiting.get("reason") == "ImagePullBackOff" else None

    found = eventually(backing_off, "backs off", within=10)
    assert found["message"].startswith('Back-off pulling image "test.local/nothing:1": ErrImagePull: ')
    place.pod("never", image="test.local/nothing:1", imagePullPolicy="Never")
    eventually(lambda: place.waiting("never").get("reason") == "ErrImageNeverPull", "is not pulled", within=10)


@pytest.mark.parametrize(
    ("name", "script", "policy", "words"),
    [
        (
            "own-words",
            "open(os.environ['TERMINATION_LOG_PATH'], 'w').write('no model'); print('x')",
            "File",
            "no model",
        ),
        ("log-words", "print('out of memory', flush=True)", "FallbackToLogsOnError", "out of memory\n"),
        ("no-words", "print('unheard', flush=True)", "File", None),
    ],
)
def test_a_crash_loop_shows_exit_code_and_last_words(
    place: Place, name: str, script: str, policy: str, words: str | None
) -> None:
    place.pod(name, script=f"import os, sys; {script}; sys.exit(3)", terminationMessagePolicy=policy)
    eventually(lambda: place.waiting(name).get("reason") == "CrashLoopBackOff", "loops", within=10)
    status = place.container(name)
    ended = status["lastState"]["terminated"]
    assert (ended["exitCode"], ended["reason"], ended.get("message")) == (3, "Error", words)
    assert status["restartCount"] >= 1
    before = status["restartCount"]
    eventually(lambda: place.container(name)["restartCount"] > before, "tries again", within=10)
    assert not status["ready"]


def test_init_containers_run_first_and_hold_up_the_pod(place: Place) -> None:
    gate = place.shared / "gate"
    check = "import pathlib, sys; sys.exit(0 if pathlib.Path(sys.argv[1]).exists() else 4)"
    volume_mounts = [{"name": "shared", "mountPath": "/shared"}]
    place.pod(
        "staged",
        script="import time; time.sleep(60)",
        initContainers=[
            {"name": "check", "image": PYTHON, "args": ["-c", check, "/shared/gate"], "volumeMounts": volume_mounts}
        ],
        volumes=[{"name": "shared", "hostPath": {"path": "/shared", "type": "Directory"}}],
    )

    def init_status() -> Manifest:
        statuses: list[Manifest] = place.status("staged").get("initContainerStatuses") or [{}]
        return statuses[0]

    eventually(
        lambda: (init_status().get("state") or {}).get("waiting", {}).get("reason") == "CrashLoopBackOff", "init"
    )
    assert init_status()["lastState"]["terminated"]["exitCode"] == 4
    assert place.status("staged")["phase"] == "Pending"
    conditions = {c["type"]: c["status"] for c in place.status("staged")["conditions"]}
    assert conditions["Initialized"] == "False"
    gate.touch()
    place.wait_phase("staged", "Running")
    assert init_status()["state"]["terminated"]["exitCode"] == 0


def test_probes_decide_readiness_and_restart(place: Place) -> None:
    state = place.shared / "probed"
    state.mkdir()
    (state / "starting").touch()
    probe = {"httpGet": {"path": "/starting", "port": "http"}, "periodSeconds": 1}
    place.kubectl.apply(
        _web(
            "probed",
            app="probed",
            startupProbe={**probe, "failureThreshold": 30},
            readinessProbe={"httpGet": {"path": "/busy", "port": 8000}, "periodSeconds": 1, "failureThreshold": 1},
            livenessProbe={"httpGet": {"path": "/dead", "port": "http"}, "periodSeconds": 1, "failureThreshold": 2},
        )
    )
    eventually(lambda: place.container("probed").get("state", {}).get("running"), "runs", within=15)
    assert place.container("probed")["started"] is False
    (state / "starting").unlink()
    eventually(lambda: place.container("probed")["ready"], "is ready", within=10)
    (state / "busy").touch()
    eventually(lambda: not place.container("probed")["ready"], "is not ready", within=10)
    assert place.container("probed")["restartCount"] == 0
    (state / "busy").unlink()
    eventually(lambda: place.container("probed")["ready"], "is ready again", within=10)
    (state / "dead").touch()
    eventually(lambda: place.container("probed")["restartCount"] == 1, "is restarted", within=15)
    (state / "dead").unlink()
    eventually(lambda: place.container("probed")["ready"], "is ready after the restart", within=15)


def test_a_service_spreads_over_ready_pods_on_one_port_each(place: Place) -> None:
    probe = {"httpGet": {"path": "/busy", "port": "http"}, "periodSeconds": 1, "failureThreshold": 1}
    for name in ("web-a", "web-b"):
        (place.shared / name).mkdir()
        place.kubectl.apply(_web(name, app="web", readinessProbe=probe))
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "web"},
        "spec": {"selector": {"app": "web"}, "ports": [{"port": 80, "targetPort": "http"}]},
    }
    place.kubectl.apply(service)
    eventually(lambda: all(place.container(name)["ready"] for name in ("web-a", "web-b")), "both ready", within=20)
    assert place.status("web-a")["podIP"] != place.status("web-b")["podIP"]
    url = place.node.service_url("default", "web")

    def names() -> list[str]:
        return [httpx.get(url).text for _ in range(4)]

    eventually(lambda: sorted(names()) == ["web-a", "web-a", "web-b", "web-b"], "both answer in turn", within=10)
    (place.shared / "web-a" / "busy").touch()
    eventually(lambda: names() == ["web-b"] * 4, "only the ready one answers", within=10)


def test_termination_is_polite_then_firm(place: Place) -> None:
    (place.shared / "polite").mkdir()
    place.kubectl.apply(_web("polite", app="polite", lifecycle={"preStop": {"sleep": {"seconds": 1}}}))
    stubborn = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(99)"
    )
    place.pod("stubborn", script=stubborn, terminationGracePeriodSeconds=2)
    for name in ("polite", "stubborn"):
        place.wait_phase(name, "Running")
    eventually(lambda: place.log("stubborn"), "ignores signals from now on", within=5)
    polite, stubborn_pod = (place.node.node.worker("default", name) for name in ("polite", "stubborn"))
    assert polite is not None
    assert stubborn_pod is not None
    eventually(lambda: _answers(polite.ip), "listens", within=10)
    began = time.monotonic()
    place.kubectl("delete", "pod", "polite", "--grace-period=20")
    took = time.monotonic() - began
    assert 1.0 <= took < 10.0, took
    log = polite.log_path("main")
    assert log is not None
    assert "terminated politely" in log.read_text()
    began = time.monotonic()
    place.kubectl("delete", "pod", "stubborn")
    took = time.monotonic() - began
    assert 2.0 <= took < 10.0, took
    # kubectl returns when the pod is gone from the API server; the node sees that a moment later.
    eventually(lambda: place.node.node.worker("default", "stubborn") is None, "the worker is gone", within=5)


def _answers(ip: str) -> bool:
    try:
        return httpx.get(f"http://{ip}:8000/any").status_code == 200
    except httpx.HTTPError:
        return False


def test_npus_are_counted_and_freed(place: Place) -> None:
    npu = {"limits": {"huawei.com/Ascend910": "1"}}
    for name in ("npu-1", "npu-2", "npu-3"):
        place.pod(name, script="import time; time.sleep(99)", resources=npu)
    place.wait_phase("npu-2", "Running")

    def condition() -> Manifest:
        found = [c for c in place.status("npu-3").get("conditions") or () if c["type"] == "PodScheduled"]
        return found[0] if found else {}

    eventually(lambda: condition().get("reason") == "Unschedulable", "no NPU is left", within=10)
    assert condition()["message"] == "0/1 nodes are available: 1 Insufficient huawei.com/Ascend910."
    place.kubectl("delete", "pod", "npu-1")
    place.wait_phase("npu-3", "Running")


def test_a_missing_host_path_or_claim_is_reported(place: Place) -> None:
    volume = {"name": "model", "hostPath": {"path": "/shared/absent", "type": "Directory"}}
    place.pod("homeless", volumes=[volume], volumeMounts=[{"name": "model", "mountPath": "/model"}])

    def told() -> bool:
        events = place.kubectl.list("events")
        return any(e["involvedObject"]["name"] == "homeless" and e["reason"] == "FailedMount" for e in events)

    eventually(told, "FailedMount", within=10)
    assert place.waiting("homeless")["reason"] == "ContainerCreating"
    claim = {"name": "model", "persistentVolumeClaim": {"claimName": "absent"}}
    place.pod("claimless", volumes=[claim])
    eventually(
        lambda: any(
            'persistentvolumeclaim "absent" not found' in c.get("message", "")
            for c in place.status("claimless").get("conditions") or ()
        ),
        "the claim is named",
        within=10,
    )
