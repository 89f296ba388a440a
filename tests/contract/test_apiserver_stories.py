"""The emulated API server answers as the real one did, and the real one still does: apiserver/stories."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import yaml

from tests.contract.apiserver.replay import HERE, STORIES, client_of, install_definitions, play, real_only
from tests.support import emulated
from tests.support.apiserver import ApiServerKind, start_api_server
from tests.support.kube_assets import find_kube_assets

EMULATION = Path(emulated.__file__).parent


@pytest.fixture(scope="module", params=["emulated", "real"])
def server_kind(request: pytest.FixtureRequest) -> ApiServerKind:
    kind: ApiServerKind = request.param
    return kind


@pytest.fixture(scope="module")
def client(server_kind: ApiServerKind) -> Iterator[httpx.Client]:
    """An API server with no controllers, since those would write between two requests of a story."""
    if server_kind == "real" and find_kube_assets() is None:
        pytest.skip("no kube-apiserver: run `make kube-assets`, or set KUBEBUILDER_ASSETS")
    with start_api_server(server_kind, controllers=False) as server, client_of(server) as client:
        install_definitions(client)
        yield client


@pytest.mark.parametrize("story", STORIES)
def test_answers_as_recorded(client: httpx.Client, server_kind: ApiServerKind, story: str) -> None:
    recorded = yaml.safe_load((HERE / "answers" / f"{story}.yaml").read_text())
    answers = dict(play(story, client))
    excused = real_only(story) if server_kind == "emulated" else {}
    different = [name for name, answer in answers.items() if answer != recorded[name] and name not in excused]
    assert list(answers) == list(recorded)
    assert not different, "\n\n".join(f"{n}\n answered {answers[n]}\n recorded {recorded[n]}" for n in different)


def test_enough_recorded_requests_hold_for_both_servers() -> None:
    recorded = {story: yaml.safe_load((HERE / "answers" / f"{story}.yaml").read_text()) for story in STORIES}
    assert sum(len(recorded[story].keys() - real_only(story).keys()) for story in STORIES) >= 150


def test_the_emulation_is_small() -> None:
    """What it leaves out is written down in its docstring; more than this would be a second API server."""
    lines = [len(path.read_text().splitlines()) for path in EMULATION.glob("*.py")]
    assert 0 < sum(lines) <= 1200
