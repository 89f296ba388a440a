"""One leader at a time: the decision as a table, and two operator processes on an API server."""

from __future__ import annotations

import contextlib
import signal
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from reprise_operator.leader import Claim, Election, Held, LeaseTimes
from tests.operator.operator_process import Process, ended
from tests.support.apiserver import ApiServer
from tests.support.kubectl import Kubectl, eventually, namespace
from tests.support.request_recorder import Hang, recording

TIMES = LeaseTimes()
LEADS = "reprise_operator_leader"


def held(holder: str | None = "other", renewed: str = "1", duration: float | None = 15.0) -> Held:
    return Held(holder=holder, renewed=renewed, duration=duration)


@pytest.mark.parametrize(
    ("lease", "claim"),
    [
        (None, Claim.CREATE),
        (held("me"), Claim.RENEW),
        (held(None), Claim.TAKE),
        (held("other"), Claim.WAIT),
    ],
)
def test_what_is_done_about_a_lease_at_first_sight(lease: Held | None, claim: Claim) -> None:
    assert Election(identity="me", duration=15).decide(lease, now=1000.0) is claim


def test_a_lease_is_taken_when_nobody_was_seen_to_renew_it_for_so_long() -> None:
    election = Election(identity="me", duration=15)
    # Its own times say that it ran out years ago: clocks differ, so only what was seen counts.
    assert election.decide(held(renewed="2001-01-01"), now=100.0) is Claim.WAIT
    assert election.decide(held(renewed="2001-01-01"), now=114.9) is Claim.WAIT
    assert election.decide(held(renewed="2001-01-02"), now=114.9) is Claim.WAIT
    assert election.decide(held(renewed="2001-01-02"), now=129.8) is Claim.WAIT
    assert election.decide(held(renewed="2001-01-02"), now=129.9) is Claim.TAKE


def test_another_holder_is_another_lease() -> None:
    election = Election(identity="me", duration=15)
    assert election.decide(held("a"), now=0.0) is Claim.WAIT
    assert election.decide(held("b"), now=20.0) is Claim.WAIT


@pytest.mark.parametrize(("asked", "patience"), [(60.0, 60.0), (5.0, 15.0), (None, 15.0)])
def test_the_longer_patience_of_the_two_counts(asked: float | None, patience: float) -> None:
    """A holder of another release may renew less often than this one would."""
    election = Election(identity="me", duration=15)
    election.decide(held(duration=asked), now=0.0)
    assert election.decide(held(duration=asked), now=patience - 0.1) is Claim.WAIT
    assert election.decide(held(duration=asked), now=patience) is Claim.TAKE


# Pairs of processes ---------------------------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True, eq=False)
class Pair:
    """The leader, and one that waits. When what came to pass, in seconds since the leader's misfortune."""

    kubectl: Kubectl
    first: Process
    second: Process
    roles: tuple[float, float] = (0.0, 0.0)
    """Whether they led, at first."""
    ended: float | None = None
    """The first."""
    led_at_its_end: float | None = None
    """Whether the second led then."""
    took_over: float | None = None

    def look(self, seconds: float) -> bool:
        """Takes note of what has come to pass after so many seconds; whether the second leads."""
        if self.ended is None and self.first.process.poll() is not None:
            self.ended = seconds
            self.led_at_its_end = self.second.metric(LEADS)
        if self.took_over is None and self.second.metric(LEADS) == 1.0:
            self.took_over = seconds
        return self.took_over is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Misfortunes:
    """Three pairs, each with a lease of its own: their leaders were killed, cut off and stopped at the same moment."""

    killed: Pair
    cut_off: Pair
    asleep: Pair


@pytest.fixture(scope="module")
def misfortunes(crd_server: ApiServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Misfortunes]:
    """All at once: a lease takes its time to run out, and the three need not wait for each other."""
    cut = Hang()
    with contextlib.ExitStack() as stack:
        admin = Kubectl(kubeconfig=crd_server.kubeconfig_path)

        def pair(name: str) -> Pair:
            kubectl = Kubectl(kubeconfig=admin.kubeconfig, namespace=f"{name}-{uuid.uuid4().hex[:8]}")
            kubectl.put(namespace(kubectl.namespace))
            stack.callback(kubectl.delete_namespace)
            folder = tmp_path_factory.mktemp(name)
            lease = ("-n", kubectl.namespace, "--lease-namespace", kubectl.namespace)
            wire = stack.enter_context(recording(kubectl.kubeconfig, folder=folder))
            wire.interfere(lambda _: cut if cut.on and name == "cut-off" else None)
            first = stack.enter_context(ended(Process(wire.kubeconfig, folder / "first.log", *lease)))
            first.wait_ready()
            second = stack.enter_context(ended(Process(kubectl.kubeconfig, folder / "second.log", *lease)))
            eventually(lambda: "another operator holds lease" in second.log(), "the second waits")
            return Pair(kubectl=kubectl, first=first, second=second, roles=(first.metric(LEADS), second.metric(LEADS)))

        found = Misfortunes(killed=pair("killed"), cut_off=pair("cut-off"), asleep=pair("asleep"))
        stack.callback(setattr, cut, "on", False)
        found.killed.first.process.kill()
        found.asleep.first.process.send_signal(signal.SIGSTOP)
        cut.on = True
        begun = time.monotonic()
        found.killed.kubectl.apply(SERVICE)
        waiting = {found.killed, found.cut_off, found.asleep}
        while waiting:
            waiting -= {each for each in waiting if each.look(time.monotonic() - begun)}
            assert time.monotonic() - begun < 60, "somebody does not take over"
            time.sleep(0.1)
        yield found


def test_a_leader_that_is_killed_is_succeeded_within_the_lease(misfortunes: Misfortunes) -> None:
    pair = misfortunes.killed
    assert pair.roles == (1.0, 0.0)
    assert pair.took_over is not None
    assert TIMES.duration - TIMES.period <= pair.took_over <= TIMES.duration + 2 * TIMES.period + 3
    done = "what was asked for in between is done"
    eventually(lambda: pair.kubectl.get("deployment", "qwen"), done, within=10)
    lease = pair.kubectl.get("lease", "reprise-operator")
    assert lease is not None
    assert lease["spec"]["leaseTransitions"] == 1


def test_a_leader_that_is_cut_off_stops_before_the_other_begins(misfortunes: Misfortunes) -> None:
    """A cut wire answers nothing and refuses nothing. The first is the one that could still do harm when it heals."""
    pair = misfortunes.cut_off
    assert pair.roles == (1.0, 0.0)
    assert pair.first.process.poll() == 1
    assert "the lease was lost" in pair.first.log()
    assert pair.ended is not None
    assert pair.ended < TIMES.duration, "others may lead by now"
    assert pair.led_at_its_end == 0.0, "the lease has not run out yet"
    assert pair.took_over is not None


def test_a_leader_that_slept_through_its_lease_ends_when_it_wakes(misfortunes: Misfortunes) -> None:
    """A paused machine: the lease is somebody else's, and the sleeper has not seen it go."""
    pair = misfortunes.asleep
    assert pair.roles == (1.0, 0.0)
    assert pair.took_over is not None
    assert pair.took_over < TIMES.duration + 15
    pair.first.process.send_signal(signal.SIGCONT)
    assert pair.first.process.wait(10) == 1
    assert "the lease was lost" in pair.first.log()
    assert pair.second.metric(LEADS) == 1.0


SERVICE = {
    "apiVersion": "serving.reprise.io/v1alpha1",
    "kind": "InferenceService",
    "metadata": {"name": "qwen"},
    "spec": {"model": {"uri": "hostpath:///m"}, "accelerator": {"profile": "cpu"}},
}
