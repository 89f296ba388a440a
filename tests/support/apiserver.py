"""One API server for tests and `make demo`: the real one where its programs are found, else the emulated one."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from .control_plane import ControlPlaneFailed, running_control_plane, write_kubeconfig
from .kube_assets import find_kube_assets

ApiServerKind = Literal["auto", "real", "emulated"]

PROJECT = Path(__file__).resolve().parents[2]


class NoRealApiServer(Exception):
    """kind="real" was asked for and no kube-apiserver with etcd was found."""


@dataclass(frozen=True, slots=True)
class ApiServer:
    """A running API server. Workload controllers and the garbage collector run beside it in every case."""

    url: str
    """https://127.0.0.1:… (real) or http://127.0.0.1:… (emulated), without a trailing slash."""
    kubeconfig_path: Path
    """An administrator's, current namespace `default`."""
    version_line: str
    """`kube-apiserver v1.36.2` or `emulated`."""
    has_controller_manager: bool
    """True: they are kube-controller-manager's. False: tests.support.emulated_controllers'."""
    restart: Callable[[float], None] | None = None
    """Kills the API server and starts it again after so many seconds; None: the emulated one would lose its objects."""


@contextlib.contextmanager
def start_api_server(kind: ApiServerKind = "auto", *, controllers: bool = True) -> Iterator[ApiServer]:
    """An empty API server of its own, stopped and removed at the end; `controllers` False: nothing acts on its objects.

    `auto` is `$REPRISE_TEST_API_SERVER` (real or emulated) when set, else real when found, else emulated.
    Raises NoRealApiServer, ControlPlaneFailed.
    """
    if kind == "auto":
        kind = _from_environment()
    assets = None if kind == "emulated" else find_kube_assets()
    if assets is None and kind == "real":
        raise NoRealApiServer(
            "no kube-apiserver with etcd in $KUBEBUILDER_ASSETS, /usr/local/kubebuilder/bin or .cache/kube: "
            "run `make kube-assets`, or set KUBEBUILDER_ASSETS"
        )
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="reprise-api-")))
        if assets is None:
            url = stack.enter_context(_child("tests.support.emulated", [], folder / "emulated.log"))
            kubeconfig = write_kubeconfig(folder / "kubeconfig", url, token="emulated")
            server = ApiServer(url, kubeconfig, "emulated", has_controller_manager=False)
        else:
            if not controllers:
                assets = dataclasses.replace(assets, controller_manager=None)
            # 15 s are the default: each test of an autoscaler would wait for them.
            flags = ["--horizontal-pod-autoscaler-sync-period=1s"]
            plane = stack.enter_context(running_control_plane(assets, folder, controller_manager_flags=flags))
            server = ApiServer(
                plane.url,
                plane.kubeconfig_path,
                f"kube-apiserver {plane.version}",
                plane.has_controller_manager,
                plane.restart_api_server,
            )
        if controllers and not server.has_controller_manager:
            arguments = ["--kubeconfig", str(server.kubeconfig_path)]
            stack.enter_context(_child("tests.support.emulated_controllers", arguments, folder / "controllers.log"))
        yield server


def _from_environment() -> ApiServerKind:
    wanted = os.environ.get("REPRISE_TEST_API_SERVER", "auto")
    if wanted in ("auto", "real", "emulated"):
        return wanted  # type: ignore[return-value]  # narrowed by the line above, which mypy does not see
    raise ValueError(f"REPRISE_TEST_API_SERVER is {wanted!r}: use auto, real or emulated")


@contextlib.contextmanager
def _child(module: str, arguments: list[str], log: Path) -> Iterator[str]:
    """Runs a module of ours that prints one line when it is ready and ends when its stdin closes; yields that line.

    Its stdin is our end of a pipe, so it ends with us even when we are killed.
    """
    with log.open("wb") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            cwd=PROJECT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            start_new_session=True,
        )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        line = process.stdout.readline().decode().strip()
        if not line:
            raise ControlPlaneFailed(f"{module} ended with code {process.wait()}:\n{log.read_text()[-2000:]}")
        yield line
    finally:
        process.stdin.close()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()
