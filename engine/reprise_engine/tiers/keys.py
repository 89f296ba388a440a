"""The name of a block's KV below the device's pool, shared by all tiers."""

from __future__ import annotations

from typing import NewType

BlockKey = NewType("BlockKey", bytes)
"""32 bytes: the sha256 chain hash of the block (`kv/hashing.sha256_block_hash`), whichever algorithm names blocks to
the outside."""

BLOCK_KEY_BYTES = 32
