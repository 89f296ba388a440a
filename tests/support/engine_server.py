"""A server on a free loopback port, in a thread of the test's process; its engine is a process of its own."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from reprise_engine.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from reprise_engine.server.lifecycle import Stop, serve
from reprise_engine.server.options import ServerOptions
from reprise_engine.server.start import bind
from tests.support.fake_engine import write_model


@dataclass(slots=True)
class RunningServer:
    """`result` is set when the server has ended: its exit code, or what it raised."""

    url: str
    stop: Stop
    loop: asyncio.AbstractEventLoop
    thread: threading.Thread | None = None
    result: int | BaseException | None = None
    client: httpx.Client = field(default_factory=httpx.Client)

    def signal(self) -> None:
        """What SIGTERM does to a server of its own process."""
        self.loop.call_soon_threadsafe(self.stop.on_signal)

    def join(self) -> int | BaseException | None:
        assert self.thread is not None
        self.thread.join(60)
        assert not self.thread.is_alive(), "the server does not end"
        return self.result


def fake_options(folder: Path, *, builder: str = "build", **changes: object) -> ServerOptions:
    """Options of a server over tests/support/fake_engine.py; `prefix_caching` False switches the cache off,
    `max_num_seqs` is the scheduler's."""
    caching = bool(changes.pop("prefix_caching", True))
    scheduler = SchedulerConfig(max_num_seqs=int(str(changes.pop("max_num_seqs", SchedulerConfig().max_num_seqs))))
    return ServerOptions(
        engine=EngineConfig(
            model=ModelConfig(model=str(write_model(folder))),
            cache=CacheConfig(enable_prefix_caching=caching),
            scheduler=scheduler,
        ),
        host="127.0.0.1",
        port=0,
        served_names=("counter", "other-name"),
        builder=f"tests.support.fake_engine:{builder}",
        **changes,  # type: ignore[arg-type]
    )


@contextmanager
def running_server(options: ServerOptions, *, ready: bool = True) -> Iterator[RunningServer]:
    """Runs it inside the block; with `ready` the block starts when /health is 200."""
    listener = bind(options.host, options.port)
    host, port = listener.getsockname()
    loop = asyncio.new_event_loop()
    server = RunningServer(f"http://{host}:{port}", Stop(), loop)
    server.client = httpx.Client(base_url=server.url, timeout=60)

    def work() -> None:
        asyncio.set_event_loop(loop)
        try:
            server.result = loop.run_until_complete(serve(options, listener, stop=server.stop))
        except BaseException as error:  # noqa: BLE001  (handed to the test)
            server.result = error
        finally:
            loop.run_until_complete(loop.shutdown_default_executor())
            loop.close()

    server.thread = threading.Thread(target=work, name="server")
    server.thread.start()
    try:
        if ready:
            wait_healthy(server)
        yield server
    finally:
        server.client.close()
        if server.thread.is_alive():
            server.signal()
            server.signal()
        server.join()


def wait_healthy(server: RunningServer, *, seconds: float = 180) -> None:
    deadline = time.monotonic() + seconds
    while server.client.get("/health").status_code != 200:
        assert server.result is None, f"the server ended: {server.result!r}"
        assert time.monotonic() < deadline, "the server does not get healthy"
        time.sleep(0.05)
