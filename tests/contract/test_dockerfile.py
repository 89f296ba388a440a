"""What the Dockerfile promises: two lean targets, nobody root, no shell at run time, every package pinned.

The build itself checks that the operator's environment holds no ML framework; here is what can be known without one.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from reprise_operator.settings import ENGINE_PORT, Settings

ROOT = Path(__file__).resolve().parents[2]
FINAL = ("operator", "engine")


@dataclass(slots=True)
class Stage:
    name: str
    base: str
    instructions: list[tuple[str, str]] = field(default_factory=list)

    def all(self, keyword: str) -> list[str]:
        return [rest for word, rest in self.instructions if word == keyword]

    def last(self, keyword: str) -> str:
        return self.all(keyword)[-1]


def instructions(text: str) -> Iterator[tuple[str, str]]:
    """Keyword and rest of each instruction; comments dropped, continued lines joined."""
    lines = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    for line in re.sub(r"\\\n\s*", " ", lines).splitlines():
        if line.strip():
            keyword, _, rest = line.strip().partition(" ")
            yield keyword.upper(), rest.strip()


def read_stages() -> tuple[Mapping[str, str], Mapping[str, Stage]]:
    """The global build arguments, and the stages by name."""
    arguments: dict[str, str] = {}
    stages: dict[str, Stage] = {}
    current: Stage | None = None
    for keyword, rest in instructions((ROOT / "Dockerfile").read_text()):
        if keyword == "FROM":
            match = re.fullmatch(r"(\S+) AS (\S+)", rest)
            assert match, f"a stage without a name: FROM {rest}"
            current = Stage(name=match[2], base=match[1])
            stages[current.name] = current
        elif current is None:
            assert keyword == "ARG", f"{keyword} before the first FROM"
            name, _, value = rest.partition("=")
            arguments[name] = value
        else:
            current.instructions.append((keyword, rest))
    return arguments, stages


ARGUMENTS, STAGES = read_stages()


def project(distribution: str) -> dict[str, Any]:
    loaded: dict[str, Any] = tomllib.loads((ROOT / distribution / "pyproject.toml").read_text())["project"]
    return loaded


def pins() -> dict[str, str]:
    found: dict[str, str] = {}
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            name, equal, version = line.partition("==")
            assert equal, f"constraints.txt pins nothing in the line {line!r}"
            found[canonicalize_name(name)] = version
    return found


def closure(requirements: list[str]) -> set[str]:
    """Names of everything these requirements bring along on this platform, from the installed packages' metadata."""
    seen: set[tuple[str, frozenset[str]]] = set()
    todo = [Requirement(text) for text in requirements]
    while todo:
        requirement = todo.pop()
        key = (canonicalize_name(requirement.name), frozenset(requirement.extras))
        if key in seen:
            continue
        seen.add(key)
        for text in metadata.requires(requirement.name) or ():
            child = Requirement(text)
            extras = requirement.extras or {""}
            if child.marker is None or any(child.marker.evaluate({"extra": extra}) for extra in extras):
                todo.append(child)
    return {name for name, _ in seen}


def test_one_file_has_both_targets_on_one_pinned_base() -> None:
    assert set(FINAL) <= set(STAGES)
    tag = ARGUMENTS["BASE"].rpartition(":")[2]
    assert re.match(r"3\.11\b", tag), f"BASE is {ARGUMENTS['BASE']}: a Python 3.11 image by its tag is expected"
    for stage in STAGES.values():
        assert stage.base == "${BASE}" or stage.base in STAGES, f"{stage.name} is built on {stage.base}"


@pytest.mark.parametrize("target", FINAL)
def test_nobody_is_root_and_kubernetes_can_tell(target: str) -> None:
    user, _, group = STAGES[target].last("USER").partition(":")
    assert user.isdecimal(), "runAsNonRoot is refused by the kubelet where USER is a name"
    assert int(user) > 0
    assert int(group) > 0
    after_user = [word for word, _ in STAGES[target].instructions][::-1]
    assert "RUN" not in after_user[: after_user.index("USER")]


@pytest.mark.parametrize("target", FINAL)
def test_starts_without_a_shell_by_a_script_that_the_distribution_installs(target: str) -> None:
    entrypoint = json.loads(STAGES[target].last("ENTRYPOINT"))
    command = json.loads(STAGES[target].last("CMD"))
    assert all(isinstance(word, str) for word in [*entrypoint, *command])
    assert entrypoint == list(project(target)["scripts"])
    assert not STAGES[target].all("SHELL")


@pytest.mark.parametrize("target", FINAL)
def test_probes_are_left_to_kubernetes(target: str) -> None:
    assert not STAGES[target].all("HEALTHCHECK")


def test_ports_agree_with_the_operator_s_settings() -> None:
    settings = Settings()
    assert STAGES["engine"].last("EXPOSE").split() == [str(ENGINE_PORT)]
    assert STAGES["operator"].last("EXPOSE").split() == [str(settings.metrics_port), str(settings.health_port)]


@pytest.mark.parametrize("target", FINAL)
def test_labels_and_versions_agree(target: str) -> None:
    labels = STAGES[target].last("LABEL")
    for name in ("title", "description", "licenses", "version", "revision"):
        assert f"org.opencontainers.image.{name}=" in labels
    assert project(target)["description"] in labels
    assert f"VERSION={project(target)['version']}" in STAGES[target].all("ARG")
    assert Settings().reprise_image.endswith(f"/reprise-engine:{project('engine')['version']}")


def test_every_installation_is_pinned_or_offline() -> None:
    seen = 0
    for stage in STAGES.values():
        for run in stage.all("RUN"):
            for install in re.findall(r"pip (?:--python \S+ )?install[^&;]*", run):
                seen += 1
                assert "-c constraints.txt" in install or "--no-index --no-deps" in install, install
            for wheel in re.findall(r"pip wheel[^&;]*", run):
                assert "--no-deps" in wheel, wheel
                assert "--no-build-isolation" in wheel, f"the build backend would be fetched unpinned: {wheel}"
    assert seen >= 5


@pytest.mark.parametrize("target", FINAL)
def test_each_final_image_takes_its_own_environment_only(target: str) -> None:
    copies = STAGES[target].all("COPY")
    assert [c for c in copies if c.startswith("--from")] == [f"--from={target}-env /opt/reprise /opt/reprise"]
    other = FINAL[1 - FINAL.index(target)]
    ancestors = [STAGES[f"{target}-env"], STAGES["tools"], STAGES[target]]
    assert not [c for stage in ancestors for c in stage.all("COPY") if c.startswith(f"{other}/")]


@pytest.mark.parametrize("target", FINAL)
def test_what_is_copied_is_let_through_and_nothing_else(target: str) -> None:
    patterns = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]
    assert patterns[0] == "*", "the build context is an allow list"
    allowed = {pattern[1:] for pattern in patterns if pattern.startswith("!")}
    for name in allowed:
        assert (ROOT / name).exists(), f".dockerignore lets {name} through, which does not exist"
    for stage in (STAGES["tools"], STAGES[f"{target}-env"], STAGES[target]):
        for copy in stage.all("COPY"):
            source = copy.split()[0]
            if not source.startswith("--from"):
                assert any(f"{name}/".startswith(source.rstrip("/") + "/") for name in allowed), source


@pytest.mark.parametrize("target", FINAL)
def test_pip_s_settings_stay_out_of_the_final_images(target: str) -> None:
    assert not [e for e in STAGES[target].all("ENV") if "PIP_" in e]
    for run in (run for stage in STAGES.values() for run in stage.all("RUN")):
        if re.search(r"pip (?:--python \S+ )?install", run) and "--no-index" not in run:
            assert run.startswith("--mount=type=secret,id=pip,target=/etc/pip.conf ")


def test_the_operator_brings_no_ml_framework_along() -> None:
    brought = closure(project("operator")["dependencies"])
    assert {"kopf", "kubernetes", "aiohttp", "pydantic"} <= brought
    assert not brought & {"torch", "torch-npu", "transformers", "tokenizers", "numpy", "reprise-engine"}


@pytest.mark.parametrize("target", FINAL)
def test_everything_a_final_image_installs_is_pinned(target: str) -> None:
    brought = closure(project(target)["dependencies"])
    assert brought <= set(pins()), f"not pinned in constraints.txt: {sorted(brought - set(pins()))}"
    for name in brought:
        installed = metadata.version(name).partition("+")[0]
        assert installed == pins()[name], f"{name} {installed} is installed, {pins()[name]} is pinned"


def test_the_npu_extra_pairs_with_the_pinned_torch() -> None:
    (npu,) = project("engine")["optional-dependencies"]["npu"]
    assert npu == f"torch-npu=={pins()['torch']}"
