"""One record: a block's KV with all that says whose it is.

    head      magic, format version, sizes, digest of the identity, key, parent, tokens
    checksum  XXH3-128 over head and payload, 16 bytes
    payload   the KV, as the tier above lays it out

A reader knows the head it wants byte for byte, so a record is served only where the file has exactly this head, these
sizes and a checksum that fits: a torn, truncated, flipped, empty or foreign file never is. No write is followed by
fsync, which would cost more than computing the block again: what a power loss leaves behind fails the checksum.
"""

from __future__ import annotations

import os
import struct
from enum import Enum, auto

import xxhash

from reprise_engine.tiers.keys import BlockKey

FORMAT_VERSION = 1
CHECKSUM_BYTES = 16
_MAGIC = b"reprkv\r\n"  # a transfer in text mode would damage it
_HEAD = struct.Struct("<8sIIQ16s32s?7x32s")


class Found(Enum):
    """What a file turned out to be."""

    WHOLE = auto()
    DAMAGED = auto()
    OTHER = auto()
    """Whole, but not the record that was asked for."""


def record_head(*, identity: bytes, key: BlockKey, parent: BlockKey | None, tokens: bytes, payload_bytes: int) -> bytes:
    """All of a record before its checksum. `identity` is 16 bytes."""
    return (
        _HEAD.pack(
            _MAGIC, FORMAT_VERSION, len(tokens), payload_bytes, identity, key, parent is not None, parent or bytes(32)
        )
        + tokens
    )


def record_size(head: bytes, payload_bytes: int) -> int:
    """Bytes of the file."""
    return len(head) + CHECKSUM_BYTES + payload_bytes


def smallest_record(payload_bytes: int) -> int:
    """Bytes of a record with that payload, and no tokens."""
    return _HEAD.size + CHECKSUM_BYTES + payload_bytes


def write_record(fd: int, head: bytes, payload: memoryview) -> None:
    """Raises OSError where not all could be written."""
    parts = [memoryview(head + _checksum(head, payload)), payload]
    while parts:
        written = os.writev(fd, parts)
        while parts and written >= parts[0].nbytes:
            written -= parts.pop(0).nbytes
        if parts:
            parts[0] = parts[0][written:]


def read_record(fd: int, head: bytes, into: memoryview) -> Found:
    """Fills `into`, whose contents count only where the answer is WHOLE. Raises OSError."""
    if os.fstat(fd).st_size != record_size(head, into.nbytes):
        return Found.DAMAGED
    start = bytearray(len(head) + CHECKSUM_BYTES)
    parts = [memoryview(start), into]
    while parts:
        count = os.readv(fd, parts)
        if count == 0:  # truncated in this moment
            return Found.DAMAGED
        while parts and count >= parts[0].nbytes:
            count -= parts.pop(0).nbytes
        if parts:
            parts[0] = parts[0][count:]
    found = bytes(start[: len(head)])
    if start[len(head) :] != _checksum(found, into):
        return Found.DAMAGED
    return Found.WHOLE if found == head else Found.OTHER


def _checksum(head: bytes, payload: memoryview) -> bytes:
    digest = xxhash.xxh3_128(head)
    digest.update(payload)
    return digest.digest()
