"""Events as vLLM writes them (`vllm/distributed/kv_events.py`): MessagePack, a batch a step.

    batch            [seconds since 1970, [event …], data-parallel rank]
    event, "map"     {"type": "BlockStored", "block_hashes": […], …}    vLLM since June 2026 (its pull request 42892)
    event, "array"   ["BlockStored", […], …]                            before

Fields at their defaults are left out, at the end of an array as well. Block hashes are whole numbers, the low 64 bits,
or all the bytes where VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES is 0. Of vLLM's fields we leave out those that say nothing
here: `kv_cache_spec_sliding_window`, `locality`, `ownership`, `session_id`.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping, Sequence

import msgspec

from reprise_engine.errors import ConfigError
from reprise_engine.kv.events import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent
from reprise_engine.kv.hash_algorithms import external_keys
from reprise_engine.kv.hashing import TOKEN_BYTES
from reprise_engine.kv_events.config import Encoding
from reprise_engine.step import BlockHash

INT_HASHES_VARIABLE = "VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES"

_LOW_64_BITS = 8
_GROUP = 0
"""There is one group of layers with one kind of cache."""
_RANK = 0

ExternalHash = int | bytes


class _Stored(msgspec.Struct, tag="BlockStored", omit_defaults=True, gc=False):
    block_hashes: list[ExternalHash]
    parent_block_hash: ExternalHash | None
    token_ids: tuple[int, ...]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[str | bytes, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None


class _Removed(msgspec.Struct, tag="BlockRemoved", omit_defaults=True, gc=False):
    block_hashes: list[ExternalHash]
    medium: str | None
    group_idx: int | None = None


class _Cleared(msgspec.Struct, tag="AllBlocksCleared", gc=False):
    pass


class _StoredArray(_Stored, tag="BlockStored", array_like=True, omit_defaults=True, gc=False):
    pass


class _RemovedArray(_Removed, tag="BlockRemoved", array_like=True, omit_defaults=True, gc=False):
    pass


class _ClearedArray(_Cleared, tag="AllBlocksCleared", array_like=True, gc=False):
    pass


class _Batch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    ts: float
    events: list[_Stored | _Removed | _Cleared]
    data_parallel_rank: int | None = None


class WireFormat:
    """Encodes batches. `int_hashes`: hashes as whole numbers."""

    def __init__(self, encoding: Encoding = "map", *, int_hashes: bool = True) -> None:
        array = encoding == "array"
        self._stored = _StoredArray if array else _Stored
        self._removed = _RemovedArray if array else _Removed
        self._cleared = _ClearedArray if array else _Cleared
        self._int_hashes = int_hashes
        self._encoder = msgspec.msgpack.Encoder()

    def encode(self, events: Sequence[KVEvent], *, timestamp: float) -> bytes:
        """One batch. `timestamp` in seconds since 1970."""
        wire = [self._wire(event) for event in events]
        return self._encoder.encode(_Batch(ts=timestamp, events=wire, data_parallel_rank=_RANK))

    def _wire(self, event: KVEvent) -> _Stored | _Removed | _Cleared:
        match event:
            case BlockStored():
                return self._stored(
                    block_hashes=[self._hash(one) for one in event.hashes],
                    parent_block_hash=None if event.parent is None else self._hash(event.parent),
                    token_ids=struct.unpack(f"<{len(event.tokens) // TOKEN_BYTES}I", event.tokens),
                    block_size=event.block_size,
                    lora_id=None,
                    medium=event.medium,
                    lora_name=event.adapter,
                    extra_keys=[external_keys(keys) for keys in event.extra_keys],
                    group_idx=_GROUP,
                    kv_cache_spec_kind="full_attention",
                )
            case BlockRemoved():
                hashes = [self._hash(one) for one in event.hashes]
                return self._removed(block_hashes=hashes, medium=event.medium, group_idx=_GROUP)
            case AllBlocksCleared():
                return self._cleared()

    def _hash(self, block_hash: BlockHash) -> ExternalHash:
        return int.from_bytes(block_hash[-_LOW_64_BITS:], "big") if self._int_hashes else block_hash


def int_hashes(environment: Mapping[str, str] = os.environ) -> bool:
    """vLLM's switch. Raises ConfigError where it is neither 0 nor 1."""
    value = environment.get(INT_HASHES_VARIABLE, "1").strip()
    if value not in ("0", "1"):
        raise ConfigError(f"{INT_HASHES_VARIABLE} is {value!r}; it must be 0 or 1.")
    return value == "1"
