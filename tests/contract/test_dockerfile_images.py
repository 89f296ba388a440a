"""How `make images` chooses its tool and hands pip's settings to it, without building."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.images import ImageBuildError, PipSettings, build, build_command, find_tool, parse_pip_config

NO_SETTINGS = PipSettings(options={}, paths=())


@pytest.mark.parametrize(
    ("working", "chosen"),
    [
        (("docker", "podman", "buildah"), "docker"),
        (("podman", "buildah"), "podman"),  # docker is installed, its daemon is not running
        (("buildah",), "buildah"),
    ],
)
def test_the_first_tool_that_works_is_taken(working: tuple[str, ...], chosen: str) -> None:
    def answers(probe: Sequence[str]) -> bool:
        return probe[0] in working

    assert find_tool(answers) == chosen


def test_without_a_tool_the_message_says_what_to_install() -> None:
    with pytest.raises(ImageBuildError, match=r"none of docker, podman, buildah works here: install one"):
        find_tool(lambda probe: False)


def test_pip_settings_are_read_from_every_section_that_counts_for_an_installation(tmp_path: Path) -> None:
    wheels = tmp_path / "wheels"
    index = tmp_path / "index" / "simple"
    wheels.mkdir()
    index.mkdir(parents=True)
    settings = parse_pip_config(
        f"""global.index-url='https://user:secret@mirror.example/simple'
global.extra-index-url='file://{index}'
global.no-color='true'
download.find-links='/not/for/us'
install.constraint='{tmp_path / "gone.txt"}'
:env:.default-timeout='180'
:env:.find-links='{wheels}'
"""
    )
    assert settings.options == {
        "index-url": "https://user:secret@mirror.example/simple",
        "extra-index-url": f"file://{index}",
        "constraint": str(tmp_path / "gone.txt"),
        "timeout": "180",
        "find-links": str(wheels),
    }
    assert settings.paths == (index.parent, wheels), "an index is mounted with the files beside it; what is gone is not"
    assert settings.has_own_source
    assert f"find-links = {wheels}\n" in settings.as_pip_conf()


def test_certificates_alone_are_no_source_of_packages() -> None:
    assert not parse_pip_config("global.cert='/etc/ssl/cert.pem'").has_own_source


def test_settings_travel_as_a_secret_and_mounts_never_as_arguments(tmp_path: Path) -> None:
    pip = PipSettings(options={"index-url": "https://user:secret@mirror.example/simple"}, paths=(tmp_path,))
    command = build_command(
        "buildah", target="engine", image="x:dev", pip=pip, pip_conf=tmp_path / "pip.conf", revision="abc", pull=False
    )
    assert command[:3] == ("buildah", "bud", "--layers")
    assert command[command.index("--secret") + 1] == f"id=pip,src={tmp_path}/pip.conf"
    assert command[command.index("-v") + 1] == f"{tmp_path}:{tmp_path}:ro"
    assert "TORCH_INDEX_URL=" in command
    assert "--pull=never" in command
    assert not any("secret@" in word for word in command)


def test_without_settings_torch_comes_from_its_own_index_and_nothing_is_mounted() -> None:
    command = build_command(
        "docker", target="engine", image="x:dev", pip=NO_SETTINGS, pip_conf=None, revision="abc", build_args=["A=b"]
    )
    assert not {"--secret", "-v"} & set(command)
    assert not any(word.startswith("TORCH_INDEX_URL") for word in command)
    assert command[:2] == ("docker", "build")
    assert command[command.index("A=b") - 1] == "--build-arg"
    assert (Path(command[-1]) / "Dockerfile").is_file()


def test_a_build_argument_of_the_user_wins_over_ours() -> None:
    pip = PipSettings(options={"index-url": "https://mirror.example/simple"}, paths=())
    mine = "TORCH_INDEX_URL=https://torch.example"
    command = build_command(
        "podman", target="engine", image="x:dev", pip=pip, pip_conf=None, revision="abc", build_args=[mine]
    )
    assert command.index(mine) > command.index("TORCH_INDEX_URL=")


def test_docker_says_so_where_it_cannot_mount_local_wheels(tmp_path: Path) -> None:
    pip = PipSettings(options={"find-links": str(tmp_path)}, paths=(tmp_path,))
    with pytest.raises(ImageBuildError, match="cannot mount: use podman or buildah"):
        build_command("docker", target="engine", image="x", pip=pip, pip_conf=tmp_path / "pip.conf", revision="abc")


def test_an_unknown_target_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        build(["gateway"])
    assert stopped.value.code == 2
    assert "unknown target gateway: choose from operator, engine" in capsys.readouterr().err
