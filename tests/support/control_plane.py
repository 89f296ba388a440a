"""A real control plane on loopback: etcd, kube-apiserver and, where found, kube-controller-manager.

As in production: RBAC, TLS, service account tokens. As in envtest: no ServiceAccount admission (a pod needs no token),
and etcd does not fsync. Ready in about three seconds; everything lives in one temporary folder.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import ssl
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
import yaml

from .kube_assets import KubeAssets

START_TIMEOUT_SECONDS = 120.0


class ControlPlaneFailed(Exception):
    """A program ended or did not become ready; the message ends with the last lines of its log."""


@dataclass(frozen=True, slots=True)
class ControlPlane:
    url: str
    kubeconfig_path: Path
    version: str
    """As the server says it: v1.36.2."""
    has_controller_manager: bool
    restart_api_server: Callable[[float], None]
    """Kills kube-apiserver, starts it again after so many seconds and waits until it is ready; the others stay."""


@contextlib.contextmanager
def running_control_plane(
    assets: KubeAssets,
    folder: Path,
    *,
    apiserver_flags: Sequence[str] = (),
    controller_manager_flags: Sequence[str] = (),
    users: Mapping[str, str] | None = None,
) -> Iterator[ControlPlane]:
    """Starts the programs with all their state in `folder`, and stops them at the end. Raises ControlPlaneFailed.

    The flags come after ours and so before them; `users` are more administrators, by their tokens.
    """
    token = secrets.token_hex(16)
    everybody = {token: "admin", **(users or {})}
    rows = (f'{secret},{name},{name},"system:masters"\n' for secret, name in everybody.items())
    (folder / "tokens.csv").write_text("".join(rows))
    etcd_port, peer_port, port = free_ports(3)
    certs = folder / "certs"
    etcd_url, url = f"http://127.0.0.1:{etcd_port}", f"https://127.0.0.1:{port}"
    with contextlib.ExitStack() as stack:
        etcd = stack.enter_context(
            _program(
                folder,
                [
                    str(assets.etcd),
                    f"--data-dir={folder / 'etcd'}",
                    f"--listen-client-urls={etcd_url}",
                    f"--advertise-client-urls={etcd_url}",
                    f"--listen-peer-urls=http://127.0.0.1:{peer_port}",
                    "--unsafe-no-fsync",
                ],
            )
        )
        apiserver = stack.enter_context(
            _program(
                folder,
                [
                    str(assets.apiserver),
                    f"--etcd-servers={etcd_url}",
                    f"--secure-port={port}",
                    "--bind-address=127.0.0.1",
                    # Written by the server itself at its start, and good enough to sign service account tokens with.
                    f"--cert-dir={certs}",
                    "--service-account-issuer=https://kubernetes.default.svc",
                    f"--service-account-key-file={certs / 'apiserver.key'}",
                    f"--service-account-signing-key-file={certs / 'apiserver.key'}",
                    "--authorization-mode=RBAC",
                    f"--token-auth-file={folder / 'tokens.csv'}",
                    "--service-cluster-ip-range=10.96.0.0/24",
                    "--allow-privileged",
                    "--disable-admission-plugins=ServiceAccount",
                    *apiserver_flags,
                ],
            )
        )
        _wait_ready(url, token, certs / "apiserver.crt", [etcd, apiserver])
        kubeconfig = write_kubeconfig(folder / "kubeconfig", url, token=token, authority=certs / "apiserver.crt")
        if assets.controller_manager is not None:
            stack.enter_context(
                _program(
                    folder,
                    [
                        str(assets.controller_manager),
                        f"--kubeconfig={kubeconfig}",
                        "--leader-elect=false",
                        "--use-service-account-credentials",
                        f"--service-account-private-key-file={certs / 'apiserver.key'}",
                        f"--root-ca-file={certs / 'apiserver.crt'}",
                        "--secure-port=0",
                        *controller_manager_flags,
                    ],
                )
            )

        def restart(away: float) -> None:
            apiserver.kill()
            time.sleep(away)
            apiserver.start()
            _wait_ready(url, token, certs / "apiserver.crt", [etcd, apiserver])

        yield ControlPlane(url, kubeconfig, _version(url, token, certs), assets.controller_manager is not None, restart)


def free_ports(count: int) -> list[int]:
    """Loopback ports nobody listens on; all are held until all are known, so that they differ."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def write_kubeconfig(path: Path, url: str, *, token: str, authority: Path | None = None) -> Path:
    cluster: dict[str, str] = {"server": url}
    if authority is not None:
        cluster["certificate-authority"] = str(authority)
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "local", "cluster": cluster}],
        "users": [{"name": "admin", "user": {"token": token}}],
        "contexts": [{"name": "local", "context": {"cluster": "local", "user": "admin", "namespace": "default"}}],
        "current-context": "local",
    }
    path.write_text(yaml.safe_dump(config))
    path.chmod(0o600)
    return path


class _Program:
    def __init__(self, folder: Path, argv: list[str]) -> None:
        self.name = Path(argv[0]).name
        self.log = folder / f"{self.name}.log"
        self._folder = folder
        self._argv = argv
        self.start()

    def start(self) -> None:
        with self.log.open("ab") as output:
            # A session of its own: Ctrl-C reaches us alone, and we stop the programs in the right order.
            self.process = subprocess.Popen(
                self._argv,
                cwd=self._folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def check(self) -> None:
        code = self.process.poll()
        if code is not None:
            raise ControlPlaneFailed(f"{self.name} ended with code {code}:\n{self.tail()}")

    def tail(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-15:])


@contextlib.contextmanager
def _program(folder: Path, argv: list[str]) -> Iterator[_Program]:
    program = _Program(folder, argv)
    try:
        yield program
    finally:
        program.kill()  # what it would save at its end is thrown away with the folder


def _get(url: str, token: str, authority: Path) -> str:
    context = ssl.create_default_context(cafile=str(authority))
    answer = httpx.get(url, headers={"Authorization": f"Bearer {token}"}, timeout=5, verify=context)
    return answer.raise_for_status().text


def _wait_ready(url: str, token: str, authority: Path, programs: list[_Program]) -> None:
    deadline = time.monotonic() + START_TIMEOUT_SECONDS
    reason: object = "no answer"
    while time.monotonic() < deadline:
        for program in programs:
            program.check()
        try:
            _get(f"{url}/readyz", token, authority)
            _get(f"{url}/api/v1/namespaces/default", token, authority)  # created shortly after readyz says ok
        except (httpx.HTTPError, OSError) as error:
            reason = error
            time.sleep(0.1)
        else:
            return
    raise ControlPlaneFailed(
        f"kube-apiserver was not ready in {START_TIMEOUT_SECONDS:.0f} s ({reason}):\n{programs[-1].tail()}"
    )


def _version(url: str, token: str, certs: Path) -> str:
    return str(yaml.safe_load(_get(f"{url}/version", token, certs / "apiserver.crt"))["gitVersion"])
