"""The identity of a block of tokens: a hash chain, equal in every process, on every machine, after every restart.

By default of sha256, as here; the others are in `hash_algorithms.py`.

    hash(block) = sha256( hash(parent) | number of tokens | tokens, 4 bytes each | extra keys, each with its length )

Everything that changes a block's KV is covered: the parent's hash stands for all tokens before it, the extra keys (of
the first block only: the rest inherit them through their parents) for the salt. Inside one engine a match never rests
on this hash: the prefix index compares the tokens themselves. The hash names the block to the outside.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from typing import NewType, Protocol

from reprise_engine.request import TokenId
from reprise_engine.step import BlockHash

TokenBytes = NewType("TokenBytes", bytes)
"""The tokens of a block, or of its beginning, 4 bytes each, little-endian: exact, comparable, hashed by Python with a
secret seed."""

ExtraKeys = tuple[str, ...]
"""What besides its tokens changes a prefix's KV or who may read it: () or (cache_salt,)."""

TOKEN_BYTES = 4
MAX_TOKEN_ID = 2 ** (8 * TOKEN_BYTES) - 1
_COUNT = struct.Struct("<I")
_ROOT = hashlib.sha256(b"reprise kv block chain, version 1").digest()


class BlockHasher(Protocol):
    """Names a block. `extra_keys` is empty except for the first block of a sequence, whose parent is None."""

    def __call__(self, parent: BlockHash | None, tokens: TokenBytes, extra_keys: ExtraKeys) -> BlockHash: ...


def sha256_block_hash(parent: BlockHash | None, tokens: TokenBytes, extra_keys: ExtraKeys) -> BlockHash:
    """The 32-byte hash of a block below `parent` (None: the first block)."""
    return BlockHash(hashlib.sha256(chain_input(_ROOT if parent is None else parent, tokens, extra_keys)).digest())


def chain_input(parent: bytes, tokens: TokenBytes, extra_keys: ExtraKeys) -> bytes:
    """What is hashed: every field with its length, so that no two blocks have the same."""
    data = parent + _COUNT.pack(len(tokens) // TOKEN_BYTES) + tokens
    for key in extra_keys:
        # surrogatepass: a salt out of JSON may hold lone surrogates, and must not stop the engine.
        encoded = key.encode("utf-8", "surrogatepass")
        data += _COUNT.pack(len(encoded)) + encoded
    return data


def encode_tokens(tokens: Sequence[TokenId]) -> TokenBytes:
    """All of `tokens`, encoded. Raises struct.error for a token id that is not from 0 to MAX_TOKEN_ID."""
    return TokenBytes(struct.pack(f"<{len(tokens)}I", *tokens))


def encode_blocks(tokens: Sequence[TokenId], block_size: int) -> list[TokenBytes]:
    """The full blocks of `tokens`, encoded; what is left over at the end is dropped.

    Raises struct.error for a token id that is not from 0 to MAX_TOKEN_ID.
    """
    full = len(tokens) // block_size * block_size
    data = struct.pack(f"<{full}I", *tokens[:full])
    width = block_size * TOKEN_BYTES
    return [TokenBytes(data[at : at + width]) for at in range(0, len(data), width)]
