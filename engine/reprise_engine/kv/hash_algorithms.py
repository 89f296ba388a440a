"""The names a block can have: `--prefix-caching-hash-algo`.

    sha256        our own chain (`hashing.py`): the default. 32 bytes
    xxhash        the same chain with XXH3-128: faster, not cryptographic. 16 bytes
    sha256_cbor   vLLM's, byte for byte: sha256 over CBOR. For gateways that compute the names of blocks themselves
    xxhash_cbor   vLLM's, byte for byte: XXH3-128 over CBOR

Which one is chosen changes no result: inside the engine a match is verified against the tokens themselves.

vLLM's two are hash(CBOR of [parent, [tokens …], [adapter, salt] or null]), canonical CBOR (RFC 8949, section
4.2.1). The parent of a first block is hash(CBOR of the seed), the seed being the text of the environment variable
PYTHONHASHSEED. Where that is not set vLLM draws a seed at every start; we take "0", so that names outlive a restart. A
gateway must be given the same seed either way. (vLLM: `v1/core/kv_cache_utils.py`, `utils/hashing.py`.)
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Callable, Mapping

import cbor2
import xxhash

from reprise_engine.config import HashAlgorithm
from reprise_engine.kv.hashing import (
    TOKEN_BYTES,
    Adapter,
    BlockHasher,
    ExtraKeys,
    TokenBytes,
    chain_input,
    sha256_block_hash,
)
from reprise_engine.step import BlockHash

SEED_VARIABLE = "PYTHONHASHSEED"
DEFAULT_SEED = "0"

_ROOT = xxhash.xxh3_128_digest(b"reprise kv block chain, version 1")


def xxhash_block_hash(parent: BlockHash | None, tokens: TokenBytes, extra_keys: ExtraKeys) -> BlockHash:
    """The 16-byte hash of a block below `parent` (None: the first block)."""
    return BlockHash(xxhash.xxh3_128_digest(chain_input(_ROOT if parent is None else parent, tokens, extra_keys)))


def cbor_block_hasher(digest: Callable[[bytes], bytes], *, seed: str) -> BlockHasher:
    """vLLM's hash of a block, with `digest` over the CBOR."""
    root = digest(cbor2.dumps(seed, canonical=True))

    def block_hash(parent: BlockHash | None, tokens: TokenBytes, extra_keys: ExtraKeys) -> BlockHash:
        token_ids = struct.unpack(f"<{len(tokens) // TOKEN_BYTES}I", tokens)
        extra = external_keys(extra_keys)
        return BlockHash(digest(cbor2.dumps((root if parent is None else parent, token_ids, extra), canonical=True)))

    return block_hash


def external_keys(extra_keys: ExtraKeys) -> tuple[str | bytes, ...] | None:
    """A block's extra keys as vLLM writes them: flat, and None where there are none."""
    return tuple(map(_text_or_bytes, extra_keys)) or None


def _text_or_bytes(key: Adapter | str) -> str | bytes:
    """Neither CBOR nor MessagePack has text with lone surrogates. vLLM would fail; here it must not stop the engine."""
    if isinstance(key, Adapter):
        key = key.name
    try:
        key.encode()
    except UnicodeEncodeError:
        return key.encode("utf-8", "surrogatepass")
    return key


def _sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def block_hasher(algorithm: HashAlgorithm, environment: Mapping[str, str] = os.environ) -> BlockHasher:
    """The hasher of that name; vLLM's are seeded from `environment`."""
    seed = environment.get(SEED_VARIABLE, DEFAULT_SEED)
    match algorithm:
        case "sha256":
            return sha256_block_hash
        case "xxhash":
            return xxhash_block_hash
        case "sha256_cbor":
            return cbor_block_hasher(_sha256, seed=seed)
        case "xxhash_cbor":
            return cbor_block_hasher(xxhash.xxh3_128_digest, seed=seed)
