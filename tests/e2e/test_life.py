"""The life of an InferenceService, from `kubectl apply` to its deletion, on any cluster."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

import openai
import pytest

from tests.e2e.conversation import Conversation
from tests.e2e.site import Deployed, Site
from tests.support.gitops import kstatus
from tests.support.kubectl import eventually, secret

pytestmark = [pytest.mark.e2e, pytest.mark.cluster]


@pytest.fixture(scope="module")
def served(site: Site) -> Iterator[Deployed]:
    """One service for many tests; each leaves it Ready, with one pod and caching on."""
    with site.deployed("served") as service:
        states = [kstatus(service.body())]
        deadline = time.monotonic() + 240
        while states[-1] not in ("Current", "Failed") and time.monotonic() < deadline:
            states.append(kstatus(service.body()))
        # In order: never Current before it is, and nothing alarming on the way.
        assert states[0] == "InProgress"
        assert set(states[:-1]) == {"InProgress"}
        assert states[-1] == "Current", service.status()
        yield service


@pytest.fixture(autouse=True)
def _left_as_found(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "served" in request.fixturenames:
        request.getfixturevalue("served").wait_ready()


def test_it_is_ready_when_its_pods_are(served: Deployed) -> None:
    status = served.status()
    assert (status["replicas"], status["readyReplicas"], status["updatedReplicas"]) == (1, 1, 1)
    assert status["observedGeneration"] == served.body()["metadata"]["generation"]
    assert served.condition("Available")["status"] == "True"
    assert served.condition("Stalled")["status"] == "False"
    assert status["url"] == f"http://served.{served.kubectl.namespace}.svc:8000/v1"
    assert served.args().count("--enable-prefix-caching") == 1


def test_a_conversation_is_remembered(served: Deployed) -> None:
    with served.client() as client:
        assert [model.id for model in client.models.list()] == ["served"]
        talk = Conversation(client=client, model="served")
        first = talk.say("What is the capital of France?")
        second = talk.say("And of Italy?")
        third = talk.say("And of Spain?")
    assert first.cached_tokens < first.prompt_tokens
    # All of an earlier turn is found again, to the token.
    assert second.cached_tokens >= first.prompt_tokens - 1
    assert third.cached_tokens >= second.prompt_tokens - 1
    assert third.cached_tokens < third.prompt_tokens


def test_a_stream_reports_its_usage(served: Deployed) -> None:
    with served.client() as client:
        stream = client.chat.completions.create(
            model="served",
            messages=[{"role": "user", "content": "Count to three, slowly."}],
            max_tokens=6,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    usage = chunks[-1].usage
    assert usage is not None
    assert not chunks[-1].choices
    assert 1 <= usage.completion_tokens <= 6
    assert usage.prompt_tokens_details is not None


def test_status_shows_what_the_cache_saves(served: Deployed) -> None:
    with served.client() as client:
        talk = Conversation(client=client, model="served")
        for text in ("One?", "Two?", "Three?"):
            talk.say(text)

    def figures() -> dict[str, object] | None:
        cache: dict[str, object] = served.status().get("prefixCache") or {}
        percent = cache.get("hitRatePercent")
        return cache if isinstance(percent, int | float) and percent > 0 else None

    cache = eventually(figures, "a hit rate in status.prefixCache", within=150)
    assert cache["enabled"] is True
    assert isinstance(cache["hitTokens"], int)
    assert isinstance(cache["queriedTokens"], int)
    assert 0 < cache["hitTokens"] < cache["queriedTokens"]
    assert served.condition("PrefixCacheEffective")["status"] == "True"
    engine = served.status()["engine"]
    assert engine["blockSize"] == 16
    assert engine["kvBlocks"] == 600


def test_kubectl_get_shows_it_at_a_glance(served: Deployed) -> None:
    header, row = served.kubectl("get", "risvc", "served", "-o", "wide").splitlines()
    columns = dict(zip(header.split(), row.split(), strict=False))
    expected = {"NAME", "READY", "MODEL", "PREFIX-CACHE", "HIT%", "MEM-UTIL", "REPLICAS", "URL", "AGE"}
    assert expected <= set(header.split())
    assert columns["READY"] == "True"
    assert columns["MODEL"] == "served"
    assert columns["PREFIX-CACHE"] == "true"


def test_drift_is_repaired_within_five_seconds(served: Deployed) -> None:
    kubectl, pods = served.kubectl, served.pod_uids()
    before = served.deployment()
    labels = before["metadata"]["labels"]
    kubectl("label", "deployment", "served", "app.kubernetes.io/managed-by=somebody", "--overwrite")
    eventually(lambda: served.deployment()["metadata"]["labels"] == labels, "label is back", within=5)
    kubectl("label", "deployment", "served", "app.kubernetes.io/managed-by-")
    eventually(lambda: served.deployment()["metadata"]["labels"] == labels, "removed label is back", within=5)
    kubectl.patch("deployment", "served", {"spec": {"replicas": 3}})
    eventually(lambda: served.deployment()["spec"]["replicas"] == 1, "replicas are back", within=5)
    eventually(lambda: served.pod_uids() == pods, "the serving pod is the same", within=60)
    template = before["spec"]["template"]["spec"]["containers"][0]["args"]
    change = [{"op": "replace", "path": "/spec/template/spec/containers/0/args", "value": ["serve", "/nowhere"]}]
    kubectl("patch", "deployment", "served", "--type=json", "-p", json.dumps(change))

    def args_are_back() -> bool:
        return bool(served.deployment()["spec"]["template"]["spec"]["containers"][0]["args"] == template)

    eventually(args_are_back, "args are back", within=5)


def test_a_deleted_child_comes_back(served: Deployed) -> None:
    old = (served.kubectl.get("service", "served") or {})["metadata"]["uid"]
    served.kubectl.delete("service", "served")

    def new_service() -> bool:
        found = served.kubectl.get("service", "served")
        return found is not None and found["metadata"]["uid"] != old

    eventually(new_service, "the Service is back", within=5)
    with served.client() as client:
        assert [model.id for model in client.models.list()] == ["served"]


def test_it_scales_through_the_scale_subresource(served: Deployed) -> None:
    served.kubectl("scale", "inferenceservice", "served", "--replicas=2")
    served.wait_ready()
    assert served.status()["readyReplicas"] == 2
    assert len(served.pods()) == 2
    assert served.kubectl("get", "risvc", "served", "-o", "jsonpath={.status.selector}").strip()
    served.kubectl("scale", "inferenceservice", "served", "--replicas=1")
    served.wait_ready()
    eventually(lambda: len(served.pods()) == 1, "one pod is left", within=60)


def test_suspended_it_has_no_pods_and_is_ready(served: Deployed) -> None:
    served.patch({"suspend": True})
    served.wait_condition("Ready", "True", "Suspended", within=90)
    eventually(lambda: not served.pods(), "no pods", within=30)
    served.patch({"suspend": None})
    served.wait_ready()
    assert len(served.pods()) == 1


def test_memory_utilisation_rolls_out(served: Deployed) -> None:
    assert served.status()["memory"]["effective"] == 0.9
    before = served.pod_uids()
    served.patch({"memory": {"utilization": 0.8}})
    served.wait_ready()
    assert not served.pod_uids() & before
    args = served.args()
    assert args[args.index("--gpu-memory-utilization") + 1] == "0.8"
    assert served.status()["memory"]["effective"] == 0.8
    served.patch({"memory": None})


def test_caching_off_rolls_out_and_is_reported(served: Deployed) -> None:
    served.patch({"prefixCaching": {"enabled": False}})
    served.wait_ready()
    assert served.args().count("--no-enable-prefix-caching") == 1
    with served.client() as client:
        talk = Conversation(client=client, model="served")
        assert [talk.say(text).cached_tokens for text in ("One?", "Two?")] == [0, 0]
    eventually(lambda: served.status()["prefixCache"]["enabled"] is False, "status says off", within=60)
    assert served.condition("PrefixCacheEffective")["reason"] == "Disabled"
    served.patch({"prefixCaching": None})
    served.wait_ready()
    eventually(lambda: served.status()["prefixCache"]["enabled"] is True, "status says on", within=60)


def test_a_field_not_honoured_is_named_while_pods_go_on(served: Deployed) -> None:
    before = served.pod_uids()
    served.patch({"prefixCaching": {"persistence": {"size": "1Gi"}}, "rollout": {"maxSurge": 1}})
    message = served.wait_condition("Stalled", "True", "NotSupported", within=30)
    assert "spec.rollout.maxSurge" in message
    assert served.pod_uids() == before
    with served.client() as client:
        assert Conversation(client=client, model="served").say("Still there?").completion_tokens > 0
    served.patch({"prefixCaching": {"persistence": None}, "rollout": None})
    served.wait_ready()
    assert served.pod_uids() == before


def test_an_operator_restart_touches_no_pod(served: Deployed, site: Site) -> None:
    sets = {each["metadata"]["name"] for each in served.kubectl.list("replicasets", "serving.reprise.io/name=served")}
    before, generation = served.pod_uids(), served.deployment()["metadata"]["generation"]
    labels = served.deployment()["metadata"]["labels"]
    site.stop_operator()
    served.kubectl("label", "deployment", "served", "app.kubernetes.io/managed-by=somebody", "--overwrite")
    site.start_operator()
    # The new process is at work once it has seen what changed in its absence.
    eventually(lambda: served.deployment()["metadata"]["labels"] == labels, "the label is back", within=60)
    assert served.deployment()["metadata"]["generation"] == generation
    assert served.pod_uids() == before
    after = served.kubectl.list("replicasets", "serving.reprise.io/name=served")
    assert {each["metadata"]["name"] for each in after} == sets


def test_deletion_takes_the_children_along(site: Site) -> None:
    service = site.apply("shortlived")
    service.wait_ready()
    owner = service.body()["metadata"]
    assert not owner.get("finalizers")
    for kind in ("deployment", "service"):
        child = service.kubectl.get(kind, "shortlived") or {}
        assert [each["uid"] for each in child["metadata"]["ownerReferences"]] == [owner["uid"]]
    service.delete()
    assert service.body() == {}


def test_deletion_does_not_need_the_operator(site: Site) -> None:
    service = site.apply("orphan")
    eventually(service.deployment, "the Deployment", within=30)
    site.stop_operator()
    try:
        service.delete()
    finally:
        site.start_operator()


def test_an_api_key_from_a_secret_guards_the_endpoint(site: Site) -> None:
    site.kubectl.apply(secret("engine-keys", token="s3cret-key"))
    spec = {"auth": {"apiKeySecretRef": {"name": "engine-keys", "key": "token"}}}
    with site.deployed("guarded", spec) as service:
        service.wait_ready()
        assert "s3cret-key" not in json.dumps(service.pods())
        with service.client(api_key="wrong") as client, pytest.raises(openai.AuthenticationError):
            client.models.list()
        with service.client(api_key="s3cret-key") as client:
            assert [model.id for model in client.models.list()] == ["guarded"]
