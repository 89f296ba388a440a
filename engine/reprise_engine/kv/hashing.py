"""The identity of a block of tokens: a hash chain, equal in every process, on every machine, after every restart.

By default of sha256, as here; the others are in `hash_algorithms.py`.

    hash(block) = sha256( hash(parent) | number of tokens | tokens, 4 bytes each | extra keys, each with its length )

Everything that changes a block's KV is covered: the parent's hash stands for all tokens before it, the extra keys for
the adapter (in every block) and the salt (in the first one only: the rest inherit it through their parents). Inside one
engine a match never rests on this hash: the prefix index compares the tokens themselves. The hash names the block to
the outside.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NewType, Protocol

from reprise_engine.request import TokenId
from reprise_engine.step import BlockHash

TokenBytes = NewType("TokenBytes", bytes)
"""The tokens of a block, or of its beginning, 4 bytes each, little-endian: exact, comparable, hashed by Python with a
secret seed."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """The name of the adapter (LoRA) that computed the KV. A type of its own: no salt equals it, whatever its text."""

    name: str


ExtraKeys = tuple[Adapter | str, ...]
"""What besides its tokens changes a prefix's KV or who may read it, in vLLM's order: the Adapter, the salt; or ()."""

TOKEN_BYTES = 4
MAX_TOKEN_ID = 2 ** (8 * TOKEN_BYTES) - 1
_COUNT = struct.Struct("<I")
_IS_ADAPTER = 1 << 31
"""In the length of a key; no text is that long."""
_ROOT = hashlib.sha256(b"reprise kv block chain, version 1").digest()


class BlockHasher(Protocol):
    """Names a block. `extra_keys` are the block's own: see `keys_of_block`."""

    def __call__(self, parent: BlockHash | None, tokens: TokenBytes, extra_keys: ExtraKeys) -> BlockHash: ...


def extra_keys(*, adapter: str | None = None, cache_salt: str | None = None) -> ExtraKeys:
    """Of a whole sequence."""
    keys: ExtraKeys = () if adapter is None else (Adapter(adapter),)
    return keys if cache_salt is None else (*keys, cache_salt)


def keys_of_block(keys: ExtraKeys, *, first: bool) -> ExtraKeys:
    """Of a sequence's extra keys those that go into the hash of one block: as in vLLM, the salt only into the first."""
    return keys if first or not keys else tuple(key for key in keys if isinstance(key, Adapter))


def sha256_block_hash(parent: BlockHash | None, tokens: TokenBytes, extra_keys: ExtraKeys) -> BlockHash:
    """The 32-byte hash of a block below `parent` (None: the first block)."""
    return BlockHash(hashlib.sha256(chain_input(_ROOT if parent is None else parent, tokens, extra_keys)).digest())


def chain_input(parent: bytes, tokens: TokenBytes, extra_keys: ExtraKeys) -> bytes:
    """What is hashed: every field with its length, so that no two blocks have the same."""
    data = parent + _COUNT.pack(len(tokens) // TOKEN_BYTES) + tokens
    for key in extra_keys:
        text, mark = (key.name, _IS_ADAPTER) if isinstance(key, Adapter) else (key, 0)
        # surrogatepass: a salt out of JSON may hold lone surrogates, and must not stop the engine.
        encoded = text.encode("utf-8", "surrogatepass")
        data += _COUNT.pack(len(encoded) | mark) + encoded
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
