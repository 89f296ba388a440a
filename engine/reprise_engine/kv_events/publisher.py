"""Publishes batches of events over ZeroMQ, from a thread of its own, as vLLM's publisher does.

    PUB      frames [topic, sequence number, batch]; the number is 8 bytes, big-endian
    ROUTER   asked with [empty, first number wanted], it answers with [empty, number, batch] for each batch from there
             on, and [empty, number -1, empty] as the end

A step never waits: it appends to a bounded queue. A batch that finds the queue full is dropped, and its number with it,
so that consumers see the gap; what they then need is published as soon as there is room (`wants_snapshot`). A consumer
that does not read costs at most `hwm` batches of memory; what it misses it sees from the numbers.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket as socketlib
import stat
import threading
import time
from collections import deque
from collections.abc import Sequence

import zmq

from reprise_engine.errors import ConfigError
from reprise_engine.kv.events import AllBlocksCleared, KVEvent
from reprise_engine.kv_events.config import FLAG, KVEventsConfig
from reprise_engine.kv_events.replay import PublishedBatch, ReplayLog
from reprise_engine.kv_events.wire import WireFormat

logger = logging.getLogger(__name__)

_END = (-1).to_bytes(8, "big", signed=True)
_LONGEST_REQUEST = 64 * 1024
"""Bytes of what a consumer may send: a topic, or a number. Anybody can connect."""
_LINGER_MILLISECONDS = 1000
_CLOSE_SECONDS = 5.0
_SECONDS_BETWEEN_WARNINGS = 60


class ZmqPublisher:
    """Binds at once; publishes from `start` to `close`. `publish` is called by one thread at a time."""

    def __init__(self, config: KVEventsConfig, wire: WireFormat) -> None:
        """Raises ConfigError where an endpoint cannot be bound or connected to."""
        self._wire = wire
        self._topic = config.topic.encode()
        self._max_queue_size = config.max_queue_size
        self._queue: deque[PublishedBatch] = deque()
        self._next = 0
        self._lost = False
        self._published = 0
        self._overflown = 0
        # Written by the thread alone.
        self._failed = 0
        self._stalled = 0
        self._told = 0
        self._told_at = float(-_SECONDS_BETWEEN_WARNINGS)
        self._log = ReplayLog(config.buffer_steps)
        self._closing = False
        self._thread: threading.Thread | None = None
        self._context = zmq.Context()
        self._pub = self._context.socket(zmq.PUB)
        self._replay = self._context.socket(zmq.ROUTER) if config.replay_endpoint is not None else None
        try:
            self._open_sockets(config)
        except BaseException:
            self._close_sockets(linger=0)
            raise
        self._woken, self._wake = os.pipe()
        os.set_blocking(self._woken, False)
        os.set_blocking(self._wake, False)

    @property
    def published(self) -> int:
        """Events that were taken for publishing."""
        return self._published

    @property
    def dropped(self) -> int:
        """Events that did not reach every consumer, as far as it shows on this side."""
        return self._overflown + self._failed + self._stalled

    @property
    def owes_snapshot(self) -> bool:
        """Whether something was lost: what follows must begin with a batch that says all that is cached."""
        return self._lost

    @property
    def wants_snapshot(self) -> bool:
        """Whether there is room for that batch, which begins with AllBlocksCleared."""
        return self._lost and len(self._queue) < self._max_queue_size

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()

    def publish(self, events: Sequence[KVEvent]) -> None:
        """Queues a batch; never waits. Once one is dropped so are all others, up to one that begins by clearing all."""
        batch = PublishedBatch(self._next, time.time(), events)
        self._next += 1
        says_all = isinstance(events[0], AllBlocksCleared)
        if len(self._queue) >= self._max_queue_size or (self._lost and not says_all):
            self._overflown += len(events)
            self._lost = True
            return
        self._lost = False
        self._published += len(events)
        self._queue.append(batch)
        self._wake_up()

    def close(self) -> None:
        """Publishes what is queued, within seconds, and gives the endpoints back."""
        if self._context.closed:
            return
        self._closing = True
        self._wake_up()
        if self._thread is not None:
            self._thread.join(_CLOSE_SECONDS)
        if self._thread is None or not self._thread.is_alive():
            self._close_sockets(linger=_LINGER_MILLISECONDS)
            os.close(self._woken)
            os.close(self._wake)

    def _open_sockets(self, config: KVEventsConfig) -> None:
        pub = self._pub
        pub.set_hwm(config.hwm)
        pub.setsockopt(zmq.MAXMSGSIZE, _LONGEST_REQUEST)
        # With it a send says when a consumer is full, instead of leaving it out in silence.
        pub.setsockopt(zmq.XPUB_NODROP, 1)
        _open(pub, "endpoint", config.endpoint, bind=config.binds)
        if self._replay is not None and config.replay_endpoint is not None:
            # One whole answer fits, so a consumer that reads gets all of it; one that asks on and on and reads nothing
            # costs no more. Twice its messages: up to half of the mark, what was read may still count as unread.
            self._replay.setsockopt(zmq.SNDHWM, 2 * (config.buffer_steps + 2))
            self._replay.setsockopt(zmq.ROUTER_MANDATORY, 1)
            self._replay.setsockopt(zmq.MAXMSGSIZE, _LONGEST_REQUEST)
            _open(self._replay, "replay_endpoint", config.replay_endpoint, bind=True)

    def _close_sockets(self, *, linger: int) -> None:
        self._pub.close(linger=linger)
        if self._replay is not None:
            self._replay.close(linger=linger)
        self._context.term()

    def _wake_up(self) -> None:
        with contextlib.suppress(BlockingIOError):  # full: it has been woken often enough
            os.write(self._wake, b"\0")

    # --- in the thread

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._woken, zmq.POLLIN)
        if self._replay is not None:
            poller.register(self._replay, zmq.POLLIN)
        closing = False
        while not closing:
            poller.poll(_SECONDS_BETWEEN_WARNINGS * 1000)
            with contextlib.suppress(BlockingIOError):
                os.read(self._woken, 4096)
            closing = self._closing  # read first: what was queued before it is still sent
            while self._queue:
                self._send(self._queue[0])
                self._queue.popleft()
            if self._replay is not None:
                self._answer(self._replay)
            self._warn(at_once=closing)

    def _send(self, batch: PublishedBatch) -> None:
        try:
            payload = self._wire.encode(batch.events, timestamp=batch.timestamp)
            frames = (self._topic, _number(batch.sequence), payload)
            try:
                self._pub.send_multipart(frames, zmq.NOBLOCK)
            except zmq.Again:
                self._stalled += len(batch.events)
                self._pub.setsockopt(zmq.XPUB_NODROP, 0)  # to all others, that is
                self._pub.send_multipart(frames, zmq.NOBLOCK)
                self._pub.setsockopt(zmq.XPUB_NODROP, 1)
        except Exception:
            self._failed += len(batch.events)
            logger.exception("a batch of KV events cannot be published; its consumers miss it")
        if self._replay is not None:
            self._log.append(batch)

    def _answer(self, replay: zmq.Socket[bytes]) -> None:
        """One request, so that those who ask on and on do not keep from the others what is new."""
        try:
            frames = replay.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return
        if len(frames) != 3 or len(frames[2]) != 8:
            logger.debug("a replay request is not [empty, 8 bytes]; it is ignored")
            return
        client = frames[0]
        try:
            for batch in self._log.since(int.from_bytes(frames[2], "big")):
                payload = self._wire.encode(batch.events, timestamp=batch.timestamp)
                replay.send_multipart((client, b"", _number(batch.sequence), payload), zmq.NOBLOCK)
            replay.send_multipart((client, b"", _END, b""), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            # It has gone, or asks again and again without reading: it sees that there is no end, and asks anew.
            logger.debug("a replay broke off: %s", error)
        except Exception:
            logger.exception("a replay of KV events broke off")

    def _warn(self, *, at_once: bool) -> None:
        dropped, now = self.dropped, time.monotonic()
        if dropped == self._told or (now - self._told_at < _SECONDS_BETWEEN_WARNINGS and not at_once):
            return
        logger.warning(
            "%d KV events were dropped; since the start %d because a consumer does not read, %d because the queue was "
            "full, %d by errors. Consumers see gaps in the sequence numbers, and can ask at replay_endpoint",
            dropped - self._told,
            self._stalled,
            self._overflown,
            self._failed,
        )
        self._told, self._told_at = dropped, now


def _open(socket: zmq.Socket[bytes], name: str, endpoint: str, *, bind: bool) -> None:
    if "[" in endpoint or "::" in endpoint:
        socket.setsockopt(zmq.IPV6, 1)
    path = endpoint.removeprefix("ipc://")
    is_file = bind and path != endpoint and not path.startswith("@")
    try:
        if is_file:
            _check_free(path)
        if bind:
            socket.bind(endpoint)
        else:
            socket.connect(endpoint)
        if is_file:
            os.chmod(path, 0o600)
    except (OSError, zmq.ZMQError) as error:
        what = "listen on" if bind else "connect to"
        why = zmq.strerror(error.errno or 0)  # the system's numbers, and ZeroMQ's own
        raise ConfigError(f"{FLAG}: cannot {what} {name} {endpoint!r}: {why}; choose another one.") from error


def _check_free(path: str) -> None:
    """Raises OSError where a file or a living socket has that name: ZeroMQ would put its own socket in its place."""
    try:
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
    except FileNotFoundError:
        return
    with socketlib.socket(socketlib.AF_UNIX) as probe:
        probe.setblocking(False)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            return  # left over by a process that was killed
        except BlockingIOError:
            pass  # so many wait to be accepted
    raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))


def _number(sequence: int) -> bytes:
    return sequence.to_bytes(8, "big")


def open_publisher(config: KVEventsConfig, wire: WireFormat) -> ZmqPublisher:
    """A publisher that works. Raises ConfigError."""
    publisher = ZmqPublisher(config, wire)
    publisher.start()
    return publisher
