"""What breaks around the operator, injected: it comes back to a steady state, nothing is lost, and nothing runs hot.

The operator is a process of its own; what it sends goes over a wire (tests/support/request_recorder.py) that counts,
answers in the API server's place, or keeps a watch's events to itself.
"""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from reprise_operator.naming import NAME_LABEL
from reprise_operator.workqueue import Backoff
from tests.operator.operator_process import Process, ended
from tests.support.apiserver import ApiServer, start_api_server
from tests.support.cluster import install_crd
from tests.support.kube_assets import find_kube_assets
from tests.support.kubectl import Kubectl, eventually, namespace
from tests.support.request_recorder import Answer, Deaf, Hang, Request, RequestRecorder, Silent, recording

Manifest = dict[str, Any]
SERVICE: Manifest = {
    "apiVersion": "serving.reprise.io/v1alpha1",
    "kind": "InferenceService",
    "metadata": {"name": "qwen"},
    "spec": {"model": {"uri": "hostpath:///m"}, "accelerator": {"profile": "cpu"}},
}
BACKOFF = Backoff()


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """An operator at work on one service that has come to rest, and the wire between it and the API server."""

    kubectl: Kubectl
    wire: RequestRecorder
    operator: Process

    def change(self, length: int) -> None:
        """Something that reaches the pods."""
        self.kubectl.patch("inferenceservice", "qwen", {"spec": {"model": {"maxModelLen": length}}})

    def runs_with(self, length: int) -> bool:
        """Whether the Deployment and the status are those of that change."""
        return runs_with(self.kubectl, length)

    def rest(self, *, seconds: float = 3.0) -> None:
        """Comes to rest, which is a second without a request, and then sends none in so many seconds."""
        sent, since = -1, 0.0

        def quiet() -> bool:
            nonlocal sent, since
            if (now := self._sent()) != sent:
                sent, since = now, time.monotonic()
            return time.monotonic() - since >= 1.0

        eventually(quiet, f"it comes to rest: {self.operator.log()[-2000:]}", within=40)
        time.sleep(seconds)
        assert self._sent() == sent

    def _sent(self) -> int:
        return sum(not request.is_watch for request in self.wire.requests())


def runs_with(kubectl: Kubectl, length: int, name: str = "qwen") -> bool:
    body = kubectl.get("inferenceservice", name) or {}
    deployment = kubectl.get("deployment", name)
    if deployment is None or (body.get("status") or {}).get("observedGeneration") != body["metadata"]["generation"]:
        return False
    args = deployment["spec"]["template"]["spec"]["containers"][0]["args"]
    return f"{length}" in args


@pytest.fixture
def scene(kubectl: Kubectl, tmp_path: Path) -> Iterator[Scene]:
    with recording(kubectl.kubeconfig, folder=tmp_path) as wire:
        operator = Process(
            wire.kubeconfig,
            tmp_path / "operator.log",
            *("-n", kubectl.namespace, "--watch-inactivity-seconds=3", "--watch-patience-seconds=2"),
        )
        with ended(operator):
            operator.wait_ready()
            kubectl.apply(SERVICE)
            eventually(lambda: kubectl.list("pods"), "there is a pod")
            found = Scene(kubectl=kubectl, wire=wire, operator=operator)
            found.rest(seconds=0.5)
            yield found
            wire.interfere(None)


def is_for(
    method: str, plural: str, *, subresource: str | None = None, name: str = "qwen"
) -> Callable[[Request], bool]:
    tail = [plural, name] if subresource is None else [plural, name, subresource]
    return lambda request: request.method == method and request.path.split("/")[-len(tail) :] == tail


class Times:
    """A rule that interferes with the first `count` requests that match, and remembers when they came."""

    def __init__(self, matches: Callable[[Request], bool], answer: Answer | None, count: int) -> None:
        self._matches = matches
        self._answer = answer
        self._count = count
        self.seen: list[float] = []

    def __call__(self, request: Request) -> Answer | None:
        if request.is_watch or not self._matches(request):
            return None
        self.seen.append(time.monotonic())
        return self._answer if len(self.seen) <= self._count else None


# Answers that are none ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusals:
    """What is refused to one service, how often, and how long at least it takes to come through."""

    rule: Times
    count: int
    least: float
    change: Manifest
    is_done: Callable[[Kubectl, str], bool]


LONGER: Manifest = {"model": {"maxModelLen": 1111}}
STICKY: Manifest = {"service": {"sessionAffinity": "ClientIP"}}


def runs_longer(kubectl: Kubectl, name: str) -> bool:
    return runs_with(kubectl, 1111, name)


def is_sticky(kubectl: Kubectl, name: str) -> bool:
    body = kubectl.get("inferenceservice", name) or {}
    child = kubectl.get("service", name) or {"spec": {}}
    seen = (body.get("status") or {}).get("observedGeneration") == body["metadata"]["generation"]
    return bool(seen and child["spec"].get("sessionAffinity") == "ClientIP")


def refusals() -> dict[str, Refusals]:
    """By the name of the service that gets them: each answer to each request, and one that asks for a pause."""
    found: dict[str, Refusals] = {}
    for status in (409, 429, 500, 503):
        for what, method, plural, subresource in (
            ("apply", "PATCH", "deployments", None),
            ("status", "PATCH", "inferenceservices", "status"),
            ("read", "GET", "inferenceservices", None),
        ):
            name = f"{what}-{status}"
            matches = is_for(method, plural, subresource=subresource, name=name)
            # Each pause is the back-off's at its shortest or longer, unless news came in between.
            least = 3 * BACKOFF.base * (1 - BACKOFF.jitter)
            rule = Times(matches, Answer(status=status), 3)
            if what == "status":
                # What goes before is written, and a Deployment's own events would be news.
                change, is_done = STICKY, is_sticky
            else:
                change, is_done = LONGER, runs_longer
            found[name] = Refusals(rule=rule, count=3, least=least, change=change, is_done=is_done)
    pause = Answer(status=429, headers={"Retry-After": "4"})
    matches = is_for("PATCH", "deployments", name="asks-for-a-pause")
    rule = Times(matches, pause, 1)
    found["asks-for-a-pause"] = Refusals(rule=rule, count=1, least=4.0, change=LONGER, is_done=runs_longer)
    return found


def test_a_refusal_is_tried_again_and_not_at_once(scene: Scene) -> None:
    """All of them at the same time, each of a service of its own."""
    refused = refusals()
    scene.kubectl.apply(*({**SERVICE, "metadata": {"name": name}} for name in refused))
    for name in refused:
        eventually(partial(scene.kubectl.list, "pods", f"{NAME_LABEL}={name}"), f"a pod of {name}")
    scene.rest(seconds=0.5)

    rules = [each.rule for each in refused.values()]
    scene.wire.interfere(lambda request: next((found for rule in rules if (found := rule(request))), None))
    for name, each in refused.items():
        scene.kubectl.patch("inferenceservice", name, {"spec": each.change})
    for name, each in refused.items():
        told = f"{name} is overcome: {scene.operator.log()[-2000:]}"
        eventually(partial(each.is_done, scene.kubectl, name), told, within=30)
    for name, each in refused.items():
        assert len(each.rule.seen) > each.count, f"{name}: it was refused {len(each.rule.seen)} times"
        assert each.rule.seen[each.count] - each.rule.seen[0] >= each.least, name
    scene.rest()
    # Of a watch that two seconds of a busy machine held up, the next look tells that it has delivered.
    eventually(lambda: scene.operator.get("probes", "/healthz") == (200, "ok"), "its health is told", within=10)
    assert scene.operator.metric('reprise_operator_reconcile_total{outcome="error"}') == 0.0


def test_a_refusal_that_stays_costs_less_and_less(scene: Scene) -> None:
    rule = Times(is_for("PATCH", "deployments"), Answer(status=503), 1000)
    scene.wire.interfere(rule)
    scene.change(1113)
    eventually(lambda: rule.seen, "it tries")
    time.sleep(5)
    # 0.5, 1, 2, 4 … seconds apart, each shorter by a quarter at most: after 5 s the fifth try has not come.
    assert 3 <= len(rule.seen) <= 5, rule.seen
    scene.wire.interfere(None)
    eventually(lambda: scene.runs_with(1113), "and it is not forgotten", within=30)


# The operator itself ------------------------------------------------------------------------------------------------


def test_killed_in_the_middle_of_a_rollout_the_next_one_ends_it(scene: Scene, tmp_path: Path) -> None:
    """Between the write to the Deployment and the one to the status."""
    before = scene.kubectl.get("deployment", "qwen")
    assert before is not None
    wall = Hang(on=True)
    matches = is_for("PATCH", "inferenceservices", subresource="status")
    scene.wire.interfere(lambda request: wall if wall.on and matches(request) else None)
    scene.change(1114)
    eventually(lambda: "1114" in str(scene.kubectl.get("deployment", "qwen")), "the Deployment is written")
    scene.operator.process.kill()
    scene.operator.process.wait()
    time.sleep(0.5)  # the wire has noticed: what hung on it is not sent after all
    wall.on = False
    assert not scene.runs_with(1114), "the status still tells of the change before"
    begin = len(scene.wire.requests())
    arguments = ("-n", scene.kubectl.namespace)
    with ended(Process(scene.wire.kubeconfig, tmp_path / "next.log", *arguments)) as following:
        following.wait_ready()
        eventually(lambda: scene.runs_with(1114), "the next one ends it")
        scene.rest()
        after = scene.kubectl.get("deployment", "qwen")
        assert after is not None
        assert after["metadata"]["generation"] == before["metadata"]["generation"] + 1, "and does it once"
        assert len(scene.wire.requests()) - begin < 80


# The API server -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def restartable() -> Iterator[ApiServer]:
    if find_kube_assets() is None:
        pytest.skip("the emulated API server keeps its objects in memory: a restart would lose them")
    with start_api_server("real") as server:
        install_crd(Kubectl(kubeconfig=server.kubeconfig_path))
        yield server


def test_an_api_server_that_goes_and_comes_back(restartable: ApiServer, tmp_path: Path) -> None:
    """Without a lease, whose deadline a slow start may pass: the same process goes on, and its watches too."""
    kubectl = Kubectl(kubeconfig=restartable.kubeconfig_path)
    arguments = ("-n", "default")
    assert restartable.restart is not None
    with ended(Process(kubectl.kubeconfig, tmp_path / "operator.log", *arguments)) as operator:
        operator.wait_ready()
        kubectl.apply(SERVICE)
        eventually(lambda: kubectl.get("deployment", "qwen"), "the Deployment")
        asked = operator.metric_sum("reprise_operator_api_requests_total")
        restartable.restart(1.0)
        change = {"spec": {"model": {"maxModelLen": 1115}}}
        eventually(lambda: _patched(kubectl, change), "the API server takes writes again")
        eventually(lambda: runs_with(kubectl, 1115), f"the watch lives again: {operator.log()[-3000:]}", within=40)
        assert operator.process.poll() is None
        assert operator.get("probes", "/healthz")[0] == 200
        assert operator.metric_sum("reprise_operator_api_requests_total") - asked < 150
    kubectl.delete("inferenceservice", "qwen")


def _patched(kubectl: Kubectl, change: Manifest) -> bool:
    try:
        kubectl.patch("inferenceservice", "qwen", change)
    except Exception:  # noqa: BLE001 - kubectl has many ways to say that nobody is there
        return False
    return True


def test_an_outage_longer_than_the_lease_ends_the_process_and_the_next_one_waits_and_works(
    restartable: ApiServer, tmp_path: Path
) -> None:
    """The kubelet starts it again; it must not end again and again meanwhile, or its back-off grows to minutes."""
    # Not where the test before was: its Deployment may still be there, and is nobody's then.
    kubectl = Kubectl(kubeconfig=restartable.kubeconfig_path, namespace="outage")
    kubectl.apply(namespace("outage"))
    kubectl.apply(SERVICE)
    arguments = ("-n", "outage", "--lease-namespace", "outage")
    with recording(kubectl.kubeconfig, folder=tmp_path) as wire:
        away = Hang()
        wire.interfere(lambda _: away if away.on else None)
        with ended(Process(wire.kubeconfig, tmp_path / "first.log", *arguments)) as first:
            first.wait_leading()
            away.on = True
            assert first.process.wait(20) == 1
        begin = len(wire.requests())
        with ended(Process(wire.kubeconfig, tmp_path / "second.log", *arguments)) as second:
            time.sleep(5)
            assert second.process.poll() is None
            assert second.get("probes", "/healthz")[0] == 200
            assert second.get("probes", "/readyz")[0] == 503
            assert len(wire.requests()) - begin <= 3
            away.on = False
            second.wait_leading(within=90)
            kubectl.patch("inferenceservice", "qwen", {"spec": {"model": {"maxModelLen": 1116}}})
            eventually(lambda: runs_with(kubectl, 1116), "it works", within=20)
    kubectl.delete("inferenceservice", "qwen")


# The watches --------------------------------------------------------------------------------------------------------


def test_a_watch_that_falls_silent_is_opened_anew_and_nothing_is_lost(scene: Scene) -> None:
    """A firewall that forgets a connection: no end, no error, no bookmark. No resync helps here within the hour."""
    open_now = {request for request in scene.wire.requests() if request.is_watch}
    scene.wire.interfere(lambda request: Silent() if request in open_now else None)
    scene.change(1117)
    eventually(lambda: scene.runs_with(1117), "the change is seen", within=15)
    opened = {request for request in scene.wire.requests() if request.is_watch} - open_now
    assert any("/inferenceservices" in request.path for request in opened), "by a stream that was opened since"
    assert scene.operator.get("probes", "/healthz") == (200, "ok")


@dataclass(frozen=True, slots=True, kw_only=True)
class Watching:
    """An operator in a namespace of its own, and the kind whose events will not come through to it."""

    plural: str
    kubectl: Kubectl
    wire: RequestRecorder
    operator: Process

    def is_deaf(self, request: Request) -> Deaf | None:
        return Deaf() if request.is_watch and f"/{self.plural}" in request.path else None


@pytest.fixture
def watching(crd_server: ApiServer, tmp_path: Path) -> Iterator[list[Watching]]:
    """One for each kind, and they need not wait for each other."""
    arguments = ("--resync-seconds=1", "--scrape-seconds=1", "--watch-patience-seconds=3")
    with contextlib.ExitStack() as stack:
        found = []
        for plural in ("inferenceservices", "deployments", "pods"):
            kubectl = Kubectl(kubeconfig=crd_server.kubeconfig_path, namespace=f"deaf-{uuid.uuid4().hex[:8]}")
            kubectl.put(namespace(kubectl.namespace))
            stack.callback(kubectl.delete_namespace)
            (folder := tmp_path / plural).mkdir()
            wire = stack.enter_context(recording(kubectl.kubeconfig, folder=folder))
            process = Process(wire.kubeconfig, folder / "o.log", "-n", kubectl.namespace, *arguments)
            operator = stack.enter_context(ended(process))
            operator.wait_ready()
            kubectl.put(SERVICE)
            eventually(partial(kubectl.list, "pods"), "there is a pod")
            found.append(Watching(plural=plural, kubectl=kubectl, wire=wire, operator=operator))
        yield found
        for each in found:
            each.wire.interfere(None)


def test_a_watch_that_lives_and_does_not_deliver_turns_the_probe_red(watching: list[Watching]) -> None:
    """Fault 16. The stream and its bookmarks come through, so nothing in HTTP tells; the passes' own reads do."""
    time.sleep(5)
    for each in watching:
        assert each.operator.get("probes", "/healthz") == (200, "ok"), "a watch that delivers is never called dead"
    for each in watching:
        each.wire.interfere(each.is_deaf)
        each.kubectl.patch("inferenceservice", "qwen", {"spec": {"model": {"maxModelLen": 1118}}})
    for each in watching:
        done = f"the resync does what the watch of {each.plural} did not tell of"
        eventually(partial(runs_with, each.kubectl, 1118), done, within=20)
        eventually(partial(_is_red, each.operator), f"{each.plural}: the probe is red", within=20)
        told = each.operator.get("probes", "/healthz")[1]
        assert told.startswith(f"the watch of {each.plural} has owed an event for ")
        assert each.operator.metric(f'reprise_operator_watch_behind_seconds{{resource="{each.plural}"}}') > 3.0
        assert each.operator.metric('reprise_operator_watch_behind_seconds{resource="services"}') == 0.0


def _is_red(operator: Process) -> bool:
    return operator.get("probes", "/healthz")[0] == 503


# Other people -------------------------------------------------------------------------------------------------------


def test_somebody_who_sets_a_field_of_ours_again_and_again_gets_as_many_answers_and_no_more(scene: Scene) -> None:
    begin = len(scene.wire.writes())
    for replicas in (3, 4, 5, 6, 7):
        scene.kubectl.patch("deployment", "qwen", {"spec": {"replicas": replicas}})
        eventually(lambda: _replicas(scene.kubectl) == 1, "it is set back", within=10)
    scene.rest()
    applied = [w for w in scene.wire.writes()[begin:] if is_for("PATCH", "deployments")(w)]
    assert len(applied) == 5


def _replicas(kubectl: Kubectl) -> int:
    body = kubectl.get("deployment", "qwen")
    return -1 if body is None else int(body["spec"]["replicas"])


def test_a_foreign_deployment_with_our_name_is_never_adopted(scene: Scene) -> None:
    foreign: Manifest = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "other", "labels": {"app.kubernetes.io/managed-by": "reprise-operator"}},
        "spec": {
            "replicas": 0,
            "selector": {"matchLabels": {"app": "theirs"}},
            "template": {
                "metadata": {"labels": {"app": "theirs"}},
                "spec": {"containers": [{"name": "theirs", "image": "theirs:1"}]},
            },
        },
    }
    scene.kubectl.apply(foreign)
    before = scene.kubectl.get("deployment", "other")
    assert before is not None
    scene.kubectl.apply({**SERVICE, "metadata": {"name": "other"}})

    def taken() -> bool:
        body = scene.kubectl.get("inferenceservice", "other") or {}
        conditions = (body.get("status") or {}).get("conditions") or ()
        return any((c["type"], c["status"], c["reason"]) == ("Stalled", "True", "NameTaken") for c in conditions)

    eventually(taken, "the status says whose it is")
    scene.rest()
    after = scene.kubectl.get("deployment", "other")
    assert after is not None
    assert after["metadata"]["resourceVersion"] == before["metadata"]["resourceVersion"] or (
        after["spec"] == before["spec"] and "ownerReferences" not in after["metadata"]
    )
    scene.kubectl.delete("inferenceservice", "other")
    eventually(lambda: scene.kubectl.get("inferenceservice", "other") is None, "the service is gone")
    time.sleep(1)
    assert scene.kubectl.get("deployment", "other") is not None, "it goes with nobody"


# Idling -------------------------------------------------------------------------------------------------------------


def test_a_service_that_idles_costs_the_api_server_nothing_and_a_change_is_seen_at_once(
    kubectl: Kubectl, tmp_path: Path
) -> None:
    """Its figures are looked at each second here; not a request comes of it until there is news."""
    with recording(kubectl.kubeconfig, folder=tmp_path) as wire:
        arguments = ("-n", kubectl.namespace, "--scrape-seconds=1")
        with ended(Process(wire.kubeconfig, tmp_path / "operator.log", *arguments)) as operator:
            operator.wait_ready()
            kubectl.apply(SERVICE)
            eventually(lambda: kubectl.list("pods"), "there is a pod")
            found = Scene(kubectl=kubectl, wire=wire, operator=operator)
            found.rest(seconds=4.0)
            passes = operator.metric('reprise_operator_reconcile_total{outcome="success"}')
            time.sleep(2.5)
            assert operator.metric('reprise_operator_reconcile_total{outcome="success"}') >= passes + 2
            found.change(1119)
            eventually(lambda: found.runs_with(1119), "the change is seen", within=5)
            pod = kubectl.list("pods")[0]["metadata"]["name"]
            kubectl.patch("pod", pod, {"metadata": {"annotations": {"x": "y"}}})
            before = len(wire.requests())
            eventually(lambda: len(wire.requests()) > before, "news of a pod is looked at", within=5)
