"""Disk stores for tests: a small identity, blocks whose contents follow from their number, and damage to files."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass, replace
from pathlib import Path

from reprise_engine.kv.hashing import TokenBytes, encode_tokens, sha256_block_hash
from reprise_engine.step import BlockHash
from reprise_engine.tiers.disk import DiskStore
from reprise_engine.tiers.folder import FOLDER_NAME
from reprise_engine.tiers.identity import CacheIdentity
from reprise_engine.tiers.keys import BlockKey
from reprise_engine.tiers.record_files import allocated_bytes
from reprise_engine.tiers.records import smallest_record

PAYLOAD_BYTES = 10_000
BLOCK_SIZE = 4
RECORD_BYTES = allocated_bytes(smallest_record(PAYLOAD_BYTES) + 4 * BLOCK_SIZE)
IDENTITY = CacheIdentity(
    weights="weights",
    config="{}",
    dtype="bfloat16",
    kv_dtype="bfloat16",
    arithmetic="cpu-native",
    layout="layer,kv,slot,head,dim",
    num_layers=2,
    num_kv_heads=2,
    head_dim=16,
    block_size=BLOCK_SIZE,
)
OTHER_IDENTITY = replace(IDENTITY, weights="other weights")


@dataclass(frozen=True, slots=True)
class Block:
    """A block of KV with all that names it."""

    key: BlockKey
    parent: BlockKey | None
    tokens: TokenBytes
    payload: bytes


def block(number: int, *, payload_bytes: int = PAYLOAD_BYTES) -> Block:
    """Always the same for the same number; every third is the first of its sequence."""
    tokens = encode_tokens([number] * BLOCK_SIZE)
    parent = None if number % 3 == 0 else BlockHash(hashlib.sha256(b"parent %d" % number).digest())
    key = sha256_block_hash(parent, tokens, ())
    payload = (hashlib.sha256(b"payload %d" % number).digest() * (payload_bytes // 32 + 1))[:payload_bytes]
    return Block(BlockKey(key), None if parent is None else BlockKey(parent), tokens, payload)


def open_store(folder: Path, *, records: int = 100, identity: CacheIdentity = IDENTITY) -> DiskStore:
    """A store whose bound holds exactly that many records."""
    return DiskStore(folder, capacity_bytes=records * RECORD_BYTES, identity=identity, payload_bytes=PAYLOAD_BYTES)


def put(store: DiskStore, number: int) -> bool:
    """Writes the block of that number."""
    it = block(number)
    return store.write(it.key, parent=it.parent, tokens=it.tokens, payload=memoryview(it.payload))


def get(store: DiskStore, number: int) -> bytes | None:
    """Reads the block of that number; None where it was not served."""
    it = block(number)
    into = bytearray(PAYLOAD_BYTES)
    served = store.read(it.key, parent=it.parent, tokens=it.tokens, into=memoryview(into))
    return bytes(into) if served else None


def has(store: DiskStore, number: int) -> bool:
    """What the store says without looking."""
    return block(number).key in store


def record_files(folder: Path) -> list[Path]:
    """The files of all records, from outside."""
    return sorted(path for path in (folder / FOLDER_NAME).glob("*/??/*") if len(path.name) == 64)


def record_file(folder: Path, number: int, *, identity: CacheIdentity = IDENTITY) -> Path:
    """Where that block's record is."""
    name = block(number).key.hex()
    return folder / FOLDER_NAME / identity.digest().hex() / name[:2] / name


def bytes_on_disk(folder: Path) -> int:
    """The sum that the bound is about, from outside; files that vanish meanwhile count as nothing."""
    total = 0
    for path in record_files(folder):
        try:
            total += allocated_bytes(os.stat(path).st_size)
        except FileNotFoundError:
            continue
    return total


def temporary_files(folder: Path) -> list[Path]:
    """What is being written, or was left over."""
    return sorted((folder / FOLDER_NAME / "writers").glob("*.tmp"))
