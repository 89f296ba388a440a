"""Publishers and consumers of KV events for tests, on sockets in a folder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from reprise_engine.kv_events.config import KVEventsConfig
from reprise_engine.kv_events.publisher import ZmqPublisher, open_publisher
from reprise_engine.kv_events.wire import WireFormat
from reprise_engine.step import BlockHash
from tests.support.kv_event_consumer import Consumer


def low_64_bits(block_hash: BlockHash) -> int:
    return int.from_bytes(block_hash[-8:], "big")


def config(folder: Path, **values: Any) -> KVEventsConfig:
    ours = {"enable_kv_cache_events": True, "endpoint": f"ipc://{folder}/pub", "replay_endpoint": f"ipc://{folder}/rep"}
    return KVEventsConfig.of(ours | values)


@contextmanager
def publishing(settings: KVEventsConfig) -> Iterator[ZmqPublisher]:
    publisher = open_publisher(settings, WireFormat(settings.encoding))
    try:
        yield publisher
    finally:
        publisher.close()


@contextmanager
def consuming(settings: KVEventsConfig) -> Iterator[Consumer]:
    with Consumer(settings.endpoint, settings.replay_endpoint, topic=settings.topic) as consumer:
        yield consumer
