"""The content of a model's files as one digest: the same for a copy elsewhere, another for changed weights.

Every byte is hashed (XXH3-128, in pieces, on several threads), which for 1.2 GB in the page cache takes a fraction of a
second, and otherwise as long as reading them, which loading then need not do again. The digest of a file is remembered
in the private folder under (device, inode, size, mtime, ctime) and a hash of samples of it, so that a restart reads a
megabyte.

The limit of that, honestly: a file changed in place, with the same size and its mtime set back, still has another
ctime, which no system call sets. Only who sets the machine's clock back, or writes to the device below the file
system, can change bytes between the samples unseen. A file whose ctime is too recent to be told from a change that
comes right after is not remembered. XXH3 tells accidents apart, not forgeries: whoever may change the weights decides
what the model says anyway.
"""

from __future__ import annotations

import fnmatch
import hashlib
import json
import logging
import os
import struct
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Literal

import xxhash

from reprise_engine.errors import ModelError
from reprise_engine.tiers.folder import PrivateFolder, create_file
from reprise_engine.tiers.writers import Writer

logger = logging.getLogger(__name__)

DIGESTS_NAME = "digests.json"
PIECE_BYTES = 64 << 20
RACY_SECONDS = 2.0
MOST_DIGESTS = 1024
MOST_DIGESTS_BYTES = 1 << 20
_BUFFER_BYTES = 1 << 20
_SAMPLES = 64
_SAMPLE_BYTES = 16 << 10
_ATTEMPTS = 3


def content_files(folder: Path, *, weights: Literal["safetensors", "bin", "gguf"], gguf_file: str | None) -> list[Path]:
    """The files of a model that its KV depends on: weights, their index, how they are quantised, config.json.

    Raises ModelError.
    """
    try:
        names = {entry.name for entry in folder.iterdir()}
    except OSError as error:
        raise ModelError(f"The model folder {folder} cannot be read: {error.strerror}.") from error
    if weights == "gguf":
        assert gguf_file is not None
        chosen = {gguf_file}
    elif weights == "safetensors":
        chosen = {name for name in names if name.endswith((".safetensors", ".safetensors.index.json"))}
        # Of the same int8 tensors it says which arithmetic is theirs (models/quantization.py).
        chosen |= {name for name in names if fnmatch.fnmatchcase(name, "quant_model_description*.json")}
    else:
        chosen = {name for name in names if name.startswith("pytorch_model") and name.endswith((".bin", ".index.json"))}
    return [folder / name for name in sorted(chosen | ({"config.json"} & names))]


def fingerprint_files(files: Sequence[Path], *, cache_folder: Path | None) -> str:
    """Digest, in hexadecimal, of the files' contents and, where there are several, of their names.

    `cache_folder` is the value of --prefix-cache-dir; None remembers nothing. Raises ModelError where a file cannot be
    read or is being changed, ConfigError where the folder cannot be used.
    """
    folder = None if cache_folder is None else PrivateFolder(cache_folder)
    known = {} if folder is None else _read_digests(folder)
    used: dict[str, str] = {}
    total = hashlib.sha256()
    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1), thread_name_prefix="reprise-fingerprint") as pool:
        for path in files:
            identity, digest = _digest_of(path, known, pool)
            if identity is not None:
                used[identity] = digest
            role = "weights.gguf" if path.suffix == ".gguf" else path.name  # the name of a single file says nothing
            total.update(f"{len(role.encode())}:{role}:{digest}\n".encode())
    if folder is not None and not used.items() <= known.items():
        with suppress(OSError):  # it is a matter of a second at the next start
            _write_digests(folder, {**known, **used})
    return total.hexdigest()[:32]


def _digest_of(path: Path, known: dict[str, str], pool: ThreadPoolExecutor) -> tuple[str | None, str]:
    """(what it is remembered under, or None; digest)."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}.") from error
    try:
        for _ in range(_ATTEMPTS):
            status = os.fstat(fd)
            now = time.time()
            identity = _file_identity(fd, status)
            if identity in known:
                return identity, known[identity]
            digest = _hash_contents(fd, status.st_size, pool)
            if _stamp(os.fstat(fd)) == _stamp(status):
                racy = max(status.st_ctime, status.st_mtime) > now - RACY_SECONDS
                return (None if racy else identity), digest
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}.") from error
    finally:
        os.close(fd)
    raise ModelError(f"{path} is being changed while it is read. Start again when its download or copy is complete.")


def _stamp(status: os.stat_result) -> tuple[int, ...]:
    return (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


def _file_identity(fd: int, status: os.stat_result) -> str:
    samples = xxhash.xxh3_128()
    step = max(_SAMPLE_BYTES, status.st_size // _SAMPLES)
    for offset in range(0, min(status.st_size, step * _SAMPLES), step):
        samples.update(os.pread(fd, _SAMPLE_BYTES, offset))
    return "-".join(map(str, _stamp(status))) + "-" + samples.hexdigest()


def _hash_contents(fd: int, size: int, pool: ThreadPoolExecutor) -> str:
    """A hash of the hashes of its pieces: these can be computed side by side."""

    def piece(start: int) -> bytes:
        digest = xxhash.xxh3_128()
        buffer = memoryview(bytearray(min(_BUFFER_BYTES, PIECE_BYTES)))
        end = min(start + PIECE_BYTES, size)
        while start < end:
            count = os.preadv(fd, [buffer[: end - start]], start)
            if count == 0:
                break  # truncated: its size will tell
            digest.update(buffer[:count])
            start += count
        return digest.digest()

    digest = xxhash.xxh3_128(struct.pack("<QQ", size, PIECE_BYTES))
    for part in pool.map(piece, range(0, size, PIECE_BYTES)):
        digest.update(part)
    return digest.hexdigest()


def _read_digests(folder: PrivateFolder) -> dict[str, str]:
    """What is remembered; nothing where that cannot be read."""
    try:
        fd = os.open(DIGESTS_NAME, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=folder.fd)
        with os.fdopen(fd, "rb") as file:
            wrapped = json.loads(file.read(MOST_DIGESTS_BYTES))
        digests = wrapped["digests"]
        if wrapped["check"] != _check(digests):
            raise ValueError("damaged")
        return dict(digests)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        logger.warning("%s is damaged; the weights are hashed anew.", folder.path / DIGESTS_NAME)
        return {}


def _write_digests(folder: PrivateFolder, digests: dict[str, str]) -> None:
    kept = dict(list(digests.items())[-MOST_DIGESTS:])
    data = json.dumps({"check": _check(kept), "digests": kept}).encode()
    writer = Writer(folder)
    try:
        with writer.directory() as within:
            temporary = writer.temporary_name()
            fd = create_file(temporary, within=within)
            try:
                with os.fdopen(fd, "wb") as file:
                    file.write(data)
                os.rename(temporary, DIGESTS_NAME, src_dir_fd=within, dst_dir_fd=folder.fd)
            except OSError:
                with suppress(OSError):
                    os.unlink(temporary, dir_fd=within)
                raise
    finally:
        writer.close()


def _check(digests: dict[str, str]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(digests, sort_keys=True).encode())
