"""The API process's client of the engine process: starts it, sends requests, hands each request its outputs.

Two threads do the blocking I/O, so a busy engine never blocks the event loop: a full socket blocks the writer, a step
that takes seconds blocks the reader. Everything else happens on the event loop; no state is shared but two queues.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import signal
import threading
from collections.abc import AsyncGenerator, Callable
from functools import partial
from typing import Any

from reprise_engine.cache_report import PrefixCacheReport
from reprise_engine.config import EngineConfig, ResolvedConfig
from reprise_engine.engine_process import EngineProcess
from reprise_engine.errors import EngineDead, EngineStopped, RepriseError, SlowReader
from reprise_engine.messages import (
    DEFAULT_BUILDER,
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
from reprise_engine.request import EngineRequest, RequestId, RequestOutput

logger = logging.getLogger(__name__)

MAX_UNREAD_OUTPUTS = 4096
"""Of one request, with one token each: what a client may lag behind. With twenty logprobs a token they are 10 MiB."""

Inbox = asyncio.Queue[RequestOutput | RepriseError]


class EngineClient:
    """One engine process. Create with `EngineClient(…)` inside a running event loop, then `await start()`.

    `on_progress` and `on_stats` are called on the event loop. `process` was started with the same config already.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        builder: str = DEFAULT_BUILDER,
        log_level: int = logging.INFO,
        max_unread_outputs: int = MAX_UNREAD_OUTPUTS,
        on_progress: Callable[[LoadProgress], None] | None = None,
        on_stats: Callable[[SchedulerStats], None] | None = None,
        process: EngineProcess | None = None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._start = Start(config, builder, log_level)
        self._max_unread = max_unread_outputs
        self._on_progress = on_progress
        self._on_stats = on_stats
        self._inboxes: dict[RequestId, Inbox] = {}
        self._questions: dict[int, asyncio.Future[Any]] = {}
        self._question = 0
        self._outbox: queue.SimpleQueue[ToEngine | None] = queue.SimpleQueue()
        self._ready: asyncio.Future[ResolvedConfig] = self._loop.create_future()
        self._ended: asyncio.Future[EngineDead] = self._loop.create_future()
        self._last_words: Died | None = None
        self._closing = False
        self._process = process
        self._listening = False
        self.resolved: ResolvedConfig | None = None
        self.stats = SchedulerStats()

    @property
    def alive(self) -> bool:
        """Ready to serve: loaded, and the process is there."""
        return self.resolved is not None and not self._ended.done() and not self._closing

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.process.pid

    @property
    def num_requests(self) -> int:
        """Requests that wait for outputs."""
        return len(self._inboxes)

    # --- life

    async def start(self) -> ResolvedConfig:
        """Start the process and wait until the model is loaded.

        Raises what the engine raised (ConfigError, ModelError, InsufficientMemory …), or EngineDead.
        """
        if self._process is None:
            await asyncio.to_thread(self._spawn)
        process = self._process
        assert process is not None
        self._listening = True
        threading.Thread(target=self._write, args=(process,), name="engine-writer", daemon=True).start()
        threading.Thread(target=self._read, args=(process,), name="engine-reader", daemon=True).start()
        self.resolved = await asyncio.shield(self._ready)  # a start that is given up leaves the future to close()
        return self.resolved

    def _spawn(self) -> None:
        self._process = EngineProcess(self._start)

    async def wait_ended(self) -> EngineDead:
        """Returns the cause once the process has ended without being asked to."""
        return await asyncio.shield(self._ended)

    async def close(self, *, patience: float = 10.0) -> None:
        """End the process: by message, after `patience` seconds by force. Outstanding requests get EngineDead."""
        self._closing = True
        process = self._process
        if process is None:
            return
        if not self._listening:  # given up before start()
            process.kill()
            await asyncio.to_thread(process.process.wait)
            process.connection.close()
            process.let_go()
            return
        self._outbox.put(Shutdown())
        if not self._ready.done():
            process.kill()  # it listens to nothing while it loads
        try:
            await asyncio.wait_for(asyncio.shield(self._ended), patience)
        except TimeoutError:
            process.kill()
            await asyncio.shield(self._ended)
        process.let_go()

    # --- requests

    async def generate(self, request: EngineRequest) -> AsyncGenerator[RequestOutput, None]:
        """The outputs of one request, as steps bring them, to the finished one.

        Leaving early (break, cancellation, aclose) aborts the request in the engine. Raises the RequestError by which
        the engine refused it, SlowReader where `max_unread_outputs` wait to be taken, or EngineDead.
        """
        self._check_alive()
        inbox: Inbox = asyncio.Queue()
        self._inboxes[request.request_id] = inbox
        self._outbox.put(Submit((request,)))
        finished = False
        try:
            while not finished:
                item = await inbox.get()
                if isinstance(item, RepriseError):
                    finished = True
                    raise item
                finished = item.finished
                if item.error is not None:
                    raise item.error
                yield item
        finally:
            self._inboxes.pop(request.request_id, None)
            if not finished:
                self._outbox.put(Abort((request.request_id,)))

    async def reset_prefix_cache(self, *, include_pins: bool = False) -> PrefixCacheReset:
        """Forget all cached blocks; pinned ones only with `include_pins`. Raises EngineDead."""
        answer: PrefixCacheReset = await self._ask(partial(ResetPrefixCache, include_pins=include_pins))
        return answer

    async def unpin(self, name: str) -> bool:
        """False where there is no such pin. Raises EngineDead."""
        answer: Unpinned = await self._ask(partial(Unpin, name=name))
        return answer.found

    async def inspect_prefix_cache(self) -> PrefixCacheReport:
        """What is in the prefix cache, and why the last requests missed it. Raises EngineDead."""
        answer: PrefixCacheInspected = await self._ask(InspectPrefixCache)
        return answer.report

    async def _ask(self, question: Callable[[int], ToEngine]) -> Any:
        """Sends `question(token)` and returns the answer that bears the token. Raises EngineDead."""
        self._check_alive()
        self._question += 1
        future: asyncio.Future[Any] = self._loop.create_future()
        self._questions[self._question] = future
        self._outbox.put(question(self._question))
        return await future

    def _check_alive(self) -> None:
        if self._ended.done():
            raise self._ended.result()
        if not self.alive:
            raise EngineStopped("The engine is not ready: the model is still loading, or the server is shutting down.")

    # --- the two threads

    def _write(self, process: EngineProcess) -> None:
        while (message := self._outbox.get()) is not None:
            try:
                process.connection.send(message)
            except OSError:
                return  # the reader sees the end as well, and tells

    def _read(self, process: EngineProcess) -> None:
        try:
            while True:
                message: FromEngine = process.connection.recv()
                self._call(self._take, message)
        except (EOFError, OSError):
            pass  # the process has ended
        except Exception:
            logger.exception("a message of the engine process cannot be read; it is killed")
            process.kill()
        code = process.process.wait()
        self._outbox.put(None)
        self._call(self._take_end, process, code)

    def _call(self, function: Callable[..., None], *arguments: object) -> None:
        with contextlib.suppress(RuntimeError):  # the event loop is closed: nobody listens any more
            self._loop.call_soon_threadsafe(function, *arguments)

    # --- on the event loop

    def _take(self, message: FromEngine) -> None:
        match message:
            case Outputs(outputs=outputs, stats=stats):
                self.stats = stats
                if self._on_stats is not None:
                    self._on_stats(stats)
                for output in outputs:
                    inbox = self._inboxes.get(output.request_id)
                    if inbox is None:
                        continue  # aborted while the output was under way
                    if inbox.qsize() < self._max_unread:
                        inbox.put_nowait(output)
                    else:
                        self._give_up(output.request_id, inbox)
            case PrefixCacheReset(token=token) | PrefixCacheInspected(token=token) | Unpinned(token=token):
                future = self._questions.pop(token, None)
                if future is not None and not future.done():
                    future.set_result(message)
            case LoadProgress():
                if self._on_progress is not None:
                    self._on_progress(message)
            case Ready(config=config):
                if not self._ready.done():
                    self._ready.set_result(config)
            case StartupFailed(error=error):
                if not self._ready.done():
                    self._ready.set_exception(error)
            case Died():
                self._last_words = message

    def _give_up(self, request_id: RequestId, inbox: Inbox) -> None:
        """Its reader gets an error in the place of all that it has not read."""
        del self._inboxes[request_id]
        self._outbox.put(Abort((request_id,)))
        while not inbox.empty():
            inbox.get_nowait()
        inbox.put_nowait(SlowReader(f"The client left {self._max_unread} outputs unread; the request was aborted."))

    def _take_end(self, process: EngineProcess, code: int) -> None:
        error = (EngineStopped if self._closing else EngineDead)(self._cause(code))
        if self._last_words is not None:
            error.__cause__ = self._last_words.cause
        process.connection.close()
        self._ended.set_result(error)
        if not self._ready.done():
            self._ready.set_exception(error)
            self._ready.exception()  # it may be that nobody awaits it
        for inbox in self._inboxes.values():
            inbox.put_nowait(error)
        for future in self._questions.values():
            if not future.done():
                future.set_exception(error)
        self._questions.clear()

    def _cause(self, code: int) -> str:
        if self._closing:
            return "The server is shutting down."
        if self._last_words is not None:
            return f"The engine process died: {self._last_words.message}"
        if code < 0:
            name = signal.Signals(-code).name
            hint = "; SIGKILL is what the kernel sends when memory runs out" if -code == signal.SIGKILL else ""
            return f"The engine process was killed by {name}{hint}."
        return f"The engine process ended with exit code {code}."
