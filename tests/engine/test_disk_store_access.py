"""Whom the disk store lets in: modes, owners, links, strangers' files."""

from __future__ import annotations

import os
import stat
from contextlib import closing
from pathlib import Path

import pytest

from reprise_engine.errors import ConfigError
from reprise_engine.tiers.disk import DiskStore
from reprise_engine.tiers.folder import FOLDER_NAME
from tests.engine.disk_stores import (
    IDENTITY,
    PAYLOAD_BYTES,
    RECORD_BYTES,
    block,
    get,
    has,
    open_store,
    put,
    record_file,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.mark.parametrize("umask", [0o000, 0o077, 0o777])
def test_what_it_makes_is_private_whatever_the_umask(folder: Path, umask: int) -> None:
    folder.mkdir()
    before = os.umask(umask)
    try:
        with closing(open_store(folder)) as store:
            put(store, 1)
            paths = [folder / FOLDER_NAME, *(folder / FOLDER_NAME).rglob("*")]
            modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in paths}
            assert set(modes.values()) == {0o700, 0o600}
            assert all(modes[path.name] == (0o700 if path.is_dir() else 0o600) for path in paths)
            assert get(store, 1) == block(1).payload
    finally:
        os.umask(before)


def test_a_volume_of_the_group_is_used_through_a_folder_of_its_own(folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o2775)  # what Kubernetes makes of a volume with an fsGroup
    with closing(open_store(folder)) as store:
        assert put(store, 1)
        assert stat.S_IMODE((folder / FOLDER_NAME).stat().st_mode) & 0o777 == 0o700


@pytest.mark.parametrize("mode", [0o770, 0o702, 0o750])
def test_a_folder_that_others_may_use_is_refused(folder: Path, mode: int) -> None:
    (folder / FOLDER_NAME).mkdir(parents=True)
    (folder / FOLDER_NAME).chmod(mode)
    with pytest.raises(ConfigError, match=rf"--prefix-cache-dir is {folder}.*mode {mode:04o}.*chmod 700"):
        open_store(folder)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to somebody else")
def test_a_folder_of_somebody_else_is_refused(folder: Path) -> None:
    (folder / FOLDER_NAME).mkdir(parents=True, mode=0o700)
    os.chown(folder / FOLDER_NAME, 12345, 12345)
    with pytest.raises(ConfigError, match=r"--prefix-cache-dir is .* belongs to user 12345"):
        open_store(folder)


def test_a_file_instead_of_a_folder_is_refused(folder: Path) -> None:
    folder.write_text("")
    with pytest.raises(ConfigError, match=r"--prefix-cache-dir is .*, which is not a folder"):
        open_store(folder)


def test_a_read_only_place_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--prefix-cache-dir is /proc/cache, which cannot be used: .*may write to"):
        open_store(Path("/proc/cache"))


def test_a_bound_below_one_record_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"--prefix-cache-disk-size is 12287 bytes, .* takes 12288 bytes"):
        DiskStore(folder, capacity_bytes=RECORD_BYTES - 1, identity=IDENTITY, payload_bytes=PAYLOAD_BYTES)
    assert not folder.exists()


def test_links_do_not_lead_out(folder: Path, tmp_path: Path) -> None:
    with closing(open_store(folder)) as store:
        put(store, 1)
        put(store, 2)
    away = tmp_path / "away"
    away.mkdir()
    secret = away / "record"
    os.replace(record_file(folder, 1), secret)
    record_file(folder, 1).symlink_to(secret)  # a whole record, but behind a link
    fan_out = record_file(folder, 2).parent
    os.replace(fan_out, away / "fan-out")
    fan_out.symlink_to(away / "fan-out")
    with closing(open_store(folder)) as store:
        assert (has(store, 1), has(store, 2)) == (False, False)
        assert (get(store, 1), get(store, 2)) == (None, None)
        assert store.clear() == 0
        assert not put(store, 2)  # refused, not written elsewhere
    assert secret.exists()
    assert len(list((away / "fan-out").iterdir())) == 1


def test_the_private_folder_itself_may_not_be_a_link(folder: Path, tmp_path: Path) -> None:
    folder.mkdir()
    (tmp_path / "away").mkdir()
    (folder / FOLDER_NAME).symlink_to(tmp_path / "away")
    with pytest.raises(ConfigError, match="is a link or a file"):
        open_store(folder)


def test_strangers_files_are_left_alone(folder: Path) -> None:
    with closing(open_store(folder)) as store:
        put(store, 1)
    strangers = [folder / FOLDER_NAME / "README", record_file(folder, 1).with_name("notes"), folder / "mine"]
    for path in strangers:
        path.write_text("mine")
    with closing(open_store(folder, records=1)) as store:
        assert store.stats().records == 1
        put(store, 2)
        store.clear()
    assert [path.read_text() for path in strangers] == ["mine"] * 3
