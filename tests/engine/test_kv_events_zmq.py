"""Events over real sockets: consumers that follow, come late, miss something, or do not read."""

from __future__ import annotations

import logging
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import zmq

from reprise_engine.errors import ConfigError
from reprise_engine.kv.events import AllBlocksCleared, BlockStored, KVEvent
from reprise_engine.kv.hashing import encode_tokens
from reprise_engine.kv_events.config import KVEventsConfig
from reprise_engine.kv_events.publisher import ZmqPublisher, open_publisher
from reprise_engine.kv_events.wire import WireFormat
from reprise_engine.step import BlockHash
from tests.engine.kv_event_sockets import config, consuming, low_64_bits, publishing
from tests.engine.test_server_lifecycle import free_port
from tests.engine.test_soak import Soak


def stored(number: int, *, blocks: int = 1) -> list[KVEvent]:
    """A chain of `blocks` blocks of 16 tokens that no other number has."""
    hashes = tuple(BlockHash((number << 20 | i).to_bytes(32, "big")) for i in range(1, blocks + 1))
    tokens = encode_tokens([70_000] * 16 * blocks)
    return [BlockStored(hashes=hashes, parent=None, tokens=tokens, block_size=16, extra_keys=((),) * blocks)]


class Published(Soak):
    """A soak whose events are published."""

    def __init__(self, seed: int, publisher: ZmqPublisher) -> None:
        super().__init__(seed, record_kv_events=True)
        self.publisher = publisher
        self.batches = 0

    def act(self) -> None:
        super().act()
        self.publish()

    def collect(self) -> None:
        super().collect()
        self.publish()

    def publish(self) -> None:
        if events := self.world.scheduler.kv.take_events():
            self.publisher.publish(events)
            self.batches += 1

    @property
    def hashes(self) -> set[int]:
        index = self.world.scheduler.kv.index
        return {low_64_bits(node.block_hash) for node in index if node.block_hash is not None}


@pytest.mark.parametrize("seed", range(2))
def test_consumers_rebuild_exactly_the_cached_blocks(seed: int, tmp_path: Path) -> None:
    settings = config(tmp_path, buffer_steps=50, topic="kv@10.0.0.1:8000@m")
    with publishing(settings) as publisher, consuming(settings) as consumer:
        soak = Published(seed, publisher)
        for _ in range(6):
            soak.live(60)
            consumer.follow(soak.batches - 1)
            assert consumer.cached.hashes == soak.hashes
            # One that comes only now, long after the buffer has forgotten the beginning.
            with consuming(settings) as late:
                late.catch_up()
                assert late.next == soak.batches
                assert late.cached.blocks == consumer.cached.blocks
        assert soak.batches > 100
        assert soak.world.scheduler.stats().num_evicted_blocks > 0
        assert consumer.topics == {b"kv@10.0.0.1:8000@m"}
        assert publisher.dropped == 0


def test_the_frames_of_a_replay_are_vllms(tmp_path: Path) -> None:
    settings = config(tmp_path)
    with publishing(settings) as publisher, zmq.Context() as context, context.socket(zmq.DEALER) as client:
        for number in range(3):
            publisher.publish(stored(number))
        client.connect(str(settings.replay_endpoint))
        # Garbage is ignored, and ends nothing.
        for garbage in ([b""], [b"x", b"y", b"z", b"w"], [b"", b"short"], [b"", b"\xff" * 9]):
            client.send_multipart(garbage)
        client.send_multipart((b"", (1).to_bytes(8, "big")))
        frames = []
        for _ in range(3):
            assert client.poll(30_000)
            frames.append(client.recv_multipart())
        assert [frame[:2] for frame in frames] == [
            [b"", bytes(7) + b"\x01"],
            [b"", bytes(7) + b"\x02"],
            [b"", b"\xff" * 8],
        ]
        assert frames[2][2] == b""
        assert frames[1][2] == WireFormat().encode(stored(2), timestamp=_timestamp(frames[1][2]))
        assert not client.poll(0)


def _timestamp(payload: bytes) -> float:
    import msgspec

    timestamp: float = msgspec.msgpack.decode(payload)[0]
    assert abs(timestamp - time.time()) < 600
    return timestamp


def wants(publisher: ZmqPublisher) -> bool:
    """A call: mypy would take the property for what it was."""
    return publisher.wants_snapshot


def test_a_full_queue_drops_shows_a_gap_and_asks_for_a_snapshot(tmp_path: Path) -> None:
    settings = config(tmp_path, max_queue_size=2, replay_endpoint=None)
    publisher = ZmqPublisher(settings, WireFormat())  # its thread does not run yet: nothing leaves the queue
    try:
        with consuming(settings) as consumer:
            for number in range(4):
                assert not wants(publisher)
                publisher.publish(stored(number, blocks=2))
            assert (publisher.published, publisher.dropped) == (2, 2)
            assert not wants(publisher), "there is no room for one yet"
            publisher.start()
            _until(lambda: wants(publisher))
            publisher.publish(stored(8))  # of no use to anybody who missed the others
            assert wants(publisher)
            assert (publisher.published, publisher.dropped) == (2, 3)
            snapshot = [AllBlocksCleared(), *stored(9)]
            publisher.publish(snapshot)
            assert not wants(publisher)
            number = last = 5
            while not consumer.cached.blocks.keys() & _hashes(stored(9)):  # its subscription may still be under way
                number += 1
                before = publisher.published
                publisher.publish(snapshot)
                if publisher.published > before:  # else the queue was full again, and the number is lost
                    last = number
                consumer.poll()
            consumer.follow(last)
            assert consumer.cached.hashes == _hashes(stored(9))
            missed = {number for expected, received in consumer.gaps for number in range(expected, received)}
            assert {2, 3, 4} <= missed
    finally:
        publisher.close()


def _hashes(events: list[KVEvent]) -> set[int]:
    return {low_64_bits(one) for event in events if isinstance(event, BlockStored) for one in event.hashes}


def test_a_gap_shows_in_the_numbers_and_a_replay_fills_it(tmp_path: Path) -> None:
    settings = config(tmp_path, buffer_steps=2)
    with publishing(settings) as publisher:
        expected = set()
        for number in range(5):
            publisher.publish(stored(number))
            expected |= _hashes(stored(number))
        with consuming(settings) as early:  # once it has the last one from the replay, all have been sent

            def has_all() -> bool:
                early.catch_up()
                return early.next == 5

            _until(has_all)
        with consuming(settings) as consumer:
            number = 5
            while not consumer.next:
                publisher.publish(stored(number))
                expected |= _hashes(stored(number))
                number += 1
                consumer.poll()
            [(missing, received)] = consumer.gaps
            assert missing == 0
            assert received >= 5
            consumer.follow(number - 1)
            assert consumer.cached.hashes == expected


def test_a_consumer_that_does_not_read_stalls_nobody_and_costs_bounded_memory(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = config(tmp_path, hwm=20, replay_endpoint=None)
    with publishing(settings) as publisher, consuming(settings) as reader, zmq.Context() as context:
        sleeper = context.socket(zmq.SUB)
        sleeper.setsockopt(zmq.RCVHWM, 1)
        sleeper.setsockopt(zmq.LINGER, 0)
        sleeper.subscribe("")
        sleeper.connect(settings.endpoint)
        sent = 0
        while not (sleeper.poll(20) and reader.next):  # both are subscribed
            publisher.publish(stored(sent))
            sent += 1
            reader.poll()
        reader.follow(sent - 1)
        missed_before = len(reader.gaps)
        before = psutil.Process().memory_info().rss
        with caplog.at_level(logging.WARNING):
            for _ in range(1500):  # 80 MB
                publisher.publish(stored(sent, blocks=700))
                reader.follow(sent)
                sent += 1
                reader.cached.blocks.clear()
            assert publisher.dropped > 0
        assert len(reader.gaps) == missed_before, "the consumer that reads misses nothing"
        assert psutil.Process().memory_info().rss - before < 40_000_000
        warnings = [record.getMessage() for record in caplog.records if "KV events were dropped" in record.getMessage()]
        assert len(warnings) == 1, "told once a minute"
        assert "because a consumer does not read" in warnings[0]
        sleeper.close()


def test_one_connection_may_ask_for_replay_after_replay(tmp_path: Path) -> None:
    settings = config(tmp_path, buffer_steps=5)
    with publishing(settings) as publisher, consuming(settings) as consumer:
        for sent in range(20):
            publisher.publish(stored(sent))
        consumer.follow(19)
        for start in (0, 17, 0, 19, 0, 16, 0):
            answer = consumer.replay(start)
            assert [number for number, _ in answer] == list(range(max(start, 14), 20))


def test_who_asks_for_replays_on_and_on_keeps_nothing_from_the_others(tmp_path: Path) -> None:
    settings = config(tmp_path)
    stop = threading.Event()

    def ask() -> None:
        with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
            dealer.setsockopt(zmq.LINGER, 0)
            dealer.connect(settings.replay_endpoint or "")
            while not stop.is_set():
                with suppress(zmq.Again):
                    dealer.send_multipart((b"", bytes(8)), zmq.NOBLOCK)
                while dealer.poll(0):
                    dealer.recv_multipart()

    askers = [threading.Thread(target=ask) for _ in range(3)]
    with publishing(settings) as publisher, consuming(settings) as consumer:
        for sent in range(500):
            publisher.publish(stored(sent))
        consumer.follow(499)
        for asker in askers:
            asker.start()
        try:
            time.sleep(0.5)  # until their questions pile up
            publisher.publish(stored(500))
            deadline = time.monotonic() + 30
            while consumer.next <= 500 and time.monotonic() < deadline:
                consumer.poll()
            begun = time.monotonic()
            publisher.close()
            closed = time.monotonic() - begun
        finally:
            stop.set()
            for asker in askers:
                asker.join()
        assert consumer.next == 501
        assert closed < 4.0, "the thread was told to end, and given up"


def _until(condition: Any, seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_an_endpoint_in_use_is_a_config_error_and_files_are_private(tmp_path: Path) -> None:
    endpoint = f"tcp://*:{free_port()}"
    settings = KVEventsConfig(enable_kv_cache_events=True, endpoint=endpoint)
    with publishing(settings):
        with pytest.raises(ConfigError, match=r"cannot listen on endpoint 'tcp.*: Address already in use"):
            open_publisher(settings, WireFormat())
        other = KVEventsConfig(enable_kv_cache_events=True, endpoint=f"tcp://*:{free_port()}", replay_endpoint=endpoint)
        with pytest.raises(ConfigError, match="cannot listen on replay_endpoint"):
            open_publisher(other, WireFormat())
    with publishing(settings):  # it was given back
        pass
    missing = KVEventsConfig(enable_kv_cache_events=True, endpoint=f"ipc://{tmp_path}/no/such/folder")
    with pytest.raises(ConfigError, match="No such file or directory"):
        open_publisher(missing, WireFormat())
    with publishing(config(tmp_path)):
        with pytest.raises(ConfigError, match=r"cannot listen on endpoint 'ipc.*: Address already in use"):
            open_publisher(config(tmp_path), WireFormat())
        assert {(tmp_path / name).stat().st_mode & 0o777 for name in ("pub", "rep")} == {0o600}


def test_a_file_is_no_endpoint_and_stays_but_a_dead_publishers_socket_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "pub").write_text("precious")
    with pytest.raises(ConfigError, match=r"cannot listen on endpoint 'ipc.*/pub': File exists"):
        open_publisher(config(tmp_path), WireFormat())
    assert (tmp_path / "pub").read_text() == "precious"
    (tmp_path / "pub").unlink()
    with socket.socket(socket.AF_UNIX) as left_over:
        left_over.bind(str(tmp_path / "pub"))
    with publishing(config(tmp_path)) as publisher, consuming(config(tmp_path)) as consumer:
        publisher.publish(stored(1))
        consumer.follow(0)
    with pytest.raises(ConfigError, match=r"endpoint is 'ipc://\*'"):
        KVEventsConfig(enable_kv_cache_events=True, endpoint="ipc://*")


def test_a_publisher_may_connect_to_a_router_that_binds() -> None:
    with zmq.Context() as context, context.socket(zmq.SUB) as router:
        router.subscribe("kv@")
        port = router.bind_to_random_port("tcp://127.0.0.1")
        settings = KVEventsConfig(enable_kv_cache_events=True, endpoint=f"tcp://127.0.0.1:{port}", topic="kv@pod@m")
        with publishing(settings) as publisher:
            number = 0
            while not router.poll(50):
                publisher.publish(stored(number))
                number += 1
            topic, _, _ = router.recv_multipart()
            assert topic == b"kv@pod@m"
