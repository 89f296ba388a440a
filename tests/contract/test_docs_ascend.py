"""docs/ascend.md says what is so: chips, build arguments, commands, variables, messages, exit codes."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from reprise_engine.attention.npu_chip import Chip, chip_named
from reprise_engine.entrypoints.arguments import build_parser
from reprise_engine.errors import ConfigError, DeviceError
from reprise_engine.memory import MemoryFacts
from reprise_engine.npu_environment import ALLOCATOR, AUTOLOAD, SUMS, TASK_QUEUE, VISIBLE_DEVICES
from reprise_engine.npu_troubles import TROUBLES
from reprise_engine.runner.npu_graphs import capture_sizes
from reprise_operator.children.profiles import PROFILES
from reprise_operator.pod_failures import LAST_WORDS
from tests.contract.test_dockerfile import ARGUMENTS, STAGES, pins
from tests.support.images import build_command, parse_pip_config
from tests.support.npu_device import is_asked_for

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "ascend.md").read_text()
BUILDS = re.findall(r"^\$ python3 (tests/support/images\.py) (.+)$", TEXT, re.MULTILINE)


def section(heading: str) -> str:
    return TEXT[TEXT.index(f"\n## {heading}") :].split("\n## ")[1]


def first_cells(heading: str) -> list[str]:
    return [cell.strip() for cell in re.findall(r"^\| (.+?) \|", section(heading), re.MULTILINE)[1:]]


def test_the_chips_are_those_of_the_engine() -> None:
    assert first_cells("What it runs on") == ["910B", "910C", "310P"]
    assert {chip_named(f"Ascend{name}") for name in ("910B3", "910_9392", "310P3")} == set(Chip)
    with pytest.raises(ConfigError, match="not supported"):
        chip_named("Ascend310B4")


def test_a_build_for_each_chip() -> None:
    assert len(BUILDS) == 3
    bases = []
    for script, arguments in BUILDS:
        assert (ROOT / script).is_file()
        words = shlex.split(arguments)
        given = dict(word.partition("=")[::2] for word in words if "=" in word)
        assert words[-1] == "engine"
        assert given["EXTRAS"] == "npu"
        known = set(ARGUMENTS) | {arg.partition("=")[0] for stage in STAGES.values() for arg in stage.all("ARG")}
        assert set(given) <= known
        bases.append(given["BASE"])
    assert [re.fullmatch(r"quay\.io/ascend/cann:9\.1\.0-(\w+)-ubuntu22\.04-py3\.11", base) for base in bases]
    assert [base.split("-")[1] for base in bases] == ["910b", "a3", "310p"]
    assert bases[0] in (ROOT / "Dockerfile").read_text()
    assert bases[0] in (ROOT / "docs" / "production.md").read_text()


def test_the_build_arguments_are_those_of_the_dockerfile() -> None:
    declared = {arg.partition("=")[0]: arg.partition("=")[2] for stage in STAGES.values() for arg in stage.all("ARG")}
    declared |= ARGUMENTS
    named = [cell.strip("`") for cell in first_cells("The image")]
    assert named == ["BASE", "EXTRAS", "TORCH_INDEX_URL", "KERNELS"]
    assert set(named) <= set(declared)
    assert (declared["EXTRAS"].strip('"'), declared["KERNELS"]) == ("", "1")


def test_a_build_argument_reaches_the_tool() -> None:
    command = build_command(
        "buildah",
        target="engine",
        image="x:910b",
        pip=parse_pip_config(""),
        pip_conf=None,
        revision="abc",
        build_args=["BASE=quay.io/ascend/cann:9.1.0-910b-ubuntu22.04-py3.11", "EXTRAS=npu"],
    )
    assert [word for word in command if word.startswith(("BASE=", "EXTRAS="))] == list(command[-4:-1:2])


@pytest.mark.parametrize("command", re.findall(r"^\$ reprise (.+?)\s*(?:#.*)?$", TEXT, re.MULTILINE))
def test_its_commands_parse(command: str) -> None:
    build_parser().parse_args(shlex.split(command))


def test_the_marker_selects_what_the_page_says() -> None:
    (command,) = re.findall(r"-m pytest (-m npu) -ra$", TEXT, re.MULTILINE)
    assert is_asked_for(command.removeprefix("-m "))
    assert is_asked_for("npu and not e2e")
    assert not is_asked_for("not npu")
    assert not is_asked_for("")
    assert "npu: " in (ROOT / "pyproject.toml").read_text()


def test_the_variables_are_those_of_the_code() -> None:
    named = [cell.strip("`") for cell in first_cells("Environment")]
    assert named == [VISIBLE_DEVICES, ALLOCATOR, TASK_QUEUE, SUMS, AUTOLOAD]
    assert f"{AUTOLOAD}=0" in STAGES["engine"].all("ENV")[-1]


def test_every_message_of_a_start_is_explained() -> None:
    said = first_cells("When it does not start")
    known = [trouble.means for trouble in TROUBLES]
    assert set(said) <= set(known)
    unexplained = set(known) - set(said)
    assert len(unexplained) == 3, f"explain them in docs/ascend.md: {unexplained}"
    assert all(word in TEXT for word in ("ConfigError", "DeviceError"))
    reasons = {reason for reason, pattern in LAST_WORDS if pattern.search(f"{DeviceError.__name__}: x")}
    assert reasons == {"DeviceUnusable"}
    assert "`DeviceNotFound` or `DeviceUnusable`" in TEXT


def test_the_lines_of_the_log_are_those_of_the_plan() -> None:
    source = (ROOT / "engine" / "reprise_engine" / "memory.py").read_text()
    for line in first_cells("Memory"):
        assert line.strip("`") in source
    assert "graphs" in MemoryFacts.__slots__


def test_the_sizes_are_captured() -> None:
    (listed,) = re.findall(r"Decode steps of ([\d, ]+), … up to", TEXT)
    sizes = tuple(int(size) for size in listed.split(", "))
    assert capture_sizes(64)[: len(sizes)] == sizes


def test_there_is_a_manifest_for_every_profile() -> None:
    texts = [path.read_text() for path in (ROOT / "examples").rglob("*.yaml")]
    shown = {name for text in texts for name in re.findall(r"^ +profile: ([\w-]+)", text, re.MULTILINE)}
    assert shown == set(PROFILES)
    runtimes = [text for text in texts if "name: vllm-ascend" in text]
    assert {profile for text in runtimes for profile in re.findall(r"profile: ([\w-]+)", text)} >= {
        "ascend910b",
        "ascend910c",
        "ascend310p",
    }


def test_links_and_versions() -> None:
    for link in re.findall(r"\]\(([^)#]+)", TEXT):
        assert (ROOT / "docs" / link).exists(), link
    headings = {
        re.sub(r"[^a-z0-9 -]", "", line.lower()).replace(" ", "-") for line in re.findall(r"^## (.+)$", TEXT, re.M)
    }
    assert set(re.findall(r"\]\(#([^)]+)\)", TEXT)) <= headings
    assert pins()["torch-npu"] == pins()["torch"]
    for page in ("README.md", "docs/production.md"):
        assert "ascend.md" in (ROOT / page).read_text(), page
