"""Builds both images: `make images`, or `python tests/support/images.py [--tool buildah] [--tag dev] [engine …]`.

The tool is the first of docker, podman and buildah that answers. Only the standard library is used, so that images can
be built before there is an environment.

pip's own settings of this machine (an index, its credentials, certificates, folders of wheels) are honoured inside the
build without being written into a layer: as the build secret `pip`, with the local paths they name mounted read-only.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

ROOT = Path(__file__).resolve().parents[2]
TARGETS = ("operator", "engine")
TOOLS: Mapping[str, tuple[str, ...]] = {
    # What shows that a tool works here, not only that its command is installed.
    "docker": ("docker", "info"),
    "podman": ("podman", "info"),
    "buildah": ("buildah", "info"),
}
DEFAULT_REPOSITORY = "docker.io/library"
"""Under this name a local image needs no registry: a node that holds it never tries to pull it."""

Tool = Literal["docker", "podman", "buildah"]


class ImageBuildError(Exception):
    """The images cannot be built here; the message says why and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PipSettings:
    """What pip is told on this machine. `options` are pip.conf's keys; `paths` the local ones they name."""

    options: Mapping[str, str]
    paths: tuple[Path, ...]

    @property
    def has_own_source(self) -> bool:
        """Whether packages come from somewhere of the user's choice, torch included."""
        return any(key in self.options for key in ("index-url", "extra-index-url", "find-links", "no-index"))

    def as_pip_conf(self) -> str:
        return "[global]\n" + "".join(f"{key} = {value}\n" for key, value in sorted(self.options.items()))


def parse_pip_config(listing: str) -> PipSettings:
    """Read the answer of `pip config list`: lines such as `global.index-url='https://…'`; later lines are stronger.

    Settings of single commands other than install and of the interface (colour, cache) do not matter to a build.
    """
    wanted = {
        *("index-url", "extra-index-url", "find-links", "no-index", "trusted-host", "cert", "client-cert"),
        *("constraint", "proxy", "timeout", "retries", "default-timeout", "prefer-binary"),
    }
    options: dict[str, str] = {}
    for line in listing.splitlines():
        key, found, quoted = line.partition("=")
        section, _, name = key.rpartition(".")
        if not found or section not in {"global", "install", ":env:"} or name not in wanted:
            continue
        options["timeout" if name == "default-timeout" else name] = quoted.strip().strip("'\"").replace("\\n", " ")
    paths = {
        # A local index links to its files beside it: "simple" alone would not do.
        path.parent if (path := Path(word.removeprefix("file://"))).name == "simple" else path
        for key in ("find-links", "extra-index-url", "index-url", "cert", "client-cert", "constraint")
        for word in options.get(key, "").split()
        if word.startswith(("/", "file:///"))
    }
    return PipSettings(options=options, paths=tuple(sorted(path for path in paths if path.exists())))


def answers(command: Sequence[str]) -> bool:
    """Whether a command is installed and succeeds."""
    if shutil.which(command[0]) is None:
        return False
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=30, env=environment())
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0


def find_tool(answers: Callable[[Sequence[str]], bool] = answers) -> Tool:
    """The first tool that works. Raises ImageBuildError if none does."""
    for name, probe in TOOLS.items():
        if answers(probe):
            return cast(Tool, name)
    raise ImageBuildError(
        f"none of {', '.join(TOOLS)} works here: install one (Debian: apt-get install buildah) or start Docker."
    )


def environment() -> dict[str, str]:
    """As root in a container, where overlay mounts and user namespaces are refused, buildah works by vfs and chroot."""
    env = dict(os.environ)
    if os.geteuid() == 0:
        env.setdefault("STORAGE_DRIVER", "vfs")
        env.setdefault("BUILDAH_ISOLATION", "chroot")
    return env


def build_command(
    tool: Tool,
    *,
    target: str,
    image: str,
    pip: PipSettings,
    pip_conf: Path | None,
    revision: str,
    build_args: Sequence[str] = (),
    pull: bool = True,
) -> tuple[str, ...]:
    """The argv that builds one target. Raises ImageBuildError where the tool cannot honour pip's settings."""
    command: list[str] = [tool, *(("bud", "--layers") if tool == "buildah" else ("build",))]
    command += ["--target", target, "-t", image, "--build-arg", f"REVISION={revision}"]
    if pip_conf is not None:
        command += ["--secret", f"id=pip,src={pip_conf}"]
    if target == "engine" and pip.has_own_source:
        # The user's own source serves torch as well; a --build-arg of theirs comes later and wins.
        command += ["--build-arg", "TORCH_INDEX_URL="]
    for build_arg in build_args:
        command += ["--build-arg", build_arg]
    if not pull:
        command.append("--pull=never" if tool != "docker" else "--pull=false")
    if pip.paths:
        if tool == "docker":
            named = ", ".join(map(str, pip.paths))
            raise ImageBuildError(
                f"pip's settings name local paths ({named}), which `docker build` cannot mount: use podman or buildah "
                "(--tool buildah), or PIP_CONFIG_FILE with a pip.conf that names an index by URL."
            )
        for path in pip.paths:
            command += ["-v", f"{path}:{path}:ro"]
    return (*command, str(ROOT))


def revision() -> str:
    """The commit that is built, marked where the tree differs from it."""
    done = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    return done.stdout.strip() or "unknown"


def pip_settings() -> PipSettings:
    """Raises ImageBuildError if pip cannot be asked."""
    done = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True)
    if done.returncode != 0:
        raise ImageBuildError(f"`pip config list` failed: {done.stderr.strip()}")
    return parse_pip_config(done.stdout)


def image_name(target: str, *, tag: str, repository: str = DEFAULT_REPOSITORY) -> str:
    return f"{repository}/reprise-{target}:{tag}"


def build(argv: Sequence[str] | None = None) -> tuple[str, ...]:
    """Build what the command line asks for and return the images' names. Raises ImageBuildError."""
    parser = argparse.ArgumentParser(prog="make images", description="Builds the operator's and the engine's image.")
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"of {', '.join(TARGETS)}; both if none is given")
    parser.add_argument("--tool", choices=tuple(TOOLS), help="default: the first that works")
    parser.add_argument("--tag", default="dev")
    parser.add_argument("--repository", default=DEFAULT_REPOSITORY, help="registry and folder of the names")
    parser.add_argument("--build-arg", action="append", default=[], metavar="NAME=VALUE", help="BASE, EXTRAS, …")
    parser.add_argument("--no-pull", action="store_true", help="take the base image only from this machine")
    args = parser.parse_args(argv)
    if unknown := sorted(set(args.targets) - set(TARGETS)):
        parser.error(f"unknown target {', '.join(unknown)}: choose from {', '.join(TARGETS)}")
    tool: Tool = args.tool or find_tool()
    pip = pip_settings()
    images = []
    with tempfile.TemporaryDirectory(prefix="reprise-images-") as folder:
        pip_conf = Path(folder) / "pip.conf" if pip.options else None
        if pip_conf is not None:
            pip_conf.touch(mode=0o600)
            pip_conf.write_text(pip.as_pip_conf())
        for target in args.targets or TARGETS:
            image = image_name(target, tag=args.tag, repository=args.repository)
            command = build_command(
                tool,
                target=target,
                image=image,
                pip=pip,
                pip_conf=pip_conf,
                revision=revision(),
                build_args=args.build_arg,
                pull=not args.no_pull,
            )
            print(f"building {image} by {tool}", flush=True)
            if subprocess.run(command, env=environment(), stdin=subprocess.DEVNULL).returncode != 0:
                raise ImageBuildError(f"building {image} failed; the lines above say why.")
            images.append(image)
    return tuple(images)


def main() -> int:
    try:
        images = build()
    except ImageBuildError as error:
        print(f"make images: {error}", file=sys.stderr)
        return 1
    print("built " + " and ".join(images))
    return 0


if __name__ == "__main__":
    sys.exit(main())
