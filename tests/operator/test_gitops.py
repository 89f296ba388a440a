"""What Flux (kstatus) and Argo CD make of our statuses over a service's whole life."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Mapping
from typing import Any

import pytest

from tests.operator.life import Step, whole_life
from tests.support.gitops import HEALTH_LUA, ArgoCD, kstatus, script_of_config_map

LIFE = whole_life()
DECISIVE = ("Ready", "Reconciling", "Stalled")


@pytest.fixture(scope="module")
def argocd() -> ArgoCD:
    return ArgoCD()


def with_conditions(body: Mapping[str, Any], conditions: list[dict[str, Any]]) -> dict[str, Any]:
    changed = copy.deepcopy(dict(body))
    changed["status"]["conditions"] = conditions
    return changed


def informational(value: str, **generation: int) -> list[dict[str, Any]]:
    kinds = ("PrefixCacheEffective", "MemoryTuned", "AsSpecified", "Available", "SomethingOfTomorrow")
    return [{"type": kind, "status": value, "reason": "R", "message": "m", **generation} for kind in kinds]


@pytest.mark.parametrize("step", LIFE, ids=str)
def test_kstatus(step: Step) -> None:
    assert kstatus(step.body) == step.kstatus


@pytest.mark.parametrize("step", LIFE, ids=str)
def test_argocd(step: Step, argocd: ArgoCD) -> None:
    status, message = argocd.health(step.body)
    assert status == step.argo
    assert message


@pytest.mark.parametrize("step", LIFE, ids=str)
def test_exactly_one_of_the_three_holds(step: Step) -> None:
    status = step.body["status"]
    if "observedGeneration" not in status:
        return  # the schema's own: Ready=Unknown alone
    held = {item["type"]: item["status"] for item in status["conditions"]}
    assert sorted(held[kind] for kind in DECISIVE) == ["False", "False", "True"]
    assert {item["observedGeneration"] for item in status["conditions"]} == {status["observedGeneration"]}


@pytest.mark.parametrize("step", LIFE, ids=str)
def test_informational_conditions_never_matter(step: Step, argocd: ArgoCD) -> None:
    """Fault operator 11: Argo CD was Progressing for ever because of an informational condition."""
    decisive = [item for item in step.body["status"]["conditions"] if item["type"] in DECISIVE]
    for others in ([], *(informational(value) for value in ("True", "False", "Unknown"))):
        for order in ([*decisive, *others], [*others, *reversed(decisive)]):
            changed = with_conditions(step.body, order)
            assert kstatus(changed) == step.kstatus
            assert argocd.health(changed)[0] == step.argo


def test_the_decisive_conditions_decide_in_any_order(argocd: ArgoCD) -> None:
    for step in LIFE:
        decisive = [item for item in step.body["status"]["conditions"] if item["type"] in DECISIVE]
        for order in itertools.permutations(decisive):
            changed = with_conditions(step.body, list(order))
            assert (kstatus(changed), argocd.health(changed)[0]) == (step.kstatus, step.argo)


def test_it_is_never_current_of_a_spec_that_no_pod_runs_yet() -> None:
    """The states of one life, in their order: no two neighbours jump from one sound spec to the next."""
    states = [kstatus(step.body) for step in LIFE]
    assert states[0] == "InProgress"
    generations = [step.body["metadata"]["generation"] for step in LIFE]
    for index in range(1, len(LIFE)):
        if generations[index] != generations[index - 1]:
            assert states[index] == "InProgress", LIFE[index].name


def test_without_a_status_it_is_progressing(argocd: ArgoCD) -> None:
    made = {"metadata": {"generation": 1}, "spec": {}}
    assert argocd.health(made)[0] == "Progressing"
    assert argocd.health({**made, "status": {}})[0] == "Progressing"


def test_a_degraded_service_says_what_is_wrong(argocd: ArgoCD) -> None:
    (broken,) = (step for step in LIFE if step.name == "broken")
    assert argocd.health(broken.body) == (
        "Degraded",
        "ImagePullFailed: Pod qwen-new, container engine: the image ghcr.io/reprise/reprise-engine:0.1.0 cannot be "
        "pulled: not found",
    )


def test_the_script_in_the_config_map_is_the_file() -> None:
    assert script_of_config_map() == HEALTH_LUA.read_text()
