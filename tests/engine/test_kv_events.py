"""What events say, and how they are written: against the index itself, and against vLLM's schema."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reprise_engine.errors import ConfigError
from reprise_engine.kv.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    CachedBlocks,
    KVEvent,
)
from reprise_engine.kv.hash_algorithms import block_hasher
from reprise_engine.kv.hashing import Adapter, encode_tokens
from reprise_engine.kv.manager import KVCacheManager
from reprise_engine.kv_events.config import KVEventsConfig
from reprise_engine.kv_events.replay import PublishedBatch, ReplayLog
from reprise_engine.kv_events.wire import WireFormat, int_hashes
from reprise_engine.request import RequestId
from reprise_engine.step import BlockHash
from tests.engine.paged_fake import World
from tests.engine.test_soak import Soak
from tests.support.kv_event_consumer import BlockSet

HASHER = block_hasher("sha256_cbor", {})
SYSTEM = [1, 2, 3, 4, 5, 6, 7, 8]


def named(kv: KVCacheManager) -> set[BlockHash]:
    return {node.block_hash for node in kv.index if node.block_hash is not None}


def names(tokens: Sequence[int], *, size: int = 4) -> tuple[BlockHash, ...]:
    chain: list[BlockHash] = []
    for start in range(0, len(tokens) // size * size, size):
        chain.append(HASHER(chain[-1] if chain else None, encode_tokens(tokens[start : start + size]), ()))
    return tuple(chain)


def test_the_events_of_a_small_cache() -> None:
    world = World(num_blocks=6, block_size=4, record_kv_events=True, hasher=HASHER)
    kv = world.scheduler.kv
    assert kv.take_events() == []

    # Two full blocks of one prompt: one event. The unfinished third has no name, and makes none.
    world.run([*SYSTEM, 9, 10])
    stored = BlockStored(
        hashes=names(SYSTEM), parent=None, tokens=encode_tokens(SYSTEM), block_size=4, extra_keys=((), ())
    )
    assert kv.take_events() == [stored]
    assert kv.take_events() == []

    # A hit is no event; what goes on from it names its parent.
    world.run([*SYSTEM, 11, 12, 13, 14, 15])
    [event] = kv.take_events()
    assert event == BlockStored(
        hashes=names([*SYSTEM, 11, 12, 13, 14])[2:],
        parent=names(SYSTEM)[-1],
        tokens=encode_tokens([11, 12, 13, 14]),
        block_size=4,
        extra_keys=((),),
    )

    # Eviction: leaves first; of tails nothing is told. Then what took their place.
    world.run([21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31, 32, 33, 34, 35, 36, 37])
    removed, stored_event = kv.take_events()
    assert removed == BlockRemoved(hashes=tuple(reversed(names([*SYSTEM, 11, 12, 13, 14])))[:2])
    assert isinstance(stored_event, BlockStored)
    assert len(stored_event.hashes) == 4
    assert {names(SYSTEM)[0], *stored_event.hashes} == named(kv)

    # A reset that clears all is one event.
    assert world.scheduler.reset_prefix_cache()[0]
    assert kv.take_events() == [AllBlocksCleared()]


def test_a_reset_under_load_tells_what_went_and_nothing_else() -> None:
    world = World(num_blocks=8, block_size=4, record_kv_events=True, hasher=HASHER)
    kv = world.scheduler.kv
    world.run([31, 32, 33, 34, 35])
    world.add(SYSTEM, max_tokens=8)
    world.step()
    kv.take_events()
    assert not world.scheduler.reset_prefix_cache()[0]
    assert kv.take_events() == [BlockRemoved(hashes=names([31, 32, 33, 34]))]
    assert named(kv) == set(names(SYSTEM))
    world.drain()


def test_nothing_is_recorded_unless_asked_for() -> None:
    world = World()
    world.run(SYSTEM)
    world.scheduler.reset_prefix_cache()
    assert world.scheduler.kv.take_events() == []
    with pytest.raises(AssertionError):
        world.scheduler.kv.snapshot_events()


class Followed(Soak):
    """Its events go through the wire format to a consumer, which must know the index after every step."""

    def __init__(self, seed: int, *, buffer_steps: int) -> None:
        super().__init__(seed, record_kv_events=True, hasher=HASHER)
        self.wire = WireFormat(int_hashes=False)
        self.consumer = BlockSet()
        self.log = ReplayLog(buffer_steps)
        self.batches = 0

    def act(self) -> None:
        super().act()
        self.follow()

    def collect(self) -> None:
        super().collect()
        self.follow()

    def follow(self) -> None:
        kv = self.world.scheduler.kv
        if events := kv.take_events():
            self.consumer.apply(self.wire.encode(events, timestamp=1.0))
            self.log.append(PublishedBatch(self.batches, 1.0, events))
            self.batches += 1
        assert self.consumer.hashes == named(kv)

    def late(self, start: int = 0) -> BlockSet:
        consumer = BlockSet()
        for batch in self.log.since(start):
            consumer.apply(self.wire.encode(batch.events, timestamp=batch.timestamp))
        return consumer


@pytest.mark.parametrize("seed", range(4))
def test_a_consumer_has_exactly_the_index_after_every_step(seed: int) -> None:
    soak = Followed(seed, buffer_steps=20)
    for _ in range(5):
        soak.live(100)
        # Late joiners come to the same, and so does one who is given a snapshot.
        assert soak.late().blocks == soak.consumer.blocks
        soak.world.run([7] * (soak.room - 1))
        soak.follow()
        snapshot = BlockSet()
        snapshot.apply(soak.wire.encode(soak.world.scheduler.kv.snapshot_events(), timestamp=1.0))
        assert snapshot.blocks == soak.consumer.blocks != {}
    assert soak.batches > 20
    assert soak.world.scheduler.stats().num_evicted_blocks > 0
    # The names can be made anew from what the events say.
    for block_hash, (parent, tokens, extra) in soak.consumer.blocks.items():
        assert isinstance(block_hash, bytes)
        assert parent is None or isinstance(parent, bytes)
        assert block_hash == HASHER(None if parent is None else BlockHash(parent), encode_tokens(tokens), extra or ())


@given(
    chains=st.lists(st.tuples(st.integers(0, 5), st.integers(1, 4)), max_size=20),
    capacity=st.integers(0, 8),
    start=st.integers(0, 25),
)
def test_a_replay_from_any_number_leads_to_the_same_set(
    chains: list[tuple[int, int]], capacity: int, start: int
) -> None:
    """A consumer has everything before `start`. Each step stores a chain, or removes its end where it is there."""
    log, whole, early = ReplayLog(capacity), CachedBlocks(), CachedBlocks()
    for number, (first, length) in enumerate(chains):
        hashes = names([first] * 4 * length)
        known = {
            event_hash for event in whole.events() if isinstance(event, BlockStored) for event_hash in event.hashes
        }
        new = [one for one in hashes if one not in known]
        events: list[KVEvent] = [BlockRemoved(hashes=(hashes[-1],))]
        if new:
            at = len(hashes) - len(new)
            tokens, keys = encode_tokens([first] * 4 * len(new)), ((),) * len(new)
            parent = hashes[at - 1] if at else None
            events = [BlockStored(hashes=tuple(new), parent=parent, tokens=tokens, block_size=4, extra_keys=keys)]
        log.append(PublishedBatch(number, 1.0, events))
        whole.apply(events)
        if number < start:
            early.apply(events)
    for batch in log.since(start):
        early.apply(batch.events)
    assert {(e.hashes, e.parent) for e in early.events() if isinstance(e, BlockStored)} == {
        (e.hashes, e.parent) for e in whole.events() if isinstance(e, BlockStored)
    }


# --- the bytes

STORED = BlockStored(
    hashes=(BlockHash(bytes(24) + bytes.fromhex("f000000000000001")), BlockHash(bytes(31) + b"\x07")),
    parent=BlockHash(bytes(24) + bytes.fromhex("0123456789abcdef")),
    tokens=encode_tokens([1, 200, 70000, 4294967295]),
    block_size=2,
    extra_keys=((Adapter("lora"), "salt"), (Adapter("lora"),)),
)
STORED_MAP = (
    "8a"
    "a474797065ab426c6f636b53746f726564"  # type: BlockStored
    "ac626c6f636b5f68617368657392cff00000000000000107"  # block_hashes: [0xf000000000000001, 7]
    "b1706172656e745f626c6f636b5f68617368cf0123456789abcdef"  # parent_block_hash
    "a9746f6b656e5f6964739401ccc8ce00011170ceffffffff"  # token_ids
    "aa626c6f636b5f73697a6502"  # block_size
    "a76c6f72615f6964c0"  # lora_id: nil
    "a66d656469756da3475055"  # medium: GPU
    "a96c6f72615f6e616d65a46c6f7261"  # lora_name: lora
    "aa65787472615f6b6579739292a46c6f7261a473616c7491a46c6f7261"  # extra_keys
    "a967726f75705f69647800"  # group_idx: 0
    "b26b765f63616368655f737065635f6b696e64ae66756c6c5f617474656e74696f6e"  # kv_cache_spec_kind: full_attention
)
REMOVED_MAP = (
    "84a474797065ac426c6f636b52656d6f766564ac626c6f636b5f6861736865739107a66d656469756da3475055a967726f75705f69647800"
)
CLEARED_MAP = "81a474797065b0416c6c426c6f636b73436c6561726564"


def batch(*events: str) -> bytes:
    """[1.5, [events], 0]"""
    return bytes.fromhex(f"93cb3ff8000000000000{0x90 + len(events):02x}{''.join(events)}00")


def test_each_event_is_written_byte_for_byte_as_vllm_writes_it() -> None:
    wire = WireFormat()
    removed = BlockRemoved(hashes=(BlockHash(bytes(31) + b"\x07"),))
    stored = STORED_MAP.replace("8a", "8b", 1)  # eleven entries: type and ten fields
    assert wire.encode([STORED], timestamp=1.5) == batch(stored)
    assert wire.encode([removed], timestamp=1.5) == batch(REMOVED_MAP)
    assert wire.encode([AllBlocksCleared(), removed], timestamp=1.5) == batch(CLEARED_MAP, REMOVED_MAP)


def test_vllms_structs_encode_to_the_same_bytes() -> None:
    """An independent encoder: the structs of vLLM's source, filled as its block pool fills them."""
    from tests.support import kv_event_consumer as vllm

    theirs = vllm.KVEventBatch(
        ts=1.5,
        events=[
            vllm.BlockStored(
                block_hashes=[0xF000000000000001, 7],
                parent_block_hash=0x0123456789ABCDEF,
                token_ids=[1, 200, 70000, 4294967295],
                block_size=2,
                lora_id=None,
                medium="GPU",
                lora_name="lora",
                extra_keys=[("lora", "salt"), ("lora",)],
                group_idx=0,
                kv_cache_spec_kind="full_attention",
            ),
            vllm.BlockRemoved(block_hashes=[7], medium="GPU", group_idx=0),
            vllm.AllBlocksCleared(),
        ],
        data_parallel_rank=0,
    )
    ours: list[KVEvent] = [STORED, BlockRemoved(hashes=(BlockHash(bytes(31) + b"\x07"),)), AllBlocksCleared()]
    assert WireFormat().encode(ours, timestamp=1.5) == msgspec.msgpack.encode(theirs)


def test_without_salt_and_adapter_there_are_nulls_one_a_block() -> None:
    event = BlockStored(
        hashes=STORED.hashes, parent=None, tokens=STORED.tokens, block_size=2, extra_keys=((), ()), medium="CPU"
    )
    _, [decoded], _ = msgspec.msgpack.decode(WireFormat().encode([event], timestamp=1.5))
    assert (decoded["extra_keys"], decoded["lora_name"], decoded["medium"]) == ([None, None], None, "CPU")
    assert decoded["parent_block_hash"] is None


def test_older_consumers_get_arrays_in_vllms_old_order() -> None:
    wire = WireFormat("array")
    events: list[KVEvent] = [STORED, BlockRemoved(hashes=STORED.hashes[1:]), AllBlocksCleared()]
    timestamp, [stored, removed, cleared], rank = msgspec.msgpack.decode(wire.encode(events, timestamp=1.5))
    assert (timestamp, rank) == (1.5, 0)
    assert stored[:8] == [
        *("BlockStored", [0xF000000000000001, 7], 0x0123456789ABCDEF, [1, 200, 70000, 4294967295], 2),
        *(None, "GPU", "lora"),
    ]
    assert stored[8:] == [[["lora", "salt"], ["lora"]], 0, "full_attention"]
    assert removed == ["BlockRemoved", [7], "GPU", 0]
    assert cleared == ["AllBlocksCleared"]


def test_hashes_may_be_whole_and_a_salt_may_be_garbage() -> None:
    event = BlockStored(
        hashes=STORED.hashes[:1], parent=None, tokens=STORED.tokens, block_size=4, extra_keys=(("\ud800",),)
    )
    _, [decoded], _ = msgspec.msgpack.decode(WireFormat(int_hashes=False).encode([event], timestamp=1.5))
    assert decoded["block_hashes"] == [STORED.hashes[0]]
    assert decoded["extra_keys"] == [[b"\xed\xa0\x80"]]


def test_vllms_switch_of_the_hashes() -> None:
    assert int_hashes({})
    assert not int_hashes({"VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES": "0"})
    with pytest.raises(ConfigError, match="VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES is 'no'; it must be 0 or 1"):
        int_hashes({"VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES": "no"})


# --- the configuration


def test_the_defaults_are_vllms_and_off() -> None:
    config = KVEventsConfig.of({})
    assert not config.active
    assert (config.endpoint, config.replay_endpoint, config.topic) == ("tcp://*:5557", None, "")
    assert (config.buffer_steps, config.hwm, config.max_queue_size) == (10_000, 100_000, 100_000)
    assert KVEventsConfig.of({"enable_kv_cache_events": True}).active
    assert not KVEventsConfig.of({"enable_kv_cache_events": True, "publisher": "null"}).active
    assert not KVEventsConfig.of({"publisher": "zmq"}).active


@pytest.mark.parametrize(
    ("endpoint", "binds"),
    [
        *[("tcp://*:5557", True), ("tcp://0.0.0.0:5557", True), ("tcp://[::]:5557", True), ("ipc:///run/kv", True)],
        *[("tcp://router:5557", False), ("tcp://10.0.0.1:5557", False)],
    ],
)
def test_it_binds_every_address_and_connects_to_one(endpoint: str, binds: bool) -> None:
    assert KVEventsConfig(endpoint=endpoint).binds is binds


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"buffer": 5}, "unknown key 'buffer'; there are enable_kv_cache_events, publisher, endpoint"),
        ({"enable_kv_cache_events": "yes"}, "enable_kv_cache_events is 'yes'; it must be true or false"),
        ({"endpoint": "5557"}, "endpoint is '5557'; it must be tcp://ADDRESS:PORT"),
        ({"endpoint": "tcp://*:70000"}, "endpoint is 'tcp://*:70000'"),
        ({"endpoint": "inproc://kv"}, "endpoint is 'inproc://kv'"),
        ({"endpoint": None}, "endpoint is None"),
        ({"replay_endpoint": "tcp://*"}, "replay_endpoint is 'tcp://*'"),
        ({"replay_endpoint": "tcp://*:5557"}, "must be another one than endpoint"),
        ({"hwm": 0}, "hwm is 0; it must be a whole number of at least 1"),
        ({"max_queue_size": True}, "max_queue_size is True"),
        ({"buffer_steps": -1}, "buffer_steps is -1; it must be a whole number of at least 0"),
        ({"topic": 5}, "topic is 5; it must be a text"),
        ({"encoding": "json"}, 'encoding is \'json\'; it must be "map" or "array"'),
    ],
)
def test_a_key_or_value_that_cannot_be_honoured_is_refused_by_name(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        KVEventsConfig.of(values)
    assert words in str(refused.value)
    assert str(refused.value).startswith("--kv-events-config")


# --- the core


class Sink:
    """Takes batches; `owes_snapshot` and `wants_snapshot` as the test says."""

    def __init__(self) -> None:
        self.batches: list[list[KVEvent]] = []
        self.owes_snapshot = self.wants_snapshot = False
        self.published = 3
        self.dropped = 2
        self.closed = False

    def publish(self, events: Sequence[KVEvent]) -> None:
        self.batches.append(list(events))

    def close(self) -> None:
        self.closed = True


def test_the_core_publishes_after_each_step_that_changed_something() -> None:
    sink = Sink()
    world = World(num_blocks=8, block_size=4, kv_events=sink)
    core = world.core
    world.add(SYSTEM, max_tokens=3)
    while core.has_work():
        core.step()
    assert [type(event) for [event] in sink.batches] == [BlockStored]
    assert (core.stats().num_kv_events_published, core.stats().num_kv_events_dropped) == (3, 2)

    # Something was lost: the next batch says all, and leaves out nothing that happened since.
    sink.wants_snapshot = True
    world.add([41, 42, 43, 44, 45])
    core.step()
    known = CachedBlocks()
    known.apply(sink.batches[-1])
    assert isinstance(sink.batches[-1][0], AllBlocksCleared)
    assert len(known) == len(named(world.scheduler.kv)) == 3
    sink.wants_snapshot = False
    core.reset_prefix_cache()
    assert sink.batches[-1] == [AllBlocksCleared()]
    core.abort([RequestId("r0")])
    core.close()
    assert sink.closed
    assert len(sink.batches) == 3


def test_what_was_lost_last_is_told_though_no_request_comes() -> None:
    sink = Sink()
    world = World(num_blocks=8, block_size=4, kv_events=sink)
    core = world.core
    world.add(SYSTEM)
    core.step()
    assert not core.has_background_work()
    sink.batches.clear()
    sink.owes_snapshot = True  # the queue is full: that batch found no room in it
    assert core.has_background_work(), "the engine would wait for a request"
    begun = time.monotonic()
    assert core.step() == ()
    assert not sink.batches
    assert time.monotonic() - begun > 0.005, "it would go round and round"
    sink.wants_snapshot = True
    core.step()
    known = CachedBlocks()
    known.apply(sink.batches[0])
    assert isinstance(sink.batches[0][0], AllBlocksCleared)
    assert len(known) == len(named(world.scheduler.kv)) > 0
    sink.owes_snapshot = sink.wants_snapshot = False
    core.step()
    assert not core.has_background_work()
    assert len(sink.batches) == 1
