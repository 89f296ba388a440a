"""Which Secrets and ConfigMaps roll the pods, decided as tables; and how they are looked after."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from reprise_operator.api import ClusterError, Fault
from reprise_operator.observed import Observed
from reprise_operator.plan import Plan
from reprise_operator.references import (
    REFERENCES_ANNOTATION,
    ObjectRef,
    ObservedReference,
    Reference,
    ReferenceKind,
    annotation_of,
    followed,
    rotated,
    unresolved,
)
from reprise_operator.rotation import ReferenceKey, ReferenceReader
from tests.support.factories import NOT_READY, observed, planned, pod
from tests.support.statuses import READY, conditions, kstatus, message, reason, status_of

KEYS = {"auth": {"apiKeySecretRef": {"name": "keys", "key": "token"}}}
SECRET = ObjectRef("Secret", "keys")
KEY = ReferenceKey(b"0123456789abcdef")
OTHER_KEY = ReferenceKey(b"fedcba9876543210")


def env(*entries: dict[str, Any]) -> dict[str, Any]:
    return {"runtime": {"env": [{"name": f"V{index}", "valueFrom": entry} for index, entry in enumerate(entries)]}}


def seen(values: Mapping[str, str] | None, *, key: ReferenceKey = KEY, changed: str = "") -> ObservedReference:
    """The Secret "keys" as it is read with these values."""
    if values is None:
        return ObservedReference(present=False, key_name=key.name)
    prints = {name: key.fingerprint("llm", SECRET, name, value.encode()) for name, value in values.items()}
    return ObservedReference(
        present=True, fingerprints=prints, key_name=key.name, changed=frozenset([changed] if changed else ())
    )


def after(of: Plan, saw: ObservedReference | None, *, live: Plan | None = None) -> Plan:
    """`of` as it follows from what was seen, where `live` is applied."""
    state = observed(live or of)
    if live is None:
        state = replace(state, children=())
    return followed(of, replace(state, references={} if saw is None else {SECRET: saw}))


# What is referred to ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ({}, []),
        (KEYS, [("Secret/keys", {"token"}, set())]),
        ({"runtime": {"imagePullSecrets": [{"name": "registry"}]}}, []),
        (
            {**KEYS, "prefixCaching": {"isolation": "perKey", "isolationSecretRef": {"name": "salt"}}},
            [("Secret/keys", {"token"}, set()), ("Secret/salt", {"isolation-secret"}, set())],
        ),
        (
            {
                **KEYS,
                "prefixCaching": {
                    "enabled": False,
                    "isolation": "perKey",
                    "isolationSecretRef": {"name": "salt"},
                },
            },
            [("Secret/keys", {"token"}, set())],
        ),
        # A pod starts without it.
        (
            {"prefixCaching": {"warmup": {"configMapKeyRef": {"name": "w", "key": "k"}}}},
            [("ConfigMap/w", set(), {"k"})],
        ),
        (env({"secretKeyRef": {"name": "a", "key": "k"}}), [("Secret/a", {"k"}, set())]),
        (env({"configMapKeyRef": {"name": "a", "key": "k", "optional": True}}), [("ConfigMap/a", set(), {"k"})]),
        (env({"fieldRef": {"fieldPath": "status.podIP"}}), []),
        (
            env(
                {"secretKeyRef": {"name": "a", "key": "k", "optional": True}},
                {"secretKeyRef": {"name": "a", "key": "k"}},
                {"secretKeyRef": {"name": "a", "key": "l", "optional": True}},
            ),
            [("Secret/a", {"k"}, {"l"})],
        ),
        (
            {"model": {"uri": "hf://a/b", "secretRef": {"name": "hub"}}},
            [("Secret/hub", {"HF_TOKEN"}, set())],
        ),
        (
            {"model": {"uri": "s3://a/b", "secretRef": {"name": "s"}}},
            [
                (
                    "Secret/s",
                    {"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"},
                    {"AWS_SESSION_TOKEN", "AWS_REGION", "AWS_ENDPOINT_URL"},
                )
            ],
        ),
    ],
)
def test_what_the_pods_read(spec: dict[str, Any], expected: list[tuple[str, set[str], set[str]]]) -> None:
    found = planned(spec).references
    assert [(str(item.object), set(item.required), set(item.optional)) for item in found] == expected


def test_a_stateful_set_s_pods_follow_their_secrets_too() -> None:
    of = planned({**KEYS, "prefixCaching": {"persistence": {"size": "1Gi"}}})
    first = after(of, seen({"token": "a"}))
    assert first.workload["kind"] == "StatefulSet"
    second = after(of, seen({"token": "b"}, changed="token"), live=first)
    assert rotated(first.workload, second.workload) == ("Secret/keys",)


def test_a_service_that_refers_to_nothing_keeps_its_template() -> None:
    of = planned()
    assert followed(of, observed(of)) is of


# What the template carries ------------------------------------------------------------------------------------------


def test_the_annotation_is_a_keyed_hash_of_the_keys_in_use() -> None:
    of = after(planned(KEYS), seen({"token": "hunter2", "other": "x"}))
    value = annotation_of(of.workload)
    name, _, entry = value.partition("=")
    assert (name, entry.partition(".")[0]) == ("Secret/keys", KEY.name)
    for plain in (b"hunter2", b'"hunter2"', b"token=hunter2"):
        assert hashlib.sha256(plain).hexdigest()[:16] not in value
    assert after(planned(KEYS), seen({"token": "hunter2", "other": "y"})) == of, "a key that nobody uses rolls nothing"
    assert annotation_of(after(planned(KEYS), seen({"token": "hunter3"})).workload) != value


def test_only_the_pods_annotations_differ() -> None:
    plain = planned({**KEYS, "podTemplate": {"metadata": {"annotations": {"example.com/note": "b"}}}})
    of = after(plain, seen({"token": "a"}))
    metadata = of.workload["spec"]["template"]["metadata"]
    assert metadata["annotations"].pop(REFERENCES_ANNOTATION)
    assert of.workload["spec"] == plain.workload["spec"]
    assert of.workload["metadata"]["annotations"] != plain.workload["metadata"]["annotations"], "the plan's hash"


LIVE = after(planned(KEYS), seen({"token": "a"}))
LIVE_OTHER = after(planned(KEYS), seen({"token": "a"}, key=OTHER_KEY))


@pytest.mark.parametrize(
    ("live", "saw", "rolls"),
    [
        (LIVE, seen({"token": "a"}), False),
        (LIVE, seen({"token": "b"}), True),
        (LIVE, seen(None), False),
        (LIVE, seen({"tokn": "a"}), False),
        (LIVE, None, False),
        (LIVE_OTHER, seen({"token": "a"}), False),
        (LIVE_OTHER, seen({"token": "b"}), False),
        (LIVE_OTHER, seen({"token": "b"}, changed="token"), True),
        (LIVE_OTHER, seen({"token": "a", "x": "2"}, changed="x"), False),
    ],
    ids=[
        "the same",
        "rotated",
        "vanished",
        "without the key",
        "not readable",
        "the operator's key is another one",
        "and nobody knows whether it changed",
        "and it was seen to change",
        "and another key of it changed",
    ],
)
def test_when_the_pods_roll(live: Plan, saw: ObservedReference | None, rolls: bool) -> None:
    of = after(planned(KEYS), saw, live=live)
    assert (of.workload["spec"]["template"] != live.workload["spec"]["template"]) is rolls
    assert bool(rotated(live.workload, of.workload)) is rolls


def test_one_that_was_never_there_leaves_no_entry_and_its_coming_makes_one() -> None:
    waiting = after(planned(KEYS), seen(None))
    assert annotation_of(waiting.workload) == ""
    assert annotation_of(after(planned(KEYS), seen({"token": "a"}), live=waiting).workload) != ""


def test_a_vanished_one_does_not_hold_another_up() -> None:
    both = {**KEYS, **env({"configMapKeyRef": {"name": "c", "key": "k"}})}
    config = ObjectRef("ConfigMap", "c")

    def of(secret: ObservedReference, value: str, live: Plan | None) -> Plan:
        made = planned(both)
        prints = ObservedReference(
            present=True, fingerprints={"k": KEY.fingerprint("llm", config, "k", value.encode())}, key_name=KEY.name
        )
        state = observed(live or made)
        return followed(made, replace(state, references={SECRET: secret, config: prints}))

    live = of(seen({"token": "a"}), "1", None)
    new = of(seen(None), "2", live)
    assert rotated(live.workload, new.workload) == ("ConfigMap/c",)
    before, now = annotation_of(live.workload).split(","), annotation_of(new.workload).split(",")
    assert before[1] == now[1]


# What is said -------------------------------------------------------------------------------------------------------


def status(of: Plan, saw: ObservedReference | None, *, ready: bool) -> dict[str, Any]:
    references = {} if saw is None else {SECRET: saw}
    state = observed(of, pod(ready=ready), status=None if ready else NOT_READY, references=references)
    return status_of(of, state)


@pytest.mark.parametrize(
    ("saw", "expected", "words"),
    [
        (None, "SecretNotFound", "Secret keys does not exist in namespace llm (spec.auth.apiKeySecretRef asks for it)"),
        ({"tokn": "x"}, "SecretKeyNotFound", "Secret keys in namespace llm has no key token"),
    ],
)
def test_what_is_missing_is_named_and_running_pods_stay_ready(
    saw: dict[str, str] | None, expected: str, words: str
) -> None:
    of = planned(KEYS)
    running = status(of, seen(saw), ready=True)
    assert kstatus(running) == READY
    assert conditions(running)["ReferencesResolved"] == ("False", expected)
    assert words in message(running, "ReferencesResolved")
    starting = status(of, seen(saw), ready=False)
    assert kstatus(starting) == ("False", "False", "True")
    assert reason(starting) == expected
    assert words in message(starting, "Stalled")


def test_all_is_well_and_all_is_unknown() -> None:
    of = planned(KEYS)
    assert conditions(status(of, seen({"token": "x"}), ready=True))["ReferencesResolved"] == ("True", "Resolved")
    assert conditions(status(of, None, ready=True))["ReferencesResolved"] == ("Unknown", "NotReadable")
    assert "ReferencesResolved" not in conditions(status(planned(), None, ready=True))


def test_an_optional_one_may_be_missing() -> None:
    of = planned(env({"secretKeyRef": {"name": "keys", "key": "token", "optional": True}}))
    assert unresolved(of, observed(of, references={SECRET: seen(None)})) == ()
    assert unresolved(of, Observed(at=0.0, references={SECRET: seen({})})) == ()


# Reading ------------------------------------------------------------------------------------------------------------


class Store:
    """Secrets and ConfigMaps, and how often each was asked for."""

    def __init__(self, **secrets: dict[str, bytes]) -> None:
        self.secrets = secrets
        self.forbidden = False
        self.asked: list[str] = []

    async def contents(self, kind: ReferenceKind, namespace: str, name: str) -> Mapping[str, bytes] | None:
        self.asked.append(f"{namespace}/{kind}/{name}")
        await asyncio.sleep(0)
        if self.forbidden:
            raise ClusterError(Fault.FORBIDDEN, "no")
        return self.secrets.get(name)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


REFERENCE = Reference(object=SECRET, required=frozenset({"token"}))


async def test_services_that_share_an_object_share_the_request() -> None:
    store, clock = Store(keys={"token": b"a"}), Clock()
    reader = ReferenceReader(KEY, clock=clock)
    results = await asyncio.gather(*(reader.read(store, "llm", [REFERENCE]) for _ in range(100)))
    assert store.asked == ["llm/Secret/keys"]
    assert all(result == results[0] for result in results)
    await reader.read(store, "other", [REFERENCE])
    assert store.asked[1:] == ["other/Secret/keys"]


async def test_each_is_read_once_a_minute() -> None:
    store, clock = Store(keys={"token": b"a"}), Clock()
    reader = ReferenceReader(KEY, clock=clock)
    first = (await reader.read(store, "llm", [REFERENCE]))[SECRET]
    store.secrets["keys"] = {"token": b"b"}
    clock.now += 59.0
    assert (await reader.read(store, "llm", [REFERENCE]))[SECRET] == first
    clock.now += 1.0
    second = (await reader.read(store, "llm", [REFERENCE]))[SECRET]
    assert second.fingerprints != first.fingerprints
    assert (set(first.changed), set(second.changed)) == (set(), {"token"})
    assert len(store.asked) == 2


async def test_what_is_not_there_is_looked_for_each_time_and_its_old_content_remembered() -> None:
    store, clock = Store(keys={"token": b"a"}), Clock()
    reader = ReferenceReader(KEY, clock=clock)
    first = (await reader.read(store, "llm", [REFERENCE]))[SECRET]
    kept = store.secrets.pop("keys")
    clock.now += 60.0
    assert not (await reader.read(store, "llm", [REFERENCE]))[SECRET].present
    store.secrets["keys"] = kept
    assert (await reader.read(store, "llm", [REFERENCE]))[SECRET] == first
    assert len(store.asked) == 3


async def test_what_may_not_be_read_is_left_out_and_asked_for_each_minute() -> None:
    store, clock = Store(keys={"token": b"a"}), Clock()
    store.forbidden = True
    reader = ReferenceReader(KEY, clock=clock)
    for _ in range(3):
        assert await reader.read(store, "llm", [REFERENCE]) == {}
    assert len(store.asked) == 1
    store.forbidden = False
    clock.now += 60.0
    assert SECRET in await reader.read(store, "llm", [REFERENCE])


async def test_another_fault_is_raised() -> None:
    class Down(Store):
        async def contents(self, kind: ReferenceKind, namespace: str, name: str) -> Mapping[str, bytes] | None:
            raise ClusterError(Fault.UNAVAILABLE, "down")

    with pytest.raises(ClusterError, match="down"):
        await ReferenceReader(KEY).read(Down(), "llm", [REFERENCE])


async def test_what_nobody_asks_for_is_forgotten() -> None:
    store, clock = Store(keys={"token": b"a"}), Clock()
    reader = ReferenceReader(KEY, clock=clock)
    await reader.read(store, "llm", [REFERENCE])
    clock.now += 3700.0
    await reader.read(store, "llm", [])
    assert reader._known == {}
    assert reader._reading == {}


def test_no_content_is_kept() -> None:
    assert "hunter2" not in repr(seen({"token": "hunter2"}))


def test_equal_values_of_two_objects_do_not_look_equal() -> None:
    prints = {
        KEY.fingerprint(namespace, reference, key, b"v")
        for namespace in ("a", "b")
        for reference in (ObjectRef("Secret", "x"), ObjectRef("ConfigMap", "x"), ObjectRef("Secret", "y"))
        for key in ("k", "l")
    }
    assert len(prints) == 12
    assert KEY.fingerprint("a", SECRET, "kv", b"") != KEY.fingerprint("a", SECRET, "k", b"v")


def test_a_key_of_a_process_is_its_own() -> None:
    assert ReferenceKey.random().name != ReferenceKey.random().name
    assert ReferenceKey(b"0123456789abcdef").name == KEY.name
    with pytest.raises(ValueError, match="the key has 5 bytes; it needs at least 16"):
        ReferenceKey(b"short")
