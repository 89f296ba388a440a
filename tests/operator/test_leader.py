"""One leader at a time: the decision as a table, and two operator processes on an API server."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from reprise_operator.leader import Claim, Election, Held, LeaseTimes
from tests.operator.operator_process import Process, ended
from tests.support.kubectl import Kubectl, eventually
from tests.support.request_recorder import Hang, recording

TIMES = LeaseTimes()


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


# Two processes ------------------------------------------------------------------------------------------------------


@pytest.fixture
def two(kubectl: Kubectl, tmp_path: Path) -> Iterator[tuple[Process, Process, Hang]]:
    """The leader, which reaches the API server over a wire that can be cut, and one that waits."""
    cut = Hang()
    lease = ("-n", kubectl.namespace, "--lease-namespace", kubectl.namespace)
    with recording(kubectl.kubeconfig, folder=tmp_path) as wire:
        wire.interfere(lambda _: cut if cut.on else None)
        with ended(Process(wire.kubeconfig, tmp_path / "first.log", *lease)) as first:
            first.wait_ready()
            with ended(Process(kubectl.kubeconfig, tmp_path / "second.log", *lease)) as second:
                eventually(lambda: "another operator holds lease" in second.log(), "the second waits")
                yield first, second, cut
        cut.on = False


def test_a_leader_that_is_killed_is_succeeded_within_the_lease(
    two: tuple[Process, Process, Hang], kubectl: Kubectl
) -> None:
    first, second, _ = two
    assert first.metric("reprise_operator_leader") == 1.0
    assert second.metric("reprise_operator_leader") == 0.0
    first.process.kill()
    killed = time.monotonic()
    kubectl.apply(SERVICE)
    second.wait_leading()
    took = time.monotonic() - killed
    assert TIMES.duration - TIMES.period <= took <= TIMES.duration + 2 * TIMES.period + 3, took
    eventually(lambda: kubectl.get("deployment", "qwen"), "what was asked for in between is done", within=10)
    lease = kubectl.get("lease", "reprise-operator")
    assert lease is not None
    assert lease["spec"]["leaseTransitions"] == 1


def test_a_leader_that_is_cut_off_stops_before_the_other_begins(two: tuple[Process, Process, Hang]) -> None:
    """A cut wire answers nothing and refuses nothing. The first is the one that could still do harm when it heals."""
    first, second, cut = two
    cut.on = True
    begun = time.monotonic()
    code = first.process.wait(TIMES.duration + 5)
    stopped = time.monotonic()
    assert code == 1
    assert stopped - begun < TIMES.duration, "others may lead by now"
    assert "the lease was lost" in first.log()
    assert second.metric("reprise_operator_leader") == 0.0, "the lease has not run out yet"
    second.wait_leading()


def test_a_leader_that_slept_through_its_lease_ends_when_it_wakes(two: tuple[Process, Process, Hang]) -> None:
    """A paused machine: the lease is somebody else's, and the sleeper has not seen it go."""
    first, second, _ = two
    first.process.send_signal(signal.SIGSTOP)
    second.wait_leading(within=TIMES.duration + 15)
    first.process.send_signal(signal.SIGCONT)
    assert first.process.wait(10) == 1
    assert "the lease was lost" in first.log()
    assert second.metric("reprise_operator_leader") == 1.0


SERVICE = {
    "apiVersion": "serving.reprise.io/v1alpha1",
    "kind": "InferenceService",
    "metadata": {"name": "qwen"},
    "spec": {"model": {"uri": "hostpath:///m"}, "accelerator": {"profile": "cpu"}},
}
