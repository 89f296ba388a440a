"""The emulated API server answers as the real one did, and the real one still does: apiserver/stories."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
import yaml

from tests.contract.apiserver.replay import HERE, STORIES, client_of, install_definitions, play
from tests.support.apiserver import start_api_server
from tests.support.kube_assets import find_kube_assets


@pytest.fixture(scope="module", params=["emulated", "real"])
def client(request: pytest.FixtureRequest) -> Iterator[httpx.Client]:
    """An API server with no controllers, since those would write between two requests of a story."""
    if request.param == "real" and find_kube_assets() is None:
        pytest.skip("no kube-apiserver: run `make kube-assets`, or set KUBEBUILDER_ASSETS")
    with start_api_server(request.param, controllers=False) as server, client_of(server) as client:
        install_definitions(client)
        yield client


@pytest.mark.parametrize("story", STORIES)
def test_answers_as_recorded(client: httpx.Client, story: str) -> None:
    recorded = yaml.safe_load((HERE / "answers" / f"{story}.yaml").read_text())
    answers = dict(play(story, client))
    different = [name for name, answer in answers.items() if answer != recorded[name]]
    assert list(answers) == list(recorded)
    assert not different, "\n\n".join(f"{n}\n answered {answers[n]}\n recorded {recorded[n]}" for n in different)


def test_there_are_enough_recorded_requests() -> None:
    recorded = [yaml.safe_load((HERE / "answers" / f"{story}.yaml").read_text()) for story in STORIES]
    assert sum(map(len, recorded)) >= 60
