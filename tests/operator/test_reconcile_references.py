"""Secrets and ConfigMaps that are rotated, vanish and lose keys, on an API server."""

from __future__ import annotations

from typing import Any

from reprise_operator.references import REFERENCES_ANNOTATION
from reprise_operator.rotation import ReferenceKey, ReferenceReader
from tests.operator.reconcile_bench import Bench

SPEC = {
    "auth": {"apiKeySecretRef": {"name": "keys"}},
    "runtime": {"env": [{"name": "LEVEL", "valueFrom": {"configMapKeyRef": {"name": "settings", "key": "level"}}}]},
}


def secret(bench: Bench, data: dict[str, str], *, labels: dict[str, str] | None = None) -> None:
    metadata = {"name": "keys", "labels": labels or {}}
    bench.kubectl.apply({"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "stringData": data})


def config_map(bench: Bench, level: str) -> None:
    bench.kubectl.apply(
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "settings"}, "data": {"level": level}}
    )


def template(bench: Bench) -> dict[str, Any]:
    return dict(bench.child("deployment")["spec"]["template"])


def annotation(bench: Bench) -> str:
    return str(template(bench)["metadata"]["annotations"][REFERENCES_ANNOTATION])


async def start(bench: Bench) -> str:
    secret(bench, {"api-key": "hunter2"})
    config_map(bench, "1")
    bench.apply(SPEC)
    await bench.make_ready()
    return annotation(bench)


async def a_minute_later(bench: Bench) -> list[tuple[str, str]]:
    bench.clock.now += 61.0
    return await bench.writes()


async def test_a_rotated_secret_and_a_changed_config_map_roll_the_pods_once(bench: Bench) -> None:
    before = await start(bench)
    assert await a_minute_later(bench) == []
    secret(bench, {"api-key": "hunter3"})
    assert await bench.writes() == [], "it is read once a minute"
    assert ("patch", "deployments") in await a_minute_later(bench)
    after = annotation(bench)
    assert after != before
    assert after.split(",")[0] == before.split(",")[0], "that of the ConfigMap is as it was"
    notes = [event["message"] for event in bench.kubectl.list("events")]
    assert "Updated Deployment/qwen: Secret/keys changed" in notes
    await bench.make_ready()
    assert await a_minute_later(bench) == []
    config_map(bench, "2")
    assert ("patch", "deployments") in await a_minute_later(bench)
    assert annotation(bench).split(",")[1] == after.split(",")[1]


async def test_what_nobody_reads_rolls_nothing(bench: Bench) -> None:
    before = await start(bench)
    secret(bench, {"api-key": "hunter2", "another": "x"}, labels={"touched": "true"})
    assert await a_minute_later(bench) == []
    assert annotation(bench) == before


async def test_a_vanished_secret_is_told_and_the_pods_are_left_alone(bench: Bench) -> None:
    before = await start(bench)
    bench.kubectl.delete("secret", "keys")
    assert await a_minute_later(bench) == [("patch", "inferenceservices"), ("create", "events")]
    status, reason, message = bench.condition("ReferencesResolved")
    assert (status, reason) == ("False", "SecretNotFound")
    assert "Secret keys does not exist" in message
    assert bench.condition("Ready")[0] == "True"
    assert bench.events()[-1] == ("Warning", "SecretNotFound")
    assert annotation(bench) == before
    assert await a_minute_later(bench) == []
    secret(bench, {"api-key": "hunter2"})
    await bench.settle()
    assert bench.condition("ReferencesResolved")[:2] == ("True", "Resolved")
    assert annotation(bench) == before, "it is back as it was"


async def test_a_secret_with_the_wrong_key_is_told_and_the_pods_are_left_alone(bench: Bench) -> None:
    before = await start(bench)
    bench.kubectl("patch", "secret", "keys", "--type=json", "-p", '[{"op": "remove", "path": "/data/api-key"}]')
    await a_minute_later(bench)
    assert bench.condition("ReferencesResolved")[:2] == ("False", "SecretKeyNotFound")
    assert bench.condition("Ready")[0] == "True"
    assert annotation(bench) == before


async def test_a_new_operator_with_the_same_key_sees_what_changed_while_there_was_none(bench: Bench) -> None:
    before = await start(bench)
    bench.reconciler.references = ReferenceReader(ReferenceKey(b"the key of this bench"), clock=bench.clock)
    await bench.settle()
    assert annotation(bench) == before
    secret(bench, {"api-key": "hunter3"})
    bench.reconciler.references = ReferenceReader(ReferenceKey(b"the key of this bench"), clock=bench.clock)
    await bench.settle()
    assert annotation(bench) != before


async def test_a_new_key_of_the_operator_rolls_nothing_and_it_goes_on_looking(bench: Bench) -> None:
    before = await start(bench)
    bench.reconciler.references = ReferenceReader(ReferenceKey(b"another key by now"), clock=bench.clock)
    await bench.settle()
    assert annotation(bench) == before
    secret(bench, {"api-key": "hunter3"})
    await a_minute_later(bench)
    await bench.settle()
    assert annotation(bench).split(",")[1] != before.split(",")[1]


async def test_services_that_share_a_secret_ask_for_it_once_a_minute(bench: Bench) -> None:
    await start(bench)
    bench.clock.now += 61.0
    bench.requests.clear()
    for _ in range(5):
        await bench.reconcile()
    named = [request for request in bench.requests if request[0] == "get" and request[1] in ("secrets", "configmaps")]
    assert sorted(named) == [("get", "configmaps"), ("get", "secrets")], "at once, in either order"


async def test_nothing_of_a_secret_is_written_anywhere(bench: Bench) -> None:
    await start(bench)
    for kind in ("deployment", "replicaset", "pods", "inferenceservice", "events"):
        text = bench.kubectl("get", kind, "-o", "yaml")
        assert "hunter2" not in text
        assert "aHVudGVyMg" not in text
