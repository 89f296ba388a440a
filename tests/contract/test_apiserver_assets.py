"""Where a real control plane is looked for, and what `make kube-assets` does with what it gets."""

from __future__ import annotations

import base64
import hashlib
import io
import tarfile
import urllib.error
from pathlib import Path
from typing import Any

import pytest

from tests.support import kube_assets
from tests.support.apiserver import NoRealApiServer, start_api_server


def _archive(*names: str) -> tuple[bytes, str]:
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w:gz") as tar:
        for name in names:
            member = tarfile.TarInfo(f"controller-tools/envtest/{name}")
            member.size = len(name)
            tar.addfile(member, io.BytesIO(name.encode()))
    return raw.getvalue(), base64.b64encode(hashlib.sha512(raw.getvalue()).digest()).decode()


def test_unpacks_executable_programs(tmp_path: Path) -> None:
    archive, checksum = _archive(*kube_assets.MEMBERS)
    kube_assets.unpack(archive, expected_sha512=checksum, into=tmp_path / "kube")
    assert {path.name: path.read_text() for path in (tmp_path / "kube").iterdir()} == {
        n: n for n in kube_assets.MEMBERS
    }
    assert (tmp_path / "kube" / "etcd").stat().st_mode & 0o111


def test_a_wrong_checksum_installs_nothing(tmp_path: Path) -> None:
    archive, _ = _archive(*kube_assets.MEMBERS)
    with pytest.raises(kube_assets.AssetsUnavailable, match="expected pinned"):
        kube_assets.unpack(archive, expected_sha512="pinned", into=tmp_path / "kube")
    assert not (tmp_path / "kube").exists()


def test_an_archive_without_a_program_is_refused(tmp_path: Path) -> None:
    archive, checksum = _archive("etcd")
    with pytest.raises(kube_assets.AssetsUnavailable, match="kube-apiserver"):
        kube_assets.unpack(archive, expected_sha512=checksum, into=tmp_path)


def test_without_network_one_line_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise urllib.error.URLError("no route to host")

    monkeypatch.setattr("urllib.request.urlopen", refuse)
    monkeypatch.setattr(kube_assets, "this_platform", lambda: "linux-amd64")
    with pytest.raises(kube_assets.AssetsUnavailable) as refused:
        kube_assets.fetch(tmp_path)
    assert "no route to host" in str(refused.value)
    assert "set KUBEBUILDER_ASSETS" in str(refused.value)
    assert "\n" not in str(refused.value)


def test_kubebuilder_assets_come_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("etcd", "kube-apiserver"):
        (tmp_path / name).write_text("")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("KUBEBUILDER_ASSETS", str(tmp_path))
    found = kube_assets.find_kube_assets()
    assert found == kube_assets.KubeAssets(tmp_path / "etcd", tmp_path / "kube-apiserver", None)


def test_asking_for_the_real_one_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.support.apiserver.find_kube_assets", lambda: None)
    with pytest.raises(NoRealApiServer, match="make kube-assets"), start_api_server("real"):
        pass


def test_an_unknown_choice_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REPRISE_TEST_API_SERVER", "kind")
    with pytest.raises(ValueError, match="use auto, real or emulated"), start_api_server():
        pass
