"""docs/models.md says what is so: keys of Secrets, exit codes, reasons, variables, the fields it shows."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from reprise_engine.entrypoints.fetch import EXIT_CODES
from reprise_engine.fetch.bucket_client import ADDRESSING_VARIABLE
from reprise_operator.children.fetch import CREDENTIALS, FETCH_CONTAINER, FSGROUP
from reprise_operator.children.memory import plan_memory
from reprise_operator.children.pod import build_pod_template
from reprise_operator.settings import Settings
from reprise_operator.spec import parse

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "models.md").read_text()
OPERATOR = "\n".join(path.read_text() for path in sorted((ROOT / "operator").rglob("*.py")))
FETCH = "\n".join(path.read_text() for path in sorted((ROOT / "engine" / "reprise_engine" / "fetch").glob("*.py")))


def rows(heading: str) -> list[list[str]]:
    """The cells of the first table under a heading."""
    section = TEXT[TEXT.index(f"| {heading}") :].split("\n\n")[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines()[2:]]


def test_the_keys_of_secrets() -> None:
    found = {
        scheme.strip("`"): (tuple(re.findall(r"`(\w+)`", must)), tuple(re.findall(r"`(\w+)`", may)))
        for scheme, must, may in rows("scheme |")
    }
    assert found == dict(CREDENTIALS)


def test_reasons_and_exit_codes() -> None:
    table = {cells[0].strip("`"): int(cells[1]) for cells in rows("reason |")}
    codes = {kind.__name__: code for kind, code in EXIT_CODES.items()}
    codes["InvalidArguments"] = codes.pop("ConfigError")
    assert table == codes | {"UnsupportedModel": 1}
    for reason in table:
        assert f'"{reason}"' in OPERATOR


def test_variables_are_read() -> None:
    named = {name for cells in rows("variable |") for name in re.findall(r"`([A-Z_0-9]+)`", cells[0])}
    libraries = {"HTTPS_PROXY", "NO_PROXY", "SSL_CERT_FILE", "AWS_CA_BUNDLE"}
    assert libraries < named
    assert ADDRESSING_VARIABLE in named
    for name in named - libraries:
        assert f'"{name}"' in FETCH, name


def test_the_manifest_is_honoured() -> None:
    (text,) = re.findall(r"```yaml\n(.*?)```", TEXT, re.DOTALL)
    body = {"metadata": {"name": "x", "namespace": "n", "uid": "u"}, **yaml.safe_load(text)}
    service = parse(body)
    template = build_pod_template(service, Settings(), plan_memory(service))
    assert [container["name"] for container in template["spec"]["initContainers"]] == [FETCH_CONTAINER]
    assert template["spec"]["securityContext"]["fsGroup"] == FSGROUP
    assert f"fsGroup: {FSGROUP}" in TEXT


def test_links_lead_to_it() -> None:
    assert "models.md" in (ROOT / "docs" / "production.md").read_text()
    assert "docs/models.md" in (ROOT / "README.md").read_text()
    assert "## When it does not work" in TEXT
