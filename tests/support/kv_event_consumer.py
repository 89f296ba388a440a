"""A consumer of KV events that knows nothing of ours: vLLM's structs and protocol, and a set of block hashes."""

from __future__ import annotations

import time
from typing import Any

import msgspec
import zmq

END = (-1).to_bytes(8, "big", signed=True)


class KVCacheEvent(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    """As in vLLM's kv_events.py on main in September 2026 (f4eccdadef), 0.28.0 and later."""


class BlockStored(KVCacheEvent):
    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None


class BlockRemoved(KVCacheEvent):
    block_hashes: list[bytes | int]
    medium: str | None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class AllBlocksCleared(KVCacheEvent):
    pass


class KVEventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


_decoder = msgspec.msgpack.Decoder(KVEventBatch)


class BlockSet:
    """What a consumer believes to be cached: hash → (parent, token ids, extra keys)."""

    def __init__(self) -> None:
        self.blocks: dict[bytes | int, tuple[bytes | int | None, list[int], tuple[Any, ...] | None]] = {}

    @property
    def hashes(self) -> set[bytes | int]:
        return set(self.blocks)

    def apply(self, payload: bytes) -> None:
        batch = _decoder.decode(payload)
        assert batch.ts > 0
        assert batch.data_parallel_rank == 0
        for event in batch.events:
            match event:
                case BlockStored():
                    self._store(event)
                case BlockRemoved():
                    assert (event.medium, event.group_idx) == ("GPU", 0)
                    for block_hash in event.block_hashes:
                        # Exact: nothing is removed that was not stored, nor a parent before its children.
                        del self.blocks[block_hash]
                case AllBlocksCleared():
                    self.blocks.clear()

    def _store(self, event: BlockStored) -> None:
        size = event.block_size
        assert len(event.token_ids) == size * len(event.block_hashes)
        assert event.extra_keys is not None
        parent = event.parent_block_hash
        for i, block_hash in enumerate(event.block_hashes):
            assert block_hash not in self.blocks, "stored twice"
            assert parent is None or parent in self.blocks, "the parent is not there"
            self.blocks[block_hash] = (parent, event.token_ids[i * size : (i + 1) * size], event.extra_keys[i])
            parent = block_hash


class Consumer:
    """Follows a publisher; asks for a replay where it misses numbers."""

    def __init__(self, endpoint: str, replay_endpoint: str | None = None, *, topic: str = "") -> None:
        self.cached = BlockSet()
        self.next = 0
        self.gaps: list[tuple[int, int]] = []
        """(expected, received) sequence numbers."""
        self.topics: set[bytes] = set()
        self._context = zmq.Context()
        self._sub = self._context.socket(zmq.SUB)
        self._sub.subscribe(topic)
        self._sub.connect(endpoint)
        self._replay = self._context.socket(zmq.DEALER)
        self._can_replay = replay_endpoint is not None
        if replay_endpoint is not None:
            self._replay.connect(replay_endpoint)

    def __enter__(self) -> Consumer:
        return self

    def __exit__(self, *_: object) -> None:
        for socket in (self._sub, self._replay):
            socket.close(linger=0)
        self._context.term()

    def follow(self, until: int, *, seconds: float = 60.0) -> None:
        """Takes in everything up to sequence number `until`."""
        deadline = time.monotonic() + seconds
        while self.next <= until:
            assert time.monotonic() < deadline, f"number {self.next} does not come"
            if not self.poll(200) and self._can_replay:
                self.catch_up()

    def poll(self, milliseconds: int = 20) -> bool:
        """Takes in the next batch, where one comes."""
        if not self._sub.poll(milliseconds):
            return False
        self._receive()
        return True

    def _receive(self) -> None:
        topic, number, payload = self._sub.recv_multipart()
        self.topics.add(topic)
        sequence = int.from_bytes(number, "big")
        if sequence > self.next:
            self.gaps.append((self.next, sequence))
            if self._can_replay:
                self.catch_up()
        self._take(sequence, payload)

    def catch_up(self) -> None:
        for sequence, payload in self.replay(self.next):
            self._take(sequence, payload)

    def replay(self, start: int) -> list[tuple[int, bytes]]:
        self._replay.send_multipart((b"", start.to_bytes(8, "big")))
        answer: list[tuple[int, bytes]] = []
        while True:
            assert self._replay.poll(30_000), "the replay does not end"
            empty, number, payload = self._replay.recv_multipart()
            assert empty == b""
            if number == END:
                assert payload == b""
                return answer
            answer.append((int.from_bytes(number, "big"), payload))

    def _take(self, sequence: int, payload: bytes) -> None:
        if sequence >= self.next:
            self.cached.apply(payload)
            self.next = sequence + 1
