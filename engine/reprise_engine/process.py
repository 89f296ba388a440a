"""The engine process: owns the model and the cache, and talks to the API process over one socket.

Started by `engine.EngineClient` as `python -m reprise_engine.process SOCKET LIFELINE`, two inherited file descriptors.
SOCKET carries pickled messages (`messages.py`); the first one from the parent is `Start`. LIFELINE is the read end of a
pipe that nobody writes to: it ends when the API process ends, however that happens, and so ends this process.
"""

from __future__ import annotations

import logging
import os
import pickle
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from importlib import import_module
from multiprocessing.connection import Connection

from reprise_engine.config import ResolvedConfig
from reprise_engine.errors import DeviceError, OutOfMemory, RankDied, RepriseError
from reprise_engine.loop import EngineCore
from reprise_engine.messages import (
    Abort,
    Died,
    FromEngine,
    InspectPrefixCache,
    LoadProgress,
    Outputs,
    PrefixCacheInspected,
    PrefixCacheReset,
    Ready,
    ResetPrefixCache,
    SchedulerStats,
    Shutdown,
    Start,
    StartupFailed,
    Submit,
    ToEngine,
    Unpin,
    Unpinned,
)
from reprise_engine.models.readahead import read_ahead
from reprise_engine.npu_environment import is_torch_npu_installed
from reprise_engine.npu_troubles import as_device_error
from reprise_engine.out_of_memory import Phase, as_out_of_memory
from reprise_engine.request import RequestOutput

logger = logging.getLogger(__name__)

Builder = Callable[..., tuple[EngineCore, ResolvedConfig]]
"""`builder(config, progress=callback)`: loads the model."""


class EngineConnection(Connection):
    """To the API process. Another thread may have last words (`_end_with_rank`): messages are sent one at a time."""

    def __init__(self, handle: int) -> None:
        super().__init__(handle)
        self._sending = threading.Lock()

    def send(self, message: FromEngine) -> None:
        with self._sending:
            super().send(message)


class EngineLoop:
    """Messages in, one step, messages out; waits only when there is nothing to compute."""

    def __init__(self, core: EngineCore, connection: Connection) -> None:
        self._core = core
        self._connection = connection
        self._told = SchedulerStats()

    def run(self) -> None:
        """Until a Shutdown, or EOFError when the API process is gone."""
        core = self._core
        while True:
            outputs: list[RequestOutput] = []
            while not core.has_work() and core.has_background_work() and not self._connection.poll(0):
                core.step()
                self._tell(outputs)
            # Before every step all that has arrived is taken in, so an abort takes effect within one step.
            while not core.has_work() or self._connection.poll(0):
                message: ToEngine = self._connection.recv()
                if isinstance(message, Shutdown):
                    return
                outputs += self._take(message)
                if not core.has_work():
                    self._tell(outputs)
                    outputs = []
            outputs += core.step()
            self._tell(outputs)

    def _take(self, message: ToEngine) -> tuple[RequestOutput, ...]:
        match message:
            case Submit(requests=requests):
                return self._core.submit(requests)
            case Abort(request_ids=request_ids):
                # The client that aborts has stopped listening: it needs no last output.
                self._core.abort(request_ids)
            case ResetPrefixCache(token=token, include_pins=include_pins):
                success, freed = self._core.reset_prefix_cache(include_pins=include_pins)
                host, disk = self._core.reset_tiers()
                self._connection.send(
                    PrefixCacheReset(
                        token=token,
                        success=success,
                        freed_blocks=freed,
                        freed_host_blocks=host,
                        freed_disk_blocks=disk,
                    )
                )
            case InspectPrefixCache(token=token):
                self._connection.send(PrefixCacheInspected(token=token, report=self._core.inspect_prefix_cache()))
            case Unpin(token=token, name=name):
                self._connection.send(Unpinned(token=token, found=self._core.unpin(name)))
            case Start() | Shutdown():
                pass
        return ()

    def _tell(self, outputs: list[RequestOutput]) -> None:
        stats = self._core.stats()
        if outputs or stats != self._told:
            self._connection.send(Outputs(outputs=tuple(outputs), stats=stats))
            self._told = stats


def _resolve(builder: str) -> Builder:
    module, _, name = builder.partition(":")
    found: Builder = getattr(import_module(module), name)
    return found


def _sendable(error: Exception) -> Exception:
    """The error itself when it survives the way, else one of ours with its words."""
    try:
        pickle.loads(pickle.dumps(error))  # noqa: S301  (our own bytes)
    except Exception:  # noqa: BLE001  (any fault of foreign __reduce__)
        return RepriseError(f"{type(error).__name__}: {error}")
    return error


def serve(connection: Connection) -> int:
    """Load, then run until told to stop. Returns the exit code."""
    start = connection.recv()
    assert isinstance(start, Start), f"expected Start, got {start!r}"
    _configure_logging(start.log_level)

    read_ahead(start.config.model.model)

    def send(message: FromEngine) -> None:
        connection.send(message)

    def progress(report: LoadProgress) -> None:
        send(report)

    try:
        if is_torch_npu_installed():
            from reprise_engine.device import settle_torch_npu  # only here: a test's engine needs no torch

            settle_torch_npu(start.config.device, size=start.config.tensor_parallel_size)
        core, resolved = _resolve(start.builder)(start.config, progress=progress)
    except RepriseError as error:
        send(StartupFailed(_sendable(error)))
        return 1
    except (Exception, MemoryError) as error:
        known = as_out_of_memory(error, Phase.START) or as_device_error(error)
        if known is None:
            logger.exception("the engine process failed while starting")
        send(StartupFailed(known or RepriseError(f"{type(error).__name__}: {error}")))
        return 1
    send(Ready(resolved))
    core.watch_ranks(partial(_end_with_rank, send))
    try:
        EngineLoop(core, connection).run()
        core.flush()
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return 0  # the API process is gone; nobody is left to tell
    except Exception as error:
        logger.exception("the engine process cannot go on")
        send(_last_words(error))
        return 1
    finally:
        core.close()
    return 0


def _last_words(error: Exception) -> Died:
    cause = (
        error
        if isinstance(error, OutOfMemory | DeviceError)
        else as_out_of_memory(error, Phase.RUNNING) or as_device_error(error)
    )
    message = str(error) if isinstance(error, RankDied) else f"{type(error).__name__}: {error}"
    return Died(message=message, details="".join(traceback.format_exception(error)), cause=cause)


def _end_with_rank(send: Callable[[FromEngine], None], error: RepriseError) -> None:
    """Ends this process from a thread: the main one waits for requests, or for a device that waits for the rank."""
    with suppress(OSError):
        send(_last_words(error))
    os._exit(1)


def _configure_logging(level: int) -> None:
    logging.basicConfig(
        level=level, stream=sys.stderr, format="%(asctime)s %(levelname)s engine: %(message)s", datefmt="%H:%M:%S"
    )


def _end_with_parent(lifeline: int) -> None:
    os.read(lifeline, 1)
    os._exit(0)  # also in the middle of a load or a step: nobody waits for it any more


def main() -> int:
    # Ctrl-C and a TERM to the group are the API process's business: it drains requests, and needs this process for it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    socket, lifeline = int(sys.argv[1]), int(sys.argv[2])
    os.set_inheritable(socket, False)
    os.set_inheritable(lifeline, False)
    threading.Thread(target=_end_with_parent, args=(lifeline,), name="lifeline", daemon=True).start()
    with EngineConnection(socket) as connection:
        try:
            return serve(connection)
        except (EOFError, BrokenPipeError, ConnectionResetError):
            return 0  # the API process went while the model was loading, or before


if __name__ == "__main__":
    sys.exit(main())
