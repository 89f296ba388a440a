"""The files of records: their names, and what is done with them but for their contents (records.py)."""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Iterable
from contextlib import suppress
from itertools import groupby
from operator import itemgetter
from typing import NewType

from reprise_engine.tiers.folder import PrivateFolder, open_directory
from reprise_engine.tiers.keys import BLOCK_KEY_BYTES

RecordName = NewType("RecordName", bytes)
"""Digest of the identity and key of the block, together 48 bytes: names a record of whatever model in the folder."""

IDENTITY_BYTES = 16
_IDENTITY_NAME = re.compile(rf"[0-9a-f]{{{2 * IDENTITY_BYTES}}}")
_FAN_OUT_NAME = re.compile(r"[0-9a-f]{2}")
_RECORD_NAME = re.compile(rf"[0-9a-f]{{{2 * BLOCK_KEY_BYTES}}}")
_DISK_BLOCK_BYTES = 4096


def allocated_bytes(size: int) -> int:
    """What a file of `size` bytes takes on the disk: whole blocks of it."""
    return -(-size // _DISK_BLOCK_BYTES) * _DISK_BLOCK_BYTES


def record_path(name: RecordName) -> tuple[str, str, str]:
    """Folder of the identity, folder of the fan-out, file."""
    key = name[IDENTITY_BYTES:].hex()
    return name[:IDENTITY_BYTES].hex(), key[:2], key


def open_record(folder: PrivateFolder, name: RecordName) -> int:
    """Raises OSError, FileNotFoundError where there is no such record."""
    identity, fan_out, key = record_path(name)
    with folder.directory(identity, fan_out) as within:
        return os.open(key, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=within)


def record_mtime(folder: PrivateFolder, name: RecordName) -> float | None:
    """When the record was last used, in seconds; None where it is gone."""
    identity, fan_out, key = record_path(name)
    try:
        with folder.directory(identity, fan_out) as within:
            return os.stat(key, dir_fd=within, follow_symlinks=False).st_mtime
    except OSError:
        return None


def set_record_mtime(folder: PrivateFolder, name: RecordName, mtime: float) -> None:
    """Tells the others that it was used. Raises OSError."""
    identity, fan_out, key = record_path(name)
    with folder.directory(identity, fan_out) as within:
        os.utime(key, (mtime, mtime), dir_fd=within, follow_symlinks=False)


def has_place(folder: PrivateFolder, name: RecordName) -> bool:
    """Whether a record can be put there: no folder is in its place, and no file or link in that of its folders."""
    identity, fan_out, key = record_path(name)
    try:
        with folder.directory(identity, fan_out) as within:
            return not stat.S_ISDIR(os.stat(key, dir_fd=within, follow_symlinks=False).st_mode)
    except FileNotFoundError:
        return True
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            return False
        raise


def delete_records(folder: PrivateFolder, names: Iterable[RecordName]) -> None:
    """One that is gone already is no error, nor is what else may be in its place (`has_place`) and stays there.

    Raises OSError for any other cause.
    """
    for (identity, fan_out), paths in groupby(map(record_path, names), key=itemgetter(0, 1)):
        with suppress(FileNotFoundError, NotADirectoryError), folder.directory(identity, fan_out) as within:
            for _, _, key in paths:
                with suppress(FileNotFoundError, IsADirectoryError):
                    os.unlink(key, dir_fd=within)


def scan_records(
    folder: PrivateFolder, identity: bytes | None = None, *, tidy: bool = False
) -> list[tuple[float, RecordName, int]]:
    """(seconds of last use, name, size in bytes) of every record, or of those of one identity.

    `tidy` removes empty folders on the way: only for who holds the lock, or a record on its way loses its place.
    What has no record's name is left alone: it is not ours. Raises OSError where the folder cannot be read.
    """
    found: list[tuple[float, RecordName, int]] = []
    with os.scandir(folder.fd) as entries:
        identities = [entry.name for entry in entries if _IDENTITY_NAME.fullmatch(entry.name)]
    for identity_name in identities:
        prefix = bytes.fromhex(identity_name)
        if identity is not None and prefix != identity:
            continue
        with suppress(FileNotFoundError, NotADirectoryError), folder.directory(identity_name) as within:
            _scan_identity(within, prefix, found, tidy=tidy)
        if tidy:
            with suppress(OSError):
                os.rmdir(identity_name, dir_fd=folder.fd)  # only where it is empty
    return found


def _scan_identity(fd: int, prefix: bytes, found: list[tuple[float, RecordName, int]], *, tidy: bool) -> None:
    with os.scandir(fd) as entries:
        fan_outs = [entry.name for entry in entries if _FAN_OUT_NAME.fullmatch(entry.name)]
    for fan_out in fan_outs:
        try:
            below = open_directory(fan_out, within=fd)
        except OSError:  # a link or a file: not ours
            continue
        try:
            with os.scandir(below) as records:
                files = [record.name for record in records]
            for file in files:
                if not _RECORD_NAME.fullmatch(file):
                    continue
                try:
                    status = os.stat(file, dir_fd=below, follow_symlinks=False)
                except FileNotFoundError:
                    continue
                if stat.S_ISREG(status.st_mode):
                    found.append((status.st_mtime, RecordName(prefix + bytes.fromhex(file)), status.st_size))
        finally:
            os.close(below)
        if tidy and not files:
            with suppress(OSError):
                os.rmdir(fan_out, dir_fd=fd)
