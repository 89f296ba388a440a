"""Starts the other ranks of an engine, hears what they say, and finds out when one of them ends.

Each is `python -m reprise_engine.parallel.worker SOCKET LIFELINE`, as the engine process is one (engine_process.py): by
the end of either descriptor it learns that this process has ended, however that happened, and ends too.
"""

from __future__ import annotations

import logging
import os
import pickle
import queue
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TypeVar

from reprise_engine.config import EngineConfig
from reprise_engine.engine_process import process_environment
from reprise_engine.errors import DeviceError, OutOfMemory, RankDied, RepriseError
from reprise_engine.parallel import slots
from reprise_engine.parallel.shard import FLAG, Place
from reprise_engine.parallel.slots import SharedSlots
from reprise_engine.parallel.talk import Allocate, Failed, Join, Meet
from reprise_engine.step import Step

logger = logging.getLogger(__name__)

Message = TypeVar("Message")

_VERDICT_SECONDS = 3.0
"""How long after a failed sum it may take to learn which rank has ended."""
_NOTICE_SECONDS = 1.0
"""For this process to find out by itself: by a sum that fails. HCCL's do not fail for minutes."""
_START_SECONDS = 60.0
"""The same at the start, where rank 0 may be loading."""
_END_SECONDS = 5.0
"""For a rank to end when it is told to; then by force."""
_TOGETHER = f"The ranks of {FLAG} compute together, so the engine ends with it; start it again."


class Ranks:
    """The ranks from 1 on, each a process, as rank 0 sees them. To be closed."""

    def __init__(self, config: EngineConfig, *, on_stuck: Callable[[RepriseError], None]) -> None:
        """Starts them. Raises OSError where no process can be started. A thread calls `on_stuck` where one of them is
        gone and rank 0 does not find out, before `watch` says what else to do."""
        self._size = config.tensor_parallel_size
        self._folder = Path(tempfile.mkdtemp(prefix="reprise-ranks-"))  # of this user alone
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._connections: dict[int, Connection] = {}
        self._inbox: queue.SimpleQueue[tuple[int, object] | None] = queue.SimpleQueue()
        self._error: RepriseError | None = None
        self._known = threading.Event()  # `_error` is there
        self._noticed = threading.Event()  # and rank 0 has raised it, or closes
        self._on_stuck = on_stuck
        self._on_death: Callable[[RepriseError], None] | None = None
        self._thread: threading.Thread | None = None
        self._closed = False
        self._afterwards: list[Callable[[], None]] = []
        self._slots = slots.create_file() if config.cache.has_tiers else None
        read, self._lifeline = os.pipe()
        try:
            for rank in range(1, self._size):
                self._start(rank, config, read)
        except BaseException:
            self.close()
            raise
        finally:
            os.close(read)
        self._thread = threading.Thread(target=self._listen, name="ranks", daemon=True)
        self._thread.start()

    def _start(self, rank: int, config: EngineConfig, lifeline: int) -> None:
        ours, theirs = socket.socketpair()
        try:
            self._processes[rank] = subprocess.Popen(
                [sys.executable, "-m", "reprise_engine.parallel.worker", str(theirs.fileno()), str(lifeline)],
                pass_fds=(theirs.fileno(), lifeline, *(() if self._slots is None else (self._slots,))),
                stdin=subprocess.DEVNULL,
                env=process_environment(),
            )
        finally:
            theirs.close()
        self._connections[rank] = Connection(ours.detach())
        place = Place(rank=rank, size=self._size)
        join = Join(
            config=config,
            place=place,
            meeting_point=str(self.meeting_point),
            log_level=logging.getLogger().getEffectiveLevel(),
            slots=self._slots,
        )
        self._send(rank, pickle.dumps(join))

    @property
    def place(self) -> Place:
        """Of this process."""
        return Place(rank=0, size=self._size)

    @property
    def meeting_point(self) -> Path:
        return self._folder / "meeting-point"

    @property
    def pids(self) -> dict[int, int]:
        """By rank, from 1 on."""
        return {rank: process.pid for rank, process in self._processes.items()}

    def share_slots(self, num_slots: int, *, part_bytes: int) -> SharedSlots | None:
        """The tiers' slots in memory that all ranks have; None without tiers. Before they are told to allocate."""
        if self._slots is None:
            return None
        slots.resize(self._slots, num_slots=num_slots, size=self._size, part_bytes=part_bytes)
        return SharedSlots(self._slots, num_slots=num_slots, size=self._size, part_bytes=part_bytes)

    # --- saying and hearing

    def tell(self, message: Meet | Allocate | Step) -> None:
        """To all of them, pickled once. Raises RankDied, or what one of them failed with."""
        self.check()
        payload = pickle.dumps(message)
        for rank in self._connections:
            self._send(rank, payload)

    def _send(self, rank: int, payload: bytes) -> None:
        with suppress(BrokenPipeError, ConnectionResetError):  # who listens is told by _listen
            self._connections[rank].send_bytes(payload)

    def hear(self, kind: type[Message]) -> list[Message]:
        """One message of this kind from each, in the order of the ranks. Raises RankDied, or what one failed with."""
        heard: dict[int, Message] = {}
        while len(heard) < len(self._connections):
            self.check()
            said = self._inbox.get()
            if said is not None:
                rank, message = said
                assert isinstance(message, kind), f"expected {kind.__name__}, got {message!r}"
                heard[rank] = message
        return [heard[rank] for rank in sorted(heard)]

    # --- whether all are there

    def check(self) -> None:
        """Raises RankDied, or what one of them failed with, where one is gone."""
        if self._error is not None:
            self._noticed.set()
            raise self._error

    def explain(self, error: Exception) -> Exception:
        """The cause of what rank 0 failed with: a rank that is gone, or `error` itself."""
        if not self._known.wait(_VERDICT_SECONDS if isinstance(error, RankDied) else 0.0):
            return error
        assert self._error is not None
        self._noticed.set()
        return self._error

    def give_up(self, reason: str) -> None:
        """Rank 0 left a step in the middle: the others wait for it, and no other step can be computed."""
        self._set_error(RankDied(f"{reason} {_TOGETHER}"))

    def watch(self, on_death: Callable[[RepriseError], None]) -> None:
        """From now on a thread calls `on_death` where one of them is gone and nobody else finds out within a second:
        rank 0 waits for requests, or for a device that waits for the other."""
        self._on_death = on_death

    def when_closed(self, action: Callable[[], None]) -> None:
        """Has `close` call it when the others have ended as told: in a broken group HCCL may wait for ever."""
        self._afterwards.append(action)

    def close(self) -> None:
        """Ends them, by force where they take long."""
        if self._closed:
            return
        self._closed = True
        self._noticed.set()
        for connection in self._connections.values():
            # Closed when the thread that reads it has ended: the number could be somebody else's by then.
            with suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as other:
                other.shutdown(socket.SHUT_RDWR)
        os.close(self._lifeline)
        if self._slots is not None:
            os.close(self._slots)  # what is mapped stays
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        for connection in self._connections.values():
            connection.close()
        for process in self._processes.values():
            try:
                process.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if self._error is None:
            for action in self._afterwards:
                action()
        shutil.rmtree(self._folder, ignore_errors=True)

    # --- the thread

    def _listen(self) -> None:
        error = self._first_fault()
        if error is None or self._noticed.is_set():
            return
        self._set_error(error)
        logger.error("%s", error)
        if self._on_death is None and self._noticed.wait(_START_SECONDS):
            return
        if self._on_death is None:
            self._on_stuck(error)
        elif not self._noticed.wait(_NOTICE_SECONDS):
            self._on_death(error)

    def _set_error(self, error: RepriseError) -> None:
        self._error = self._error or error
        self._known.set()
        self._inbox.put(None)

    def _first_fault(self) -> RepriseError | None:
        """Hands on what they say until one of them fails or ends, and tells which is to blame: where one is gone, the
        sums of all others fail as well."""
        suspects: dict[int, Failed] = {}
        ranks = {connection: rank for rank, connection in self._connections.items()}
        while ranks:
            ready = wait(list(ranks), timeout=_VERDICT_SECONDS if suspects else None)
            if not ready:
                break
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = ranks[connection]
                try:
                    message = connection.recv()
                except (EOFError, OSError):
                    if rank not in suspects:
                        return None if self._noticed.is_set() else self._ended(rank)
                    del ranks[connection]
                    continue
                if not isinstance(message, Failed):
                    self._inbox.put((rank, message))
                elif message.lost_others:
                    suspects[rank] = message
                else:
                    return self._failed(rank, message)
        return next((self._failed(rank, failed) for rank, failed in suspects.items()), None)

    def _failed(self, rank: int, failed: Failed) -> RepriseError:
        if self._on_death is None and isinstance(failed.error, RepriseError):
            return failed.error  # at the start: a wrong flag, a damaged model
        if isinstance(failed.error, OutOfMemory | DeviceError):
            return failed.error  # whoever watches reads how it begins
        return RankDied(f"Rank {rank} of {self._size} failed: {failed.error}. {_TOGETHER}")

    def _ended(self, rank: int) -> RankDied:
        process = self._processes[rank]
        try:
            code = process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            return RankDied(f"Rank {rank} of {self._size} (process {process.pid}) says nothing more. {_TOGETHER}")
        if code >= 0:
            how = f"ended with exit code {code}; its log says why"
        else:
            how = f"was killed by {signal.Signals(-code).name}"
            if -code == signal.SIGKILL:
                how += (
                    "; SIGKILL is what the kernel sends when memory runs out: if so, give the engine more, or lower "
                    "--gpu-memory-utilization"
                )
        return RankDied(f"Rank {rank} of {self._size} (process {process.pid}) {how}. {_TOGETHER}")
