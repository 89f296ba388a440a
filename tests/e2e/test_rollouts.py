"""Bad changes of a service that serves, with one pod and with two: it goes on answering, and says what was wrong.

On a CPU with maxSurge 0, that is as on NPUs of which none is free.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.e2e.serving import serving
from tests.e2e.site import Deployed, Site
from tests.support.kubectl import eventually

pytestmark = [pytest.mark.e2e, pytest.mark.cluster]

SCARCE: dict[str, Any] = {"rollout": {"maxSurge": 0}}
SOUND = ["--num-gpu-blocks-override=600", "--max-num-seqs=4"]
BAD_FLAG = [*SOUND, "--no-such-flag"]
# The check has no weights in memory, so it cannot know that they and one sequence do not fit.
BAD_START = ["--num-gpu-blocks-override=1", "--max-num-seqs=4"]


def deadline(site: Site) -> int:
    """progressDeadlineSeconds: more than an engine takes to start, which here is a local process and not a pod."""
    return 60 if site.requests is None else 30


def condition(service: Deployed, reason: str) -> Callable[[], str | None]:
    def look() -> str | None:
        body = service.body()
        found = service.condition("Stalled", body)
        fresh = found.get("observedGeneration") == body["metadata"]["generation"]
        return found["message"] if fresh and (found["status"], found["reason"]) == ("True", reason) else None

    return look


def test_one_pod_and_a_bad_flag(site: Site) -> None:
    with site.deployed("single", SCARCE) as service:
        service.wait_ready()
        before, template = service.pod_uids(), service.deployment()["spec"]["template"]
        with site.reach("single") as url:
            watched = serving(service, url)
            service.patch({"runtime": {"extraArgs": BAD_FLAG}})
            message = watched.while_waiting_for(condition(service, "CheckFailed"), "the check fails")
            assert "--no-such-flag" in message
            assert service.pod_uids() == before
            assert service.deployment()["spec"]["template"] == template
            service.patch({"runtime": {"extraArgs": SOUND}})
            watched.while_waiting_for(
                lambda: service.condition("Ready").get("status") == "True", "it is ready when taken back"
            )
        assert service.pod_uids() == before
        assert not service.kubectl.list("jobs", "serving.reprise.io/check-of=single")


def test_one_pod_and_an_image_that_is_not_there(site: Site) -> None:
    with site.deployed("unpulled", SCARCE) as service:
        service.wait_ready()
        before, image = service.pod_uids(), service.body()["spec"]["runtime"].get("image")
        with site.reach("unpulled") as url:
            watched = serving(service, url)
            service.patch({"runtime": {"image": "registry.invalid/reprise/absent:2"}})
            message = watched.while_waiting_for(condition(service, "ImagePullFailed"), "the pull fails")
            assert "registry.invalid/reprise/absent:2" in message
            service.patch({"runtime": {"image": image}})
            watched.while_waiting_for(lambda: service.condition("Ready").get("status") == "True", "ready again")
        assert service.pod_uids() == before


def test_one_pod_and_a_good_change_after_its_check(site: Site) -> None:
    with site.deployed("checked", SCARCE) as service:
        service.wait_ready()
        before = service.pod_uids()
        service.patch({"runtime": {"extraArgs": [*SOUND, "--seed=7"]}})
        service.wait_ready()
        assert not service.pod_uids() & before
        assert "--seed=7" in service.args()


def test_one_pod_and_a_change_that_only_its_start_can_tell(site: Site) -> None:
    with site.deployed("started", SCARCE | {"model": {"maxModelLen": 256}}) as service:
        service.wait_ready()
        good = service.args()
        service.patch({"runtime": {"extraArgs": BAD_START}, "rollout": {"progressDeadlineSeconds": deadline(site)}})
        message = eventually(condition(service, "RolledBack"), "it is taken back", within=240)
        assert "InsufficientMemory" in message
        available = eventually(
            lambda: service.condition("Available").get("status") == "True", "the last good template serves", within=240
        )
        assert available
        assert service.args() == good
        assert service.condition("Stalled")["reason"] == "RolledBack"
        with service.client() as client:
            assert client.completions.create(model="started", prompt="Back?", max_tokens=2).choices


def test_two_pods_and_a_bad_flag(site: Site) -> None:
    with site.deployed("double", {**SCARCE, "replicas": 2}) as service:
        service.wait_ready()
        before, good = service.pod_uids(), service.args()
        with site.reach("double") as url:
            watched = serving(service, url)
            service.patch({"runtime": {"extraArgs": BAD_FLAG}, "rollout": {"progressDeadlineSeconds": deadline(site)}})
            message = watched.while_waiting_for(condition(service, "RolledBack"), "it is taken back")
            assert "--no-such-flag" in message
            watched.while_waiting_for(
                lambda: service.deployment()["status"].get("availableReplicas") == 2, "two pods serve again"
            )
            (kept,) = service.pod_uids() & before
            assert [pod["spec"]["containers"][0]["args"] for pod in service.pods()] == [good, good]
            pods = service.pod_uids()
            service.patch({"runtime": {"extraArgs": SOUND}, "rollout": {"progressDeadlineSeconds": None}})
            watched.while_waiting_for(lambda: service.condition("Ready").get("status") == "True", "ready again")
        assert service.pod_uids() == pods
        assert kept in pods
