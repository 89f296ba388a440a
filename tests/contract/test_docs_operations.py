"""docs/operations says what the operator says: every reason, and no other; values, metrics and files that exist."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from reprise_operator.metrics import OperatorMetrics
from tests.contract.test_chart import CHART
from tests.support.factories import planned

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "operations"
PAGES = sorted(FOLDER.glob("*.md"))
PACKAGE = ROOT / "operator" / "reprise_operator"
CAMEL = re.compile(r"^[A-Z][a-z]+([A-Z][a-z]+)*$")


def constants(node: ast.expr | None) -> Iterator[str]:
    """Strings that an expression may be: itself, or either branch of a choice."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.IfExp):
        yield from constants(node.body)
        yield from constants(node.orelse)


def reasons_of(tree: ast.AST) -> Iterator[str]:
    """`reason=…` of any call but of a ContainerFailure (the kubelet's) and a Happening (an event's); the first argument
    of stalled and SpecError, the second of figures.condition; the first of a pair whose second is a compiled pattern
    (the engine's last words); and the members of a StrEnum."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = node.func.id if isinstance(node.func, ast.Name) else ""
            for keyword in node.keywords:
                if keyword.arg == "reason" and name not in ("ContainerFailure", "Happening"):
                    yield from constants(keyword.value)
            place = {"stalled": 0, "SpecError": 0, "condition": 1}.get(name)
            if place is not None and len(node.args) > place:
                yield from constants(node.args[place])
        elif isinstance(node, ast.Tuple) and len(node.elts) == 2 and "re.compile" in ast.unparse(node.elts[1]):
            yield from constants(node.elts[0])
        elif isinstance(node, ast.ClassDef) and any(ast.unparse(base) == "StrEnum" for base in node.bases):
            for member in node.body:
                if isinstance(member, ast.Assign):
                    yield from constants(member.value)


def reasons_of_the_code() -> set[str]:
    found = {reason for path in PACKAGE.rglob("*.py") for reason in reasons_of(ast.parse(path.read_text()))}
    crd = yaml.safe_load((ROOT / "crds" / "serving.reprise.io_inferenceservices.yaml").read_text())
    status = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["status"]
    defaults = status["properties"]["conditions"].get("default") or status.get("default", {}).get("conditions") or ()
    found |= {condition["reason"] for condition in defaults}
    return {reason for reason in found if CAMEL.match(reason)}


def reasons_of_the_page() -> list[str]:
    text = (FOLDER / "troubleshooting.md").read_text()
    return re.findall(r"^\| `([A-Za-z]+)` \| ", text[text.index("## Reasons") :], re.MULTILINE)


def test_every_reason_is_explained_and_none_is_invented() -> None:
    code, page = reasons_of_the_code(), reasons_of_the_page()
    assert len(code) > 30
    assert {"ImagePullFailed", "UnsupportedModel", "NotSupported", "Pending", "NoTraffic"} <= code
    assert len(page) == len(set(page))
    assert code - set(page) == set(), "explain them in docs/operations/troubleshooting.md"
    assert set(page) - code == set(), "the operator never says so"


def test_every_row_says_what_it_means() -> None:
    text = (FOLDER / "troubleshooting.md").read_text()
    rows = re.findall(r"^\| `[A-Za-z]+` \| (.*) \| (.*) \| (.*)\|$", text[text.index("## Reasons") :], re.MULTILINE)
    assert len(rows) == len(reasons_of_the_page())
    assert all(of.strip() and meaning.strip() for of, meaning, _ in rows)
    assert all(todo.strip() for of, _, todo in rows if "Stalled" in of), "what needs a person says what to do"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    text = page.read_text()
    links = [link for link in re.findall(r"\]\(([^)]+)\)", text) if not link.startswith("https:")]
    for link in links:
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.is_file(), link
        if anchor:
            assert anchor in headings(target), link
    for path in re.findall(r"(?<![\w/.])(?:charts|crds|examples|docs|tests)/[\w./-]*\w", text):
        assert (ROOT / path).exists(), path


def headings(page: Path) -> set[str]:
    return {
        re.sub(r"[^a-z0-9 -]", "", line.lower()).strip().replace(" ", "-")
        for line in re.findall(r"^##+ (.*)$", page.read_text(), re.MULTILINE)
    }


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_value_is_one_of_the_chart(page: Path) -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    text = page.read_text()
    for path in re.findall(r"--set(?:-json)? '?([A-Za-z.]+)=", text):
        found: Any = values
        for part in path.split("."):
            assert part in found, f"charts/reprise-operator/values.yaml has no {path}"
            found = found[part]
    for block in re.findall(r"```yaml\n# values\n(.*?)```", text, re.DOTALL):
        check(yaml.safe_load(block), values, "values")


def check(given: Any, known: Any, path: str) -> None:
    for key, value in given.items():
        assert key in known, f"charts/reprise-operator/values.yaml has no {path}.{key}"
        if isinstance(value, dict) and known[key]:
            check(value, known[key], f"{path}.{key}")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_metric_of_the_operator_is_one(page: Path) -> None:
    families = {family.name for family in OperatorMetrics().registry.collect()}
    for name in re.findall(r"`(reprise_operator_\w+)", page.read_text()):
        assert re.sub(r"_(total|bucket|count|sum)$", "", name) in families, name


def test_the_table_of_metrics_is_whole() -> None:
    text = (FOLDER / "monitoring.md").read_text()
    cells = re.findall(r"^\| (`reprise_operator_.*?) \|", text, re.MULTILINE)
    named = {re.sub(r"_total$", "", name) for cell in cells for name in re.findall(r"`(\w+)`", cell)}
    assert named == {family.name for family in OperatorMetrics().registry.collect()}


def test_the_network_policy_for_engines_selects_their_pods() -> None:
    text = (FOLDER / "install.md").read_text()
    (policy,) = [
        document
        for block in re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
        for document in yaml.safe_load_all(block)
        if document and document.get("kind") == "NetworkPolicy"
    ]
    pod = planned().workload["spec"]["template"]
    assert policy["spec"]["podSelector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    ports = [port["port"] for rule in policy["spec"]["ingress"] for port in rule["ports"]]
    assert set(ports) == {port["name"] for port in pod["spec"]["containers"][0]["ports"]}
