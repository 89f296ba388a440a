"""The folder a model is fetched into, safe against whatever ends a process at whatever moment.

folder/                      the model's files: each was verified before it was put here, by a rename
folder/.reprise-fetch/
    lock                     held by the one process that writes; the kernel lets go of it when that process ends
    placed.json              path → size and identity of each file put in place, of this or an earlier version
    complete.json            there only when every file is; what serves a model looks for it
    parts/                   what has come of files still on their way; named by path and identity
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reprise_engine.errors import ModelVolumeFull, ModelVolumeUnusable
from reprise_engine.fetch.files import Hasher, Listing, RemoteFile, hasher

PRIVATE = ".reprise-fetch"
_READ_BYTES = 4 << 20
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_NO_LOCKS = frozenset({errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK, errno.EINVAL})


@contextlib.contextmanager
def volume_errors(folder: Path) -> Iterator[None]:
    """Turns an OSError of the block into a FetchError that says what to do about the volume."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        if error.errno in _FULL:
            raise ModelVolumeFull(
                f"{folder}: {reason}. Give spec.model.cache a larger claimName or sizeLimit, or free some room; "
                "what has come so far is kept on the volume."
            ) from error
        raise ModelVolumeUnusable(
            f"{folder}: {reason}. The volume must let user {os.getuid()} (group {os.getgid()}) write."
        ) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Complete:
    """What complete.json says."""

    uri: str
    revision: str | None
    sizes: Mapping[str, int]


class Part:
    """One file on its way. Its digest is kept up to date with its bytes."""

    def __init__(self, path: Path, file: RemoteFile) -> None:
        self.path = path
        self.file = file
        self.size = 0
        self._hasher: Hasher | None = None
        self._stream: Any = None

    def open(self) -> None:
        """Takes up what is there, reading it for the digest. Raises OSError."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._stream = self.path.open("a+b")
        self._hasher, self.size = hasher(self.file), 0
        present = os.fstat(self._stream.fileno()).st_size
        if present > self.file.size:
            self.reset()
            return
        self._stream.seek(0)
        while data := self._stream.read(_READ_BYTES):
            if self._hasher is not None:
                self._hasher.update(data)
            self.size += len(data)

    def write(self, data: bytes) -> None:
        """Appends. Raises OSError."""
        self._stream.write(data)
        self._stream.flush()
        if self._hasher is not None:
            self._hasher.update(data)
        self.size += len(data)

    def reset(self) -> None:
        """From the first byte again."""
        self._stream.truncate(0)
        self._hasher, self.size = hasher(self.file), 0

    def is_sound(self) -> bool:
        """Whether all bytes are there, and are those of the listing."""
        if self.size != self.file.size:
            return False
        return self._hasher is None or self.file.digest is None or self._hasher.hexdigest() == self.file.digest.value

    def close(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def sync(self) -> None:
        """To the disk, so that what is renamed into place after it holds its bytes after a crash of the node, too."""
        os.fsync(self._stream.fileno())


class ModelFolder:
    """The folder. Its methods raise FetchError where the volume fails; `place` may be called from several threads."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._private = folder / PRIVATE
        self._placed: dict[str, dict[str, Any]] = {}
        self._recording = threading.Lock()

    @contextlib.contextmanager
    def try_lock(self) -> Iterator[bool]:
        """Whether this process is the one that writes, for the time of the block."""
        with volume_errors(self.folder):
            self._private.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self._private / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            yield self._lock(descriptor)
        finally:
            os.close(descriptor)

    def _lock(self, descriptor: int) -> bool:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno in _NO_LOCKS:
                raise ModelVolumeUnusable(
                    f"{self.folder}: the volume cannot lock files ({error.strerror}), and two pods that fetch into one "
                    "folder would spoil it. Use another storage class for spec.model.cache, or leave it out."
                ) from error
            raise ModelVolumeUnusable(f"{self.folder}: cannot be locked: {error.strerror}.") from error
        return True

    def complete(self, uri: str) -> Complete | None:
        """What is there of `uri`, None unless all of it is, each file in its full size."""
        found = self._read("complete.json")
        try:
            complete = Complete(uri=found["uri"], revision=found["revision"], sizes=dict(found["sizes"]))
            sound = all((self.folder / path).stat().st_size == size for path, size in complete.sizes.items())
        except (KeyError, TypeError, OSError):
            return None
        return complete if sound and complete.uri == uri else None

    def begin(self, listing: Listing) -> tuple[RemoteFile, ...]:
        """Prepares the folder for `listing` and says which of its files are still to come.

        From here on the folder does not count as complete. A file in place that nobody has a record of is read and
        compared, so that one whose record was lost is not fetched again; a file of another version is taken away.
        """
        with volume_errors(self.folder):
            (self._private / "complete.json").unlink(missing_ok=True)
            self._placed = {path: entry for path, entry in self._read("placed.json").items() if isinstance(entry, dict)}
            names = {file.path for file in listing.files}
            for path in [path for path in self._placed if path not in names]:
                (self.folder / path).unlink(missing_ok=True)
                del self._placed[path]
            missing = tuple(file for file in listing.files if not self._is_placed(file))
            self._write("placed.json", self._placed)
            self._drop_other_parts({self._part_path(file).name for file in missing})
        self._check_room(missing)
        return missing

    def part(self, file: RemoteFile) -> Part:
        return Part(self._part_path(file), file)

    def place(self, part: Part) -> None:
        """Puts a sound part into place."""
        target = self.folder / part.file.path
        with volume_errors(self.folder):
            part.sync()
            part.close()
            target.parent.mkdir(parents=True, exist_ok=True)
            part.path.replace(target)
            with self._recording:
                self._placed[part.file.path] = _entry(part.file)
                self._write("placed.json", self._placed)

    def finish(self, uri: str, listing: Listing) -> None:
        """Marks the folder as complete."""
        with volume_errors(self.folder):
            sizes = {file.path: file.size for file in listing.files}
            self._write("complete.json", {"uri": uri, "revision": listing.revision, "sizes": sizes})
            shutil.rmtree(self._private / "parts", ignore_errors=True)

    def _is_placed(self, file: RemoteFile) -> bool:
        path = self.folder / file.path
        try:
            if path.stat().st_size != file.size:
                return False
        except FileNotFoundError:
            return False
        record = self._placed.get(file.path)
        if record is not None:
            return record == _entry(file)
        if file.digest is None or _digest_of(path, file) != file.digest.value:
            return False
        self._placed[file.path] = _entry(file)
        return True

    def _check_room(self, missing: tuple[RemoteFile, ...]) -> None:
        needed = 0
        for file in missing:
            with contextlib.suppress(FileNotFoundError):
                needed -= self._part_path(file).stat().st_size
            needed += file.size
        with volume_errors(self.folder):
            free = shutil.disk_usage(self.folder).free
        if needed > free:
            raise ModelVolumeFull(
                f"{self.folder}: {needed / 2**30:.1f} GiB are still to come, but the volume has {free / 2**30:.1f} GiB "
                "left. Give spec.model.cache a larger volume, or free some room."
            )

    def _part_path(self, file: RemoteFile) -> Path:
        name = hashlib.sha256(f"{file.path}\0{file.identity}".encode()).hexdigest()[:32]
        return self._private / "parts" / name

    def _drop_other_parts(self, names: set[str]) -> None:
        with contextlib.suppress(FileNotFoundError):
            for path in (self._private / "parts").iterdir():
                if path.name not in names:
                    path.unlink()

    def _read(self, name: str) -> dict[str, Any]:
        """The JSON object in a file of ours; empty where there is none, or it is damaged."""
        try:
            value = json.loads((self._private / name).read_bytes())
        except (FileNotFoundError, NotADirectoryError, ValueError):
            return {}
        return value if isinstance(value, dict) else {}

    def _write(self, name: str, value: Mapping[str, Any]) -> None:
        path = self._private / name
        new = path.with_suffix(".new")
        with new.open("w", encoding="utf-8") as stream:
            json.dump(value, stream)
            stream.flush()
            os.fsync(stream.fileno())
        new.replace(path)
        descriptor = os.open(self._private, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _entry(file: RemoteFile) -> dict[str, Any]:
    return {"size": file.size, "identity": file.identity}


def _digest_of(path: Path, file: RemoteFile) -> str | None:
    computed = hasher(file)
    if computed is None:
        return None
    with path.open("rb") as stream:
        while data := stream.read(_READ_BYTES):
            computed.update(data)
    return computed.hexdigest()
