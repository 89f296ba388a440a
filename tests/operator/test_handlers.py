"""An event wakes the service it concerns, and the watches' health is known."""

from __future__ import annotations

from typing import Any

import aiohttp
import kopf
import pytest
from kopf._cogs.structs import references
from kubernetes.aio.client import Configuration

from reprise_operator.api import Api
from reprise_operator.cluster import Key
from reprise_operator.directory import Directory
from reprise_operator.handlers import COALESCE_SECONDS, Waker, connection_info, kopf_settings, register
from reprise_operator.kinds import CHILD_TYPES, DEPLOYMENTS, INFERENCE_SERVICES, PODS, REPLICA_SETS, SERVICES
from reprise_operator.metrics import OperatorMetrics
from reprise_operator.naming import child_name
from reprise_operator.newest import Newest
from reprise_operator.options import parse_options
from reprise_operator.process import Operator
from reprise_operator.spec import identity_of
from reprise_operator.watch import WatchHealth, watched_objects
from tests.support.factories import body, child, planned

QWEN = Key("llm", "qwen")


class Woken:
    def __init__(self) -> None:
        self.keys: list[tuple[Key, float]] = []
        self.health = WatchHealth()
        self.metrics = OperatorMetrics()
        self.directory = Directory()
        self.newest = Newest()
        self.waker = Waker(
            lambda key, after: self.keys.append((key, after)),
            health=self.health,
            metrics=self.metrics,
            directory=self.directory,
            newest=self.newest,
            clock=lambda: 50.0,
        )


def service(name: str = "qwen", version: str = "7") -> dict[str, Any]:
    made = body(name=name)
    made["metadata"]["resourceVersion"] = version
    return made


def pod(name_label: str, namespace: str = "llm") -> dict[str, Any]:
    return {"metadata": {"namespace": namespace, "name": "p", "labels": {"serving.reprise.io/name": name_label}}}


def test_a_change_of_the_resource_wakes_it_at_once() -> None:
    woken = Woken()
    woken.waker.service_event(service(), deleted=False)
    assert woken.keys == [(QWEN, 0.0)]
    assert woken.metrics.registry.get_sample_value(
        "reprise_operator_watch_last_event_timestamp_seconds", {"resource": "inferenceservices"}
    ) == pytest.approx(50.0)


@pytest.mark.parametrize("resource", CHILD_TYPES, ids=lambda resource: resource.kind)
def test_a_child_wakes_its_owner(resource: Any) -> None:
    woken = Woken()
    plan = planned({"prefixCaching": {"warmup": {"prompts": ["a"]}}})
    volumes = planned({"prefixCaching": {"persistence": {"size": "1Gi"}}})
    (manifest,) = [child for child in (*plan.children, volumes.workload) if child["kind"] == resource.kind]
    woken.waker.child_event(manifest, resource)
    assert woken.keys == [(QWEN, COALESCE_SECONDS)]


def test_a_child_whose_owner_reference_was_taken_away_still_wakes_it() -> None:
    woken = Woken()
    woken.waker.service_event(service(), deleted=False)
    orphan = {**planned().network_service}
    orphan["metadata"] = {key: value for key, value in orphan["metadata"].items() if key != "ownerReferences"}
    woken.waker.child_event(orphan, SERVICES)
    assert woken.keys[1:] == [(QWEN, COALESCE_SECONDS)]


def test_a_foreign_owner_wakes_nobody() -> None:
    woken = Woken()
    foreign = {
        "metadata": {
            "namespace": "llm",
            "name": "x",
            "ownerReferences": [
                {"apiVersion": "serving.kserve.io/v1beta1", "kind": "InferenceService", "name": "qwen"}
            ],
        }
    }
    woken.waker.child_event(foreign, DEPLOYMENTS)
    assert woken.keys == []


def test_a_pod_finds_its_service_also_where_the_names_differ() -> None:
    """Fault 9: a long name is cut in the label, and two that begin alike stay apart."""
    woken = Woken()
    names = ["qwen", "a" * 70 + "-one", "a" * 70 + "-two", "2.5-qwen"]
    for name in names:
        woken.waker.service_event(service(name), deleted=False)
    woken.keys.clear()
    for name in names:
        woken.waker.pod_event(pod(child_name(identity_of(service(name)))))
    assert [key.name for key, _ in woken.keys] == names
    woken.keys.clear()
    woken.waker.pod_event(pod("qwen", namespace="other"))
    woken.waker.pod_event({"metadata": {"namespace": "llm", "name": "p"}})
    assert woken.keys == []


def test_the_pod_of_a_check_wakes_the_service_that_it_is_for() -> None:
    woken = Woken()
    woken.waker.service_event(service(), deleted=False)
    woken.keys.clear()
    checking = pod("qwen")
    checking["metadata"]["labels"] = {"serving.reprise.io/check-of": "qwen"}
    woken.waker.pod_event(checking)
    assert [key.name for key, _ in woken.keys] == ["qwen"]


def test_a_deleted_service_is_woken_once_more_and_then_unknown() -> None:
    woken = Woken()
    woken.waker.service_event(service(), deleted=False)
    woken.waker.service_event(service(), deleted=True)
    assert len(woken.keys) == 2
    woken.waker.pod_event(pod("qwen"))
    assert len(woken.keys) == 2
    assert len(woken.directory) == 0


async def test_the_resync_asks_for_what_is_listed_and_for_what_was_known() -> None:
    options = parse_options(["run", "-A"], {})
    async with Api(Configuration(host="http://127.0.0.1:1")) as api, aiohttp.ClientSession() as session:
        operator = Operator(options, api, session, OperatorMetrics())  # no request is made
        operator.waker.service_event(service("missed"), deleted=False)
        assert operator._resync_keys([service("qwen")]) == {QWEN, Key("llm", "missed")}


@pytest.mark.parametrize("deleted", [False, True])
def test_an_event_is_the_least_that_a_cached_listing_has_to_know(deleted: bool) -> None:
    woken = Woken()
    changed = pod("qwen")
    changed["metadata"]["resourceVersion"] = "12"
    woken.waker.pod_event(changed, deleted=deleted)
    woken.waker.child_event(planned().network_service, SERVICES)  # of no version
    assert (woken.newest.of(PODS), woken.newest.of(SERVICES)) == ("12", None)


def test_a_service_whose_deletion_the_watch_missed_is_asked_for_and_forgotten() -> None:
    """No event of it comes any more: each one that went while the watch was away would be remembered for ever."""
    directory = Directory()
    for name in ("qwen", "llama", "2.5-qwen"):
        directory.learn(identity_of(service(name)))
    gone = directory.absent_from([QWEN])
    assert gone == {Key("llm", "llama"), Key("llm", "2.5-qwen")}
    for key in gone:
        directory.forget(key)
    directory.forget(Key("llm", "never-known"))
    assert len(directory) == 1
    assert directory.owner("llm", child_name(identity_of(service("2.5-qwen")))) is None
    assert directory.owner("llm", "qwen") == QWEN
    assert directory.owner("other", "qwen") is None
    assert directory.owner("llm", None) is None


# Fault 16: a watch that dies in silence ---------------------------------------------------------------------------


class Time:
    """Seconds, moved by the test."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_a_watch_that_does_not_deliver_is_found_out() -> None:
    clock = Time()
    health = WatchHealth(dead_after=120, clock=clock)
    health.delivered(QWEN, "10")
    health.read(QWEN, "10")
    clock.now += 900
    assert health.behind() == 0.0
    health.read(QWEN, "12")
    clock.now += 30
    health.read(QWEN, "14")
    clock.now += 30
    assert health.behind() == 60.0
    assert health.behind(INFERENCE_SERVICES) == 60.0
    assert health.behind(PODS) == 0.0
    assert health.dead() is None
    clock.now += 61
    assert health.dead() == "inferenceservices"
    health.delivered(QWEN, "14")
    assert health.behind() == 0.0
    assert health.dead() is None


def test_a_service_the_watch_never_saw_counts_too() -> None:
    clock = Time()
    health = WatchHealth(clock=clock)
    health.read(QWEN, "3")
    clock.now += 10
    assert health.behind() == 10.0
    health.forget(QWEN)
    assert health.behind() == 0.0


def test_a_read_older_than_the_watch_is_no_sign() -> None:
    clock = Time()
    health = WatchHealth(clock=clock)
    health.delivered(QWEN, "20")
    health.read(QWEN, "9")
    health.read(QWEN, "opaque")
    clock.now += 1000
    assert health.behind() == 0.0


def test_each_watch_is_judged_by_its_own_objects() -> None:
    clock = Time()
    health = WatchHealth(dead_after=120, clock=clock)
    health.read_all(QWEN, [(DEPLOYMENTS, ("llm", "qwen"), "5"), (PODS, ("llm", "p"), "6"), (REPLICA_SETS, "r", "7")])
    health.delivered(("llm", "qwen"), "5", resource=DEPLOYMENTS)
    clock.now += 121
    assert (health.behind(DEPLOYMENTS), health.behind(PODS)) == (0.0, 121.0)
    assert health.behind(REPLICA_SETS) == 0.0, "nobody watches them"
    assert health.dead() == "pods"


def test_a_pod_whose_end_was_delivered_before_an_older_reading_arrived_is_not_owed_for_ever() -> None:
    clock = Time()
    health = WatchHealth(dead_after=120, clock=clock)
    health.delivered(("llm", "p"), "5", resource=PODS)
    health.forget(("llm", "p"), resource=PODS)  # deleted, while a list of pods is on its way
    health.read_all(QWEN, [(PODS, ("llm", "p"), "5")])
    health.read_all(Key("llm", "other"), [])
    clock.now += 60
    assert health.behind() == 60.0
    health.read_all(QWEN, [])  # the pass that its end has woken
    clock.now += 1000
    assert health.behind() == 0.0


def test_only_what_the_watches_select_is_expected_from_them() -> None:
    plan = planned({"autoscaling": {"maxReplicas": 2}})
    assert plan.autoscaler is not None
    # Of the last no watch tells: it is polled.
    seen = [child(plan.network_service), child(plan.workload), child(plan.autoscaler)]
    labels = {"app.kubernetes.io/managed-by": "reprise-operator"}
    pods: list[dict[str, Any]] = [
        {"metadata": {"namespace": "llm", "name": "ours", "resourceVersion": "9", "labels": labels}},
        {"metadata": {"namespace": "llm", "name": "stripped", "resourceVersion": "9", "labels": {}}},
    ]
    seen[1].body["metadata"]["labels"]["app.kubernetes.io/managed-by"] = "me"
    assert list(watched_objects(seen, pods)) == [(SERVICES, ("llm", "qwen"), "7"), (PODS, ("llm", "ours"), "9")]


def test_events_of_children_and_pods_pay_what_is_owed_of_them() -> None:
    woken = Woken()
    deployment = child(planned().workload).body
    made = {**pod("qwen"), "metadata": {**pod("qwen")["metadata"], "resourceVersion": "8"}}
    for deleted in (False, True):
        woken.health.read_all(QWEN, [(DEPLOYMENTS, ("llm", "qwen"), "7"), (PODS, ("llm", "p"), "8")])
        assert woken.health.behind() > 0.0
        woken.waker.child_event(deployment, DEPLOYMENTS, deleted=deleted)
        woken.waker.pod_event(made, deleted=deleted)
        assert woken.health.behind() == 0.0
        woken.health.forget(("llm", "qwen"), resource=DEPLOYMENTS)
        woken.health.forget(("llm", "p"), resource=PODS)


# kopf ---------------------------------------------------------------------------------------------------------------


def test_children_and_pods_are_selected_on_the_server() -> None:
    settings = kopf_settings(namespaced=False)
    selectors = settings.watching.label_selectors
    for key in (("apps", "deployments"), ("apps", "statefulsets"), ("", "services"), ("", "configmaps"), ("", "pods")):
        assert selectors[key] == "app.kubernetes.io/managed-by=reprise-operator"
    labels = planned().workload["metadata"]["labels"]
    assert labels["app.kubernetes.io/managed-by"] == "reprise-operator"


def test_kopf_writes_nothing_of_its_own() -> None:
    settings = kopf_settings(namespaced=True)
    assert settings.peering.standalone
    assert not settings.posting.enabled
    assert settings.scanning.disabled
    assert not kopf_settings(namespaced=False).scanning.disabled
    registry = kopf.OperatorRegistry()
    register(registry, Woken().waker)
    selectors = [handler.selector for handler in registry._watching.get_all_handlers()]
    resources = [
        references.Resource(
            group=kind.group,
            version=kind.api_version.rpartition("/")[2],
            plural=kind.plural,
            kind=kind.kind,
            preferred=True,
        )
        for kind in (INFERENCE_SERVICES, *CHILD_TYPES, PODS, REPLICA_SETS)
    ]
    watched = [kind.plural for kind in resources if any(selector and selector.check(kind) for selector in selectors)]
    assert watched == ["inferenceservices", "deployments", "services", "statefulsets", "configmaps", "pods"]
    # A finalizer comes with a daemon, a timer or an on.delete handler; a patch with an on.create, update or resume.
    assert not registry._spawning.get_all_handlers()
    assert not registry._changing.get_all_handlers()


@pytest.mark.parametrize(
    ("given", "scheme", "token"), [("Bearer abc", "Bearer", "abc"), ("Basic eHg=", "Basic", "eHg="), (None, None, None)]
)
def test_kopf_is_the_same_user_as_the_client(given: str | None, scheme: str | None, token: str | None) -> None:
    configuration = Configuration(host="https://example:6443")
    configuration.verify_ssl = False
    if given is not None:
        configuration.api_key["BearerToken"] = given
    info = connection_info(configuration)
    assert (info.server, info.scheme, info.token, info.insecure) == ("https://example:6443", scheme, token, True)
