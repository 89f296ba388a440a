"""A whole small cluster on this machine: an API server (apiserver.py), a node that runs pods as processes and a proxy
for Services (node_thread.py), and the operator as a process of its own. For the end-to-end tests and `make demo`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.apiserver import ApiServer
from tests.support.kubectl import Kubectl, KubectlFailed, eventually
from tests.support.node import NodeConfig
from tests.support.node_spec import Image, program_path
from tests.support.node_thread import RunningNode, running_node

PROJECT = Path(__file__).resolve().parents[2]
CRD = PROJECT / "crds" / "serving.reprise.io_inferenceservices.yaml"
ENGINE_IMAGE = "ghcr.io/reprise/reprise-engine"
OPERATOR_ARGS = (
    *("--all-namespaces", "--host", "127.0.0.1", "--metrics-port", "0", "--health-port", "0"),
    *("--log-format", "text"),
)


def engine_image() -> Image:
    """The engine of this working tree in the place of its image."""
    programs = Path(sys.executable).parent
    env = {"PATH": program_path(programs), "PYTHONDONTWRITEBYTECODE": "1", "PYTHONUNBUFFERED": "1", "LANG": "C.UTF-8"}
    for name in ("OMP_NUM_THREADS", "HOME", "LD_LIBRARY_PATH", "PYTHONPATH"):
        if name in os.environ:
            env[name] = os.environ[name]
    return Image(entrypoint=(str(programs / "reprise"),), env=env, host_flag="--host")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """`quick` shortens back-offs and probe periods for tests; patience and order of events stay the same."""

    folder: Path
    npus: int = 0
    host_paths: Mapping[str, Path] = field(default_factory=dict)
    images: Mapping[str, Image] = field(default_factory=lambda: {ENGINE_IMAGE: engine_image()})
    quick: bool = True
    operator_args: tuple[str, ...] = ()
    """Beside those that let several operators run on one machine."""
    operator_env: Mapping[str, str] = field(default_factory=dict)
    operator_kubeconfig: Path | None = None
    """Another way for the operator to the same API server (a recording proxy, for instance)."""

    def node(self) -> NodeConfig:
        return NodeConfig(
            folder=self.folder / "node",
            images=self.images,
            host_paths=self.host_paths,
            extended_resources={"huawei.com/Ascend910": str(self.npus)} if self.npus else {},
            back_off_seconds=1.0 if self.quick else 10.0,
            back_off_limit_seconds=4.0 if self.quick else 300.0,
            fastest_probe_seconds=0.5 if self.quick else None,
        )


class OperatorProcess:
    """`python -m reprise_operator run` with a kubeconfig: started, stopped and started again by tests."""

    def __init__(self, *, kubeconfig: Path, log: Path, args: tuple[str, ...], env: Mapping[str, str]) -> None:
        self._kubeconfig = kubeconfig
        self._args = args
        self._env = env
        self._process: subprocess.Popen[bytes] | None = None
        self.log = log

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Starts it unless it runs."""
        if self.running:
            return
        with self.log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "reprise_operator", "run", *OPERATOR_ARGS, *self._args],
                cwd=PROJECT,
                env={**os.environ, "PYTHONUNBUFFERED": "1", **self._env, "KUBECONFIG": str(self._kubeconfig)},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def stop(self, *, within: float = 15.0) -> int | None:
        """SIGTERM, in need SIGKILL; the exit code, None if it never ran."""
        if self._process is None:
            return None
        self._process.terminate()
        try:
            return self._process.wait(within)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            return self._process.wait()

    def last_words(self) -> str:
        return self.log.read_text(errors="replace")[-2000:] if self.log.exists() else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """A running cluster and the ways to look into it."""

    api: ApiServer
    kubectl: Kubectl
    operator: OperatorProcess
    node: RunningNode


def install_crd(kubectl: Kubectl) -> None:
    """Applies our CRD and waits until it is served."""
    kubectl("apply", "--server-side", "-f", str(CRD))
    # Not `kubectl wait`: it fails at once on a CRD that has no conditions yet.
    eventually(lambda: _serves_ours(kubectl), "the CRD is served")


def _serves_ours(kubectl: Kubectl) -> bool:
    try:
        kubectl.list("inferenceservices")
    except KubectlFailed:
        return False
    return True


@contextlib.contextmanager
def start_cluster(
    api: ApiServer, config: ClusterConfig, *, on_services: Callable[[Mapping[str, str]], None] | None = None
) -> Iterator[Cluster]:
    """Installs the CRD, starts node, proxy and operator; on exit all their processes are gone, the files stay."""
    config.folder.mkdir(parents=True, exist_ok=True)
    kubectl = Kubectl(kubeconfig=api.kubeconfig_path)
    install_crd(kubectl)
    operator = OperatorProcess(
        kubeconfig=config.operator_kubeconfig or api.kubeconfig_path,
        log=config.folder / "operator.log",
        args=config.operator_args,
        env=config.operator_env,
    )
    with running_node(api.kubeconfig_path, config.node(), on_services=on_services) as node:
        operator.start()
        try:
            yield Cluster(api=api, kubectl=kubectl, operator=operator, node=node)
        finally:
            operator.stop()
