"""The store's own folder below `--prefix-cache-dir`: private to its owner whatever the umask, links never followed.

The store makes a folder of its own because the given one need not be private: a volume that Kubernetes mounts with an
fsGroup belongs to root and is writable by the group. Everything inside is opened relative to a descriptor and with
O_NOFOLLOW, component by component, so that no symbolic link leads out of it.

    reprise-kv-v1/                     0700
        journal                        what was added and removed (journal.py)
        digests.json                   content hashes of weight files (fingerprint.py)
        writers/ID.lock, ID.N.tmp      one locked file a live process, and what it is writing
        IDENTITY/ab/abcd…              one record a block: 32 and 64 hexadecimal digits
"""

from __future__ import annotations

import errno
import os
import stat
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from reprise_engine.errors import ConfigError

FOLDER_NAME = "reprise-kv-v1"
_DIRECTORY_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class PrivateFolder:
    """An open descriptor of the folder; closed with the last reference, so a thread may go on that still uses it.

    Raises ConfigError, naming --prefix-cache-dir, where the folder cannot be ours alone.
    """

    def __init__(self, given: Path) -> None:
        self.path = given / FOLDER_NAME
        try:
            given.mkdir(mode=0o700, parents=True, exist_ok=True)
        except FileExistsError as error:
            raise ConfigError(f"--prefix-cache-dir is {given}, which is not a folder. Give a folder.") from error
        except OSError as error:
            raise unusable(given, error) from error
        try:
            _make_directory(str(self.path))
        except NotADirectoryError as error:
            raise ConfigError(f"--prefix-cache-dir is {given}, which is not a folder. Give a folder.") from error
        except OSError as error:
            raise unusable(given, error) from error
        try:
            self.fd = os.open(self.path, _DIRECTORY_FLAGS)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENOTDIR):
                raise ConfigError(
                    f"--prefix-cache-dir is {given}, but {self.path} is a link or a file, not a folder. Remove it."
                ) from error
            raise unusable(given, error) from error
        weakref.finalize(self, os.close, self.fd)
        self._check_private(given)

    def _check_private(self, given: Path) -> None:
        found = os.fstat(self.fd)
        if found.st_uid != os.geteuid():
            raise ConfigError(
                f"--prefix-cache-dir is {given}, but {self.path} belongs to user {found.st_uid}, and this process runs "
                f"as user {os.geteuid()}: whoever owns it could change cached KV. Remove it, or give another folder."
            )
        mode = stat.S_IMODE(found.st_mode)
        if mode & 0o077:
            raise ConfigError(
                f"--prefix-cache-dir is {given}, but {self.path} has mode {mode:04o}: group or others may use it, and "
                f"it must be private to its owner. Run chmod 700 {self.path}; where the volume forces modes, mount it "
                "with dir_mode=0700 and file_mode=0600."
            )

    @contextmanager
    def directory(self, *parts: str, create: bool = False) -> Iterator[int]:
        """A descriptor of the folder below this one. Raises OSError (FileNotFoundError without `create`)."""
        fd = self.fd
        try:
            for part in parts:
                below = open_directory(part, within=fd, create=create)
                if fd != self.fd:
                    os.close(fd)
                fd = below
            yield fd
        finally:
            if fd != self.fd:
                os.close(fd)


def open_directory(name: str, *, within: int, create: bool = False) -> int:
    """A descriptor of the folder of that name; never through a link. Raises OSError."""
    try:
        return os.open(name, _DIRECTORY_FLAGS, dir_fd=within)
    except FileNotFoundError:
        if not create:
            raise
    _make_directory(name, within=within)
    return os.open(name, _DIRECTORY_FLAGS, dir_fd=within)


def _make_directory(name: str, *, within: int | None = None) -> None:
    """Makes it, 0700 whatever the umask took away, unless it is there."""
    try:
        os.mkdir(name, 0o700, dir_fd=within)
    except FileExistsError:
        return
    # O_PATH: needs no permission, and follows no link that took its place.
    fd = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=within)
    try:
        os.chmod(f"/proc/self/fd/{fd}", 0o700)
    finally:
        os.close(fd)


def unusable(given: Path, error: OSError, *, need: str = "Give a folder") -> ConfigError:
    """For --prefix-cache-dir; `need` is what another folder must be."""
    advice = f"{need} that user {os.geteuid()} may write to"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        advice = "Free space on that disk"
    return ConfigError(
        f"--prefix-cache-dir is {given}, which cannot be used: {error.strerror}. {advice}, or leave the flag out."
    )


def create_file(name: str, *, within: int) -> int:
    """A new file, 0600, for reading and writing. Raises FileExistsError."""
    fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=within)
    os.fchmod(fd, 0o600)
    return fd
