"""The start of a server: its port, then the engine process, and only then the libraries that HTTP needs.

The engine process has torch to import, this one FastAPI: on two cores they do so side by side. So nothing here, nor
what it imports, may import `lifecycle` or FastAPI at its top (tested).
"""

from __future__ import annotations

import contextlib
import logging
import resource
import socket

from reprise_engine.engine_process import EngineProcess
from reprise_engine.errors import ConfigError, DeviceError, OutOfMemory, RepriseError
from reprise_engine.messages import Start
from reprise_engine.server import logs
from reprise_engine.server.options import ServerOptions

logger = logging.getLogger(__name__)

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2

_OPEN_FILES = 65_536


def run(options: ServerOptions) -> int:
    """Serve until told to stop. Returns the exit code: 0 after a drain, 2 for a wrong flag, 1 for anything else."""
    logs.configure(options.log_level)
    _allow_many_connections()
    try:
        listener = bind(options.host, options.port)
    except OSError as error:
        return _fail(f"cannot listen on {options.host}:{options.port}: {error.strerror or error}", EXIT_FAILED)
    process = EngineProcess(engine_start(options))
    from reprise_engine.server import lifecycle

    try:
        return lifecycle.run(options, listener, process)
    except RepriseError as error:
        # The operator reads the class of the error from the last words: it becomes the reason in the status.
        told = error.__cause__ if isinstance(error.__cause__, OutOfMemory | DeviceError) else error
        words = f"{type(told).__name__}: {told}"
        return _fail(str(error), EXIT_USAGE if isinstance(error, ConfigError) else EXIT_FAILED, words=words)


def engine_start(options: ServerOptions) -> Start:
    """The first message to the engine process."""
    return Start(options.engine, options.builder, logging.getLevelName(options.log_level.upper()))


def _allow_many_connections() -> None:
    """Each takes a file descriptor; shells and container runtimes often allow 1,024 where there is room for more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def bind(host: str, port: int) -> socket.socket:
    """A listening socket. Raises OSError."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    listener = socket.socket(family)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Connections inherit it. asyncio sets it only on sockets that name their protocol; without it the body of an
        # answer, and a token of a stream, waits up to 40 ms for the client's acknowledgement of what went before.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        listener.bind(address)
        listener.listen(2048)
    except OSError:
        listener.close()
        raise
    return listener


def _fail(message: str, code: int, *, words: str | None = None) -> int:
    """One line where a person looks, and one where the kubelet looks."""
    logger.error("%s", message)
    logs.last_words(words or message)
    return code
