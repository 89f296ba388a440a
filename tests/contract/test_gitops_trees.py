"""The trees for Argo CD and Flux hang together: paths exist, values fit the chart, each waits for what it needs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from reprise_operator.spec import parse
from tests.contract.test_chart import CHART, render

PROJECT = Path(__file__).resolve().parents[2]
EXAMPLES = PROJECT / "examples"
Manifest = dict[str, Any]


def documents(folder: Path) -> list[Manifest]:
    texts = [path.read_text() for path in sorted(folder.rglob("*.yaml"))]
    return [document for text in texts for document in yaml.safe_load_all(text) if document]


def of_kind(folder: str, kind: str) -> dict[str, Manifest]:
    found = [document for document in documents(EXAMPLES / folder) if document["kind"] == kind]
    return {document["metadata"]["name"]: document for document in found}


SERVICES = [
    pytest.param(document, id=str(path.relative_to(EXAMPLES)))
    for path in sorted(EXAMPLES.rglob("*.yaml"))
    for document in yaml.safe_load_all(path.read_text())
    if document and document["kind"] == "InferenceService"
]


@pytest.mark.parametrize("service", SERVICES)
def test_every_service_of_the_examples_is_one_that_this_release_honours(service: Manifest) -> None:
    metadata = {"namespace": "n", "uid": "u", "generation": 1, **service["metadata"]}
    assert parse({**service, "metadata": metadata}).spec.model.uri


# Argo CD ------------------------------------------------------------------------------------------------------------


def wave(application: Manifest) -> int:
    return int(application["metadata"]["annotations"]["argocd.argoproj.io/sync-wave"])


def test_argo_cd_brings_the_crd_then_the_operator_then_the_services() -> None:
    applications = of_kind("argocd", "Application")
    assert list(applications) == ["reprise-crds", "reprise-operator", "reprise-services", "reprise"]
    root = applications.pop("reprise")
    assert [wave(application) for application in applications.values()] == [0, 1, 2]
    for application in [root, *applications.values()]:
        source = application["spec"]["source"]
        assert (PROJECT / source["path"]).is_dir()
        assert list((PROJECT / source["path"]).rglob("*.yaml"))
    assert PROJECT / root["spec"]["source"]["path"] == EXAMPLES / "argocd" / "apps"


def test_argo_cd_never_takes_the_crd_away() -> None:
    crds = of_kind("argocd", "Application")["reprise-crds"]["spec"]
    assert crds["syncPolicy"]["automated"]["prune"] is False
    assert "Prune=false" in crds["syncPolicy"]["syncOptions"]
    operator = of_kind("argocd", "Application")["reprise-operator"]["spec"]
    assert operator["source"]["helm"]["skipCrds"] is True, "the operator's Application would prune it"


def test_argo_cd_ignores_nothing_but_a_number_that_an_autoscaler_writes() -> None:
    services = of_kind("argocd", "Application")["reprise-services"]["spec"]
    assert services["ignoreDifferences"] == [
        {"group": "serving.reprise.io", "kind": "InferenceService", "jsonPointers": ["/spec/replicas"]}
    ]
    assert "RespectIgnoreDifferences=true" in services["syncPolicy"]["syncOptions"]
    others = [a for name, a in of_kind("argocd", "Application").items() if name != "reprise-services"]
    assert not [application for application in others if "ignoreDifferences" in application["spec"]]


def test_argo_cds_values_fit_the_chart() -> None:
    operator = of_kind("argocd", "Application")["reprise-operator"]["spec"]
    assert PROJECT / operator["source"]["path"] == CHART
    assert render(operator["source"]["helm"]["valuesObject"])


# Flux ---------------------------------------------------------------------------------------------------------------


def test_flux_waits_for_what_each_part_needs() -> None:
    kustomizations = of_kind("flux", "Kustomization")
    assert set(kustomizations) == {"reprise-operator", "reprise-services"}
    services = kustomizations["reprise-services"]["spec"]
    # It refers to Kustomizations by their names, and to nothing else.
    assert [needed["name"] for needed in services["dependsOn"]] == ["reprise-operator"]
    assert kustomizations["reprise-operator"]["spec"]["wait"] is True
    assert "wait" not in services, "Flux ignores healthChecks then"
    for kustomization in kustomizations.values():
        assert (PROJECT / kustomization["spec"]["path"]).is_dir()
        assert kustomization["spec"]["sourceRef"]["name"] in of_kind("flux", "GitRepository")


def test_fluxs_health_checks_name_every_service() -> None:
    services = of_kind("flux", "Kustomization")["reprise-services"]["spec"]
    checked = {(check["apiVersion"], check["name"], check["namespace"]) for check in services["healthChecks"]}
    there = {
        (document["apiVersion"], document["metadata"]["name"], document["metadata"]["namespace"])
        for document in documents(PROJECT / services["path"])
        if document["kind"] == "InferenceService"
    }
    assert checked == there


def test_fluxs_release_upgrades_the_crd_and_fits_the_chart() -> None:
    (release,) = of_kind("flux", "HelmRelease").values()
    assert release["spec"]["install"]["crds"] == "Create"
    assert release["spec"]["upgrade"]["crds"] == "CreateReplace"
    assert PROJECT / release["spec"]["chart"]["spec"]["chart"] == CHART
    assert render(release["spec"]["values"])
    source = of_kind("flux", "GitRepository")["reprise"]["spec"]["ignore"].splitlines()
    assert {"!/charts", "!/crds", "!/examples"} <= set(source)
