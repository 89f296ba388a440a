"""A damaged record is never served, and a disk that fails stops nothing."""

from __future__ import annotations

import logging
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from reprise_engine.errors import ConfigError
from reprise_engine.tiers import trouble
from reprise_engine.tiers.disk import DiskStore
from reprise_engine.tiers.folder import FOLDER_NAME
from tests.engine.disk_stores import (
    PAYLOAD_BYTES,
    block,
    get,
    has,
    open_store,
    put,
    record_file,
    record_files,
    temporary_files,
)

RECORD_FILE_BYTES = 112 + 16 + 16 + PAYLOAD_BYTES  # head, tokens, checksum, payload
MAY_SHARE_A_STORE = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def store(folder: Path) -> Iterator[DiskStore]:
    with closing(open_store(folder)) as opened:
        yield opened


def is_refused(folder: Path, store: DiskStore, data: bytes) -> None:
    """`data` in place of the record is neither served nor kept; and the record can be written again."""
    record_file(folder, 1).write_bytes(data)
    damaged = store.stats().damaged
    assert get(store, 1) is None
    assert not has(store, 1)
    assert not record_file(folder, 1).exists()
    assert store.stats().damaged == damaged + 1
    assert put(store, 1)
    assert get(store, 1) == block(1).payload


@MAY_SHARE_A_STORE
@given(at=st.integers(0, RECORD_FILE_BYTES - 1), flip=st.integers(1, 255))
def test_any_flipped_byte(folder: Path, store: DiskStore, at: int, flip: int) -> None:
    put(store, 1)
    data = bytearray(record_file(folder, 1).read_bytes())
    assert len(data) == RECORD_FILE_BYTES
    data[at] ^= flip
    is_refused(folder, store, bytes(data))


def test_any_flipped_byte_of_the_head(folder: Path, store: DiskStore) -> None:
    put(store, 1)
    whole = record_file(folder, 1).read_bytes()
    for at in range(RECORD_FILE_BYTES - PAYLOAD_BYTES):
        is_refused(folder, store, whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])


@MAY_SHARE_A_STORE
@given(length=st.integers(0, RECORD_FILE_BYTES - 1), zeros=st.booleans())
def test_truncated_anywhere(folder: Path, store: DiskStore, length: int, zeros: bool) -> None:
    """Also where the file has its full size and the rest was never written, as after a power loss."""
    put(store, 1)
    data = record_file(folder, 1).read_bytes()[:length]
    if zeros and data + bytes(RECORD_FILE_BYTES - length) != record_file(folder, 1).read_bytes():
        data += bytes(RECORD_FILE_BYTES - length)
    is_refused(folder, store, data)


@MAY_SHARE_A_STORE
@given(data=st.binary(max_size=300))
def test_any_other_file(folder: Path, store: DiskStore, data: bytes) -> None:
    put(store, 1)
    is_refused(folder, store, data)
    is_refused(folder, store, record_file(folder, 1).read_bytes() + data + b"!")


def test_a_record_of_another_version(folder: Path, store: DiskStore) -> None:
    put(store, 1)
    data = bytearray(record_file(folder, 1).read_bytes())
    data[8:12] = (2).to_bytes(4, "little")
    is_refused(folder, store, bytes(data))


def test_what_a_power_loss_cut_short_goes_at_the_next_start(folder: Path) -> None:
    with closing(open_store(folder)) as store:
        put(store, 1)
        put(store, 2)
    record_file(folder, 1).write_bytes(b"")
    with closing(open_store(folder)) as store:
        assert (has(store, 1), has(store, 2)) == (False, True)
        assert store.stats().damaged == 1
        assert record_files(folder) == [record_file(folder, 2)]


def test_a_damaged_journal_costs_a_look_at_the_folder(folder: Path) -> None:
    path = folder / FOLDER_NAME / "journal"
    for damage in (b"", b"nonsense", b"\0" * 640, os.urandom(1000)):
        with closing(open_store(folder)) as store, closing(open_store(folder)) as other:
            put(store, 1)
            path.write_bytes(damage)
            put(other, 2)
            put(store, 3)
            put(other, 4)
            assert other.stats().records == len(record_files(folder)) == 4
            assert all(get(store, number) == block(number).payload for number in (1, 2, 3, 4))
        with closing(open_store(folder)) as store:
            assert store.clear() == 4


def test_damage_is_warned_of_once_a_minute(folder: Path, store: DiskStore, caplog: pytest.LogCaptureFixture) -> None:
    for number in range(3):
        put(store, number)
        record_file(folder, number).write_bytes(b"nonsense")
        get(store, number)
    assert store.stats().damaged == 3
    [message] = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert str(record_file(folder, 0)) in message
    assert "damaged and is deleted, not served" in message


# What is not ours, in a record's place


def test_a_folder_in_a_records_place_costs_that_record_only(
    folder: Path, store: DiskStore, caplog: pytest.LogCaptureFixture
) -> None:
    record_file(folder, 1).mkdir(parents=True)
    record_file(folder, 2).parent.write_bytes(b"a file in the place of a folder of records")
    for number in (1, 2):
        assert not put(store, number)
    assert put(store, 0), "the other records wait for the one that has no place"
    assert get(store, 0) == block(0).payload
    assert (store.stats().failures, store.stats().records) == (2, 1)
    assert temporary_files(folder) == []
    [warning] = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert f"cannot write {record_file(folder, 1)}: something else is there" in warning
    record_file(folder, 1).rmdir()
    assert put(store, 1)
    with closing(open_store(folder)) as other:
        assert other.stats().records == 2


def test_a_folder_that_took_a_records_place_is_forgotten(folder: Path, store: DiskStore) -> None:
    with closing(open_store(folder)) as other:
        put(store, 1)
        put(other, 2)
        record_file(folder, 1).unlink()
        record_file(folder, 1).mkdir()
        assert get(store, 1) is None
        assert not has(store, 1)
        assert put(store, 3), "writes wait for what cannot be deleted"
        assert put(other, 4)
        assert other.stats().records == 3, "the others count what is not there"
        assert record_file(folder, 1).is_dir()


# A disk that is full


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    place = tmp_path / "disk"
    place.mkdir()
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("only root can mount a small file system")
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)], check=False)
    if mounted.returncode != 0:
        pytest.skip("mounting a tmpfs is not allowed here")
    try:
        yield place
    finally:
        # Lazily: a test that failed may still have it open.
        subprocess.run(["umount", "--lazy", str(place)], check=True)


def test_a_full_disk(small_disk: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    caplog.set_level(logging.INFO)
    with closing(open_store(small_disk, records=1000)) as store:
        written = 0
        while put(store, written):
            written += 1
            assert written < 1000
        assert 10 < written < 100
        assert store.stats().failures == 1
        assert not put(store, written)  # not even tried
        assert store.stats().failures == 1
        assert temporary_files(small_disk) == []
        assert all(get(store, number) == block(number).payload for number in range(written))
        [warning] = [record.getMessage() for record in caplog.records]
        assert f"The disk cache in {small_disk} cannot write: No space left on device." in warning
        assert "Free space on that disk, or lower --prefix-cache-disk-size" in warning

        monkeypatch.setattr(trouble, "RETRY_SECONDS", 0.0)
        store._trouble._retry_at = 0.0  # the 10 s are over
        assert not put(store, written)
        assert store.stats().failures == 2
        assert len(caplog.records) == 1  # said once
        assert store.clear() == written
        assert put(store, written)
        assert "written to again" in caplog.records[-1].getMessage()


def test_a_disk_that_is_full_before_the_folder_is_made(small_disk: Path) -> None:
    with (small_disk / "foreign").open("wb", buffering=0) as file:
        assert file.write(bytes(2 << 20)) == 1 << 20
    with pytest.raises(ConfigError, match=r"No space left on device\. Free space on that disk, or leave the flag out"):
        open_store(small_disk)


def test_writes_that_the_system_cuts_short(tmp_path: Path) -> None:
    """The same without root: no file may grow beyond half a record, so each write ends in the middle."""
    program = f"""
import resource
from contextlib import closing
from pathlib import Path
from tests.engine.disk_stores import *
folder = Path({str(tmp_path)!r})
with closing(open_store(folder)) as store:
    assert put(store, 1)
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, ({RECORD_FILE_BYTES // 2}, hard))
    assert not put(store, 2)
    assert temporary_files(folder) == []
    assert store.stats().failures == 1
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    assert get(store, 1) == block(1).payload
    assert get(store, 2) is None
"""
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[1] == resource.RLIM_INFINITY
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert "cannot write: File too large" in result.stderr
