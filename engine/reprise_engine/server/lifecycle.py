"""One server from start to end, in numbered steps.

1. bind the port, so that a taken one is told before a model is loaded, and start the engine process (`start.py`);
2. answer HTTP: /health is 503 while
3. tokenizer and engine process load, and the warm-up prompts are computed;
4. serve, until a signal comes or the engine process dies;
5. drain: no new requests, the running ones end; then stop the engine process.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import AsyncIterator, Iterator

import uvicorn

from reprise_engine.engine import EngineClient
from reprise_engine.engine_process import EngineProcess
from reprise_engine.messages import LoadProgress
from reprise_engine.server import logs
from reprise_engine.server.app import create_app
from reprise_engine.server.connection import connection_class
from reprise_engine.server.defaults import SamplingDefaults, load_defaults
from reprise_engine.server.isolation import Isolation
from reprise_engine.server.metrics import Metrics
from reprise_engine.server.options import ServerOptions
from reprise_engine.server.pinning import warm_up
from reprise_engine.server.start import EXIT_OK
from reprise_engine.server.state import Loaded, ServerState
from reprise_engine.server.tracing import Tracer, otlp_tracer
from reprise_engine.text import Tokenizer, load_tokenizer
from reprise_engine.text.chat_formats import chat_formats

logger = logging.getLogger(__name__)

_DEATH_GRACE_SECONDS = 2
"""For the answers that tell clients of a dead engine."""
_KEEP_ALIVE_SECONDS = 75
"""Longer than the 60 s of common load balancers, so that they, not we, close an idle connection."""
_VERDICT_SECONDS = 60
"""How long the engine may take to judge a model whose tokenizer is already known to be missing."""


class _HttpServer(uvicorn.Server):
    """uvicorn without its own signal handling, which would end the process by the signal instead of exit code 0."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Stop:
    """SIGTERM and SIGINT. The first asks for a drain, the second for an end at once."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.at_once = asyncio.Event()

    def on_signal(self) -> None:
        if self.asked.is_set():
            self.at_once.set()
        self.asked.set()

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        signals = (signal.SIGTERM, signal.SIGINT)
        installed = []
        for number in signals:
            with contextlib.suppress(ValueError, RuntimeError):  # not the main thread: a test drives `asked` itself
                loop.add_signal_handler(number, self.on_signal)
                installed.append(number)
        try:
            yield
        finally:
            for number in installed:
                loop.remove_signal_handler(number)


def run(options: ServerOptions, listener: socket.socket, process: EngineProcess) -> int:
    """Steps 2 to 5. Returns the exit code; raises what `serve` raises."""
    return asyncio.run(serve(options, listener, process=process))


async def serve(
    options: ServerOptions, listener: socket.socket, *, stop: Stop | None = None, process: EngineProcess | None = None
) -> int:
    """Steps 2 to 5 on a bound socket. Raises the RepriseError by which the start failed, or EngineDead.

    `process` is the engine's, where it was started already.
    In the main thread the signals drive `stop`; elsewhere its owner does, on this event loop.
    """
    names = options.served_names or (options.engine.model.model,)
    state = ServerState(
        model=options.engine.model.model,
        served_names=names,
        metrics=Metrics(names[0]),
        force_include_usage=options.force_include_usage,
        isolation=Isolation(options.prefix_cache_isolation, secret=options.prefix_cache_isolation_secret),
        http=options.http,
    )
    stop = stop or Stop()
    async with _http(state, options, listener) as http:
        with stop.listening():
            engine = EngineClient(
                options.engine,
                builder=options.builder,
                log_level=logging.getLevelName(options.log_level.upper()),
                on_progress=lambda report: _show(state, report),
                on_stats=state.metrics.engine_stats,
                process=process,
            )
            try:
                if not await _load(state, options, engine, stop):
                    return EXIT_OK
                assert state.loaded is not None
                url = _url(listener)
                for line in logs.describe_start(options.engine, state.loaded.resolved, url=url, names=names):
                    logger.info(line)
                logger.info("  chat       %s", state.loaded.formats.described())
                logger.info("  sampling   where a request says nothing: %s", state.loaded.defaults.described())
                return await _until_stopped(state, engine, stop, http, options.shutdown_timeout)
            finally:
                await engine.close()


@contextlib.asynccontextmanager
async def _http(state: ServerState, options: ServerOptions, listener: socket.socket) -> AsyncIterator[_HttpServer]:
    """An HTTP server that answers inside the block, and lets running answers end behind it. Raises ConfigError."""
    tracer: Tracer | None = None
    if options.http.otlp_traces_endpoint is not None:
        tracer = otlp_tracer(options.http.otlp_traces_endpoint, model=state.served_names[0])
    bounds = connection_class(receive_timeout=options.http.receive_timeout, send_timeout=options.http.send_timeout)
    config = uvicorn.Config(
        create_app(state, api_keys=options.api_keys, tracer=tracer),
        http=bounds,
        ws="none",
        access_log=False,
        lifespan="off",
        log_config=None,
        log_level=None,
        timeout_keep_alive=_KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=_DEATH_GRACE_SECONDS,
        server_header=False,
    )
    server = _HttpServer(config)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield server
    finally:
        server.should_exit = True
        await serving
        if tracer is not None:
            await asyncio.to_thread(tracer.close)


async def _load(state: ServerState, options: ServerOptions, engine: EngineClient, stop: Stop) -> bool:
    """Tokenizer and engine side by side; the first error ends both. False when told to stop meanwhile."""
    loading = asyncio.create_task(_load_and_warm_up(state, options, engine))
    stopping = asyncio.create_task(stop.asked.wait())
    try:
        await asyncio.wait((loading, stopping), return_when=asyncio.FIRST_COMPLETED)
        if not loading.done():
            state.draining = True
            logger.info("told to stop while the model was loading")
            return False
        state.loaded = loading.result()
    finally:
        loading.cancel()
        stopping.cancel()
        await asyncio.gather(loading, stopping, return_exceptions=True)
    state.metrics.configured(state.loaded.resolved)
    state.metrics.engine_stats(engine.stats)
    return True


async def _load_and_warm_up(state: ServerState, options: ServerOptions, engine: EngineClient) -> Loaded:
    loaded = await _load_both(options, engine)
    if options.warmup_prompts is not None:
        _show(state, LoadProgress("Warming the prefix cache up"))
        await warm_up(
            loaded,
            options.warmup_prompts,
            seconds=options.warmup_timeout,
            isolation=state.isolation,
            api_keys=options.api_keys,
        )
    return loaded


async def _load_both(options: ServerOptions, engine: EngineClient) -> Loaded:
    starting = asyncio.create_task(engine.start())
    text = asyncio.create_task(asyncio.to_thread(_load_text, options))
    try:
        await asyncio.wait((starting, text), return_when=asyncio.FIRST_EXCEPTION)
        if text.done() and text.exception() is not None:
            # Where the model itself cannot be served, that is the cause; the tokenizer's trouble its echo.
            await asyncio.wait((starting,), timeout=_VERDICT_SECONDS)
        if starting.done() and starting.exception() is not None:
            starting.result()
        tokenizer, defaults = await text
        return Loaded(
            engine=engine,
            resolved=await starting,
            tokenizer=tokenizer,
            defaults=defaults,
            formats=chat_formats(
                tokenizer, tool_call_parser=options.tool_call_parser, reasoning_parser=options.reasoning_parser
            ),
            auto_tool_choice=options.auto_tool_choice,
        )
    finally:
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)


def _load_text(options: ServerOptions) -> tuple[Tokenizer, SamplingDefaults]:
    model = options.engine.model
    tokenizer = load_tokenizer(
        model.model, tokenizer=model.tokenizer, revision=model.revision, chat_template=options.chat_template
    )
    defaults = load_defaults(
        model.model,
        source=options.generation_config,
        revision=model.revision,
        override=options.override_generation_config,
    )
    return tokenizer, defaults


async def _until_stopped(
    state: ServerState, engine: EngineClient, stop: Stop, http: _HttpServer, drain_seconds: float
) -> int:
    """Step 4 and 5. Raises EngineDead when the engine process dies."""
    died = asyncio.create_task(engine.wait_ended())
    asked = asyncio.create_task(stop.asked.wait())
    at_once = asyncio.create_task(stop.at_once.wait())
    try:
        await asyncio.wait((died, asked), return_when=asyncio.FIRST_COMPLETED)
        if died.done():
            raise died.result()
        state.draining = True
        logger.info("draining: %d sequences are running; send the signal again to end at once", engine.num_requests)
        drained = asyncio.create_task(_drained(engine, http))
        await asyncio.wait((died, at_once, drained), timeout=drain_seconds, return_when=asyncio.FIRST_COMPLETED)
        if died.done():
            raise died.result()
        if drained.done():
            logger.info("drained")
        else:
            logger.warning("%d sequences are cut off", engine.num_requests)
        drained.cancel()
        await asyncio.gather(drained, return_exceptions=True)
        return EXIT_OK
    finally:
        for task in (died, asked, at_once):
            task.cancel()
        await asyncio.gather(died, asked, at_once, return_exceptions=True)


async def _drained(engine: EngineClient, http: _HttpServer) -> None:
    """Until no sequence runs and no answer is being sent."""
    while engine.num_requests or http.server_state.tasks:  # noqa: ASYNC110  (uvicorn tells only its present tasks)
        await asyncio.sleep(0.05)


def _show(state: ServerState, report: LoadProgress) -> None:
    if not state.stage.startswith(report.stage):
        logger.info("%s", report.stage)
    state.stage = report.stage if report.fraction is None else f"{report.stage}, {report.fraction:.0%}"


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    if host in ("0.0.0.0", "::"):  # noqa: S104  (every address: name one that a browser can open)
        host = "127.0.0.1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
